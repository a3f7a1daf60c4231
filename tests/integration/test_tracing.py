"""Traces of a deployment of real processes, as a real collector gets them."""

import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from benchmarks.answer import Answer
from benchmarks.deployment import mock_model, scrape, total
from benchmarks.kill_worker import kill_tree
from benchmarks.loadgen import send_all
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.core import metrics as names
from paceline.core import tracing
from paceline.rpc.channel import connect
from paceline.v1.common_pb2 import TokenIds
from paceline.v1.generate_pb2 import EmbedInput, EmbedRequest, GenerateRequest
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.end_to_end import prompt, streaming
from tests.support.waits import wait_for

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra otel is missing")

from tests.support.collector import Collector, Seen, collector

pytestmark = pytest.mark.slow

STEP_S = 0.02
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HANG_S = 4.0
SLACK_NS = 2_000_000  # between clocks that processes read one after the other


class Deployed:
    def __init__(self, cluster: Cluster, found: Collector, model: Path) -> None:
        self.cluster = cluster
        self.collector = found
        self.model = model

    def ask(self, number: int, count: int = 1, max_tokens: int = 8, **headers: str) -> list[Answer]:
        calls = [
            streaming(
                self.model, prompt(200, salt=number + i), max_tokens=max_tokens, ignore_eos=True
            )
            for i in range(count)
        ]
        calls = [replace(call, headers={**call.headers, **headers}) for call in calls]
        answers = asyncio.run(send_all(self.cluster.base_url, calls, count))
        assert all(answer.is_complete for answer in answers)
        return answers

    def trace(self, is_it: Callable[[Seen], bool]) -> dict[str, list[Seen]]:
        """All spans of the trace whose root `is_it`, by name, once they are here."""

        def roots() -> list[Seen]:
            return [s for s in self.collector.spans if s.service == "paceline-gateway" and is_it(s)]

        wait_for(lambda: any(tracing.REQUEST_ID in s.attributes for s in roots()), 20)
        time.sleep(2.5)  # the other processes send theirs every second
        (trace_id,) = {span.trace_id for span in roots()}
        spans = sorted(self.collector.spans, key=lambda span: span.began_ns)
        tree: dict[str, list[Seen]] = {}
        for span in spans:
            if span.trace_id == trace_id:
                tree.setdefault("root" if is_root(span) else span.name, []).append(span)
        return tree


def is_root(span: Seen) -> bool:
    return tracing.OPERATION in span.attributes


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with collector() as found, mock_model(step_s=STEP_S) as model:
        sends = {"otlp_endpoint": found.endpoint}
        worker = {"num_threads": 1, "pool_mib": 16, **sends}
        settings = {"prefill": worker, "decode": worker, "router": sends, "gateway": sends}
        spec = ClusterSpec(model, decode=2, settings=settings)  # type: ignore[arg-type]
        with Cluster(spec) as cluster:
            yield Deployed(cluster, found, model)


def check_order(*spans: Seen) -> None:
    for before, after in zip(spans, spans[1:], strict=False):
        assert before.began_ns <= after.began_ns + SLACK_NS, (before, after)


def test_a_split_request_is_one_tree(deployed: Deployed) -> None:
    (answer,) = deployed.ask(1, traceparent=PARENT)
    tree = deployed.trace(lambda span: span.parent == PARENT.split("-")[2])
    spans = {name: found[0] for name, found in tree.items()}
    assert {name: len(found) for name, found in tree.items()} == dict.fromkeys(
        ("root", "prepare", "route", "queue", "attempt", "prefill", "pull", "decode"), 1
    )
    above = {"prepare": "root", "route": "root", "queue": "route", "attempt": "route"}
    above |= dict.fromkeys(("prefill", "pull", "decode"), "attempt")
    for name, span in spans.items():
        assert span.began_ns <= span.ended_ns and not span.is_error
        if name != "root":
            whole = spans[above[name]]
            assert span.parent == whole.id, name
            assert whole.began_ns <= span.began_ns + SLACK_NS, name
            assert span.ended_ns <= whole.ended_ns + SLACK_NS, name
    check_order(*(spans[n] for n in ("root", "route", "attempt", "prefill", "pull", "decode")))
    assert spans["prefill"].service == "paceline-prefill"
    assert spans["pull"].service == spans["decode"].service == "paceline-decode"
    root = spans["root"]
    assert root.name == "text_completion mock"
    assert root.attributes[tracing.OUTPUT_TOKENS] == 8
    ttft_s = root.attributes[tracing.TTFT]
    assert 0 < ttft_s <= answer.ttft_s + 0.001  # the client's own, which waits for the way back
    first_ns = spans["prefill"].ended_ns - root.began_ns
    assert first_ns <= ttft_s * 1e9 + SLACK_NS
    texts = json.dumps([span.attributes for found in tree.values() for span in found])
    assert "default" not in texts  # the tenant's name


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_an_embedding_ends_with_its_prefill(deployed: Deployed, way: str) -> None:
    own = PARENT.replace("4bf9", "5bf9" if way == "http" else "6bf9")
    token_ids = prompt(200, salt=500)
    if way == "http":
        body = {"model": deployed.model.name, "input": [token_ids]}
        url, headers = f"{deployed.cluster.base_url}/v1/embeddings", {"traceparent": own}
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
    else:
        request = EmbedRequest(inputs=[EmbedInput(tokens=TokenIds(ids=token_ids))])
        with grpc.insecure_channel(deployed.cluster.grpc_endpoint) as channel:
            stub: Any = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
            stub.Embed(request, metadata=(("traceparent", own),), timeout=60)
    tree = deployed.trace(lambda span: span.trace_id == own.split("-")[1])
    names_found = {name: len(found) for name, found in tree.items()}
    assert names_found == dict.fromkeys(
        ("root", "prepare", "route", "queue", "attempt", "prefill"), 1
    )
    assert not any(span.is_error for found in tree.values() for span in found)
    assert tree["root"][0].attributes[tracing.OPERATION] == "embeddings"


