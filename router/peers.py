"""Workers of one role and revision beside each other: who is slower, and who fails too often to get
work, as long as others are left."""

from collections.abc import Sequence

import structlog

from paceline.router.pace import costs, mean_pace
from paceline.router.worker_session import WorkerSession

log = structlog.stdlib.get_logger("paceline.router")


def compare_paces(peers: Sequence[WorkerSession]) -> None:
    """Sets what tokens cost on each, in tokens of a usual prompt on a usual one."""
    known = [session.pace for session in peers if session.pace.is_known]
    if not known:
        return
    usual = mean_pace(known)
    for session in peers:
        session.token_cost, session.pair_cost = costs(session.pace, usual)
        session.cost_s = usual.usual_token_s


def note_failure(
    session: WorkerSession, peers: Sequence[WorkerSession], now: float, stale_after_s: float
) -> None:
    """An attempt failed for it, which may eject it. Half of `peers`, it among them, stay whatever
    they do: then it is not the worker."""
    if session.lost is not None or not session.health.fail():
        return
    num_others = sum(one.is_usable(now, stale_after_s) for one in peers) - 1
    if now < session.health.ejected_until or 2 * num_others < len(peers):
        return
    pause_s = session.health.eject(now)
    failures = session.health.num_failures
    log.warning("worker ejected", worker=session.worker_id, failures=failures, for_s=pause_s)


def readmit(peers: Sequence[WorkerSession], now: float, stale_after_s: float) -> None:
    """Where no other worker is left, one that fails is better than none."""
    ejected = [one for one in peers if now < one.health.ejected_until]
    if ejected and not any(one.is_usable(now, stale_after_s) for one in peers):
        for session in ejected:
            session.health.ejected_until = now
