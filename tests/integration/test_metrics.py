"""What a running deployment exports, against the table, and while a worker is down."""

import asyncio
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.deployment import Samples, mock_model, scrape, total
from benchmarks.loadgen import send_all
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.core import metrics as names
from tests.support.end_to_end import prompt, streaming
from tests.support.waits import wait_for

MAX_SERIES = 2000  # of a process
NUM_REQUESTS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill and a decode worker of different configuration, after a few requests."""
    tiers = tmp_path_factory.mktemp("tiers") / "tiers.yaml"
    tiers.write_text("- kind: host\n  capacity_mib: 8\n")
    with mock_model(step_s=0.005) as model:
        prefill = {"num_threads": 1, "pool_mib": 16, "transports": "tcp,shm", "tiers": tiers}
        decode = {"num_threads": 1, "pool_mib": 24, "transports": "tcp", "max_running": 8}
        spec = ClusterSpec(model, settings={"prefill": prefill, "decode": decode}, restart=False)
        with Cluster(spec) as cluster:
            serve_some(cluster, model)
            yield cluster


def serve_some(cluster: Cluster, model: Path, first: int = 0) -> None:
    salts = range(first, first + NUM_REQUESTS)
    calls = [streaming(model, prompt(300, salt=salt), max_tokens=8) for salt in salts]
    answers = asyncio.run(send_all(cluster.base_url, calls, NUM_REQUESTS))
    assert all(answer.is_complete for answer in answers)


def text_of(cluster: Cluster, process: str) -> str:
    with urllib.request.urlopen(f"{cluster.urls[process]}/metrics", timeout=5) as answer:
        assert answer.status == 200
        text: str = answer.read().decode()
        return text


def check(text: str, process: str) -> None:
    """It parses, has one HELP and TYPE a family, few series, and the table's labels."""
    table = {str(metric): metric for metric in names.ALL}
    heads = Counter(tuple(line.split(" ")[:3]) for line in text.splitlines() if line[0] == "#")
    assert set(heads.values()) == {1}
    num_series = 0
    for family in text_string_to_metric_families(text):
        metric = table[family.name if family.name in table else f"{family.name}_total"]
        assert family.type == metric.kind
        for sample in family.samples:
            num_series += 1
            assert sample.name in metric.samples, process
            assert set(sample.labels) - {"le"} == set(metric.labels), sample
    assert 10 < num_series < MAX_SERIES


def test_each_process_exports_what_the_table_says(cluster: Cluster) -> None:
    for process in ("gateway", "router", "prefill-0", "decode-0"):
        check(text_of(cluster, process), process)


def test_stages_of_requests_are_counted_once_each(cluster: Cluster) -> None:
    gateway = scrape(cluster.urls["gateway"])
    for stage in ("prepare", "queue", "prefill", "pull", "second_token", "decode"):
        count = total(gateway, f"{names.STAGE_SECONDS}_count", stage=stage)
        assert count == NUM_REQUESTS, stage
    assert total(gateway, f"{names.REQUEST_PREFILL_SECONDS}_sum") > 0
    decode_s = total(gateway, f"{names.REQUEST_DECODE_SECONDS}_sum")
    assert decode_s >= NUM_REQUESTS * 7 * 0.005 * 0.9  # seven steps after the first token
    mean_s = total(gateway, f"{names.TIME_PER_OUTPUT_TOKEN}_sum")
    assert mean_s == pytest.approx(decode_s / 7)
    assert total(gateway, f"{names.REQUEST_GENERATION_TOKENS}_sum") == NUM_REQUESTS * 8
    assert total(gateway, f"{names.REQUEST_PROMPT_TOKENS}_sum") == NUM_REQUESTS * 300
    assert total(gateway, names.PROMPT_TOKENS) == NUM_REQUESTS * 300


def test_a_hand_off_is_timed_from_its_reservation_to_its_last_page(cluster: Cluster) -> None:
    router, decode = scrape(cluster.urls["router"]), scrape(cluster.urls["decode-0"])
    assert total(router, f"{names.ROUTER_ADMISSION_SECONDS}_count") == NUM_REQUESTS
    sums = {}
    for stage in ("first_byte", "last_byte", "pull_wait"):
        assert total(decode, f"{names.HANDOFF_SECONDS}_count", stage=stage) == NUM_REQUESTS, stage
        sums[stage] = total(decode, f"{names.HANDOFF_SECONDS}_sum", stage=stage)
    assert 0 < sums["first_byte"] <= sums["last_byte"]
    assert 0 < sums["pull_wait"] <= sums["last_byte"]


