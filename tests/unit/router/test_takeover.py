"""Who is asked to move when a worker comes up: those whose turn is furthest away, shared out."""

from contextlib import ExitStack

from paceline.router.takeover import movable, waiting_at
from paceline.router.worker_session import Flight, WorkerSession
from paceline.v1 import worker_pb2
from tests.unit.router.listener import Heard


def _crowded(stack: ExitStack, num_flights: int, num_waiting: int) -> WorkerSession:
    session = WorkerSession(worker_pb2.WorkerInfo(worker_id="w"), 0.0)
    for _ in range(num_flights):
        stack.enter_context(session.fly(Heard(), 100)).computing = True
    load = worker_pb2.Load(num_waiting=num_waiting)
    session.handle(worker_pb2.WorkerFrame(load=load), 0.0)
    return session


def _slots(flights: list[Flight]) -> list[int]:
    return [flight.slot for flight in flights]


def test_who_came_last_waits_as_far_as_the_worker_counts() -> None:
    with ExitStack() as stack:
        session = _crowded(stack, 5, 3)
        assert _slots(waiting_at(session)) == [3, 4, 5]
        session.flights[4].began_at = 1.0  # its tokens come
        session.flights[5].computing = False  # it was not sent yet
        assert _slots(waiting_at(session)) == [1, 2, 3]


def test_nothing_moves_where_nothing_waits() -> None:
    with ExitStack() as stack:
        assert waiting_at(_crowded(stack, 5, 0)) == []


def test_each_of_n_workers_gets_its_part() -> None:
    with ExitStack() as stack:
        peers = [_crowded(stack, 7, 7) for _ in range(2)]
        came = WorkerSession(worker_pb2.WorkerInfo(worker_id="new"), 0.0)
        assert _slots(list(movable(came, [peers[0], came]))) == [2, 4, 6]
        assert _slots(list(movable(came, [*peers, came]))) == [3, 6, 3, 6]
        assert not list(movable(came, [came]))
