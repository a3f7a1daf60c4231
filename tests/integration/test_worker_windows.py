"""Hand-off of a model with windows between real workers: what the end of a prompt sees moves."""

import random
from collections.abc import Iterator

import pytest

from paceline.core.kv_layout import PAGE_TOKENS
from tests.support.fake_router import make_request, run_split
from tests.support.waits import wait_for
from tests.support.worker_pair import Workers, workers

TRANSPORTS = ("shm", "tcp")
WINDOW = 300
MODEL = {
    "num_hidden_layers": 6,  # three groups of two, one of them of full attention
    "layer_windows": [WINDOW, 0, WINDOW, WINDOW, 0, WINDOW],
    "head_dim": 128,  # pages that are worth an early pull
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Named after how decode reads. Without windows a prompt of 1201 tokens would not fit."""
    settings = {"pool_mib": 13}
    decodes = {name: {"transports": name, **settings} for name in TRANSPORTS}
    folder = tmp_path_factory.mktemp("workers")
    yield from workers(folder, decodes, {**settings, "max_batch_tokens": 300}, **MODEL)


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("length", [16, 331, 1201])
async def test_a_split_request_equals_a_whole_one(
    deployment: Workers, transport: str, length: int
) -> None:
    worker = deployment.by_name[transport]
    label = f'paceline_transfer_bytes_total{{transport="{transport}"}}'
    before = worker.metric(label)
    tokens = prompt(length, length + 1000 * TRANSPORTS.index(transport))
    async with deployment.attached(transport) as pair:
        sampling = {"n": 2, "temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
        request = make_request(pair.decode.info, tokens, **sampling)
        split = await run_split(pair.prefill, pair.decode, request)
        whole = await pair.prefill.run(request).until_ended()
        page_bytes = pair.decode.info.page_bytes
    assert split.decode.error is None
    for choice in (0, 1):
        assert split.output(choice) == whole.output(choice)
        assert len(split.output(choice)) == 20
    num_full, tail = divmod(length, PAGE_TOKENS)
    first = max(0, length + 1 - WINDOW) // PAGE_TOKENS
    num_tokens = (num_full + 2 * (num_full - first)) * PAGE_TOKENS + 3 * tail
    moved = worker.metric(label) - before
    assert moved == num_tokens * page_bytes // PAGE_TOKENS


async def test_a_prompt_whose_last_window_is_here_is_not_pulled_again(deployment: Workers) -> None:
    worker = deployment.by_name["shm"]
    async with deployment.attached("shm") as pair:
        tokens = prompt(1200, 7)
        request = make_request(pair.decode.info, tokens, max_tokens=4, ignore_eos=True)
        await run_split(pair.prefill, pair.decode, request)
        before = worker.metric("paceline_transfer_bytes_total")
        again = make_request(pair.decode.info, tokens, max_tokens=4, ignore_eos=True)
        split = await run_split(pair.prefill, pair.decode, again)
        assert split.decode.reserved is not None
        assert split.decode.reserved.num_cached_tokens == 1200
        assert split.prefill.emissions[0].num_cached_tokens == 1184
        assert worker.metric("paceline_transfer_bytes_total") == before
        await split.decode.until_ended()
    wait_for(lambda: worker.metric("paceline_worker_page_books_balanced") == 1, 5)
