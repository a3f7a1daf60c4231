"""The commands of one attempt, in order, with the waits between them bounded."""

import asyncio
import time

from paceline.core.errors import KvUnavailable, Unavailable
from paceline.router.attempt import Attempt
from paceline.router.config import RouterConfig
from paceline.router.worker_session import Flight, WorkerSession
from paceline.rpc import tickets
from paceline.v1 import common_pb2, worker_pb2


class HandoffWatch:
    """Fails an attempt whose first tokens are there and whose decode worker stays silent.

    Not while that worker has more than fits its batch: then silence may mean a wait for a place.
    Whether its step loop gets on is watched by its session.
    """

    def __init__(self, attempt: Attempt, decode: Flight, timeout_s: float) -> None:
        self._attempt = attempt
        self._decode = decode
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)

    def _check(self) -> None:
        if self._attempt.decode_heard:
            return
        if self._decode.session.load.num_waiting:
            self._wait()
        else:
            self._attempt.fail(KvUnavailable("the hand-off took too long"))


class Dispatcher:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._secret = config.secret.encode()

    async def drive(self, attempt: Attempt) -> None:
        """Returns when every choice has finished. Raises PacelineError, or Busy from reserve."""
        request = attempt.request.for_worker(attempt.choices, _now())
        request.traceparent = attempt.traceparent
        if attempt.decode is None:
            run = worker_pb2.RunWhole(
                slot=attempt.compute.slot, request=request, hints=self._hints(attempt)
            )
            attempt.compute.compute(worker_pb2.WorkerCommand(run=run))
            await attempt.done
        else:
            await self._reserve(attempt, attempt.decode, request)
            await self._hand_off(attempt, attempt.decode, request)

    async def _reserve(
        self, attempt: Attempt, decode: Flight, request: common_pb2.TokenRequest
    ) -> None:
        hold_ms = round(self._config.handoff_timeout_s * 1000)
        reserve = worker_pb2.Reserve(slot=decode.slot, request=request, hold_ms=hold_ms)
        decode.send(worker_pb2.WorkerCommand(reserve=reserve))
        try:
            async with asyncio.timeout(self._config.reserve_timeout_s):
                await attempt.reserved
        except TimeoutError:
            attempt.fail(Unavailable("a worker did not answer"), decode)
            await attempt.done

    async def _hand_off(
        self, attempt: Attempt, decode: Flight, request: common_pb2.TokenRequest
    ) -> None:
        """Both sides at once: decode pulls what is committed while prefill computes the rest."""
        ticket = self._mint(attempt, attempt.compute.session, decode.session)
        source = attempt.compute.session.info.endpoint
        adopt = worker_pb2.Adopt(slot=decode.slot, ticket=ticket, source_endpoint=source)
        decode.send(worker_pb2.WorkerCommand(adopt=adopt))
        prefill = worker_pb2.Prefill(
            slot=attempt.compute.slot,
            request=request,
            ticket=ticket,
            hints=self._hints(attempt),
            keep_ms=request.budget_ms,
        )
        attempt.compute.compute(worker_pb2.WorkerCommand(prefill=prefill))

        watch = HandoffWatch(attempt, decode, self._config.handoff_timeout_s)
        attempt.on_first_tokens = watch.start
        try:
            await attempt.done
        finally:
            watch.stop()

    def _hints(self, attempt: Attempt) -> list[worker_pb2.PrefixHint]:
        return [
            worker_pb2.PrefixHint(
                ticket=self._mint(attempt, hint.source, attempt.compute.session),
                source_endpoint=hint.source.info.endpoint,
                num_blocks=hint.num_blocks,
                num_own_blocks=hint.num_own_blocks,
            )
            for hint in attempt.hints
        ]

    def _mint(
        self, attempt: Attempt, source_session: WorkerSession, reader_session: WorkerSession
    ) -> common_pb2.Ticket:
        source, reader = source_session.info, reader_session.info
        request = attempt.request
        life_ms = request.remaining_ms(_now()) + round(self._config.ticket_margin_s * 1000)
        ticket = common_pb2.Ticket(
            request_id=request.request_id,
            attempt=attempt.number,
            tenant=request.message.tenant,
            source_worker=source.worker_id,
            source_incarnation=source.incarnation,
            reader_worker=reader.worker_id,
            reader_incarnation=reader.incarnation,
            content_digest=source.content_digest,
            expires_unix_ms=round(time.time() * 1000) + life_ms,
        )
        return tickets.sign(ticket, self._secret)


def _now() -> float:
    return asyncio.get_running_loop().time()