def test_grpc_callers_bring_their_trace_too(deployed: Deployed) -> None:
    parent = PARENT.replace("4bf9", "8bf9").replace("00f0", "11f0")

    async def ask() -> None:
        request = GenerateRequest(tokens=TokenIds(ids=prompt(200, salt=77)), max_tokens=2)
        async with connect(deployed.cluster.grpc_endpoint) as channel:
            stub: Any = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
            async for _ in stub.Generate(request, metadata=(("traceparent", parent),)):
                pass

    asyncio.run(ask())
    tree = deployed.trace(lambda span: span.parent == parent.split("-")[2])
    assert tree["root"][0].trace_id == parent.split("-")[1]
    assert {"attempt", "prefill"} <= set(tree)


def test_a_killed_workers_request_shows_its_second_attempt(deployed: Deployed) -> None:
    parent = PARENT.replace("4bf9", "9bf9").replace("00f0", "22f0")

    async def ask() -> None:
        call = streaming(deployed.model, prompt(200, salt=99), max_tokens=100, ignore_eos=True)
        call = replace(call, headers={**call.headers, "traceparent": parent})
        asking = asyncio.create_task(send_all(deployed.cluster.base_url, [call], 1))
        worker = await asyncio.to_thread(busy_decode_worker)
        await asyncio.to_thread(kill_tree, deployed.cluster.processes[worker].process.pid)
        (answer,) = await asking
        assert answer.is_complete

    def busy_decode_worker() -> str:
        def attempts() -> list[dict[str, str]]:
            running = debug_requests(deployed.cluster)["running"]
            return running[0]["attempts"] if running else []

        wait_for(lambda: bool(attempts()), 10)
        return attempts()[0]["decode"]

    asyncio.run(ask())
    tree = deployed.trace(lambda span: span.parent == parent.split("-")[2])
    first, second = tree["attempt"]
    assert first.is_error and first.attributes["error.type"] == "unavailable"
    assert not second.is_error and first.ended_ns <= second.began_ns + SLACK_NS
    assert (
        first.attributes[tracing.ATTEMPT_NUMBER],
        second.attributes[tracing.ATTEMPT_NUMBER],
    ) == (
        0,
        1,
    )
    workers = [span.attributes[tracing.DECODE_WORKER] for span in (first, second)]
    assert workers[0] != workers[1]
    assert tree["decode"][-1].parent == second.id  # the first one's died with its worker
    assert not tree["root"][0].is_error
    ended = debug_requests(deployed.cluster)["ended"][0]
    assert ended["trace_id"] == second.trace_id
    assert [attempt["decode"] for attempt in ended["attempts"]] == workers
    deployed.cluster.wait_ready()
    deployed.cluster.wait_connected(3)


def test_ttft_and_gaps_point_to_the_trace(deployed: Deployed) -> None:
    parent = PARENT.replace("4bf9", "7bf9")
    deployed.ask(300, traceparent=parent)
    trace_id = parent.split("-")[1]
    here = {"gateway": [names.TTFT, names.INTER_TOKEN_LATENCY]}
    here["router"] = [names.ROUTER_TTFT_SECONDS, names.ROUTER_TOKEN2_GAP_SECONDS]
    for process, metrics in here.items():
        text = openmetrics(deployed.cluster, process)
        for metric in metrics:
            assert exemplars(text, metric) >= {trace_id}, metric
        plain = urllib.request.urlopen(f"{deployed.cluster.urls[process]}/metrics", timeout=5)
        assert trace_id not in plain.read().decode()


def openmetrics(cluster: Cluster, process: str) -> str:
    headers = {"accept": "application/openmetrics-text;version=1.0.0"}
    request = urllib.request.Request(f"{cluster.urls[process]}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        text: str = answer.read().decode()
        return text


def exemplars(text: str, metric: names.Metric) -> set[str]:
    """Trace ids."""
    (family,) = (f for f in text_string_to_metric_families(text) if f.name == metric)
    return {s.exemplar.labels["trace_id"] for s in family.samples if s.exemplar}


def test_a_collector_that_hangs_slows_no_request(deployed: Deployed) -> None:
    """Pairs, one after the other: with a collector that answers, and one that takes its time."""
    took: dict[float, list[float]] = {0.0: [], HANG_S: []}
    for round in range(4):
        for delay_s, seconds in took.items():
            deployed.collector.delay_s = delay_s
            answers = deployed.ask(1000 + 50 * round + int(delay_s), count=4)
            seconds += [answer.token_times[-1] - answer.sent_s for answer in answers]
    deployed.collector.delay_s = 0.0
    quick, slow = (statistics.median(seconds) for seconds in took.values())
    assert slow < quick + HANG_S / 4  # one that waited for it would take longer by all of that


def test_a_dead_collector_costs_spans_and_no_request(deployed: Deployed) -> None:
    deployed.collector.stop()
    deployed.ask(2000, count=4)
    gateway = deployed.cluster.urls["gateway"]
    wait_for(lambda: total(scrape(gateway), names.TRACE_SPANS_DROPPED) > 0, 20)


def debug_requests(cluster: Cluster) -> dict[str, Any]:
    with urllib.request.urlopen(f"{cluster.operator_urls[0]}/debug/requests", timeout=5) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found
