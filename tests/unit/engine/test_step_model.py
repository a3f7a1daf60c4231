"""Chunks beside streams with a target for the latency between tokens, in virtual time."""

import random
from dataclasses import dataclass

import pytest

from paceline.engine.step_time import LEAST_STEPS, StepTime

TARGET_S = 0.040
PROMPT = 8000


@dataclass
class Machine:
    """Seconds of a step, which only it knows."""

    base_s: float = 0.004
    decode_s: float = 0.00004
    mixed_s: float = 0.0015
    token_s: float = 21e-6
    pair_s: float = 1.1e-9
    noise: float = 0.0

    def seconds(self, num_decodes: int, num_new: int, context: int, chance: random.Random) -> float:
        seconds = self.base_s + self.decode_s * num_decodes
        if num_new:
            pairs = num_new * (context + num_new / 2)
            seconds += self.mixed_s + self.token_s * num_new + self.pair_s * pairs
        return seconds * chance.gauss(1, self.noise)


class Server:
    """Streams that never end, and one prompt after the other."""

    def __init__(
        self,
        machine: Machine,
        num_streams: int = 64,
        target_s: float = TARGET_S,
        hoped_s: float = 0.0,
    ) -> None:
        self.machine = machine
        self.num_streams = num_streams
        self.hoped_s = hoped_s
        self.step_time = StepTime(max_step_s=10.0, itl_target_s=target_s)
        self.chunks: list[int] = []
        self.intervals: list[float] = []
        self.predicted: list[float] = []
        self._computed = 0
        self._chance = random.Random(5)

    def step(self, *, has_prompt: bool = True) -> None:
        num_new, context = 0, self._computed
        if has_prompt:
            num_tokens = 8192 - self.num_streams
            budget = self.step_time.budget(num_tokens, self.num_streams, self.hoped_s)
            num_new = min(budget.tokens_behind(context), PROMPT - context)
            model = self.step_time.model
            assert model is not None
            self.predicted.append(model.seconds(self.num_streams, [(num_new, context)]))
        seconds = self.machine.seconds(self.num_streams, num_new, context, self._chance)
        self.step_time.observe(num_new, seconds)
        chunks = [(num_new, context)] if num_new else []
        self.step_time.observe_interval(self.num_streams, chunks, seconds)
        self._computed = (context + num_new) % PROMPT
        self.chunks.append(num_new)
        self.intervals.append(seconds)

    def steps(self, num_steps: int, *, has_prompt: bool = True) -> "Server":
        for _ in range(num_steps):
            self.step(has_prompt=has_prompt)
        return self

    def forget(self) -> None:
        self.chunks, self.intervals, self.predicted = [], [], []


def worst(intervals: list[float], share: float) -> float:
    return sorted(intervals)[int(len(intervals) * share)]


def test_no_chunk_makes_a_predicted_step_exceed_the_target() -> None:
    server = Server(Machine(noise=0.05)).steps(50, has_prompt=False)
    server.steps(800)
    assert max(server.predicted[1:]) <= TARGET_S
    assert min(server.chunks[50:]) > 0


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_steps_keep_to_the_target_and_use_the_time(noise: float) -> None:
    server = Server(Machine(noise=noise)).steps(200)
    server.forget()
    server.steps(800)
    assert worst(server.intervals, 0.97) <= 1.02 * TARGET_S
    assert worst(server.intervals, 0.5) >= 0.85 * TARGET_S


def test_it_learns_that_the_machine_has_become_slower_or_faster() -> None:
    server = Server(Machine(noise=0.02)).steps(500)
    for token_s in (40e-6, 15e-6):
        server.machine.token_s = token_s
        server.steps(300)
        server.forget()
        server.steps(500)
        assert worst(server.intervals, 0.97) <= 1.02 * TARGET_S
        assert worst(server.intervals, 0.5) >= 0.8 * TARGET_S


@pytest.mark.parametrize("num_slow", [1, 5, 30])
def test_it_gets_over_first_steps_that_took_seconds(num_slow: int) -> None:
    server = Server(Machine(noise=0.02))
    quick = server.machine.base_s
    server.machine.base_s = 3.0  # kernels are compiled, say
    server.steps(num_slow)
    server.machine.base_s = quick
    server.steps(100)
    server.forget()
    server.steps(300)
    assert worst(server.intervals, 0.97) <= 1.02 * TARGET_S
    assert worst(server.intervals, 0.5) >= 0.8 * TARGET_S


@pytest.mark.parametrize("target_s", [0.0, 0.2])
def test_steps_keep_to_what_a_stream_in_them_hopes_for(target_s: float) -> None:
    server = Server(Machine(noise=0.02), target_s=target_s, hoped_s=TARGET_S).steps(200)
    server.forget()
    server.steps(800)
    assert worst(server.intervals, 0.97) <= 1.02 * TARGET_S
    assert worst(server.intervals, 0.5) >= 0.85 * TARGET_S
    server.hoped_s = 0.0  # it has ended
    server.steps(20)
    assert max(server.chunks[-20:]) > 2 * max(server.chunks[:800])


def test_the_target_of_a_worker_is_never_loosened_by_what_a_stream_hopes_for() -> None:
    server = Server(Machine(noise=0.02), hoped_s=10 * TARGET_S).steps(400)
    assert worst(server.intervals[200:], 0.97) <= 1.02 * TARGET_S


@pytest.mark.parametrize("hoped_s", [1e-6, 0.001, 0.005])
def test_however_little_a_stream_hopes_for_prompts_get_half_of_the_time(hoped_s: float) -> None:
    machine = Machine()
    server = Server(machine, target_s=0.0, hoped_s=hoped_s).steps(100)
    server.steps(50, has_prompt=False).steps(50)
    alone_s = machine.base_s + machine.decode_s * server.num_streams
    server.forget()
    server.steps(300)
    assert worst(server.intervals, 0.5) == pytest.approx(LEAST_STEPS * alone_s, rel=0.15)
    assert sum(server.chunks) > 300 * 150, "which here is 200 tokens in a step, not 32"


def test_chunks_shrink_with_the_context_before_them() -> None:
    server = Server(Machine()).steps(300)
    budget = server.step_time.budget(8192, server.num_streams)
    assert budget.tokens_behind(0) > 1.15 * budget.tokens_behind(7000)


def test_a_target_that_streams_alone_exceed_still_lets_prompts_advance() -> None:
    server = Server(Machine(base_s=0.06)).steps(200)
    assert set(server.chunks[20:]) <= {32, PROMPT % 32 or 32}


def test_prompts_of_one_step_share_its_time() -> None:
    server = Server(Machine()).steps(300)
    budget = server.step_time.budget(8192, server.num_streams)
    alone = budget.tokens_behind(0)
    budget.spend(alone // 2, 0)
    assert budget.tokens_behind(0) == pytest.approx(alone / 2, rel=0.1)
    budget.spend(alone, 0)
    assert budget.is_spent and budget.tokens_behind(0) == 0


def test_without_streams_or_a_target_only_the_time_of_a_step_limits() -> None:
    server = Server(Machine()).steps(300)
    assert server.step_time.budget(8192, 0).tokens_behind(4000) == 8192
    throughput = StepTime(max_step_s=10.0)
    throughput.observe(1000, 0.021)
    throughput.observe_interval(64, [(1000, 0)], 0.021)
    assert throughput.budget(8192, 64).tokens_behind(4000) == 8192
