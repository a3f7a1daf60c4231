"""From a waiting request to an attempt: asks fleet, index and planner."""

import asyncio
import random
from collections.abc import Iterator, Mapping
from typing import Protocol

from paceline.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    ErrorCode,
    ModelNotFound,
    PacelineError,
    Unavailable,
)
from paceline.core.keys import HASH_BLOCK_TOKENS
from paceline.router.attempt import Attempt
from paceline.router.config import RouterConfig
from paceline.router.decision_log import DecisionLog
from paceline.router.fleet import Fleet, Revision
from paceline.router.lineup import Turn
from paceline.router.mirror import HeldBlocks
from paceline.router.planner import Job, Plan, Whole, plan
from paceline.router.prefix_hints import Hints, PullYield, hints_for
from paceline.router.request import Request
from paceline.router.worker_session import WorkerSession

LOOKUP_LIFE_S = 0.2  # whoever waits for room is planned again with every frame
MAX_MOVES = 32
FORGIVEN_S = 30.0  # after so long, and tokens, failures before count no more
MAX_SPLIT_FAILURES = 2  # then the hand-off itself is doubted: decode computes the prompt


class Superseded(Unavailable):
    """Nobody serves the request's revision any more; another one of the model could."""

    def __init__(self, digest: str) -> None:
        super().__init__("the revision of the model is not served any more", retry_after_s=1)
        self.digest = digest  # of the other one


class PrefixLookup(Protocol):
    def held_blocks(self, block_keys: bytes) -> HeldBlocks: ...


class Line:
    """The choices of a request that go on together, and what happened to them so far."""

    def __init__(self, request: Request, digest: str, choices: tuple[int, ...], turn: Turn) -> None:
        self.request = request
        self.digest = digest
        self.turn = turn
        self.num_failures = request.num_failures_before
        self.num_moves = 0
        self.failed_at = float("-inf")
        self.may_split = True
        self.was_busy = False  # a worker said so
        self.avoid: frozenset[str] = frozenset()
        self.held = HeldBlocks({}, {})  # when it was looked up last
        self.looked_up_at = float("-inf")
        self._choices = choices

    @property
    def choices(self) -> tuple[int, ...]:
        return self.request.unfinished(self._choices)

    def may_move(self) -> bool:
        """Because its worker has asked for that, as often as can be meant."""
        self.num_moves += 1
        return self.num_moves <= MAX_MOVES

    @property
    def num_remaining(self) -> int:
        lengths = (len(self.request.logs[choice].tokens) for choice in self.choices)
        return self.request.max_tokens - min(lengths, default=0)

    @property
    def group(self) -> tuple[str, bool]:
        return self.digest, self.num_remaining <= 1

    def move_to(self, digest: str, root_key: bytes) -> None:
        """Another revision of the model."""
        self.digest = digest
        self.request.change_revision(root_key)
        self.held, self.looked_up_at = HeldBlocks({}, {}), float("-inf")

    def note_failure(self, attempt: Attempt, failure: PacelineError) -> None:
        """Unverified KV speaks against its source, other failures against who reported them."""
        now = asyncio.get_running_loop().time()
        if attempt.is_proven and now - max(self.failed_at, self.request.created_at) > FORGIVEN_S:
            self.num_failures = 0  # a long stream may see many workers go
        self.num_failures += 1
        self.failed_at = now
        guilty = attempt.flights if attempt.failed_at is None else [attempt.failed_at]
        if failure.code == ErrorCode.KV_UNAVAILABLE and attempt.failed_at is not None:
            guilty = [attempt.compute]
        self.avoid |= {flight.session.worker_id for flight in guilty}
        incompatible = failure.code == ErrorCode.INCOMPATIBLE_PEER
        if incompatible or self.num_failures > MAX_SPLIT_FAILURES:
            self.may_split = False

    def split(self) -> "list[Line]":
        """One line a choice, each with the history of this one."""
        lines = []
        for choice in self.choices:
            line = Line(self.request, self.digest, (choice,), self.turn)
            line.num_failures, line.failed_at = self.num_failures, self.failed_at
            line.num_moves = self.num_moves
            line.may_split, line.avoid = self.may_split, self.avoid
            line.was_busy = self.was_busy
            lines.append(line)
        return lines


