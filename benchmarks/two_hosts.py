"""KV travels between hosts over a link that is slow, late and lossy; a cut costs a few seconds.

Three network namespaces on this machine (tests/support/network.py): two prefill workers and a
decode worker on the mock model, joined at 1 Gbit/s, 2 ms each way, with 1 % of the packets lost.
This process stands for their router and reaches them over another network. Requests are handed off
over each transport; then, while pages are on their way, the first prefill worker is cut off the
other hosts, and the request goes on with the second.

handoff_mb_s    of a hand-off's pages, from the request to decode's first token, median
wrong_tokens    that differ from those of a worker which computes the whole request
retried         hand-offs over a link that was whole, which went on elsewhere all the same
retry_s         from the cut until the request goes on elsewhere
next_token_s    from the cut to the next token: pages of that hand-off travel over such a link, too
free_s          from the cut until all pages are free or cached, at both ends of it
hung            requests that did not end
cut_mid_pull    cuts that came while some pages were there and others not
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Figures, Options, publish, show
from benchmarks.deployment import mock_model
from benchmarks.transfer_faults import MODEL
from benchmarks.transfer_faults_hand import Hand, Outcome
from benchmarks.transfer_faults_seam import PoolWatch, until
from benchmarks.transfer_faults_workers import DEFAULT, POOL_MIB, READY_S
from paceline.kv_transfer import registry
from tests.support.fake_router import Attachment
from tests.support.network import Host, network, why_not
from tests.support.tun_forwarder import DEVICE
from tests.support.worker_pair import is_free
from tests.support.workers import WorkerProcess, start_worker

TRANSPORTS = ("tcp", "ucx")
DELAY_MS, LOSS_PERCENT = 2, 1
PORTS = {"port": 7001, "probe_port": 7002}
COUNTS = (20, 5)  # hand-offs, cuts
QUICK_COUNTS = (3, 1)
NAMES = ("first", "second", "reader")
PROMPT_TOKENS = 1600
PROMPT_MB = PROMPT_TOKENS / 16 * 0.131072
FREE_LIMIT_S = 20.0


Attached = dict[str, Attachment]


@dataclass(frozen=True, slots=True)
class Cut:
    wrong_tokens: int
    hung: int
    is_mid_pull: bool
    retry_s: float
    next_token_s: float
    free_s: float


class Trio:
    """One worker a host: `first` and `second` prefill, `reader` decodes."""

    def __init__(self, hosts: dict[str, Host], workers: dict[str, WorkerProcess]) -> None:
        self._hosts, self._workers = hosts, workers
        self._num_prompts = 0

    async def hand_off(self, source: str = "first") -> tuple[float, Outcome]:
        """Seconds until decode's first token."""
        async with self._attached() as attached:
            hand = self._hand(attached, source)
            await hand.prepare()
            began = time.monotonic()
            running = asyncio.create_task(hand.run())
            await until(lambda: hand.has_decoded() or running.done(), DEFAULT.limit_s)
            return time.monotonic() - began, await running

    async def cut(self) -> Cut:
        """The first off the others in the middle of a pull from it; then from the second."""
        reader = self._workers["reader"]
        async with self._attached() as attached:
            hand = self._hand(attached, "first")
            await hand.prepare()
            watch = PoolWatch(reader.pid, attached["reader"].info)
            watching = asyncio.create_task(asyncio.to_thread(watch.wait, self._cut_off))
            await hand.begin(attached["first"], self._endpoint("first"))
            assert await watching, "no page came"
            cut_at, num_changed = time.monotonic(), watch.num_changed()
            hung = int(not await until(hand.is_over, DEFAULT.limit_s))
            retry_s = time.monotonic() - cut_at
            hand.end()
            assert not hand.is_answered(), "the cut came too late"
            await hand.begin(attached["second"], self._endpoint("second"))
            hung += not await until(hand.has_decoded, DEFAULT.limit_s)
            next_token_s = time.monotonic() - cut_at
            hung += not await until(hand.is_answered, DEFAULT.limit_s)
            hand.end()
            free_s = await self._free_after(cut_at)
        self._hosts["first"].set_link(is_up=True)
        is_mid_pull = 0 < num_changed < PROMPT_TOKENS // 16
        return Cut(hand.num_wrong(), hung, is_mid_pull, retry_s, next_token_s, free_s)

    def lose_first_packets(self, source: str = "first") -> None:
        """Of each connection to it, from now on."""
        self._hosts[source].lose_first_packets()

    def _cut_off(self) -> None:
        self._hosts["first"].set_link(is_up=False)

    async def _free_after(self, began: float) -> float:
        for name in ("first", "reader"):
            while not await asyncio.to_thread(is_free, self._workers[name]):
                if time.monotonic() - began > FREE_LIMIT_S:
                    return FREE_LIMIT_S
                await asyncio.sleep(0.05)
        return time.monotonic() - began

    @asynccontextmanager
    async def _attached(self) -> AsyncIterator[Attached]:
        async with AsyncExitStack() as stack:
            yield {
                name: await stack.enter_async_context(Attachment(worker.endpoint))
                for name, worker in self._workers.items()
            }

    def _hand(self, attached: Attached, source: str) -> Hand:
        """Of a new prompt."""
        self._num_prompts += 1
        chance = random.Random(self._num_prompts)
        prompt = [chance.randrange(256) for _ in range(PROMPT_TOKENS)]
        spare = attached["second" if source == "first" else "first"]
        parts = (attached[source], attached["reader"], spare)
        return Hand(*parts, prompt, self._endpoint(source), DEFAULT)

    def _endpoint(self, name: str) -> str:
        """For other hosts."""
        return f"{self._hosts[name].address}:{PORTS['port']}"


