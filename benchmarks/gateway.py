"""What a token costs the gateway: from a router's frame to an SSE event on the client's socket.

The gateway is a process of its own on one core, with one token an event and detokenising; a mock
router and raw-socket clients run on another core.

cpu_us_per_token  CPU time of the gateway process, all threads, a token, at 64 streams of 20 tokens
                  a second each
tokens_per_s_64   tokens that reach 64 clients a second, when frames come as fast as it takes them
tokens_per_s_512  the same with 512 clients
busy_512          share of that time in which the gateway was at work: well below 1 the router and
                  the clients, on their core, set the pace
With --peer, at the same pace:
vllm_front_cpu_us_per_token   of vLLM's API server before an engine that is paced as our router is
cpu_vs_vllm_front             ours over its
smg_cpu_us_per_token          of the Rust router smg (PyPI), which passes ready events on and makes
                              no text
cpu_over_smg                  ours over its
"""

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import orjson
import psutil
import uvloop

from benchmarks.common import REPEATS, Options, publish, show
from benchmarks.deployment import mock_model
from benchmarks.mock_router import MockRouter
from benchmarks.mock_sse import MockSse
from benchmarks.peer import peer_command
from benchmarks.word_tokenizer import word_tokenizer
from paceline.cli.ports import free_port
from paceline.core.serving_digest import serving_digest
from paceline.v1.control_pb2 import ModelInfo

VOCAB_SIZE = 4096
STEP_S = 0.05
NUM_STREAMS, NUM_MANY_STREAMS = 64, 512
CONTEXT_LENGTH = 1 << 22  # no stream ends while it is measured
PEER_TOKENS = 8192  # the same of vLLM's, whose pages are bounded
START_S = 30.0  # the first token of all
READY_S, PEER_READY_S = 20.0, 300.0
COMMAND = "import sys; from paceline.cli.main import main; sys.exit(main(sys.argv[1:]))"


