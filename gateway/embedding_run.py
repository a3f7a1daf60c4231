"""The embeddings of one request while they are made: so many at once at the router, the others wait
here, so that a long list of inputs holds up nobody's queue.

Whoever ends first (router, client, deadline, error) ends it everywhere: `close` cancels what still
runs upstream, and is always called.
"""

from collections.abc import Iterator, Sequence

from paceline.core.errors import EngineFailure, PacelineError
from paceline.core.finish import FinishReason
from paceline.gateway.deadline import Deadline
from paceline.gateway.jobs import EmbeddingJob, embedding_request
from paceline.gateway.mailbox import Mailbox
from paceline.gateway.metrics import ModelMetrics, now_s
from paceline.gateway.rate_limits import Meter
from paceline.gateway.request_log import RequestRecord
from paceline.gateway.router import Router
from paceline.gateway.vectors import Vector, VectorForm
from paceline.v1.common_pb2 import Emission

MAX_AT_ONCE = 64  # inputs of one request at the router
MAX_NAMED = 32  # ids of inputs that operators are shown


class EmbeddingRun:
    """`vectors` once, then `close`. Not shared between tasks, but `fail` may come from any."""

    def __init__(
        self,
        router: Router,
        metrics: ModelMetrics,
        meter: Meter,
        mailbox: Mailbox,
        deadline: Deadline,
        record: RequestRecord,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._meter = meter
        self._mailbox = mailbox
        self._deadline = deadline
        self._running: dict[int, int] = {}  # by slot: the input's index
        self._found: list[Vector | None] = []
        self.record = record

    async def vectors(self, jobs: Sequence[EmbeddingJob], form: VectorForm) -> list[Vector]:
        """In the order of `jobs`. Raises how the request failed."""
        num_tokens = self.record.num_prompt_tokens = sum(len(job.prompt.token_ids) for job in jobs)
        self.record.num_choices = len(jobs)
        self._meter.take_prompt(num_tokens, now_s())
        self._metrics.prompt_tokens.inc(num_tokens)
        self._found = [None] * len(jobs)
        waiting = iter(enumerate(jobs))
        self._submit_more(waiting)
        self.record.times.sent(now_s())
        while self._running:
            for emission in await self._mailbox.next():
                self._take(emission, form)
            self._submit_more(waiting)
        return [vector for vector in self._found if vector is not None]

    @property
    def done(self) -> bool:
        return all(vector is not None for vector in self._found)

    def fail(self, error: PacelineError) -> None:
        """Ends it at once: the gateway shuts down."""
        self._mailbox.fail(error, drop_pending=True)

    def close(self) -> None:
        for slot in self._running:
            self._router.cancel(slot)
        self._running.clear()
        for vector in self._found:
            if vector is None:
                self._metrics.choice_ended(FinishReason.CANCELLED)
        record = self.record
        self._metrics.prompt_tokens_cached.inc(record.num_cached_tokens)
        self._metrics.e2e.observe(now_s() - self._deadline.started_s)
        if record.times.has_token:
            num_computed = max(0, record.num_prompt_tokens - record.num_cached_tokens)
            self._metrics.request_ended(record.times, num_computed)

    def _submit_more(self, waiting: Iterator[tuple[int, EmbeddingJob]]) -> None:
        while len(self._running) < MAX_AT_ONCE and (following := next(waiting, None)) is not None:
            index, job = following
            request = embedding_request(job, self._deadline.left_s())
            request.traceparent = self.record.span.traceparent
            self._running[self._router.submit(request, self._mailbox)] = index
            if len(self.record.request_ids) < MAX_NAMED:
                self.record.request_ids.append(request.request_id)
            self._metrics.embedding_asked(len(job.prompt.token_ids))

    def _take(self, emission: Emission, form: VectorForm) -> None:
        """The one emission of an input."""
        index = self._running.pop(emission.slot, None)
        if index is None:
            return
        self._router.forget(emission.slot)
        if len(emission.embedding) < 4 * form.num_dimensions or len(emission.embedding) % 4:
            raise EngineFailure(f"an embedding came with {len(emission.embedding)} bytes")
        self._found[index] = form.shape(emission.embedding)
        self.record.num_cached_tokens += emission.num_cached_tokens
        self.record.times.vector(emission, now_s())
        if emission.HasField("placement"):
            self.record.placements.append(emission.placement)
        self._metrics.embedding_made()
