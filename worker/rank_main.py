"""A rank process: one model, one page pool, one engine, one step loop.

Started by the front with its configuration on standard input; dies with the front. The main
thread steps and sleeps when there is nothing to do; one takes commands, one answers the pool.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import torch
import zmq

from paceline.core import keys, logs
from paceline.core.errors import ErrorCode, PacelineError
from paceline.core.host_cpus import usable_cores
from paceline.core.kv_layout import PageGroup
from paceline.engine.compute_stream import use_compute_stream
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import PoolCall
from paceline.engine.pools import PageSums
from paceline.kv_transfer.base import DevicePool, TransportSettings
from paceline.kv_transfer.copy_pace import CopyPace
from paceline.models.loader import LoadedModel, load_model
from paceline.worker.device import check_device
from paceline.worker.device_room import room_for
from paceline.worker.device_turns import DeviceTurns
from paceline.worker.levels import LEVELS
from paceline.worker.rank_links import RankLinks
from paceline.worker.rank_messages import (
    FAILED,
    LINK,
    READY,
    STEP,
    CanaryPages,
    LinkCall,
    Ping,
    RankCommand,
    RankConfig,
    RankFailed,
    RankReady,
)
from paceline.worker.rank_pool import RankPool, make_pool
from paceline.worker.sockets import configure

SWITCH_INTERVAL_S = 0.0002  # the pool thread answers within it while the step thread computes
STARVED_WAIT_S = 0.005  # waiting requests, no pages: readers unpin without a command
LAST_WORDS_MS = 2000
WARM_UP_LOG_S = 2.0  # between lines


class Outbox:
    """Sends the engine's outputs in the order in which they are taken, from either thread."""

    def __init__(self, engine: Engine, socket: "zmq.Socket[bytes]") -> None:
        self._engine = engine
        self._socket = socket
        self._lock = threading.Lock()

    def send(self, kind: bytes, message: object) -> None:
        with self._lock:
            send(self._socket, kind, message)

    def flush(self, always: bool = False) -> bool:
        """Whether there was anything to send."""
        with self._lock:
            output = self._engine.take_output(always)
            if output is not None:
                send(self._socket, STEP, output)
        return output is not None


class StepLoop:
    """Step → outputs, and rest when there is nothing to do until a command comes."""

    def __init__(self, engine: Engine, outbox: Outbox, turns: DeviceTurns) -> None:
        self._engine = engine
        self.outbox = outbox
        self._turns = turns
        self.woken = threading.Event()
        self.is_pinged = threading.Event()  # answered here: a loop that hangs must show

    def run(self) -> None:
        while True:
            self.woken.clear()
            self._turns.wait()
            self._engine.advance()
            always = self.is_pinged.is_set()
            self.is_pinged.clear()
            if not self.outbox.flush(always):
                self.woken.wait(STARVED_WAIT_S if self._engine.has_work() else None)


def take_commands(
    context: "zmq.Context[zmq.Socket[bytes]]",
    address: str,
    engine: Engine,
    links: RankLinks | None,
    loop: StepLoop,
) -> None:
    """Runs in a thread of its own: commands take effect and are answered while a step computes."""
    use_compute_stream(engine.runner.device)
    decoder: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand)
    socket = connect(context, address, zmq.PULL)
    while True:
        command = decoder.decode(socket.recv())
        if isinstance(command, Ping):
            loop.is_pinged.set()
        elif isinstance(command, LinkCall):
            assert links is not None, "the front reads into a pool of its own"
            links.handle(command)
        else:
            engine.handle(command)
        if not socket.poll(0):
            loop.outbox.flush()
            loop.woken.set()


def answer_pool_calls(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, engine: Engine
) -> None:
    """Runs in a thread of its own: [number, call] → [number, reply]."""
    use_compute_stream(engine.runner.device)
    decoder: msgspec.msgpack.Decoder[PoolCall] = msgspec.msgpack.Decoder(PoolCall)
    encoder = msgspec.msgpack.Encoder()
    socket = connect(context, address, zmq.PAIR)
    while True:
        number, payload = socket.recv_multipart()
        answer = engine.pool_calls.answer(decoder.decode(payload))
        socket.send_multipart([number, encoder.encode(answer)])


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, kind: int
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    configure(socket)
    socket.connect(address)
    return socket


def send(socket: "zmq.Socket[bytes]", kind: bytes, message: object) -> None:
    now_us = time.time_ns() // 1000
    socket.send_multipart([kind, msgspec.msgpack.encode(message), now_us.to_bytes(8, "little")])


def fail(socket: "zmq.Socket[bytes]", failure: RankFailed) -> int:
    """Our last words: the process does not end before they have left. The exit code."""
    socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
    send(socket, FAILED, failure)
    socket.close()
    return 1


def start(target: Callable[..., None], *args: object) -> None:
    """A thread without which the rank is of no use: it ends the process when it fails."""

    def run() -> None:
        try:
            target(*args)
        except Exception:  # a rank without one of its threads would hang
            structlog.get_logger("paceline.rank").exception("a thread of the rank failed")
            os._exit(1)

    threading.Thread(target=run, name=target.__name__, daemon=True).start()


