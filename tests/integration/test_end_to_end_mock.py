"""The whole path with real processes: HTTP → gateway → router → prefill → pull → decode.

The mock model's next token is a hash of all KV bytes before it: equal tokens mean equal KV.
"""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest

from benchmarks.answer import Answer
from benchmarks.deployment import (
    NOTHING,
    deployment,
    mock_model,
    scrape,
    settle,
    total,
    workers_total,
)
from benchmarks.loadgen import Call, send, send_all
from paceline.cli.cluster import Cluster
from paceline.client import Client, Options
from paceline.core import metrics as names
from paceline.core.errors import InvalidRequest
from paceline.core.sampling import LogitsProcessorCall
from paceline.offline import LLM
from paceline.rpc.status import error_of
from paceline.v1.common_pb2 import LogitsProcessor, TokenIds
from paceline.v1.generate_pb2 import GenerateRequest
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.end_to_end import Alone, prompt, streaming
from tests.support.strangers import junk, listening_ports, seconds_until_closed

STEP_S = 0.005


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with mock_model(step_s=STEP_S) as folder:
        yield folder


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    return Alone(model)


@dataclass(frozen=True, slots=True)
class Split:
    """A deployment in which every prompt is prefilled apart."""

    cluster: Cluster
    transport: str

    def send(self, call: Call) -> Answer:
        return asyncio.run(send(self.cluster.base_url, call))

    def send_all(self, calls: list[Call]) -> list[Answer]:
        return asyncio.run(send_all(self.cluster.base_url, calls, len(calls)))

    def pulled_bytes(self) -> float:
        return workers_total(self.cluster, names.TRANSFER_BYTES, "decode", transport=self.transport)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def split(request: pytest.FixtureRequest, model: Path) -> Iterator[Split]:
    worker = {"transports": request.param, "num_threads": 1, "pool_mib": 16}
    with deployment(model, router={"split_min_tokens": 0}, worker=worker) as cluster:
        yield Split(cluster, request.param)


def test_embeddings_come_from_prefill_alone(split: Split, model: Path, alone: Alone) -> None:
    """Beside a stream, twice: a prefix from the cache changes nothing."""
    before = workers_total(split.cluster, names.WORKER_GENERATED, "decode")
    inputs = [prompt(length, salt=length) for length in (1, 16, 200)]
    body = {"model": model.name, "input": inputs, "normalize": False}
    stream = streaming(model, prompt(60, salt=5), max_tokens=30, temperature=0)
    url = f"{split.cluster.base_url}/v1/embeddings"
    hits = []
    with ThreadPoolExecutor(1) as threads:
        streamed = threads.submit(split.send, stream)
        for pooling in ("mean", "last", "last", "mean"):
            answer = httpx.post(url, json=body | {"pooling": pooling}, timeout=60).json()
            for item, token_ids in zip(answer["data"], inputs, strict=True):
                expected = alone.embedding(token_ids, pooling)
                np.testing.assert_allclose(item["embedding"], expected, rtol=1e-5)
            hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert streamed.result().is_complete
    assert hits == [0, 192, 192, 0]
    generated = workers_total(split.cluster, names.WORKER_GENERATED, "decode") - before
    assert generated <= 30, "of the stream alone"
    assert settle(split.cluster) == NOTHING


def test_split_requests_get_the_tokens_of_one_worker(
    split: Split, model: Path, alone: Alone
) -> None:
    before = split.pulled_bytes()
    lengths = [1, 15, 16, 17, 100, 333]
    prompts = [prompt(n, salt=n) for n in lengths]
    answers = split.send_all([streaming(model, p, max_tokens=24, temperature=0) for p in prompts])
    for token_ids, answer in zip(prompts, answers, strict=True):
        assert answer.is_complete, answer.error
        assert answer.finish() == "length"
        assert [answer.token_ids()] == alone.answer(token_ids, max_tokens=24, temperature=0)
    assert settle(split.cluster) == NOTHING  # and the counters have followed
    token_bytes = 2 * 2 * 2 * 8 * 4
    assert split.pulled_bytes() - before == sum(lengths) * token_bytes


def test_choices_and_seed(split: Split, model: Path, alone: Alone) -> None:
    token_ids = prompt(70, salt=1)
    sampling = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 42, "n": 3}
    first, again = split.send_all([streaming(model, token_ids, **sampling)] * 2)
    expected = alone.answer(token_ids, **sampling)
    assert [first.token_ids(i) for i in range(3)] == expected
    assert [again.token_ids(i) for i in range(3)] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


