"""One router of a simulation: fleet, index, placement and line-up are the router's own code, with a
clock that we set; streams and Redis are calls."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.router.attempt import Attempt
from paceline.router.config import RouterConfig
from paceline.router.fleet import Fleet
from paceline.router.index import PrefixIndex
from paceline.router.lineup import Answer, Lineup, Turn
from paceline.router.metrics import RouterMetrics
from paceline.router.mirror import KvEvent, MirrorSet
from paceline.router.placement import Line, Placer
from paceline.router.worker_session import WorkerSession
from paceline.sim.policies import PlacerOf
from paceline.v1 import worker_pb2

INDEX_BYTES = 512 << 20


@dataclass(eq=False)
class Attached:
    """A link whose worker is connected, as the fleet knows them."""

    session: WorkerSession


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in line; `start` is told where it goes."""

    turn: Turn
    line: Line
    start: Callable[[Attempt], None]


class SimulatedRouter:
    """It hears of the same workers as others do, and of nobody else's requests."""

    def __init__(
        self, infos: Sequence[worker_pb2.WorkerInfo], make_placer: PlacerOf, chance: random.Random
    ) -> None:
        config = RouterConfig(secret="s" * 32, max_slots_per_worker=1 << 20)
        self._fleet = Fleet(config, RouterMetrics())
        self._mirrors = MirrorSet(PrefixIndex(INDEX_BYTES))
        self._placer: Placer = make_placer(config, self._fleet, self._mirrors, chance)
        self._lineup: Lineup[Waiting] = Lineup()
        for info in infos:
            link = Attached(WorkerSession(info, 0.0))
            self._fleet.links[info.worker_id] = link  # type: ignore[assignment]
            self._mirrors.follow(info.worker_id, info.incarnation)
        self._fleet.refresh_models(0.0)

    def push(self, waiting: Waiting) -> None:
        self._lineup.push(waiting)
        self.serve()

    def serve(self) -> None:
        if self._lineup:
            self._lineup.serve(self._ask)

    def hear(self, worker_id: str, frame: worker_pb2.WorkerFrame, now: float) -> None:
        self._session(worker_id).handle(frame, now)

    def note(self, event: KvEvent) -> None:
        self._mirrors.workers[event.worker_id].apply(event)

    def num_in_flight(self, worker_id: str) -> int:
        return self._session(worker_id).num_in_flight

    def _session(self, worker_id: str) -> WorkerSession:
        session = self._fleet.links[worker_id].session
        assert session is not None, "nothing ends it here"
        return session

    def _ask(self, waiting: Waiting) -> Answer:
        """As the router's queue."""
        placed = self._placer.place(waiting.line)
        if placed is None:
            return Answer.NO_ROOM
        waiting.start(placed)
        return Answer.PLACED
