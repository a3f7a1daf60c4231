import asyncio
import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from paceline.core.errors import ConfigError
from paceline.rpc import probes
from paceline.rpc.probes import ProbeServer


class _Probed:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.registry = CollectorRegistry()
        self.server = ProbeServer("127.0.0.1", 0, lambda: self.reasons, self.registry)

    async def __aenter__(self) -> "_Probed":
        self.port = await self.server.start()
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.aclose()
        await self.server.stop()


async def test_liveness_readiness_and_metrics() -> None:
    async with _Probed() as probed:
        Counter("steps", "Steps.", registry=probed.registry).inc(3)
        assert (await probed.http.get("/livez")).status_code == 200
        assert (await probed.http.get("/readyz")).status_code == 200
        probed.reasons = ["no worker", "draining"]
        answer = await probed.http.get("/readyz?verbose=1")
        assert (answer.status_code, answer.text) == (503, "no worker\ndraining\n")
        metrics = await probed.http.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "steps_total 3.0" in metrics.text


async def test_openmetrics_with_exemplars_for_who_asks() -> None:
    async with _Probed() as probed:
        took = Histogram("took", "Seconds.", registry=probed.registry)
        took.observe(0.2, {"trace_id": "ab"})
        asked = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        answer = await probed.http.get("/metrics", headers={"accept": asked})
        assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1")
        (family,) = text_string_to_metric_families(answer.text)
        exemplars = [sample.exemplar for sample in family.samples if sample.exemplar]
        assert [exemplar.labels for exemplar in exemplars] == [{"trace_id": "ab"}]
        for accept in ("text/plain", "application/openmetrics-textual", ""):
            answer = await probed.http.get("/metrics", headers={"accept": accept})
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "trace_id" not in answer.text


async def test_other_paths_and_methods_are_refused() -> None:
    async with _Probed() as probed:
        assert (await probed.http.get("/secret")).status_code == 404
        assert (await probed.http.post("/livez")).status_code == 405
        head = await probed.http.head("/livez")
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01 junk\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (2 * probes.MAX_HEADER_BYTES), b"431"),
    ],
)
async def test_malformed_requests_get_a_bounded_answer(sent: bytes, status: bytes) -> None:
    async with _Probed() as probed:
        reader, writer = await asyncio.open_connection("127.0.0.1", probed.port)
        writer.write(sent)
        line = await asyncio.wait_for(reader.readline(), 5)
        assert line.split()[1] == status
        writer.close()
        assert (await probed.http.get("/livez")).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /livez HTTP/1.1\r\n"])
async def test_silent_connections_do_not_starve_a_probe(sent: bytes) -> None:
    async with _Probed() as probed:
        silent = []
        for _ in range(probes.MAX_CONNECTIONS + 20):
            silent.append(await asyncio.open_connection("127.0.0.1", probed.port))
            silent[-1][1].write(sent)
        for _ in range(5):
            async with asyncio.timeout(probes.HEAD_TIMEOUT_S / 2):
                assert (await probed.http.get("/livez")).status_code == 200
        assert len(probed.server._waiting) == probes.MAX_CONNECTIONS - 1
        for _, writer in silent:
            writer.close()


async def test_a_silent_connection_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "HEAD_TIMEOUT_S", 0.2)
    async with _Probed() as probed:
        reader, writer = await asyncio.open_connection("127.0.0.1", probed.port)
        for byte in b"GET /livez HTT":
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 5)
        writer.close()


async def test_a_client_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ANSWER_TIMEOUT_S", 0.2)
    async with _Probed() as probed:
        Counter("large", "x" * 8_000_000, registry=probed.registry)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", probed.port))
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            await asyncio.sleep(0.5)
            assert not probed.server._answering
            num_bytes = 0
            while piece := client.recv(1 << 20):
                num_bytes += len(piece)
            assert num_bytes < 8_000_000


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"probe_port={port}: cannot be bound"):
            await ProbeServer("127.0.0.1", port, list).start()
