"""One response while it is produced: its jobs at the router, its choices, its end.

Whoever ends first (stop string, router, client, deadline, error) ends it everywhere: `close`
cancels whatever still runs upstream, and is always called.
"""

import asyncio
from collections.abc import Callable, Sequence

from paceline.core.errors import EngineFailure, PacelineError
from paceline.core.finish import FinishReason
from paceline.gateway.choice import Choice, Delta
from paceline.gateway.deadline import Deadline
from paceline.gateway.jobs import Job, token_request
from paceline.gateway.mailbox import Mailbox, leave
from paceline.gateway.metrics import ModelMetrics, now_s
from paceline.gateway.prompt_logprobs import PartOrder
from paceline.gateway.rate_limits import Meter
from paceline.gateway.request_log import RequestRecord
from paceline.gateway.router import Router
from paceline.gateway.tokenizer import TextModel
from paceline.v1.common_pb2 import Emission
from paceline.v1.generate_pb2 import Statistics

Show = Callable[[Choice, Delta], object]


class _Running:
    """A job's slot at the router."""

    __slots__ = ("choices", "num_cached", "num_live", "prompt_order")

    def __init__(self, choices: list[Choice]) -> None:
        self.choices = choices
        self.prompt_order = PartOrder()
        self.num_live = len(choices)
        self.num_cached = 0


