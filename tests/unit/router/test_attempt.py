"""Emissions of a worker's step on their way to a gateway: right, and cheap."""

import gc
import time
import weakref

import pytest

from paceline.core.errors import PacelineError
from paceline.router.attempt import Attempt
from paceline.router.gateway_stream import GatewayStream
from paceline.router.planner import Candidate, Split, Whole
from paceline.router.request import Request, WorkerLife
from paceline.router.worker_session import WorkerSession
from paceline.v1 import common_pb2, worker_pb2


class _Sink:
    def __init__(self) -> None:
        self.tokens: list[tuple[int, int, list[int]]] = []

    def emit(self, emission: common_pb2.Emission) -> None:
        assert emission.slot == 5
        self.tokens.append((emission.choice, emission.position, list(emission.token_ids)))

    def fail(self, slot: int, error: PacelineError) -> None:
        raise AssertionError(error)

    def set_back(self, slot: int, num_failures: int, lost: WorkerLife | None) -> None: ...


def _request(sink: object, n: int = 1, slot: int = 5) -> Request:
    message = common_pb2.TokenRequest(
        request_id=f"r{slot}",
        token_ids=range(40),
        num_prompt_tokens=40,
        sampling=common_pb2.SamplingParams(max_tokens=1000, top_p=1, n=n),
    )
    return Request(slot, message, sink, 60.0)  # type: ignore[arg-type]


def _session(name: str) -> WorkerSession:
    return WorkerSession(worker_pb2.WorkerInfo(worker_id=name, num_pages=1000), 0.0)


def _whole(request: Request, session: WorkerSession) -> Attempt:
    plan = Whole(Candidate(session.worker_id, False))
    return Attempt(request, tuple(request.logs), plan, {session.worker_id: session})


def _emission(slot: int, position: int, *tokens: int, choice: int = 0, finish: int = 0):  # type: ignore[no-untyped-def]
    return common_pb2.Emission(
        slot=slot, choice=choice, position=position, token_ids=tokens, finish=finish
    )


async def test_what_a_request_holds_is_free_as_soon_as_it_has_ended() -> None:
    """A prompt of 128k tokens holds a megabyte: it does not wait for the collector of cycles."""
    session = _session("d0")
    attempt = _whole(_request(_Sink()), session)
    request = weakref.ref(attempt.request)
    gc.disable()
    try:
        attempt.on_emission(attempt.compute, _emission(1, 0, 10, finish=1))
        attempt.close()
        del attempt
        assert request() is None
    finally:
        gc.enable()


async def test_overlap_is_trimmed_with_its_logprobs_and_repeats_are_dropped() -> None:
    sink, session = _Sink(), _session("d0")
    attempt = _whole(_request(sink), session)
    emission = _emission(1, 0, 10, 11)
    attempt.on_emission(attempt.compute, emission)
    repeat = _emission(1, 1, 11, 12)
    repeat.logprobs.add(chosen=common_pb2.TokenLogprob(token_id=11))
    repeat.logprobs.add(chosen=common_pb2.TokenLogprob(token_id=12))
    attempt.on_emission(attempt.compute, repeat)
    assert [lp.chosen.token_id for lp in repeat.logprobs] == [12]
    attempt.on_emission(attempt.compute, _emission(1, 0, 10))
    assert sink.tokens == [(0, 0, [10, 11]), (0, 2, [12])]
    assert not attempt.done.done()
    attempt.close()


async def test_logprobs_of_the_prompt_pass_without_being_taken_for_a_token() -> None:
    sink, prefill, decode = _Sink(), _session("p0"), _session("d0")
    plan = Split(Candidate("p0", True), Candidate("d0", False))
    attempt = Attempt(_request(sink), (0,), plan, {"p0": prefill, "d0": decode})
    position = common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=3))
    part = common_pb2.PromptLogprobs(first_position=1, positions=[position])
    for flight in (attempt.compute, attempt.decode):  # decode has none to give
        assert flight is not None
        scored = common_pb2.Emission(slot=1, prompt_logprobs=part)
        attempt.on_emission(flight, scored)
    assert sink.tokens == [(0, 0, [])] and not attempt.first_tokens_in
    assert prefill.pending_tokens == 40 and not attempt.decode_heard
    attempt.on_emission(attempt.compute, _emission(1, 0, 10))
    assert attempt.first_tokens_in and prefill.pending_tokens == 0
    attempt.close()