class Placer:
    def __init__(
        self, config: RouterConfig, fleet: Fleet, lookup: PrefixLookup, rng: random.Random
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._lookup = lookup
        self._rng = rng
        self._pulls = PullYield()
        self.decisions = DecisionLog()

    def digest_of(self, request: Request) -> str:
        """The revision of the model that the request was made for. Its attempts stay within it.

        Raises ModelNotFound, Unavailable, or ContextLengthExceeded if no worker could hold it.
        """
        message = request.message
        digest = self._fleet.digest_of(message)
        if digest is not None:
            _check_room(request, self._fleet.context_length(digest))
            return digest
        if message.model not in {model.name for model in self._fleet.models()}:
            raise ModelNotFound(f"model {message.model[:80]!r} is not served here", field="model")
        raise Unavailable("no worker serves this revision of the model", retry_after_s=1)

    def learn(self, attempt: Attempt) -> None:
        """Whether what was promised to be pulled came, once it has ended."""
        if attempt.num_cached_tokens is not None:
            self._pulls.observe(attempt.hints, attempt.num_cached_tokens)

    def place(self, line: Line) -> Attempt | None:
        """An attempt whose slots are taken, or None: wait. Raises Superseded, Unavailable,
        Cancelled or DeadlineExceeded."""
        choices = line.choices
        if not choices:
            raise Cancelled("nothing of the request is wanted any more")
        now = asyncio.get_running_loop().time()
        if now >= line.request.deadline:
            raise DeadlineExceeded("the request's time is over")
        num_tokens = line.request.num_prompt_tokens + len(line.request.logs[choices[0]].tokens)
        self._fleet.decay(now)
        job = Job(
            num_tokens,
            line.num_remaining,
            len(choices),
            line.avoid,
            line.may_split,
            self._fleet.others,
            now,
            line.request.hoped_due,
            line.request.hope_doubt_s,
        )
        found = self._plan(line, job, now)
        if found is None:
            self._check_revision(line, now)
            self._check_patience(line, now)
            return None
        self.decisions.note(line.request, job, found)
        sessions = self._sessions_of(found)
        return Attempt(line.request, choices, found, sessions, self._hints(line, found, sessions))

    def move(self, line: Line, digest: str) -> None:
        """To the revision that supersedes its own."""
        line.move_to(digest, self._fleet.root_key(digest, line.request.message))

    def _plan(self, line: Line, job: Job, now: float) -> Plan | None:
        revision = self._fleet.revision(line.digest)
        if revision is None:
            return None
        cached = self._cached_tokens(line, job.num_tokens, now)
        num_at_most = line.request.num_tokens_at_most
        prefill, decode = self._sides(revision, job, now, num_at_most)
        prefill = self._fleet.open_now(prefill, now, num_at_most)
        decode = self._fleet.open_now(decode, now, num_at_most)
        elsewhere = HASH_BLOCK_TOKENS * max(line.held.in_pool.values(), default=0) if cached else 0
        spared = self._pulls.spared(cached, [*prefill, *decode], min(elsewhere, job.num_tokens - 1))
        split_min_tokens = self._config.split_min_tokens
        return plan(job, prefill, decode, cached, split_min_tokens, self._rng, spared)

    def _sides(
        self, revision: Revision, job: Job, now: float, num_tokens: int
    ) -> tuple[list[WorkerSession], list[WorkerSession]]:
        """Prefill and decode workers that are asked. Embeddings need no decode: they wait for a
        prefill worker as long as one can make them."""
        if job.num_remaining:
            return revision.prefill, revision.decode
        able = any(
            session.worker_id not in job.avoid
            and session.info.context_length >= num_tokens
            and session.is_usable(now, self._config.stale_after_s)
            for session in revision.prefill
        )
        if able or not revision.decode:
            return revision.prefill, []
        return [], revision.decode

    def _sessions_of(self, found: Plan) -> dict[str, WorkerSession]:
        """The sessions of a plan that was made just now, by worker id."""
        candidates = [found.worker] if isinstance(found, Whole) else [found.prefill, found.decode]
        sessions = {c.worker_id: self._fleet.links[c.worker_id].session for c in candidates}
        return {worker: session for worker, session in sessions.items() if session is not None}

    def _check_revision(self, line: Line, now: float) -> None:
        """Raises Superseded when it would wait for nobody, though others serve the model."""
        if line.request.may_change_revision:
            num_tokens = line.request.num_tokens_at_most
            digest = self._fleet.successor(line.digest, now, num_tokens)
            if digest is not None:
                raise Superseded(digest)

    def _check_patience(self, line: Line, now: float) -> None:
        """Raises Unavailable when there was nobody for long who could finish it, busy or not."""
        num_tokens = line.request.num_tokens_at_most
        if _can_finish(self._fleet.usable(line.digest, now, num_tokens), line):
            return
        last_usable = self._fleet.last_usable(line.digest, num_tokens)
        if now - max(last_usable, line.failed_at) > self._config.worker_wait_s:
            raise Unavailable("no worker is ready to serve the model", retry_after_s=5)

    def _cached_tokens(self, line: Line, num_tokens: int, now: float) -> dict[WorkerSession, int]:
        """Of those that have some; the last token is always computed, and the whole prompt where
        its logits, or all its hidden states, are asked for."""
        if line.request.scores_prompt and num_tokens == line.request.num_prompt_tokens:
            return {}
        if now - line.looked_up_at > LOOKUP_LIFE_S:
            line.held = self._lookup.held_blocks(line.request.block_keys)
            line.looked_up_at = now
        return {
            session: min(HASH_BLOCK_TOKENS * num_blocks, num_tokens - 1)
            for session, num_blocks in self._holders(line, line.held.in_best_tier)
        }

    def _holders(
        self, line: Line, blocks: Mapping[tuple[str, str], int]
    ) -> Iterator[tuple[WorkerSession, int]]:
        """Those that are connected and have KV of the line's model."""
        for owner, num_blocks in blocks.items():
            session = self._fleet.session_of(*owner)
            if session is not None and session.info.content_digest == line.digest:
                yield session, num_blocks

    def _hints(self, line: Line, found: Plan, sessions: Mapping[str, WorkerSession]) -> Hints:
        """For the worker that computes the prompt: who holds more of it."""
        chosen = found.worker if isinstance(found, Whole) else found.prefill
        reader = sessions.get(chosen.worker_id)
        if reader is None:
            return ()
        own = line.held.in_best_tier.get((reader.worker_id, reader.incarnation), 0)
        more = {owner: num for owner, num in line.held.in_pool.items() if num > own}
        return hints_for(own, self._holders(line, more)) if more else ()


def _check_room(request: Request, context_length: int) -> None:
    if request.num_tokens_at_most > context_length:
        reason = (
            f"with {request.num_prompt_tokens} prompt tokens that is more than the {context_length}"
            " tokens that a worker has room for"
        )
        raise ContextLengthExceeded("max_tokens", request.max_tokens, reason)


def _can_finish(sessions: list[WorkerSession], line: Line) -> bool:
    can_decode = any(not session.is_prefill for session in sessions)
    return can_decode or (bool(sessions) and line.num_remaining <= 1)