@contextmanager
def trio(model: Path, transport: str) -> Iterator[Trio]:
    with network(NAMES, DELAY_MS, LOSS_PERCENT) as made, ExitStack() as stack:
        hosts = dict(zip(NAMES, made, strict=True))
        workers = {name: start_on(host, name, model, transport) for name, host in hosts.items()}
        for worker in workers.values():
            stack.callback(worker.stop)
        for worker in workers.values():
            worker.wait_until_ready(READY_S)
        yield Trio(hosts, workers)


def start_on(host: Host, name: str, model: Path, transport: str) -> WorkerProcess:
    role = "decode" if name == "reader" else "prefill"
    addresses = {"host": "0.0.0.0", "advertise_host": host.address, **PORTS}
    settings: dict[str, object] = {
        "worker_id": name,
        "transports": transport,
        "pool_mib": POOL_MIB,
        **addresses,
    }
    prefix = [*host.prefix, "env", f"UCX_NET_DEVICES={DEVICE}"]
    worker = start_worker(role, model, prefix, **settings)
    worker.host = host.control
    return worker


async def measure_over(model: Path, transport: str, num_handoffs: int, num_cuts: int) -> Figures:
    with trio(model, transport) as running:
        met = [await running.hand_off("second")]  # they know each other from then on
        handoffs = [await running.hand_off() for _ in range(num_handoffs)]
        cuts = []
        for _ in range(num_cuts):
            cuts.append(await running.cut())
            show(f"{transport}: {cuts[-1]}")
            handoffs.append(await running.hand_off())  # at once, as if nothing had been
    ended = [found for _, found in (*met, *handoffs)]
    took_s = [seconds for seconds, _ in handoffs[:num_handoffs]]
    return {
        f"handoff_mb_s_{transport}": PROMPT_MB / statistics.median(took_s),
        "wrong_tokens": sum(f.wrong_tokens for f in ended) + sum(c.wrong_tokens for c in cuts),
        "hung": sum(found.hung for found in ended) + sum(cut.hung for cut in cuts),
        "retried": sum(found.retried for found in ended),
        "cut_mid_pull": sum(cut.is_mid_pull for cut in cuts),
        f"retry_s_{transport}": max(cut.retry_s for cut in cuts),
        f"next_token_s_{transport}": max(cut.next_token_s for cut in cuts),
        f"free_s_{transport}": max(cut.free_s for cut in cuts),
    }


def measure(options: Options) -> dict[str, float]:
    if reason := why_not():
        show(f"no hosts can be made here: {reason}")
        return {}
    total: dict[str, float] = {}
    counts = QUICK_COUNTS if options.quick else COUNTS
    for transport in TRANSPORTS:
        if reason := registry.problem_of(transport):
            show(f"{transport} {reason}")
            continue
        with mock_model(260, **MODEL) as model:
            figures = asyncio.run(measure_over(model, transport, *counts))
        total |= {key: value + total.get(key, 0) for key, value in figures.items()}
    return total


def main() -> int:
    return publish("two_hosts", measure)


if __name__ == "__main__":
    sys.exit(main())
