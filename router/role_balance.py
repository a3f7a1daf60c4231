"""When a worker should change between prefill and decode: pure, from what routers tell to a flip.

    pressure of prefill = seconds of prompts ahead of a prefill worker ÷ those that are wanted
    pressure of decode  = (pages in use, as a share, + queued requests a worker ÷ QUEUED)
                          ÷ the share that is wanted

A side takes a worker of the other when, for `hold_s` without a break, its own pressure is at least
1, the other's would stay below CALM without that worker, and the other keeps one at least. After a
flip nothing is done for `cool_down_s`. So a load that stays as it is never moves a worker back: who
was taken left a side below CALM, which is less than 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.v1 import control_pb2, worker_pb2

CALM = 0.7
QUEUED = 8.0  # requests in routers' queues, for each decode worker, that count as much as all pages
UNKNOWN_TOKEN_S = 1e-4  # of a prompt token, where a worker has not told


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pressure 1 of each side, and how long it has to last."""

    prefill_s: float
    decode_share: float
    hold_s: float
    cool_down_s: float


@dataclass(frozen=True, slots=True)
class Side:
    """The workers of one role."""

    load: float  # pressure × workers
    workers: tuple[control_pb2.KnownWorker, ...]

    @property
    def pressure(self) -> float:
        return self.load / max(1, len(self.workers))

    @property
    def pressure_without_one(self) -> float:
        """Infinite for the last."""
        return self.load / (len(self.workers) - 1) if len(self.workers) > 1 else float("inf")

    def idlest(self) -> control_pb2.KnownWorker:
        return min(self.workers, key=lambda w: (_num_sequences(w), w.info.worker_id))


@dataclass(frozen=True, slots=True)
class Flip:
    worker: control_pb2.KnownWorker
    role: worker_pb2.Role


@dataclass(frozen=True, slots=True)
class Sides:
    """Of one revision of a model. Those that do both, or may get no work, are in neither."""

    prefill: Side
    decode: Side

    @property
    def flip(self) -> Flip | None:
        """That is called for now."""
        if _is_called_for(self.prefill, self.decode):
            return Flip(self.decode.idlest(), worker_pb2.ROLE_PREFILL)
        if _is_called_for(self.decode, self.prefill):
            return Flip(self.prefill.idlest(), worker_pb2.ROLE_DECODE)
        return None


def sides_of(workers: Sequence[control_pb2.KnownWorker], num_queued: int, wanted: Wanted) -> Sides:
    """`workers`: of one content digest; `num_queued`: for them, in all routers."""
    prefill = tuple(w for w in workers if w.is_usable and w.info.role == worker_pb2.ROLE_PREFILL)
    decode = tuple(w for w in workers if w.is_usable and w.info.role == worker_pb2.ROLE_DECODE)
    ahead_s = sum(w.load.num_waiting_tokens * _token_s(w) for w in prefill)
    in_use = sum(_share_in_use(w) for w in decode) + num_queued / QUEUED
    return Sides(
        Side(ahead_s / wanted.prefill_s, prefill), Side(in_use / wanted.decode_share, decode)
    )


class RoleBalance:
    """`look` again and again, at all revisions: one flip at a time."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._called_for: dict[str, tuple[worker_pb2.Role, float]] = {}  # and since when
        self._cool_until = float("-inf")

    def look(self, revisions: Mapping[str, Sides], now: float) -> Flip | None:
        """The flip to make now, if any. `revisions`: by content digest; none while nobody tells."""
        flips = {digest: flip for digest, sides in revisions.items() if (flip := sides.flip)}
        before = self._called_for
        self._called_for = {
            digest: before[digest]
            if before.get(digest, (None,))[0] == flip.role
            else (flip.role, now)
            for digest, flip in flips.items()
        }
        if now < self._cool_until:
            return None
        due = (
            d for d, (_, since) in self._called_for.items() if now - since >= self._wanted.hold_s
        )
        digest = min(due, default=None)
        if digest is None:
            return None
        self._cool_until = now + self._wanted.cool_down_s
        self._called_for = {}
        return flips[digest]


def _is_called_for(taker: Side, giver: Side) -> bool:
    return taker.pressure >= 1 and giver.pressure_without_one < CALM


def _token_s(worker: control_pb2.KnownWorker) -> float:
    return 1e-6 * worker.load.prompt_token_us or UNKNOWN_TOKEN_S


def _share_in_use(worker: control_pb2.KnownWorker) -> float:
    return 1 - worker.load.num_free_pages / max(1, worker.load.num_pages)


def _num_sequences(worker: control_pb2.KnownWorker) -> int:
    return worker.load.num_running + worker.load.num_waiting
