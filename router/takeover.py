"""A worker that comes up takes its part of what waits at others, which was planned without it.

Requests wait in a worker's own line, first come, first served. While one of two workers is away the
other's line grows, and what stands in it would wait for its turn there though the first one is back
and idle. So every n-th of them, n workers being there, is placed anew.
"""

from collections.abc import Iterator, Sequence

from paceline.router.worker_session import Flight, WorkerSession


def movable(came: WorkerSession, peers: Sequence[WorkerSession]) -> Iterator[Flight]:
    """Of `peers`, all workers that do the same as `came`, which may be among them."""
    others = [peer for peer in peers if peer is not came]
    for peer in others:
        yield from waiting_at(peer)[len(others) :: len(others) + 1]


def waiting_at(session: WorkerSession) -> list[Flight]:
    """Those of whose prompt nothing is computed, oldest first, as far as the worker's own count of
    what waits there tells: whoever came last waits."""
    unbegun = [f for f in session.flights.values() if f.computing and not f.began_at]
    num_waiting = min(len(unbegun), session.load.num_waiting)
    return unbegun[len(unbegun) - num_waiting :]
