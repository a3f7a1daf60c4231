"""What a decision of the router costs, by prompt, number of workers and size of the index.

One process, no network: fleet, index, planner and accounting are the router's own; sessions get
one frame of load each. A decision begins with a request whose keys are given and ends with the
attempt whose slots are taken: revision of the model, lookup, candidates, plan. Eight workers hold
the prompt at different depths, and each request is another prompt than the 63 before it. The
time of a decision is that of its thread, in the quietest of ten turns (the one with the lowest 99th
percentile): a neighbour on the same core makes every step several times slower now and then.

decision_8k_64w_p99_us is of the largest index, `…_all_us` of all its turns, `…_hopes_p99_us` beside
32 streams on each worker that hope for a time between tokens; `keys_8k_us` is the compiled chain of
SHA-256 over 8192 tokens; bytes_per_block is the growth of resident memory over (block, worker)
entries at ten million. With --peer, `lookup_8k_vs_dynamo`: time of the index part
over that of Dynamo's `RadixTree` for the same 512 blocks among 64 workers, medians of turns that
alternate.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Options, publish, show
from benchmarks.peer import peer_figures
from paceline.core import keys
from paceline.core.keys import INDEX_KEY_BYTES, KEY_BYTES
from paceline.router.attempt import Attempt
from paceline.router.config import RouterConfig
from paceline.router.fleet import Fleet
from paceline.router.index import PrefixIndex
from paceline.router.metrics import RouterMetrics
from paceline.router.mirror import KvEvent, MirrorSet
from paceline.router.placement import Line, Placer
from paceline.router.request import Request, WorkerLife
from paceline.router.worker_session import Nobody, WorkerSession
from paceline.rpc.redis_schema import DEVICE, MAX_EVENT_KEYS, Kind
from paceline.v1 import common_pb2, worker_pb2

PROMPTS = {"1k": 1024, "8k": 8192, "128k": 131072}
WORKERS = (8, 64, 512)
BLOCKS = {"1m": 1_000_000, "10m": 10_000_000}
NUM_PROMPTS = 64
NUM_HOLDERS = 8
TURNS = 10
NUM_HOPING, HOPED_ITL_S, HOPING_TOKEN_S = 32, 0.04, 1e-4
DECISIONS = {"1k": 640, "8k": 640, "128k": 192}  # a turn
INDEX_BYTES = 2 << 30
PEER_TURNS, PEER_LOOKUPS, PEER_WORKERS = 3, 2000, 64
US = 1e6

MODEL, DIGEST, TENANT, SECRET = "m", "ab" * 32, "t", "s" * 32
ROOT = keys.root_key(DIGEST, keys.tenant_salt(SECRET.encode(), TENANT))


@dataclass
class Attached:
    """A link whose worker is connected."""

    session: WorkerSession


class Nowhere:
    """Where the output of requests goes that are never run."""

    def emit(self, emission: common_pb2.Emission) -> None: ...

    def fail(self, slot: int, error: Exception) -> None: ...

    def set_back(self, slot: int, num_failures: int, lost: WorkerLife | None) -> None: ...


class Deployment:
    """A router's parts, `num_workers` connected workers, and an index with what they publish."""

    def __init__(self, num_workers: int, mirrors: MirrorSet) -> None:
        self.config = RouterConfig(secret=SECRET)
        self.fleet = Fleet(self.config, RouterMetrics())
        now = asyncio.get_running_loop().time()
        for number in range(num_workers):
            info = worker_info(number)
            session = WorkerSession(info, now)
            load = worker_pb2.Load(
                num_running=number % 7, num_pages=info.num_pages, num_free_pages=info.num_pages
            )
            session.handle(worker_pb2.WorkerFrame(load=load), now)
            link: Any = Attached(session)
            self.fleet.links[info.worker_id] = link
        self.fleet.refresh_models(now)
        self.placer = Placer(self.config, self.fleet, mirrors, random.Random(0))

    @contextmanager
    def hoping(self) -> Iterator[None]:
        """Streams on all workers that hope for a time between tokens, which their steps exceed."""
        now = asyncio.get_running_loop().time()
        with ExitStack() as slots:
            for session in self.fleet.sessions():
                session.cost_s, session.longest_step_s = HOPING_TOKEN_S, 2 * HOPED_ITL_S
                for _ in range(NUM_HOPING):
                    flight = slots.enter_context(session.fly(Nobody(), 0))
                    flight.hope(HOPED_ITL_S)
                    flight.begin(now)
            yield

    def keep_alive(self) -> None:
        now = asyncio.get_running_loop().time()
        for session in self.fleet.sessions():
            session.handle(worker_pb2.WorkerFrame(load=session.load), now)

    def decide(self, request: Request, number: int) -> Attempt:
        digest = self.placer.digest_of(request)
        attempt = self.placer.place(Line(request, digest, (0,), request.turn(number)))
        assert attempt is not None
        return attempt


