"""What Paceline adds to each token between the engine and the client's socket.

The mock engine emits every 50 ms; each event of the stream carries the time at which the engine's
step ended (header x-paceline-timing), and a raw HTTP client in a process of its own notes when the
event arrived on the same machine's clock.

added_ms_per_token   mean over tokens of arrival − emission, 32 streams in step
added_ms_1           the same for a single stream
added_ttft_ms        median over requests, one every 50 ms, of TTFT less what the engine needs: the
                     rest of the step that the prefill worker is in, and the step of the prompt.
                     Being late for a step therefore counts as a whole step.
socket_hop_ms        a bare message between two processes that slept for a step, in the same run:
                     a token makes four such hops, so four times this is the floor of added_ms_1
"""

import asyncio
import random
import sys
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median

from benchmarks.answer import Answer
from benchmarks.common import REPEATS, Options, memcpy_gb_s, publish, show
from benchmarks.deployment import deployment, mock_model
from benchmarks.loadgen import TIMING, Call, send, send_all
from benchmarks.socket_hop import socket_hop_ms

STEP_S = 0.05
ARRIVAL_S = 0.05
NUM_STREAMS = 32
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
ARRIVAL_OUTPUT_TOKENS = 16
NUM_ARRIVALS = 60
VOCAB_SIZE = 4096


def call(model: Path, seed: int, max_tokens: int) -> Call:
    chance = random.Random(seed)
    prompt = [chance.randrange(300, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
    body = {"model": model.name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return Call({**body, "stream": True}, headers=TIMING)


async def arrivals(base_url: str, sent: list[Call]) -> list[Answer]:
    """One request every ARRIVAL_S, whatever became of those before."""
    tasks = []
    for one in sent:
        tasks.append(asyncio.create_task(send(base_url, one)))
        await asyncio.sleep(ARRIVAL_S)
    return list(await asyncio.gather(*tasks))


def in_step(base_url: str, sent: list[Call]) -> list[Answer]:
    return asyncio.run(send_all(base_url, sent, len(sent)))


def one_by_one(base_url: str, sent: list[Call]) -> list[Answer]:
    return asyncio.run(arrivals(base_url, sent))


def added_ms(answers: list[Answer]) -> float:
    """Mean over tokens of arrival at the client less emission by the engine."""
    waits = [e.at_s - e.emitted_s for a in answers for e in a.events if e.emitted_s]
    return fmean(waits) * 1000


def added_ttft_ms(answers: list[Answer]) -> list[float]:
    """Of each request: TTFT less the engine's share of it, as the module says."""
    firsts = [next(e for e in answer.events if e.emitted_s) for answer in answers]
    ends = sorted({event.emitted_s for event in firsts if event.emitted_s})
    added = []
    for answer, first in zip(answers, firsts, strict=True):
        after = bisect_right(ends, answer.sent_s)
        is_busy = after < len(ends) and ends[after] - STEP_S <= answer.sent_s
        start_s = ends[after] if is_busy else answer.sent_s
        added.append((first.at_s - (start_s + STEP_S)) * 1000)
    return added


class Client:
    """The process that sends and receives: nothing else runs in it."""

    def __init__(self, base_url: str, pool: ProcessPoolExecutor) -> None:
        self._base_url = base_url
        self._pool = pool

    def run(self, how: Callable[[str, list[Call]], list[Answer]], sent: list[Call]) -> list[Answer]:
        """Raises RuntimeError if a request failed: there would be nothing to measure."""
        answers = self._pool.submit(how, self._base_url, sent).result()
        for answer in answers:
            if not answer.is_complete:
                raise RuntimeError(f"a request failed: {answer.status} {answer.error}")
        return answers


@dataclass(slots=True)
class Found:
    many_ms: list[float] = field(default_factory=list)
    one_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    hop_ms: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        ttfts = sorted(self.ttft_ms)
        return {
            "added_ms_per_token": median(self.many_ms),
            "added_ms_1": median(self.one_ms),
            "added_ttft_ms": median(ttfts),
            "added_ttft_p90_ms": ttfts[len(ttfts) * 9 // 10],
            "socket_hop_ms": median(self.hop_ms),
        }


def measure_round(client: Client, model: Path, seed: int, found: Found) -> None:
    many = [call(model, seed + i, OUTPUT_TOKENS) for i in range(NUM_STREAMS)]
    found.many_ms.append(added_ms(client.run(in_step, many)))
    one = [call(model, seed + 100, OUTPUT_TOKENS)]
    found.one_ms.append(added_ms(client.run(in_step, one)))
    found.hop_ms.append(socket_hop_ms(STEP_S))
    each = [call(model, seed + 200 + i, ARRIVAL_OUTPUT_TOKENS) for i in range(NUM_ARRIVALS)]
    found.ttft_ms += added_ttft_ms(client.run(one_by_one, each))


def measure(options: Options) -> dict[str, float]:
    num_rounds = 1 if options.quick else REPEATS
    found = Found()
    with (
        mock_model(VOCAB_SIZE, step_s=STEP_S) as model,
        deployment(model) as cluster,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        client = Client(cluster.base_url, pool)
        client.run(in_step, [call(model, -1, 4)])  # everything is connected and imported then
        for i in range(num_rounds):
            show(f"round {i + 1} of {num_rounds}")
            measure_round(client, model, 1000 * i, found)
    return {**found.figures(), "memcpy_gb_s": memcpy_gb_s()}


def main() -> int:
    return publish("stream", measure)


if __name__ == "__main__":
    sys.exit(main())
