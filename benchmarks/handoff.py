"""What the hand-off from prefill to decode costs: in bandwidth, in TTFT, in the second token.

shm_of_memcpy, tcp_of_socket   see benchmarks.pull
ttft_split_ratio_N             TTFT of N prompt tokens through prefill → decode, over TTFT of one
                               worker that does both; two deployments take turns, one request at a
                               time, every prompt another; median of the ratios of pairs. Two equal
                               deployments differ by 1 to 2 % here, the one that started first being
                               slower: the second half of the pairs is measured on new ones, started
                               in the other order
second_token_extra_of_itl      wait between tokens 1 and 2 beyond the idle inter-token latency of
                               the same answer, in such latencies; over shm, median, 1024 tokens
"""

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks import pull
from benchmarks.answer import Answer
from benchmarks.common import Options, publish, show
from benchmarks.deployment import demo_model, deployment, workers_total
from benchmarks.loadgen import TIMING, Call, send
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names

VOCAB_SIZE = 49152
TTFT_OUTPUT_TOKENS = 2  # as few as split: no engine then rests longer than the other
GAP_OUTPUT_TOKENS = 16
PAIRS = {1024: 8, 128: 30}  # prompt tokens → pairs of a half; the quick form measures fewer
QUICK_PAIRS = {1024: 2, 128: 6}
NUM_GAPS = 6  # requests of each length and half whose second token is looked at
QUICK_NUM_GAPS = 2


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt through both deployments."""

    split: Answer
    whole: Answer

    @property
    def ttft_ratio(self) -> float:
        return self.split.ttft_s / self.whole.ttft_s


def call(model: str, num_tokens: int, seed: int, max_tokens: int) -> Call:
    chance = random.Random(seed)
    prompt = [chance.randrange(300, VOCAB_SIZE) for _ in range(num_tokens)]
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return Call({**body, "ignore_eos": True, "stream": True}, headers=TIMING)


async def answer_of(url: str, one: Call) -> Answer:
    """Raises RuntimeError when it fails: there would be nothing to measure."""
    answer = await send(url, one)
    if not answer.is_complete:
        raise RuntimeError(f"a request failed: {answer.status} {answer.error}")
    return answer


async def measure_pair(urls: tuple[str, str], one: Call, *, split_first: bool) -> Pair:
    split_url, whole_url = urls
    order = (split_url, whole_url) if split_first else (whole_url, split_url)
    answers = {url: await answer_of(url, one) for url in order}
    return Pair(answers[split_url], answers[whole_url])


async def measure_pairs(urls: tuple[str, str], model: str, num_tokens: int, n: int) -> list[Pair]:
    """The first pair warms everything up and does not count."""
    pairs = []
    for i in range(n + 1):
        one = call(model, num_tokens, 1000 * num_tokens + i, TTFT_OUTPUT_TOKENS)
        pairs.append(await measure_pair(urls, one, split_first=i % 2 == 0))
        show(f"{num_tokens} tokens, pair {i} of {n}: {pairs[-1].ttft_ratio:.3f}")
    return pairs[1:]


async def second_token_extras(url: str, model: str, num_tokens: int, n: int) -> list[float]:
    """Wait of the second token beyond the usual gap of its answer, in such gaps."""
    extras = []
    for i in range(n):
        one = call(model, num_tokens, 1000 * num_tokens + 500 + i, GAP_OUTPUT_TOKENS)
        first, *others = (b - a for a, b in pairwise((await answer_of(url, one)).token_times))
        extras.append((first - median(others)) / median(others))
    return extras


@dataclass(slots=True)
class Half:
    """What was seen on two deployments, by the length of the prompts."""

    pairs: dict[int, list[Pair]]
    extras: dict[int, list[float]]
    pulled_bytes: float


@contextmanager
def deployments(model: Path, *, split_first: bool) -> Iterator[tuple[Cluster, Cluster]]:
    """Split and whole, started in the order asked for."""
    with ExitStack() as stack:

        def start(*, is_split: bool) -> Cluster:
            worker = {"transports": "shm"} if is_split else {}
            started = deployment(model, prefill=int(is_split), decode=1, worker=worker)
            return stack.enter_context(started)

        first, second = start(is_split=split_first), start(is_split=not split_first)
        yield (first, second) if split_first else (second, first)


def measure_half(num_pairs: dict[int, int], num_gaps: int, *, split_first: bool) -> Half:
    model = demo_model()
    half = Half({}, {}, 0)
    with deployments(model, split_first=split_first) as (split, whole):
        urls = (split.base_url, whole.base_url)
        for num_tokens, n in num_pairs.items():
            pairs = measure_pairs(urls, model.name, num_tokens, n)
            half.pairs[num_tokens] = asyncio.run(pairs)
            extras = second_token_extras(split.base_url, model.name, num_tokens, num_gaps)
            half.extras[num_tokens] = asyncio.run(extras)
        half.pulled_bytes = workers_total(split, names.TRANSFER_BYTES, "decode", transport="shm")
    return half


def ttft_figures(num_pairs: dict[int, int], num_gaps: int) -> dict[str, float]:
    halves = [measure_half(num_pairs, num_gaps, split_first=is_first) for is_first in (True, False)]
    figures: dict[str, float] = {}
    for num_tokens in num_pairs:
        pairs = [pair for half in halves for pair in half.pairs[num_tokens]]
        figures[f"ttft_split_ratio_{num_tokens}"] = median(p.ttft_ratio for p in pairs)
        figures[f"ttft_whole_ms_{num_tokens}"] = median(p.whole.ttft_s for p in pairs) * 1000
        suffix = "" if num_tokens == 1024 else f"_{num_tokens}"
        extras = [extra for half in halves for extra in half.extras[num_tokens]]
        figures[f"second_token_extra_of_itl{suffix}"] = median(extras)
    figures["pulled_mib"] = sum(half.pulled_bytes for half in halves) / 2**20
    return figures


def measure(options: Options) -> dict[str, float]:
    bandwidth = pull.measure(options)
    if options.quick:
        return {**bandwidth, **ttft_figures(QUICK_PAIRS, QUICK_NUM_GAPS)}
    return {**bandwidth, **ttft_figures(PAIRS, NUM_GAPS)}


def main() -> int:
    return publish("handoff", measure)


if __name__ == "__main__":
    sys.exit(main())