def worker_info(number: int) -> worker_pb2.WorkerInfo:
    """Every second one prefills."""
    return worker_pb2.WorkerInfo(
        worker_id=f"w{number}",
        incarnation="1",
        role=worker_pb2.ROLE_PREFILL if number % 2 else worker_pb2.ROLE_DECODE,
        model=MODEL,
        content_digest=DIGEST,
        context_length=1 << 18,
        num_pages=1 << 20,
    )


class Published:
    """Mirrors of as many workers as any deployment has, filled as their events would fill them."""

    def __init__(self) -> None:
        self.mirrors = MirrorSet(PrefixIndex(INDEX_BYTES))
        self.num_entries = 0
        self._sequences = [0] * max(WORKERS)
        for number in range(max(WORKERS)):
            self.mirrors.follow(f"w{number}", "1")
            self._apply(number, Kind.CLEARED, b"")

    def store(self, number: int, packed: bytes) -> None:
        event_bytes = MAX_EVENT_KEYS * INDEX_KEY_BYTES
        for start in range(0, len(packed), event_bytes):
            self._apply(number, Kind.STORED, packed[start : start + event_bytes])
        self.num_entries += len(packed) // INDEX_KEY_BYTES

    def fill(self, num_entries: int, num_workers: int) -> None:
        """With unrelated blocks, up to so many entries, evenly over the first workers."""
        number = 0
        while self.num_entries < num_entries:
            self.store(number % num_workers, os.urandom(MAX_EVENT_KEYS * INDEX_KEY_BYTES))
            number += 1

    def _apply(self, number: int, kind: Kind, packed: bytes) -> None:
        self._sequences[number] += 1
        mirror = self.mirrors.workers[f"w{number}"]
        mirror.apply(KvEvent(f"w{number}", "1", self._sequences[number], kind, DEVICE, packed))


def index_keys(chain: bytes, num_blocks: int) -> bytes:
    short = (chain[KEY_BYTES * i :][:INDEX_KEY_BYTES] for i in range(num_blocks))
    return b"".join(short)


