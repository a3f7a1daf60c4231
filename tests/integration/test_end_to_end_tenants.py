"""Tenants with real processes: a key opens the door, and no tenant finds another's KV."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.deployment import deployment, mock_model
from paceline.cli.cluster import Cluster
from paceline.client import Client
from paceline.core.errors import InvalidApiKey
from tests.support.end_to_end import prompt
from tests.support.key_file import bearer, entry, write

pytestmark = [pytest.mark.slow]

KEYS = {"acme": "sk-acme", "other": "sk-other"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(path, *(entry(name, [key]) for name, key in KEYS.items()))
    worker = {"num_threads": 1, "pool_mib": 16}
    with (
        mock_model(step_s=0.002) as model,
        deployment(
            model, router={"split_min_tokens": 0}, worker=worker, gateway={"api_keys": path}
        ) as cluster,
    ):
        yield cluster


def ask(cluster: Cluster, key: str, token_ids: list[int], **fields: Any) -> tuple[str, int]:
    """The text, and how many tokens were found in a cache."""
    body = {"model": "mock", "prompt": token_ids, "max_tokens": 6, "temperature": 0, **fields}
    url = f"{cluster.base_url}/v1/completions"
    answer = httpx.post(url, json=body, headers=bearer(key), timeout=30)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["text"], cached


def test_a_tenant_finds_its_own_kv_and_no_others(cluster: Cluster) -> None:
    texts = []
    for key in KEYS.values():
        for salt in ({}, {"cache_salt": "team"}):
            for num_cached in (0, 80):
                text, cached = ask(cluster, key, prompt(90), **salt)
                assert cached == num_cached, (key, salt)
                texts.append(text)
    assert len(set(texts)) == 1


def test_the_client_library_is_such_a_tenant(cluster: Cluster) -> None:
    token_ids = prompt(90, salt=1)
    text, _ = ask(cluster, KEYS["acme"], token_ids)
    with Client(cluster.grpc_endpoint, api_key=KEYS["acme"]) as client:
        found = client.generate(token_ids, max_tokens=6, temperature=0, statistics=True)
    assert found.text == text and found.num_cached_tokens == 80
    assert found.statistics is not None and found.statistics.num_hit_tokens == 80
    with Client(cluster.grpc_endpoint) as stranger, pytest.raises(InvalidApiKey):
        stranger.generate(token_ids)


def test_probes_and_metrics_need_no_key_and_all_else_does(cluster: Cluster) -> None:
    statuses = {
        path: httpx.get(f"{cluster.base_url}{path}").status_code
        for path in ("/livez", "/readyz", "/metrics", "/v1/models", "/none")
    }
    assert statuses == {
        "/livez": 200,
        "/readyz": 200,
        "/metrics": 200,
        "/v1/models": 401,
        "/none": 401,
    }
