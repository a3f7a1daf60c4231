"""One request that is handed off, and what became of it."""

from dataclasses import dataclass

from benchmarks.transfer_faults_seam import until
from benchmarks.transfer_faults_workers import Timers
from paceline.v1 import common_pb2, worker_pb2
from tests.support.fake_router import Attachment, Split, make_request, make_ticket

NUM_TOKENS = 16


@dataclass(slots=True)
class Outcome:
    wrong_tokens: int = 0
    leaked_blocks: int = 0
    hung: int = 0
    missed: int = 0  # the step was not reached
    retried: int = 0  # requests that went on elsewhere
    unusable: int = 0  # pairs that did not work again afterwards
    partial: int = 0  # strikes at which some pages were there and others not

    def add(self, other: "Outcome") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        parts = [f"{name} {getattr(self, name)}" for name in self.__slots__ if getattr(self, name)]
        return ", ".join(parts) or "all well"


class Hand:
    """One request, split over source and reader; what fails there goes on at the spare."""

    def __init__(
        self,
        source: Attachment,
        reader: Attachment,
        spare: Attachment,
        prompt: list[int],
        endpoint: str,
        timers: Timers,
    ) -> None:
        """`endpoint`: the source's, for the reader."""
        self._source, self._reader, self._spare = source, reader, spare
        self._prompt = prompt
        self._endpoint = endpoint
        self._timers = timers
        self._expected: list[int] = []
        self._handed: tuple[Attachment, common_pb2.Ticket] | None = None  # the last attempt
        self._split: Split | None = None
        self._tokens: dict[int, int] = {}  # of attempts before that

    def _make(self, tokens: list[int]) -> common_pb2.TokenRequest:
        return make_request(
            self._spare.info,
            tokens,
            num_prompt_tokens=len(self._prompt),
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            budget_ms=120_000,
        )

    async def prepare(self) -> None:
        whole = await self._spare.run(self._make(self._prompt)).until_ended()
        self._expected = whole.output()
        assert len(self._expected) == NUM_TOKENS

    async def run(self) -> Outcome:
        found = Outcome()
        await self.begin(self._source, self._endpoint)
        found.hung += not await until(self.is_over, self._timers.limit_s)
        found.retried = int(not self.is_answered())
        self.end()
        if found.retried:
            found.wrong_tokens += await self._go_on()
        found.wrong_tokens += self.num_wrong()
        return found

    async def begin(self, source: Attachment, endpoint: str) -> None:
        """Hands it off from `source`, forced through what was emitted before."""
        self._tokens = self._emitted()
        request = self._make(self._prompt + self._forced())
        attempt = 1 if self._handed is None else self._handed[1].attempt + 1
        ticket = make_ticket(request, source.info, self._reader.info, attempt=attempt)
        log = await self._reader.reserve(request).until_answered()
        assert log.reserved is not None, log.error
        self._reader.adopt(log, ticket, endpoint)
        self._handed = source, ticket
        self._split = Split(source.prefill(request, ticket), log)

    def end(self) -> None:
        """As a router does: source lets go when decode has its first token, or was given up."""
        assert self._handed and self._split
        if not self.is_answered():
            self.revoke()
            self._reader.cancel(self._split.decode)
        self._handed[0].cancel(self._split.prefill)

    def is_prefilled(self) -> bool:
        return self._split is not None and bool(self._split.prefill.tokens)

    def has_decoded(self) -> bool:
        return self._split is not None and bool(self._split.decode.tokens)

    def revoke(self) -> None:
        assert self._handed is not None
        source, ticket = self._handed
        source.send(revoke=worker_pb2.Revoke(request_id=ticket.request_id, attempt=ticket.attempt))

    def is_answered(self) -> bool:
        return len(self._emitted()) == NUM_TOKENS

    def is_over(self) -> bool:
        """Answered, or given up: by the reader, or by the router whose reader is silent."""
        assert self._split is not None
        is_left = self._reader.closed.is_set() or self._reader.silent_s > self._timers.patience_s
        return self.is_answered() or self._split.decode.ended or is_left

    def num_wrong(self) -> int:
        return sum(self._expected[position] != token for position, token in self._emitted().items())

    def _emitted(self) -> dict[int, int]:
        if self._split is None:
            return {}
        logs = (self._split.prefill, self._split.decode)
        return self._tokens | {k: v for log in logs for k, v in log.tokens.get(0, {}).items()}

    def _forced(self) -> list[int]:
        """What was emitted without a gap."""
        emitted = self._emitted()
        return [emitted[i] for i in range(len(emitted)) if all(j in emitted for j in range(i))]

    async def _go_on(self) -> int:
        """At the spare, forced through what was emitted; how many tokens of it are wrong."""
        forced = self._forced()
        rest = await self._spare.run(self._make(self._prompt + forced)).until_ended()
        expected = self._expected[len(forced) :]
        differing = sum(a != b for a, b in zip(rest.output(), expected, strict=False))
        return differing + abs(len(rest.output()) - len(expected))