def test_prompt_tokens_are_told_apart_by_where_their_kv_came_from(cluster: Cluster) -> None:
    """Computed at prefill, transferred to decode: each counts once."""
    asked = NUM_REQUESTS * 300
    prefill, decode = scrape(cluster.urls["prefill-0"]), scrape(cluster.urls["decode-0"])

    def tokens(samples: Samples, source: str) -> float:
        return total(samples, names.VLLM_PROMPT_TOKENS_BY_SOURCE, source=source)

    computed, found = tokens(prefill, "local_compute"), tokens(prefill, "local_cache_hit")
    assert computed + found == asked and computed > 0
    assert tokens(prefill, "external_kv_transfer") == tokens(decode, "local_compute") == 0
    moved = tokens(decode, "external_kv_transfer")
    assert moved + tokens(decode, "local_cache_hit") == asked and moved > 0
    queried = total(decode, names.VLLM_EXTERNAL_QUERIES)
    assert queried == total(decode, names.VLLM_EXTERNAL_HITS) == moved
    gateway = scrape(cluster.urls["gateway"])
    assert total(gateway, f"{names.REQUEST_COMPUTED_TOKENS}_sum") == computed
    assert total(gateway, f"{names.REQUEST_MAX_GENERATION_TOKENS}_sum") == NUM_REQUESTS * 8


def test_bytes_of_a_link_are_those_of_its_transport(cluster: Cluster) -> None:
    decode = scrape(cluster.urls["decode-0"])
    read = total(decode, names.TRANSFER_LINK_BYTES, source="prefill-0", transport="tcp")
    assert read == total(decode, names.TRANSFER_BYTES) > 0


def test_workers_are_listed_by_their_content_digest(cluster: Cluster) -> None:
    found = scrape(cluster.urls["router"])[names.ROUTER_REVISION_WORKERS]
    assert {labels["role"]: value for labels, value in found} == {"prefill": 1, "decode": 1}
    (revision,) = {labels["revision"] for labels, _ in found}
    assert len(revision) == 12 and int(revision, 16)


def test_a_reader_shows_its_link(cluster: Cluster) -> None:
    def speed() -> float:
        return total(scrape(cluster.urls["decode-0"]), names.TRANSFER_LINK_SPEED, transport="tcp")

    wait_for(lambda: speed() > 0, 5)


def test_the_planner_is_measured_once_it_has_seen_a_few(cluster: Cluster) -> None:
    serve_some(cluster, cluster.spec.model, first=NUM_REQUESTS)  # new to both workers

    def judged() -> float:
        return total(scrape(cluster.urls["router"]), f"{names.ROUTER_PLANNER_ERROR}_count")

    wait_for(lambda: judged() == NUM_REQUESTS, 5)


def test_smg_805_the_router_answers_for_unlike_workers_and_with_one_down(cluster: Cluster) -> None:
    """https://github.com/smg-project/smg/issues/805"""

    def lost() -> float:
        return total(scrape(cluster.urls["router"]), names.ROUTER_WORKER_LOST)

    text = text_of(cluster, "router")
    before = lost()
    assert 'role="prefill"' in text and 'role="decode"' in text
    cluster.kill("decode-0", signal.SIGKILL)
    wait_for(lambda: lost() > before, 5)
    text = text_of(cluster, "router")
    check(text, "router")
    assert 'role="prefill"' in text and 'role="decode"' not in text
    check(text_of(cluster, "gateway"), "gateway")


def test_a_worker_that_leaves_after_a_drain_is_not_lost(cluster: Cluster) -> None:
    """A rollout is no fault: the alert PacelineWorkersLost leaves it out."""

    def lost(**labels: str) -> float:
        return total(scrape(cluster.urls["router"]), names.ROUTER_WORKER_LOST, **labels)

    before = lost()
    cluster.kill("prefill-0", signal.SIGTERM)
    wait_for(lambda: lost() > before, 10)
    assert lost(reason="drained") == 1
