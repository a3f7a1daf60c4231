"""What the hand-off from prefill to decode costs: in bandwidth, in TTFT, in the second token.

shm_of_memcpy, tcp_of_socket   see benchmarks.pull
ttft_split_ratio_N             TTFT of N prompt tokens through prefill → decode, over TTFT of one
                               worker that does both; two deployments take turns, one request at a
                               time, every prompt another; median of the ratios of pairs
second_token_extra_of_itl      wait between tokens 1 and 2 beyond the idle inter-token latency of
                               the same answer, in such latencies; over shm, median, 1024 tokens
"""

import asyncio
import random
import sys
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks import pull
from benchmarks.answer import Answer
from benchmarks.common import Options, publish, show
from benchmarks.deployment import demo_model, deployment, workers_total
from benchmarks.loadgen import TIMING, Call, send
from paceline.core import metrics as names

VOCAB_SIZE = 49152
TTFT_OUTPUT_TOKENS = 2  # as few as split: no engine then rests longer than the other
GAP_OUTPUT_TOKENS = 16
PAIRS = {1024: 9, 128: 41}  # prompt tokens → pairs; the quick form measures fewer
QUICK_PAIRS = {1024: 3, 128: 11}
NUM_GAPS = 9  # requests of each length whose second token is looked at
QUICK_NUM_GAPS = 3


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


def ttft_figures(num_pairs: dict[int, int], num_gaps: int) -> dict[str, float]:
    model = demo_model()
    figures: dict[str, float] = {}
    with (
        deployment(model, prefill=1, decode=1, worker={"transports": "shm"}) as split,
        deployment(model, prefill=0, decode=1) as whole,
    ):
        urls = (split.base_url, whole.base_url)
        for num_tokens, n in num_pairs.items():
            pairs = asyncio.run(measure_pairs(urls, model.name, num_tokens, n))
            measuring = second_token_extras(split.base_url, model.name, num_tokens, num_gaps)
            extra = median(asyncio.run(measuring))
            figures[f"ttft_split_ratio_{num_tokens}"] = median(p.ttft_ratio for p in pairs)
            figures[f"ttft_whole_ms_{num_tokens}"] = median(p.whole.ttft_s for p in pairs) * 1000
            suffix = "" if num_tokens == 1024 else f"_{num_tokens}"
            figures[f"second_token_extra_of_itl{suffix}"] = extra
        pulled = workers_total(split, names.TRANSFER_BYTES, "decode", transport="shm")
        figures["pulled_mib"] = pulled / 2**20
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