class Stream(asyncio.Protocol):
    """One client, which only counts the events that it receives."""

    def __init__(self, request: bytes) -> None:
        self.num_events = 0
        self.transport: asyncio.Transport
        self._request = request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: {")


def request_bytes(prompt: str | list[int], max_tokens: int = CONTEXT_LENGTH // 2) -> bytes:
    body = {"model": "mock", "prompt": prompt, "max_tokens": max_tokens, "stream": True}
    body |= {"ignore_eos": True}
    content = orjson.dumps(body)
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"]
    lines += [f"content-length: {len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen of a gateway for a while."""

    tokens_per_s: float
    cpu_us_per_token: float
    busy: float


@dataclass(frozen=True, slots=True)
class Bench:
    """A gateway or a peer that is ready, and what stands behind it."""

    source: MockRouter | MockSse | None  # None: it keeps its own pace
    process: psutil.Process
    port: int
    request: bytes

    @asynccontextmanager
    async def streams(self, count: int) -> AsyncIterator[list[Stream]]:
        """All of them receive."""
        loop = asyncio.get_running_loop()
        made = [
            (await loop.create_connection(lambda: Stream(self.request), "127.0.0.1", self.port))[1]
            for _ in range(count)
        ]
        async with asyncio.timeout(START_S):
            while not all(stream.num_events for stream in made):  # noqa: ASYNC110 (on sockets)
                await asyncio.sleep(0.01)
        yield made
        for stream in made:
            stream.transport.abort()
        await asyncio.sleep(0.2)

    async def window(self, streams: list[Stream], seconds: float) -> Window:
        """Of so many seconds."""
        before, cpu_s, started = _received(streams), _cpu_s(self.process), time.perf_counter()
        await asyncio.sleep(seconds)
        tokens = _received(streams) - before
        spent_s, wall_s = _cpu_s(self.process) - cpu_s, time.perf_counter() - started
        found = Window(tokens / wall_s, 1e6 * spent_s / tokens, spent_s / wall_s)
        show(f"{len(streams)} streams: {found}")
        return found


def _received(streams: list[Stream]) -> int:
    return sum(stream.num_events for stream in streams)


def _cpu_s(process: psutil.Process) -> float:
    """Of its threads, in nanoseconds: 10 ms, a clock tick, are a tenth of what is measured."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@asynccontextmanager
async def on_first_core(
    command: list[str], url: str, environment: Mapping[str, str], ready_s: float = READY_S
) -> AsyncIterator[psutil.Process]:
    """A process that answers at `url`, on a core of its own; this one runs on the others, and so
    do its children."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: ASYNC220 (before anything is measured)
            command, env={**os.environ, **environment}, stderr=log, stdout=log
        )
        try:
            watched = psutil.Process(process.pid)
            await _until_ready(url, ready_s)
            for task in watched.threads():
                os.sched_setaffinity(task.id, cores[:1])
            yield watched
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()
            os.sched_setaffinity(0, cores)


@asynccontextmanager
async def bench(model: Path) -> AsyncIterator[Bench]:
    secret = secrets.token_hex(16)
    info = ModelInfo(
        name="mock",
        content_digest="ab" * 32,
        serving_digest=serving_digest(model),
        context_length=CONTEXT_LENGTH,
        vocab_size=VOCAB_SIZE,
    )
    router = MockRouter(info, range(300, VOCAB_SIZE, 7), STEP_S)
    endpoint = await router.start(secret)
    port = free_port("127.0.0.1")
    arguments = ["gateway", "--model", str(model), "--router", endpoint, "--port", str(port)]
    arguments += ["--grpc-port", str(free_port("127.0.0.1"))]
    command = [sys.executable, "-P", "-c", COMMAND, *arguments]
    url, environment = f"http://127.0.0.1:{port}/readyz", {"PACELINE_GATEWAY_SECRET": secret}
    async with on_first_core(command, url, environment) as process:
        yield Bench(router, process, port, request_bytes(list(range(300, 364))))
        await router.stop()


@asynccontextmanager
async def vllm_bench() -> AsyncIterator[Bench]:
    """vLLM's API server before its engine with a tiny model. Raises SystemExit where it is not
    installed."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        model = write_tiny_llama(Path(folder))
        command = peer_command("vllm_front", str(model), str(port), str(STEP_S))
        url = f"http://127.0.0.1:{port}/health"
        async with on_first_core(command, url, {}, PEER_READY_S) as process:
            request = request_bytes(list(range(300, 364)), PEER_TOKENS)
            yield Bench(None, process, port, request)


@asynccontextmanager
async def smg_bench() -> AsyncIterator[Bench]:
    """smg before a server of ready events. Raises SystemExit where it is not installed."""
    smg = Path(os.environ.get("PACELINE_PEER_SMG", "")).with_name("smg")
    if not smg.is_file():
        raise SystemExit("PACELINE_PEER_SMG must name a Python beside which smg is installed")
    server = MockSse(STEP_S)
    worker = await server.start()
    port, other = free_port("127.0.0.1"), free_port("127.0.0.1")
    command = [str(smg), "launch", "--worker-urls", worker, "--policy", "round_robin"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(other)]
    command += ["--log-level", "error"]
    async with on_first_core(command, f"http://127.0.0.1:{port}/readiness", {}) as process:
        yield Bench(server, process, port, request_bytes("Hi"))
        await server.stop()


def write_tiny_llama(folder: Path) -> Path:
    """What vLLM serves with weights that it draws itself; each token is a visible word."""
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2 * PEER_TOKENS,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_bytes(orjson.dumps(fields))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(kind))
    word_tokenizer(VOCAB_SIZE).save(str(folder / "tokenizer.json"))
    return folder


async def _until_ready(url: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            await asyncio.to_thread(urllib.request.urlopen, url, timeout=1)
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
        else:
            return


async def measured(options: Options) -> dict[str, float]:
    repeats, seconds = rounds(options)
    paced, few, many = [], [], []
    with mock_model(VOCAB_SIZE) as model:
        async with bench(model) as own:
            source = own.source
            assert source is not None, "its pace is ours"
            for index in range(repeats):
                show(f"round {index + 1} of {repeats}")
                source.step_s = STEP_S
                async with own.streams(NUM_STREAMS) as streams:
                    paced.append(await own.window(streams, seconds))
                    source.step_s = 0.0
                    few.append(await own.window(streams, seconds))
                async with own.streams(NUM_MANY_STREAMS) as streams:
                    many.append(await own.window(streams, seconds))
    figures = {
        "cpu_us_per_token": median(window.cpu_us_per_token for window in paced),
        "tokens_per_s_64": median(window.tokens_per_s for window in few),
        "tokens_per_s_512": median(window.tokens_per_s for window in many),
        "busy_512": median(window.busy for window in many),
    }
    return figures | (await peer_figures(options, figures) if options.peer else {})


async def peer_figures(options: Options, ours: Mapping[str, float]) -> dict[str, float]:
    repeats, seconds = rounds(options)
    costs_us = {}
    for name, bench_of_peer in (("vllm_front", vllm_bench), ("smg", smg_bench)):
        show(f"peer {name}")
        async with bench_of_peer() as peer, peer.streams(NUM_STREAMS) as streams:
            windows = [await peer.window(streams, seconds) for _ in range(repeats)]
        costs_us[name] = median(window.cpu_us_per_token for window in windows)
    own_us = ours["cpu_us_per_token"]
    return {
        **{f"{name}_cpu_us_per_token": cost_us for name, cost_us in costs_us.items()},
        "cpu_vs_vllm_front": own_us / costs_us["vllm_front"],
        "cpu_over_smg": own_us / costs_us["smg"],
    }


def rounds(options: Options) -> tuple[int, float]:
    """How many, and the seconds of each window."""
    return (2, 2.0) if options.quick else (REPEATS, 5.0)


def measure(options: Options) -> dict[str, float]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measured(options))


def main() -> int:
    return publish("gateway", measure)


if __name__ == "__main__":
    sys.exit(main())