class Generation:
    """Submit, step until `done`, close. Not shared between tasks, but `fail` may come from any."""

    def __init__(
        self,
        router: Router,
        text: TextModel,
        metrics: ModelMetrics,
        meter: Meter,
        mailbox: Mailbox,
        deadline: Deadline,
        record: RequestRecord,
        *,
        has_statistics: bool = False,
    ) -> None:
        self._router = router
        self._text = text
        self._metrics = metrics
        self._meter = meter
        self._mailbox = mailbox
        self._running: dict[int, _Running] = {}
        self._all: list[_Running] = []
        self._may_stop = False  # by a stop string
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None
        self._has_statistics = has_statistics
        self._record = record
        self._times = record.times
        self._exemplar: dict[str, str] | None = None  # of the first gap of an attempt
        self.num_prompt_tokens = 0

    def submit(self, jobs: Sequence[Job]) -> None:
        """Sends all jobs. Raises RateLimited, Unavailable or Overloaded; close() takes back what
        was sent."""
        self.num_prompt_tokens = sum(len(job.prompt.token_ids) for job in jobs)
        self._meter.take_prompt(self.num_prompt_tokens, now_s())
        left_s = self._deadline.left_s()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(left_s, self.fail, self._deadline.error())
        self._may_stop = any(job.stops for job in jobs)
        for job in jobs:
            running = _Running(self._choices(job))
            request = token_request(job, left_s, self._deadline.limit_s - left_s)
            request.traceparent = self._record.span.traceparent
            slot = self._router.submit(request, self._mailbox)
            self._record.request_ids.append(request.request_id)
            self._running[slot] = running
            self._all.append(running)
        self._times.sent(now_s())
        self._metrics.prompt_tokens.inc(self.num_prompt_tokens)
        for job in jobs:
            self._metrics.asked(job.params, len(job.prompt.token_ids))

    async def step(self) -> list[tuple[Choice, Delta]]:
        """What arrived since the last call, maybe nothing. Raises how the request failed."""
        taken = map(self._take, await self._mailbox.next())
        return [delta for delta in taken if delta is not None]

    def show_at_once(self, can_show: Callable[[], bool], show: Show) -> None:
        """From now on, what arrives while `step` waits goes to `show` if that can take it, and
        `step` does not return it. It still returns all that may end a choice."""

        def take_now(emission: Emission) -> bool:
            if emission.finish or not can_show():
                return False
            if (delta := self._take(emission)) is not None:
                show(*delta)
            return True

        if not self._may_stop:
            self._mailbox.take_now = take_now

    def _take(self, emission: Emission) -> tuple[Choice, Delta] | None:
        running = self._running.get(emission.slot)
        if running is None:
            return None  # ended here; the router did not know yet
        if emission.HasField("prompt_logprobs"):
            part = running.prompt_order.new_of(emission.prompt_logprobs)
            return None if part is None else (running.choices[0], Delta(prompt_logprobs=part))
        choice = self._choice_of(running, emission)
        if choice.finish is not None:
            return None
        now = now_s()
        self._observe(choice, running, emission, now)
        delta = choice.push(emission)
        self._meter.take_output(len(delta.token_ids), now)
        if choice.finish is not None:
            self._end_choice(running, emission, choice.finish)
        return choice, delta

    def fail(self, error: PacelineError) -> None:
        """Ends the generation at once: the client left, or time is up."""
        self._mailbox.fail(error, drop_pending=True)

    def close(self) -> None:
        self._mailbox.take_now = leave
        if self._timer is not None:
            self._timer.cancel()
        for slot in self._running:
            self._router.cancel(slot)
        self._count_end()
        self._running.clear()

    @property
    def done(self) -> bool:
        return not self._running

    @property
    def statistics(self) -> Statistics | None:
        """So far; None: nobody wants them, or nothing was sent."""
        if not self._has_statistics or not self._times.is_sent:
            return None
        self._note_last()
        return self._times.so_far(self.num_cached_tokens)

    @property
    def record(self) -> RequestRecord:
        """As things stand."""
        self._note_last()
        record = self._record
        record.num_prompt_tokens = self.num_prompt_tokens
        record.num_cached_tokens = self.num_cached_tokens
        record.num_output_tokens = self.num_output_tokens
        record.num_choices = sum(len(running.choices) for running in self._all)
        return record

    @property
    def num_cached_tokens(self) -> int:
        return sum(running.num_cached for running in self._all)

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for running in self._all for choice in running.choices)

    def _choices(self, job: Job) -> list[Choice]:
        end_ids = self._text.eos_token_ids | set(job.params.stop_token_ids)
        return [
            Choice(
                job.first_choice + index,
                self._text.detokenizer(job.prompt.token_ids, skip_special=job.text.skips_special),
                job.stops,
                job.params.min_tokens,
                end_ids,
                shows_stop=job.text.shows_stop,
            )
            for index in range(job.params.n)
        ]

    def _choice_of(self, running: _Running, emission: Emission) -> Choice:
        if emission.choice >= len(running.choices):
            raise EngineFailure(f"choice {emission.choice} was never asked for")
        return running.choices[emission.choice]

    def _end_choice(self, running: _Running, emission: Emission, finish: FinishReason) -> None:
        self._metrics.choice_ended(finish)
        running.num_live -= 1
        is_known_upstream = bool(emission.finish)
        if running.num_live == 0:
            del self._running[emission.slot]
            end = self._router.forget if is_known_upstream else self._router.cancel
            end(emission.slot)
        elif not is_known_upstream:  # a stop string: only gateways know text
            self._router.cancel(emission.slot, [emission.choice])

    def _observe(self, choice: Choice, running: _Running, emission: Emission, now: float) -> None:
        if emission.HasField("placement"):
            self._record.placements.append(emission.placement)
            self._exemplar = self._record.exemplar
        if choice.num_tokens == 0:
            running.num_cached = max(running.num_cached, emission.num_cached_tokens)
            self._metrics.ttft.observe(now - self._deadline.started_s, self._exemplar)
            self._times.first(emission, now)
        else:
            waited_s = now - choice.last_emission_s
            self._metrics.inter_token.observe(waited_s, self._exemplar)
            self._exemplar = None
            if emission.pull_us:
                self._times.pulled(emission.pull_us, waited_s)
        choice.last_emission_s = now

    def _count_end(self) -> None:
        for running in self._running.values():
            for choice in running.choices:
                if choice.finish is None:
                    self._metrics.choice_ended(FinishReason.CANCELLED)
        self._metrics.generation_tokens.inc(self.num_output_tokens)
        self._metrics.prompt_tokens_cached.inc(self.num_cached_tokens)
        self._metrics.e2e.observe(now_s() - self._deadline.started_s)
        if self._times.has_token:
            self._note_last()
            lengths = [choice.num_tokens for running in self._all for choice in running.choices]
            num_computed = max(0, self.num_prompt_tokens - self.num_cached_tokens)
            self._metrics.request_ended(self._times, num_computed)
            self._metrics.generation_ended(self._times, lengths)

    def _note_last(self) -> None:
        for running in self._all:
            for choice in running.choices:
                self._times.last_s = max(self._times.last_s, choice.last_emission_s)
