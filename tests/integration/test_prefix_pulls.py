"""Workers that pull a prefix from whoever holds it, told by hints, as real processes.

The mock model hashes the KV that it reads: equal tokens mean equal KV.
"""

import asyncio
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from paceline.rpc import tickets
from paceline.v1 import common_pb2, worker_pb2
from tests.support.fake_router import Attachment, Hints, make_hint, make_request, run_split
from tests.support.waits import until
from tests.support.worker_pair import Pair, Workers, workers
from tests.support.workers import SECRET, WorkerProcess

TOKEN_S = 0.002  # of a prompt: 100 tokens are worth a pull on a busy machine, too
METRIC = "paceline_prefix_tokens_total"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    decodes: dict[str, dict[str, object]] = {
        "shm": {"transports": "shm"},
        "tcp": {"transports": "tcp"},
    }
    folder = tmp_path_factory.mktemp("prefix-pulls")
    prefill: dict[str, object] = {"transports": "shm,tcp"}
    yield from workers(folder, decodes, prefill, token_s=TOKEN_S)


def text(length: int) -> list[int]:
    """Never seen before."""
    chance = random.Random(secrets.randbits(64))
    return [chance.randrange(256) for _ in range(length)]


@dataclass(frozen=True, slots=True)
class Turn:
    """The next turn of a conversation of which `source` has decoded the first."""

    tokens: list[int]
    num_known: int  # full blocks


