"""Workers that lay the same KV out differently hand it over; those that cannot are kept apart.

The mock model's next token is a hash of the KV bytes it reads: a byte in the wrong place is a wrong
token.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.core.kv_layout import head_ranges
from tests.support.fake_router import Attachment, make_hint, make_request, run_split
from tests.support.mock_model import write_mock_model
from tests.support.waits import wait_for
from tests.support.worker_pair import FAST, is_free
from tests.support.workers import WorkerProcess, start_worker

Workers = dict[str, WorkerProcess]


@contextmanager
def running(folder: Path, shared: dict[str, Any], **layouts: dict[str, Any]) -> Iterator[Workers]:
    """A worker for each of `layouts`: fields of its own beside the `shared` ones. Its name begins
    with its role."""
    started = {}
    for name, fields in layouts.items():
        settings = {**FAST, **fields.pop("settings", {})}
        model = write_mock_model(folder / name, **shared, **fields)
        started[name] = start_worker(
            name.split("_")[0], model, worker_id=name, model_name="model", **settings
        )
    try:
        for worker in started.values():
            worker.wait_until_ready()
        yield started
        for worker in started.values():
            wait_for(lambda worker=worker: is_free(worker), 5)
    finally:
        for worker in started.values():
            worker.process.terminate()
        statuses = [worker.stop() for worker in started.values()]
    assert not any(statuses), statuses


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


async def hand_over(source: WorkerProcess, reader: WorkerProcess, tokens: list[int]) -> None:
    """A split request, whose tokens must be those of each worker alone."""
    pulled = reader.metric("paceline_transfer_bytes_total")
    async with Attachment(source.endpoint) as prefill, Attachment(reader.endpoint) as decode:
        assert prefill.info.content_digest == decode.info.content_digest
        request = make_request(decode.info, tokens, max_tokens=12, ignore_eos=True)
        split = await run_split(prefill, decode, request)
        assert split.decode.error is None, split.decode.error
        for whole in (prefill, decode):
            alone = make_request(whole.info, tokens, max_tokens=12, ignore_eos=True)
            assert split.output() == (await whole.run(alone).until_ended()).output()
    assert reader.metric("paceline_transfer_bytes_total") > pulled


async def pull_back(source: WorkerProcess, reader: WorkerProcess) -> None:
    """The next turn of a conversation: prefill takes what decode has made."""
    async with Attachment(source.endpoint) as prefill, Attachment(reader.endpoint) as decode:
        first = make_request(decode.info, prompt(100, 5), max_tokens=40, ignore_eos=True)
        said = first.token_ids[:] + (await decode.run(first).until_ended()).output()
        again = make_request(prefill.info, [*said, *prompt(20, 6)], max_tokens=6, ignore_eos=True)
        hint = make_hint(again, decode, prefill, num_blocks=(len(said) - 1) // 16)
        log = await prefill.run(again, [hint]).until_ended()
        assert log.emissions[0].num_cached_tokens == (len(said) - 1) // 16 * 16
        whole = make_request(decode.info, again.token_ids, max_tokens=6, ignore_eos=True)
        assert log.output() == (await decode.run(whole).until_ended()).output()


async def test_sglang_33309_a_cached_prefix_reaches_another_sharding_whole(tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/pull/33309: one rank prefills, two decode; the cached
    prefix went early, and the rest was laid out wrong."""
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 4, "token_s": 0.002}
    layouts: dict[str, Any] = {"prefill_1": {}, "decode_2": {"num_ranks": 2}}
    with running(tmp_path, sizes, **layouts) as workers:
        source, reader = workers["prefill_1"], workers["decode_2"]
        async with Attachment(source.endpoint) as prefill:
            warm = make_request(prefill.info, prompt(4 * 16, 1), max_tokens=1)
            await prefill.run(warm).until_ended()
        await hand_over(source, reader, prompt(4 * 16, 1) + prompt(3 * 16, 2))
        await hand_over(source, reader, prompt(4 * 16, 1) + prompt(3 * 16 + 5, 3))  # with a tail
        await hand_over(source, reader, prompt(7, 4))  # nothing but a tail
        await pull_back(source, reader)


SEVERAL_HEADS: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 8}
LAYOUTS: dict[str, Any] = {
    "prefill_1": {},
    "prefill_2": {"num_ranks": 2, "settings": {"transports": "tcp,shm"}},
    "prefill_4": {"num_ranks": 4},
    "decode_1": {"group_size": 3},  # pages of three layers, then of one and two of padding
    "decode_2": {"num_ranks": 2, "settings": {"pool_mib": 2}},
    "decode_8": {"num_ranks": 8, "settings": {"transports": "tcp"}},
}
PAIRS = [
    ("prefill_1", "decode_2"),
    ("prefill_2", "decode_1"),
    ("prefill_4", "decode_2"),
    ("prefill_2", "decode_8"),
    ("prefill_2", "decode_2"),
    ("prefill_1", "decode_1"),
]


@pytest.mark.slow
async def test_sglang_31295_pairs_of_shardings_give_the_same_tokens(tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/31295, eight heads; also other page groups,
    another number of pages, and pools alike that several ranks share."""
    with running(tmp_path, SEVERAL_HEADS, **LAYOUTS) as workers:
        for seed, (source, reader) in enumerate(PAIRS):
            for length in (100, 64, 9):
                tokens = prompt(length, 10 * seed + length)
                await hand_over(workers[source], workers[reader], tokens)


@pytest.mark.slow
async def test_sglang_31295_ranks_that_repeat_heads_give_the_same_tokens(tmp_path: Path) -> None:
    """Two heads, one rank and four, either way; and a rank that would hold a part of a head."""
    layouts: dict[str, Any] = {
        f"{role}_{ranks}": {"num_ranks": ranks}
        for role in ("prefill", "decode")
        for ranks in (1, 4)
    }
    with running(tmp_path, {}, **layouts) as workers:
        await hand_over(workers["prefill_1"], workers["decode_4"], prompt(70, 1))
        await hand_over(workers["prefill_4"], workers["decode_1"], prompt(70, 2))
    model = write_mock_model(tmp_path / "three", num_ranks=3)
    refused = start_worker("decode", model, **FAST)
    assert refused.process.wait(60) == 2, "a worker whose heads cannot be shared does not start"
    assert head_ranges(2, 4)[3].first == 1


@pytest.mark.slow
async def test_windows_slide_alike_in_other_page_groups(tmp_path: Path) -> None:
    shared = {"num_hidden_layers": 6, "layer_windows": [0, 32, 32, 0, 32, 32]}
    layouts: dict[str, Any] = {
        "prefill_1": {},
        "prefill_2": {"num_ranks": 2, "group_size": 3},
        "decode_1": {"group_size": 1},
    }
    with running(tmp_path, shared, **layouts) as workers:
        for source in ("prefill_1", "prefill_2"):
            for length in (150, 20):
                tokens = prompt(length, length)
                await hand_over(workers[source], workers["decode_1"], tokens)
