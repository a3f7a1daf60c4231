"""KV that is pulled, evicted and pulled again for long stays what it was."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.fake_router import make_request, run_split
from tests.support.worker_pair import Pair, Workers, workers

pytestmark = pytest.mark.slow
NUM_PROMPTS, NUM_ROUNDS, AT_ONCE = 200, 10, 12
GREEDY = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Pools of 256 pages: a round needs 1200, so that every prompt is pulled anew in each."""
    small = {"transports": "tcp", "pool_mib": 1, "output_window_tokens": 16}
    yield from workers(tmp_path_factory.mktemp("drift"), {"tcp": small}, {**small})


def prompts() -> list[list[int]]:
    return [[(i * 37 + k * k * 11 + k * 7) % 256 for k in range(90)] for i in range(NUM_PROMPTS)]


async def round_of(pair: Pair, *, split: bool) -> list[list[int]]:
    turns = asyncio.Semaphore(AT_ONCE)

    async def answer(tokens: list[int]) -> list[int]:
        request = make_request(pair.decode.info, tokens, **GREEDY)
        async with turns:
            if split:
                return (await run_split(pair.prefill, pair.decode, request)).output()
            return (await pair.prefill.run(request).until_ended()).output()

    return list(await asyncio.gather(*map(answer, prompts())))


@pytest.mark.timeout(300)
async def test_sglang_23020_answers_do_not_drift(deployment: Workers) -> None:
    """https://github.com/sgl-project/sglang/issues/23020: 200 prompts, ten times, greedy; each
    answer is that of the first round and of one worker alone."""
    reader = deployment.by_name["tcp"]
    async with deployment.attached("tcp") as pair:
        alone = await round_of(pair, split=False)
        assert len({tuple(answer) for answer in alone}) == NUM_PROMPTS
        for _ in range(NUM_ROUNDS):
            before = reader.metric("paceline_transfer_bytes_total")
            assert await round_of(pair, split=True) == alone
            moved = reader.metric("paceline_transfer_bytes_total") - before
            assert moved > NUM_PROMPTS * 5 * 4096  # five full blocks each
    assert reader.metric("paceline_transfer_mismatches_total") == 0