async def first_turn(source: Attachment, num_tokens: int = 100, num_outputs: int = 40) -> Turn:
    prompt = text(num_tokens)
    request = make_request(source.info, prompt, max_tokens=num_outputs, ignore_eos=True)
    log = await source.run(request).until_ended()
    assert log.error is None
    said = prompt + log.output()
    return Turn(said + text(30), (len(said) - 1) // 16)


async def answer(
    worker: Attachment, tokens: list[int], source: Attachment | None = None, **hint: object
) -> tuple[list[int], int]:
    """Its output, and how many tokens of the prompt were not computed."""
    request = make_request(worker.info, tokens, max_tokens=6, ignore_eos=True)
    hints = [] if source is None else [make_hint(request, source, worker, **hint)]  # type: ignore[arg-type]
    log = await worker.run(request, hints).until_ended()
    assert log.error is None, log.error
    return log.output(), log.emissions[0].num_cached_tokens


async def has_computed(worker: Attachment) -> None:
    """It knows how fast it is."""
    await answer(worker, text(64))


def counted(worker: WorkerProcess, result: str) -> float:
    return worker.metric(f'{METRIC}{{result="{result}"}}')


@pytest.mark.parametrize("decode", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_prefill_pulls_what_only_decode_has(running: Workers, decode: str) -> None:
    prefill = running.by_name["prefill"]
    before = counted(prefill, "pulled")
    async with running.attached(decode) as pair:
        await has_computed(pair.prefill)
        turn = await first_turn(pair.decode)
        hint = {"num_blocks": turn.num_known}
        output, num_cached = await answer(pair.prefill, turn.tokens, pair.decode, **hint)
        assert num_cached == 16 * turn.num_known
        assert (output, num_cached) == await answer(pair.decode, turn.tokens)
    assert counted(prefill, "pulled") - before == 16 * turn.num_known


async def test_a_split_conversation_computes_only_what_is_new(running: Workers) -> None:
    """Four turns: each prompt is prefilled apart, and decode alone has the answer before it."""
    async with running.attached("shm") as pair:
        await has_computed(pair.prefill)
        said = text(150)
        num_known = 0
        for _ in range(4):
            request = make_request(pair.decode.info, said, max_tokens=40, ignore_eos=True)
            hints: Hints = ()
            if num_known:
                hint = {"num_blocks": num_known // 16, "num_own_blocks": 0}
                hints = [make_hint(request, pair.decode, pair.prefill, **hint)]
            split = await run_split(pair.prefill, pair.decode, request, hints)
            assert split.prefill.error is None and split.decode.error is None
            assert split.prefill.emissions[0].num_cached_tokens == num_known // 16 * 16
            whole = await pair.decode.run(request).until_ended()
            assert split.output() == whole.output()
            num_known = len(said) + 39
            said = said + split.output() + text(40)


async def test_routers_are_told_what_links_and_prompts_take(running: Workers) -> None:
    async with running.attached("tcp") as pair:
        turn = await first_turn(pair.prefill, num_outputs=1)
        await has_computed(pair.decode)
        hint = {"num_blocks": turn.num_known}
        await answer(pair.decode, turn.tokens, pair.prefill, **hint)
        source = pair.prefill.info.worker_id
        await until(lambda: source in pair.decode.links, 10)  # beats tell it
        assert 0 < pair.decode.links[source] < 1e6 * TOKEN_S
        assert pair.prefill.load.prompt_token_us >= 1e6 * TOKEN_S


async def test_decode_pulls_from_prefill_too(running: Workers) -> None:
    async with running.attached("tcp") as pair:
        await has_computed(pair.decode)
        turn = await first_turn(pair.prefill, num_outputs=1)
        hint = {"num_blocks": turn.num_known}
        output, num_cached = await answer(pair.decode, turn.tokens, pair.prefill, **hint)
        assert num_cached == 16 * turn.num_known
        assert (output, num_cached) == await answer(pair.prefill, turn.tokens)


async def test_a_hint_of_more_than_there_is_gives_what_there_is(running: Workers) -> None:
    prefill = running.by_name["prefill"]
    before = counted(prefill, "missing")
    async with running.attached("shm") as pair:
        await has_computed(pair.prefill)
        turn = await first_turn(pair.decode)
        output, num_cached = await answer(pair.prefill, turn.tokens, pair.decode)
        assert num_cached == 16 * turn.num_known
        assert output == (await answer(pair.decode, turn.tokens))[0]
        num_hinted = len(turn.tokens) // 16
    assert counted(prefill, "missing") - before == 16 * (num_hinted - turn.num_known)


@dataclass(frozen=True, slots=True)
class Lie:
    """What may be wrong with a hint."""

    num_blocks: int
    num_own_blocks: int
    incarnation: str | None
    signature: bytes | None
    lifetime_s: float
    endpoint: str | None
    num_outputs: int


LIES = st.builds(
    Lie,
    num_blocks=st.sampled_from([0, 1, 3, 8, 9, 40, 2**32 - 1]),
    num_own_blocks=st.sampled_from([0, 2, 50]),
    incarnation=st.sampled_from([None, None, "of another life"]),
    signature=st.sampled_from([None, None, bytes(32)]),
    lifetime_s=st.sampled_from([30.0, 30.0, -1.0]),
    endpoint=st.sampled_from([None, None, "127.0.0.1:1"]),
    num_outputs=st.sampled_from([1, 20, 40]),
)


@pytest.mark.slow
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lies=st.lists(LIES, min_size=1, max_size=3), is_split=st.booleans())
def test_a_wrong_hint_costs_no_token(running: Workers, lies: list[Lie], is_split: bool) -> None:
    """Stale, forged, of another incarnation, of more blocks than there are: a miss, never an
    error."""
    asyncio.run(tell_lies(running, lies, is_split))


async def tell_lies(running: Workers, lies: list[Lie], is_split: bool) -> None:
    async with running.attached("shm") as pair:
        await has_computed(pair.prefill)
        turn = await first_turn(pair.decode, num_outputs=lies[0].num_outputs)
        request = make_request(pair.decode.info, turn.tokens, max_tokens=6, ignore_eos=True)
        hints = [told(lie, request, pair) for lie in lies]
        if is_split:
            split = await run_split(pair.prefill, pair.decode, request, hints)
            assert split.prefill.error is None and split.decode.error is None
            output = split.output()
        else:
            log = await pair.prefill.run(request, hints).until_ended()
            assert log.error is None
            output = log.output()
        assert output == (await answer(pair.decode, turn.tokens))[0]


def told(lie: Lie, request: common_pb2.TokenRequest, pair: Pair) -> worker_pb2.PrefixHint:
    hint = make_hint(
        request,
        pair.decode,
        pair.prefill,
        num_blocks=lie.num_blocks,
        num_own_blocks=lie.num_own_blocks,
        lifetime_s=lie.lifetime_s,
    )
    if lie.incarnation is not None:
        hint.ticket.source_incarnation = lie.incarnation
        tickets.sign(hint.ticket, SECRET.encode())
    if lie.signature is not None:
        hint.ticket.signature = lie.signature
    if lie.endpoint is not None:
        hint.source_endpoint = lie.endpoint
    return hint