async def test_prefill_lost_after_decode_was_heard_is_no_failure() -> None:
    sink, prefill, decode = _Sink(), _session("p0"), _session("d0")
    request = _request(sink)
    plan = Split(Candidate("p0", True), Candidate("d0", False))
    attempt = Attempt(request, (0,), plan, {"p0": prefill, "d0": decode})
    assert attempt.decode is not None
    attempt.on_emission(attempt.compute, _emission(1, 0, 10))
    attempt.on_emission(attempt.decode, _emission(1, 1, 11))
    prefill.lose("closed")
    attempt.on_emission(attempt.decode, _emission(1, 2, 12, finish=2))
    assert attempt.done.done() and attempt.done.exception() is None
    assert [token for _, _, tokens in sink.tokens for token in tokens] == [10, 11, 12]
    attempt.close()
    assert prefill.num_in_flight == decode.num_in_flight == 0


def _split(request: Request, prefill: WorkerSession, decode: WorkerSession) -> Attempt:
    plan = Split(Candidate("p0", True), Candidate("d0", False))
    attempt = Attempt(request, (0,), plan, {"p0": prefill, "d0": decode})
    for flight in attempt.flights:
        flight.send(worker_pb2.WorkerCommand())
        flight.session.outbox.get_nowait()
    return attempt


def _sent(session: WorkerSession) -> list[str | None]:
    commands = [session.outbox.get_nowait() for _ in range(session.outbox.qsize())]
    return [command.WhichOneof("body") for command in commands]


@pytest.mark.parametrize("decode_first", [False, True])
async def test_prefill_is_told_to_let_go_once_decode_goes_on(decode_first: bool) -> None:
    prefill, decode = _session("p0"), _session("d0")
    attempt = _split(_request(_Sink()), prefill, decode)
    assert attempt.decode is not None
    emissions = [(attempt.compute, 0), (attempt.decode, 1)]
    first, second = reversed(emissions) if decode_first else emissions
    attempt.on_emission(first[0], _emission(1, first[1], 10))
    assert _sent(prefill) == []
    attempt.on_emission(second[0], _emission(1, second[1], 11))
    assert _sent(prefill) == ["cancel"]
    attempt.on_emission(attempt.decode, _emission(1, 2, 12))
    attempt.close()
    assert (_sent(prefill), _sent(decode)) == (["let_go"], ["cancel"])


async def test_leases_of_a_reader_that_died_are_revoked_at_their_source() -> None:
    prefill, decode = _session("p0"), _session("d0")
    attempt = _split(_request(_Sink()), prefill, decode)
    attempt.on_emission(attempt.compute, _emission(1, 0, 10))
    decode.lose("closed")
    attempt.close()
    revoke = prefill.outbox.get_nowait().revoke
    assert (revoke.request_id, revoke.attempt) == ("r5", attempt.number)
    assert _sent(prefill) == ["cancel", "let_go"]


async def test_nothing_is_revoked_from_a_reader_that_lives() -> None:
    prefill, decode = _session("p0"), _session("d0")
    attempt = _split(_request(_Sink()), prefill, decode)
    attempt.on_emission(attempt.compute, _emission(1, 0, 10))
    attempt.close()
    assert (_sent(prefill), _sent(decode)) == (["cancel", "let_go"], ["cancel"])


async def test_prefill_lost_before_its_first_token_is_a_failure_whatever_decode_said() -> None:
    sink, prefill, decode = _Sink(), _session("p0"), _session("d0")
    plan = Split(Candidate("p0", True), Candidate("d0", False))
    attempt = Attempt(_request(sink), (0,), plan, {"p0": prefill, "d0": decode})
    assert attempt.decode is not None
    attempt.on_emission(attempt.decode, _emission(1, 1, 11))
    prefill.lose("closed")
    assert attempt.done.exception() is not None and sink.tokens == []
    attempt.close()


async def test_a_frame_of_32_emissions_costs_well_under_a_millisecond() -> None:
    stream, session = GatewayStream([]), _session("d0")
    attempts = [_whole(_request(stream, slot=slot), session) for slot in range(32)]
    times = []
    for position in range(200):
        frame = worker_pb2.WorkerFrame()
        for attempt in attempts:
            frame.emissions.append(_emission(attempt.compute.slot, position, position))
        frame = worker_pb2.WorkerFrame.FromString(frame.SerializeToString())
        started = time.perf_counter()
        session.handle(frame, 0.0)
        stream._take_frame().SerializeToString()
        times.append(time.perf_counter() - started)
    assert min(times) < 0.3e-3, sorted(times)[100]
    for attempt in attempts:
        attempt.close()