def make_engine(config: RankConfig) -> tuple[Engine, LoadedModel, RankPool]:
    """Raises ConfigError for a model or a setting that cannot work."""
    compute, device = config.compute, config.compute.device
    # torch counts cores, not their threads, and knows OMP_NUM_THREADS, but no quota.
    torch.set_num_threads(compute.num_threads or min(torch.get_num_threads(), usable_cores()))
    dtype = compute.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    check_device(device)
    use_compute_stream(torch.device(device))
    advice = "set quantization to int8 or int4, or take a device with more"
    with room_for("the weights", "device", device, device, advice):
        loaded = load_model(
            Path(config.model),
            device,
            dtype,
            kernels=LEVELS[compute.level].kernels,
            quantization=compute.quantization,
        )
    give_back_freed_memory()
    pool = make_pool(loaded.model, config.pool_fd, compute.pool_bytes, device)
    advice = f"set pool_mib to {compute.pool_mib * 3 // 4}, or max_batch_tokens lower"
    with room_for("steps", "pool_mib", compute.pool_mib, device, advice):
        engine = Engine(loaded.model, engine_config(config), pool.tensors, pool.memory, pool.canary)
        engine.warm_up(WarmUpLog())
        pool.canary.compute(loaded.model)
        engine.scheduler.step_time.tested_token_s = pool.canary.token_seconds(loaded.model)
    return engine, loaded, pool


def engine_config(config: RankConfig) -> EngineConfig:
    steps, level = config.steps, LEVELS[config.compute.level]
    return EngineConfig(
        max_batch_tokens=steps.max_batch_tokens,
        max_running=steps.max_running,
        output_window_tokens=steps.output_window_tokens,
        step_time_ms=steps.step_time_ms,
        itl_target_ms=steps.itl_target_ms,
        max_waiting=config.max_waiting,
        max_pinned_share=config.max_pinned_share,
        cuda_graphs=level.cuda_graphs,
        overlap=level.overlap,
    )


def make_links(
    config: RankConfig, group: PageGroup, engine: Engine, pool: RankPool, outbox: Outbox
) -> RankLinks | None:
    """None for a pool in host memory, which the front reads into by itself."""
    if pool.device_bytes is None:
        return None
    pace = CopyPace(lambda: len(engine.state) > 0)
    engine.on_decodes = pace.step_ended
    exported = DevicePool(
        memory=pool.device_bytes,
        group=group,
        num_pages=len(pool.canary.pools[0]),
        fd=pool.device_fd,
        pace=pace,
    )
    links = RankLinks(
        exported,
        TransportSettings(config.incarnation),
        reply=lambda reply: outbox.send(LINK, reply),
        on_bug=lambda: os._exit(1),
    )
    links.start(config.transports)
    return links


def make_turns(config: RankConfig, engine: Engine, links: RankLinks | None) -> DeviceTurns:
    def is_shared() -> bool:
        return links is not None and links.has_neighbours

    turns = DeviceTurns(is_shared, engine.awaits_kv, config.steps.itl_target_ms / 1000)
    engine.gives_way = turns.gives_way
    return turns


class WarmUpLog:
    """Tells in the log how far the compilation of kernels and the capture of graphs have come."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("paceline.rank")
        self._started_s = self._told_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done == total or now_s - self._told_s >= WARM_UP_LOG_S:
            self._told_s = now_s
            took = round(now_s - self._started_s, 1)
            self._log.info("warming up", done=done, total=total, seconds=took)


def give_back_freed_memory() -> None:
    """Else glibc keeps up to 165 MiB of what loading SmolLM2-135M has freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def describe(
    loaded: LoadedModel, engine: Engine, pool: RankPool, links: RankLinks | None
) -> RankReady:
    model, canary = loaded.model, pool.canary
    sums = PageSums(canary.pools[0], pool.memory, model.layout.page, len(model.layout.ranks))
    return RankReady(
        content_digest=loaded.content_digest,
        content_parts=loaded.content_parts,
        layout_digest=model.layout.digest,
        serving_digest=loaded.serving_digest,
        context_length=engine.max_length,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        groups=model.layout.groups,
        layers=model.layout.layers,
        ranks=model.layout.ranks,
        num_pages=engine.pool.num_pages,
        page_bytes=model.layout.page_bytes,
        most_pages=engine.scheduler.allowances.most(),
        addresses=links.addresses() if links is not None else (),
        canary=CanaryPages(
            canary.own_pages, canary.arrival_pages, canary.scratch_page, sums(canary.own_pages)
        ),
    )


def main() -> int:
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RankConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the front's to handle
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.configure("rank")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    steps = connect(context, config.step_address, zmq.PUSH)
    try:
        keys.self_test()
        engine, loaded, pool = make_engine(config)
        outbox = Outbox(engine, steps)
        links = make_links(config, loaded.model.layout.page, engine, pool, outbox)
    except PacelineError as error:
        return fail(steps, RankFailed(error.code, error.message, error.field))
    except (MemoryError, RuntimeError) as error:  # torch: out of memory, no such device
        return fail(steps, RankFailed(ErrorCode.INTERNAL, str(error)[:300]))
    turns = make_turns(config, engine, links)
    loop = StepLoop(engine, outbox, turns)
    start(answer_pool_calls, context, config.pool_address, engine)
    start(take_commands, context, config.command_address, engine, links, loop)
    gc.freeze()  # else a step waits 80 ms, now and then, while modules are looked through
    outbox.send(READY, describe(loaded, engine, pool, links))
    with torch.inference_mode():
        loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