def test_an_engine_in_the_own_process_says_the_same(split: Split, model: Path) -> None:
    prompts = [prompt(n, salt=700 + n) for n in (5, 40, 70)]  # no other test has their prefixes
    options: Options = {"temperature": 1.1, "seed": 3, "n": 2, "max_tokens": 10, "logprobs": 2}
    with Client(split.cluster.grpc_endpoint) as client:
        served = [client.generate(ids, **options) for ids in prompts]
    with LLM(model, pool_mib=16, num_threads=1) as llm:
        assert llm.generate(prompts, **options) == served


def test_every_option_of_sampling(split: Split, model: Path, alone: Alone) -> None:
    """Penalties depend on all tokens so far: decode knows the prompt and prefill's first token."""
    token_ids = prompt(100, salt=20)
    bias = {301: 30.0, 302: 29.0, 5: -100.0}
    allowed = list(range(250, 1500))
    fields = {
        "temperature": 1.5,
        "seed": 8,
        "n": 2,
        "max_tokens": 20,
        "min_tokens": 20,
        "min_p": 1e-6,
        "top_k": 500,
        "top_p": 0.999,
        "typical_p": 0.99,
        "repetition_penalty": 1.4,
        "presence_penalty": 1.0,
        "frequency_penalty": 2.0,
    }
    arguments = {"token_ids": allowed}
    call = streaming(
        model,
        token_ids,
        logit_bias={str(i): value for i, value in bias.items()},
        logits_processors=[{"name": "allowed_token_ids", "arguments": arguments}],
        **fields,
    )
    answer = split.send(call)
    assert answer.is_complete, answer.error
    expected = alone.answer(
        token_ids,
        logit_bias=tuple(bias.items()),
        logits_processors=(LogitsProcessorCall("allowed_token_ids", json.dumps(arguments)),),
        **fields,
    )
    assert [answer.token_ids(i) for i in range(2)] == expected
    for tokens in expected:
        assert {301, 302} < set(tokens) <= set(allowed)


def test_vllm_ascend_13363_logprobs_of_a_prompt_that_is_prefilled_apart(
    split: Split, model: Path, alone: Alone
) -> None:
    """https://github.com/vllm-project/vllm-ascend/issues/13363"""
    token_ids = prompt(300, salt=21)
    expected = alone.scores(token_ids, 2)
    body = {"model": model.name, "prompt": token_ids, "max_tokens": 4, "prompt_logprobs": 2}
    for _ in range(2):  # computed again, though all of it is cached
        response = httpx.post(f"{split.cluster.base_url}/v1/completions", json=body, timeout=60)
        (choice,) = response.json()["choices"]
        first, *rest = choice["prompt_logprobs"]
        assert first is None and len(rest) == len(expected) == 299
        for entry, score in zip(rest, expected, strict=True):
            ids = {str(i) for i in (score.token_id, *(i for i, _ in score.top))}
            assert set(entry) == ids
            found = entry[str(score.token_id)]
            assert found["rank"] == score.rank
            assert found["logprob"] == pytest.approx(score.logprob, abs=1e-4)
    body = {"model": model.name, "prompt": token_ids, "max_tokens": 4, "echo": True, "logprobs": 1}
    response = httpx.post(f"{split.cluster.base_url}/v1/completions", json=body, timeout=60)
    values = response.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == 304 and values[0] is None and None not in values[1:]
    assert values[1:300] == pytest.approx([max(s.logprob, -9999) for s in expected], abs=1e-4)
    assert settle(split.cluster) == NOTHING


def test_a_processor_that_nobody_registered_is_refused(split: Split, model: Path) -> None:
    call = streaming(model, prompt(30), logits_processors=["os.system"])
    answer = split.send(call)
    assert answer.status == 400
    assert "is not registered" in str(answer.error)