def depths(num_blocks: int, count: int = NUM_HOLDERS) -> list[int]:
    """From a few blocks to nearly all."""
    return [max(1, num_blocks * (i + 1) // (count + 1)) for i in range(count)]


def make_prompts(num_tokens: int, published: Published, num_workers: int) -> list[bytes]:
    """Messages of requests, each with keys that eight workers hold to different depths."""
    chance = random.Random(num_tokens)
    messages = []
    for number in range(NUM_PROMPTS):
        tokens = [chance.randrange(32000) for _ in range(num_tokens)]
        chain = b"".join(keys.chain_keys(ROOT, tokens))
        holders = chance.sample(range(num_workers), NUM_HOLDERS)
        for holder, depth in zip(holders, depths(len(chain) // KEY_BYTES), strict=True):
            published.store(holder, index_keys(chain, depth))
        message = common_pb2.TokenRequest(
            request_id=f"r{number}",
            model=MODEL,
            tenant=TENANT,
            root_key=ROOT,
            token_ids=tokens,
            num_prompt_tokens=num_tokens,
            block_keys=chain,
            sampling=common_pb2.SamplingParams(max_tokens=100, temperature=1, top_p=1, n=1),
        )
        messages.append(message.SerializeToString())
    return messages


def decision_times(deployment: Deployment, messages: list[bytes], count: int) -> list[float]:
    """Seconds of this thread, of each decision. Untimed, as they come before and after it in a
    router: the request is read, the slots are given back."""
    times = []
    for number in range(count):
        if number % NUM_PROMPTS == 0:
            deployment.keep_alive()
        message = common_pb2.TokenRequest.FromString(messages[number % NUM_PROMPTS])
        request = Request(number, message, Nowhere(), 60.0)
        began = time.thread_time()
        attempt = deployment.decide(request, number)
        times.append(time.thread_time() - began)
        attempt.close()
    return times


async def decision_figures(published: Published, size: str, *, quick: bool) -> dict[str, float]:
    figures = {}
    for num_workers in WORKERS:
        deployment = Deployment(num_workers, published.mirrors)
        for prompt, num_tokens in PROMPTS.items():
            messages = make_prompts(num_tokens, published, num_workers)
            count = DECISIONS[prompt] // (2 if quick else 1)
            turns = [decision_times(deployment, messages, count) for _ in range(TURNS)]
            quietest = min(turns, key=lambda times: centile(times, 99))
            name = f"decision_{prompt}_{num_workers}w_{size}"
            figures[f"{name}_p50_us"] = centile(quietest, 50) * US
            figures[f"{name}_p99_us"] = centile(quietest, 99) * US
            figures[f"{name}_p99_all_us"] = centile([t for turn in turns for t in turn], 99) * US
            figures[f"{name}_per_s"] = len(quietest) / sum(quietest)
            if name.startswith("decision_8k_64w"):
                with deployment.hoping():
                    turns = [decision_times(deployment, messages, count) for _ in range(TURNS)]
                figures[f"{name}_hopes_p99_us"] = min(centile(t, 99) for t in turns) * US
            show(", ".join(f"{key} {figures[key]:.0f}" for key in figures if key.startswith(name)))
    return figures


def centile(times: list[float], percent: int) -> float:
    return statistics.quantiles(times, n=100)[percent - 1]


def keys_us() -> float:
    """Of one call for 8192 tokens, best of many."""
    packed = os.urandom(4 * PROMPTS["8k"])
    chain = keys._chain_keys_native
    if chain is None:
        raise SystemExit("paceline.core._native is not built; run `make venv`")
    return min(timed(lambda: chain(ROOT, packed), 200)) * US


def timed(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def bytes_per_block() -> float:
    """Growth of resident memory while ten million entries are stored."""
    published = Published()
    before = resident_bytes()
    published.fill(BLOCKS["10m"], max(WORKERS))
    return (resident_bytes() - before) / published.num_entries


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peer_turns() -> Iterator[tuple[float, float]]:
    """Microseconds of a lookup, the peer's and ours, which must say the same of each worker."""
    chance = random.Random(7)
    chain = b"".join(keys.chain_keys(ROOT, [chance.randrange(32000) for _ in range(8192)]))
    num_blocks = len(chain) // KEY_BYTES
    holders = chance.sample(range(PEER_WORKERS), NUM_HOLDERS)
    held = dict(zip(holders, depths(num_blocks), strict=True))
    other = {w: chance.randbytes(INDEX_KEY_BYTES * num_blocks) for w in range(PEER_WORKERS)}
    index = PrefixIndex(INDEX_BYTES)
    views = [index.open() for _ in range(PEER_WORKERS)]
    for worker, view in enumerate(views):
        index.store(view, other[worker])
        index.store(view, index_keys(chain, held.get(worker, 0)))
    found = index.match(chain, KEY_BYTES)
    assert {views.index(view): depth for view, depth in found.items()} == held
    with tempfile.NamedTemporaryFile("w", suffix=".json") as plan:
        json.dump(peer_plan(chain, held, other), plan)
        plan.flush()
        for _ in range(PEER_TURNS):
            theirs = dict(peer_figures("dynamo_radix", plan.name, str(PEER_LOOKUPS)))
            lookup_us = theirs.pop("lookup_us")
            assert {int(worker): depth for worker, depth in theirs.items()} == held
            ours = timed(lambda: index.match(chain, KEY_BYTES), PEER_LOOKUPS)
            yield lookup_us, statistics.median(ours) * US


def peer_plan(chain: bytes, held: dict[int, int], other: dict[int, bytes]) -> dict[str, Any]:
    """The same blocks as 64-bit numbers, the form that the peer takes."""
    numbers = [key >> 1 for key in words(index_keys(chain, len(chain) // KEY_BYTES))]
    unrelated = {
        str(worker): [key >> 1 for key in words(packed)] for worker, packed in other.items()
    }
    return {"chain": numbers, "held": {str(w): d for w, d in held.items()}, "other": unrelated}


def words(packed: bytes) -> Iterator[int]:
    """The first eight bytes of each index key."""
    for start in range(0, len(packed), INDEX_KEY_BYTES):
        yield int.from_bytes(packed[start : start + 8])


def peer_comparison() -> dict[str, float]:
    turns = list(peer_turns())
    theirs = statistics.median(peer for peer, _ in turns)
    ours = statistics.median(own for _, own in turns)
    return {
        "lookup_8k_us": ours,
        "dynamo_lookup_8k_us": theirs,
        "lookup_8k_vs_dynamo": ours / theirs,
    }


def measure(options: Options) -> dict[str, float]:
    figures = {"keys_8k_us": keys_us(), "bytes_per_block": bytes_per_block()}
    show(f"keys {figures['keys_8k_us']:.0f} us, {figures['bytes_per_block']:.1f} bytes a block")
    published = Published()
    for size, num_blocks in BLOCKS.items():
        published.fill(num_blocks, max(WORKERS))
        figures |= asyncio.run(decision_figures(published, size, quick=options.quick))
    largest = list(BLOCKS)[-1]
    for name in ("p99_us", "p99_all_us", "hopes_p99_us"):
        figures[f"decision_8k_64w_{name}"] = figures[f"decision_8k_64w_{largest}_{name}"]
    if options.peer:
        figures |= peer_comparison()
    return figures


def main() -> int:
    return publish("router_decisions", measure)


if __name__ == "__main__":
    sys.exit(main())