@pytest.mark.parametrize("length", [1, 3])
def test_a_request_that_forbids_every_token_fails_once(split: Split, length: int) -> None:
    """At the first token or later: another worker would find none either."""
    request = GenerateRequest(
        tokens=TokenIds(ids=prompt(40, salt=22)),
        n=2,
        bad_token_ids=[TokenIds(ids=[301] * length)],
        logits_processors=[
            LogitsProcessor(name="allowed_token_ids", arguments='{"token_ids": [301]}')
        ],
    )
    found = []
    with (
        grpc.insecure_channel(split.cluster.grpc_endpoint) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        stub = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        for response in stub.Generate(request, timeout=60):
            found += response.token_ids
    error = error_of(caught.value)
    assert isinstance(error, InvalidRequest) and error.field == "logits_processors"
    assert f"no token to draw at position {length - 1} of the output" in error.message
    assert found == [301] * 2 * (length - 1)
    assert total(scrape(split.cluster.urls["router"]), "paceline_router_replans_total") == 0
    assert settle(split.cluster) == NOTHING


def test_a_stop_string_across_tokens_ends_the_text_before_it(split: Split, model: Path) -> None:
    call = streaming(model, prompt(50, salt=2), max_tokens=20, temperature=0)
    text = split.send(call).text()
    words = text.split()
    stop = f"{words[5][-2:]} {words[6][:2]}"
    call.body["stop"] = [stop]  # type: ignore[index]
    answer = split.send(call)
    assert answer.finish() == "stop"
    assert answer.text() == text[: text.index(stop)]


def test_usage_counts_prompt_output_and_cached_tokens(split: Split, model: Path) -> None:
    call = streaming(model, prompt(90, salt=3), max_tokens=5, temperature=0)
    first, second = split.send(call).usage, split.send(call).usage
    assert first and second
    assert (first["prompt_tokens"], first["completion_tokens"]) == (90, 5)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 80


def test_statistics_tell_where_the_time_went(split: Split, model: Path) -> None:
    body = {"model": model.name, "prompt": prompt(600, salt=120), "max_tokens": 20}
    answer = httpx.post(
        f"{split.cluster.base_url}/v1/completions",
        json={**body, "ignore_eos": True},
        headers={"x-paceline-statistics": "1"},
        timeout=30,
    ).json()
    found = answer["paceline"]["statistics"]
    assert found["pull_ms"] > 0 and found["queue_ms"] >= 0 and found["hit_tokens"] == 0
    assert found["prefill_ms"] >= 1000 * STEP_S and found["decode_ms"] >= 19 * 1000 * STEP_S * 0.3
    parts = sum(found[f"{part}_ms"] for part in ("prepare", "queue", "prefill", "decode"))
    assert parts <= found["total_ms"] < parts + 250


def test_tensorrt_llm_11727_the_first_token_has_its_logprobs(
    split: Split, model: Path, alone: Alone
) -> None:
    """https://github.com/NVIDIA/TensorRT-LLM/pull/11727: 4 entries, those of one worker."""
    token_ids = prompt(70, salt=121)
    options = {"temperature": 0.0, "max_tokens": 4}
    body = {"model": model.name, "prompt": token_ids, "logprobs": 3, **options}
    for stream in (False, True):
        url = f"{split.cluster.base_url}/v1/completions"
        answer = httpx.post(url, json={**body, "stream": stream}, timeout=30)
        if stream:
            frames = [json.loads(f[6:]) for f in answer.text.split("\n\n") if f[6:7] == "{"]
            parts = [frame["choices"][0]["logprobs"] for frame in frames]
            found = {name: [v for p in parts for v in p[name]] for name in parts[0]}
        else:
            found = answer.json()["choices"][0]["logprobs"]
        expected = alone.logprobs(token_ids, num_logprobs=3, **options)
        assert len(found["token_logprobs"]) == len(expected) == 4
        for value, top, position in zip(
            found["token_logprobs"], found["top_logprobs"], expected, strict=True
        ):
            assert value == pytest.approx(max(position.logprob, -9999.0), abs=1e-4)
            assert len(top) == 3


def test_vllm_44250_kv_is_shared_only_within_a_cache_salt(split: Split, model: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/44250, of which salts and tenants apply: the same
    prompt under none, A and B has no hits across, and the answers of a cold cache."""
    texts = []
    for salt in (None, "A", "B"):
        fields = {} if salt is None else {"cache_salt": salt}
        body = streaming(model, prompt(90, salt=122), max_tokens=5, temperature=0, **fields)
        cold, warm = split.send(body), split.send(body)
        assert cold.usage and cold.usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm.usage and warm.usage["prompt_tokens_details"]["cached_tokens"] == 80
        texts += [cold.text(), warm.text()]
    assert len(set(texts)) == 1


@pytest.mark.slow
def test_vllm_40896_greedy_answers_do_not_depend_on_the_cache(
    split: Split, model: Path, alone: Alone
) -> None:
    """R059. https://github.com/vllm-project/vllm/issues/40896: 100 prompts, cold and warm,
    split and by one engine, have one answer. benchmarks.differential asks the real model so."""
    prompts = [prompt(17 + i % 60, salt=1000 + i) for i in range(100)]
    calls = [streaming(model, p, max_tokens=8, temperature=0) for p in prompts]
    found = [split.send_all(calls) for _ in ("cold", "warm")]
    cached = []
    for answers in found:
        usages = [answer.usage or {} for answer in answers]
        cached.append([one["prompt_tokens_details"]["cached_tokens"] for one in usages])
    assert set(cached[0]) == {0} and min(cached[1]) >= 16
    for token_ids, *answers in zip(prompts, *found, strict=True):
        one_engine = [alone.answer(token_ids, max_tokens=8, temperature=0) for _ in answers]
        assert [[answer.token_ids()] for answer in answers] == one_engine


def test_lmdeploy_4804_junk_on_any_port_of_any_service_does_nothing(
    split: Split, model: Path, tmp_path: Path
) -> None:
    """R080. https://github.com/InternLM/lmdeploy/issues/4804"""
    marker = tmp_path / "marker"
    for name, child in split.cluster.processes.items():
        if name == "redis":
            continue  # which is not ours
        children = psutil.Process(child.pid).children(recursive=True)
        ports = listening_ports([child.pid, *(one.pid for one in children)])
        assert len(ports) >= 2, name
        for port, message in product(ports, junk(marker)):
            assert seconds_until_closed(port, message) < 1, (name, port)
    assert not marker.exists()
    answer = split.send(streaming(model, prompt(40, salt=4804), max_tokens=2))
    assert answer.is_complete


def test_atom_1562_a_client_that_leaves_an_answer_in_one_piece_frees_everything(
    split: Split, model: Path
) -> None:
    """R031. https://github.com/ROCm/ATOM/pull/1562: 4000 tokens without a stream, the socket closed
    after 0.3 s: 20 s of steps are not made."""
    gateway = split.cluster.base_url
    before = total(scrape(gateway), names.REQUEST_SUCCESS, finished_reason="cancelled")
    generated = workers_total(split.cluster, names.WORKER_GENERATED)
    body = {"model": model.name, "prompt": prompt(100, salt=31), "max_tokens": 4000}
    answer = split.send(Call({**body, "ignore_eos": True}, leave_after_s=0.3))
    assert answer.has_left and not answer.events
    assert settle(split.cluster) == NOTHING
    cancelled = total(scrape(gateway), names.REQUEST_SUCCESS, finished_reason="cancelled")
    assert cancelled == before + 1
    assert workers_total(split.cluster, names.WORKER_GENERATED) - generated < 1000


def test_sglang_26486_twenty_requests_of_three_choices_are_prefilled_once_each(
    split: Split, model: Path, alone: Alone
) -> None:
    """R036. https://github.com/sgl-project/sglang/pull/26486, at once and over the split path."""
    source = {"source": "local_compute"}
    before = workers_total(split.cluster, names.VLLM_PROMPT_TOKENS_BY_SOURCE, "prefill", **source)
    sampling = {"max_tokens": 10, "temperature": 1.0, "n": 3, "ignore_eos": True}
    prompts = [prompt(40, salt=2600 + i) for i in range(20)]
    calls = [streaming(model, p, seed=i, **sampling) for i, p in enumerate(prompts)]
    for number, (token_ids, answer) in enumerate(zip(prompts, split.send_all(calls), strict=True)):
        expected = alone.answer(token_ids, seed=number, **sampling)
        assert [answer.token_ids(choice) for choice in range(3)] == expected
    assert settle(split.cluster) == NOTHING  # and the counters have followed
    after = workers_total(split.cluster, names.VLLM_PROMPT_TOKENS_BY_SOURCE, "prefill", **source)
    assert after - before == 20 * 40


def test_a_client_that_leaves_frees_everything(split: Split, model: Path) -> None:
    calls = []
    for i, leave_s in enumerate((0.0, 0.02, 0.1, 0.3)):
        call = streaming(model, prompt(200, salt=10 + i), max_tokens=4000, ignore_eos=True)
        calls.append(Call(call.body, headers=call.headers, leave_after_s=leave_s))
    answers = split.send_all(calls)
    assert all(answer.has_left for answer in answers)
    assert answers[-1].events
    assert settle(split.cluster) == NOTHING
