"""Replays a load on simulated workers, by one router or several that do not know each other."""

import asyncio
import hashlib
import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from paceline.core.keys import INDEX_KEY_BYTES, KEY_BYTES
from paceline.router.attempt import Attempt
from paceline.router.mirror import KvEvent
from paceline.router.placement import Line
from paceline.router.request import Request, WorkerLife
from paceline.router.worker_session import Flight
from paceline.rpc.redis_schema import DEVICE, MAX_EVENT_KEYS, Kind
from paceline.sim.clock import Agenda, run_virtual
from paceline.sim.policies import PlacerOf
from paceline.sim.profile import Profile
from paceline.sim.router import SimulatedRouter, Waiting
from paceline.sim.slo import Slo
from paceline.sim.trace import HASH_BLOCKS, Arrival
from paceline.sim.worker import MockWorker, StepTimes, Work
from paceline.v1 import common_pb2, worker_pb2

MODEL, DIGEST = "simulated", "5a" * 32
BEAT_S = 1.0
MAX_TOKENS = 4096  # that requests ask for: how many come is known to workers alone
EVENT_BLOCKS = MAX_EVENT_KEYS // HASH_BLOCKS
LENGTH = common_pb2.FINISH_REASON_LENGTH


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated. `noise`: of each step's time, evenly up to so much more or less."""

    profile: Profile
    num_prefill: int = 0
    num_decode: int = 8
    num_routers: int = 1  # side by side; each request comes to one of them by lot
    noise: float = 0.1
    seed: int = 0
    time_scale: float = 1.0  # arrivals come so many times as fast
    slo: Slo = Slo()
    slo_share: float = 0.9  # of requests that have to meet it
    tells_slo: bool = True  # in each request, to whoever looks at it there
    gives_up: bool = False  # ends when too many have missed the SLO


@dataclass(slots=True)
class Outcome:
    """What became of a request; times from its arrival on."""

    arrival: Arrival
    ttft_s: float = float("inf")
    total_s: float = float("inf")
    num_cached: int = 0
    worker: str = ""  # that computed its prompt
    reader: str = ""  # that decoded

    @property
    def mean_itl_s(self) -> float:
        return (self.total_s - self.ttft_s) / max(1, self.arrival.num_output_tokens - 1)


@dataclass(slots=True)
class Replay:
    outcomes: list[Outcome]
    times: list[StepTimes]
    busiest_over_mean: float = 0.0  # sequences at the busiest worker over the mean, while loaded
    gave_up: bool = False


class Load:
    """Arrivals, and the messages and keys that a gateway would make of them. Made once."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.arrivals = list(arrivals)

    @cached_property
    def messages(self) -> list[common_pb2.TokenRequest]:
        return [_message(number, arrival) for number, arrival in enumerate(self.arrivals)]

    @cached_property
    def keys(self) -> list[bytes]:
        return [b"".join(map(_KEYS.full, arrival.blocks)) for arrival in self.arrivals]


class BlockKeys:
    """The keys of the 32 hash blocks in a block of a trace, which stand for its tokens."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[bytes, bytes]] = {}

    def full(self, block: int) -> bytes:
        """As in a request."""
        return self._of(block)[0]

    def short(self, block: int) -> bytes:
        """As in the index."""
        return self._of(block)[1]

    def _of(self, block: int) -> tuple[bytes, bytes]:
        found = self._made.get(block)
        if found is None:
            full = hashlib.shake_128(b"%d" % block).digest(HASH_BLOCKS * KEY_BYTES)
            starts = range(0, len(full), KEY_BYTES)
            short = b"".join(full[start : start + INDEX_KEY_BYTES] for start in starts)
            found = self._made[block] = full, short
        return found


_KEYS = BlockKeys()


@dataclass(slots=True, eq=False)
class Served:
    """A worker, and how many events it has told routers of."""

    info: worker_pb2.WorkerInfo
    worker: MockWorker
    sequence: int = 0


class Silent:
    """Where output goes that nobody reads."""

    def emit(self, emission: common_pb2.Emission) -> None: ...

    def fail(self, slot: int, error: Exception) -> None: ...

    def set_back(self, slot: int, num_failures: int, lost: WorkerLife | None) -> None: ...


_SILENT = Silent()


class Cluster:
    """`run` once."""

    def __init__(self, agenda: Agenda, setup: Setup, load: Load, make_placer: PlacerOf) -> None:
        self._agenda = agenda
        self._setup = setup
        self._load = load
        chance = random.Random(setup.seed)
        chances = [random.Random(chance.random())]  # of routers
        self._workers: dict[str, Served] = {}
        for number in range(setup.num_prefill):
            self._add(f"p{number}", worker_pb2.ROLE_PREFILL, random.Random(chance.random()))
        for number in range(setup.num_decode):
            self._add(f"d{number}", worker_pb2.ROLE_DECODE, random.Random(chance.random()))
        self._lot = random.Random(chance.random())
        chances += [random.Random(chance.random()) for _ in range(setup.num_routers - 1)]
        infos = [served.info for served in self._workers.values()]
        self._routers = [SimulatedRouter(infos, make_placer, chance) for chance in chances]
        for served in self._workers.values():
            self._publish(served, Kind.CLEARED, b"")
        self._outcomes = [Outcome(arrival) for arrival in load.arrivals]
        self._num_open = len(self._outcomes)
        self._num_missed = 0
        self._busy: list[float] = []

    async def run(self) -> Replay:
        for number, arrival in enumerate(self._load.arrivals):
            when = arrival.at_s / self._setup.time_scale
            self._agenda.at(when, partial(self._arrive, number, when))
        for served in self._workers.values():
            self._beat(served)
        turns = 0
        most_missed = len(self._outcomes)
        if self._setup.gives_up:
            most_missed = int((1 - self._setup.slo_share) * most_missed)
        while self._num_open and self._num_missed <= most_missed and self._agenda.advance():
            turns += 1
            if not turns % 4096:
                await asyncio.sleep(0)  # callbacks of futures that nobody waits for
        times = [served.worker.times for served in self._workers.values()]
        busy = sum(self._busy) / len(self._busy) if self._busy else 0.0
        return Replay(self._outcomes, times, busy, self._num_open > 0)

    def _add(self, name: str, role: worker_pb2.Role, chance: random.Random) -> None:
        profile = self._setup.profile
        info = worker_pb2.WorkerInfo(
            worker_id=name,
            incarnation="1",
            role=role,
            model=MODEL,
            content_digest=DIGEST,
            context_length=1 << 21,
            num_pages=profile.num_pages,
        )
        worker = MockWorker(profile, self._agenda, chance, self._setup.noise)
        self._workers[name] = served = Served(info, worker)
        worker.on_step = partial(self._stepped, served)

    def _arrive(self, number: int, when: float) -> None:
        message = self._load.messages[number]
        message.block_keys = self._load.keys[number]
        if self._setup.tells_slo:
            slo, arrival = self._setup.slo, self._load.arrivals[number]
            message.ttft_ms, message.itl_ms = 1000 * slo.ttft_limit_s(arrival), 1000 * slo.itl_s
        request = Request(number, message, _SILENT, 1e6)
        line = Line(request, DIGEST, (0,), request.turn(number))
        outcome = self._outcomes[number]
        outcome.arrival = self._load.arrivals[number]
        waiting = Waiting(line.turn, line, partial(self._drive, outcome))
        self._lot.choice(self._routers).push(waiting)

    def _drive(self, outcome: Outcome, attempt: Attempt) -> None:
        arrived = attempt.request.created_at
        compute = self._workers[attempt.compute.session.worker_id].worker
        attempt.compute.compute(worker_pb2.WorkerCommand())
        attempt.compute.session.outbox.get_nowait()
        outcome.worker = outcome.reader = attempt.compute.session.worker_id
        num_more = outcome.arrival.num_output_tokens - 1

        def first_token() -> None:
            outcome.ttft_s = self._agenda.now - arrived
            outcome.num_cached = work.num_cached
            self._emit(attempt.compute, 0, 1, not num_more, work.num_cached)
            if reader is not None:
                pull_s = num_pulled * self._setup.profile.pull_s
                ready = self._agenda.now + self._setup.profile.pull_launch_s + pull_s
                self._agenda.at(ready, partial(self._hand_over, compute, work, reader, joining))

        def end() -> None:
            outcome.total_s = self._agenda.now - arrived
            if num_more:
                flight = attempt.compute if attempt.decode is None else attempt.decode
                self._emit(flight, 1, num_more, True, 0)
            for open_flight in attempt.flights:
                open_flight.ended = True
            attempt.close()
            self._num_open -= 1
            slo = self._setup.slo
            self._num_missed += not slo.is_met(outcome.arrival, outcome.ttft_s, outcome.total_s)

        reader: MockWorker | None = None
        work = Work(outcome.arrival, first_token, end)
        joining = work
        num_pulled = 0
        if attempt.decode is not None and num_more:
            reader = self._workers[attempt.decode.session.worker_id].worker
            attempt.decode.send(worker_pb2.WorkerCommand())
            attempt.decode.session.outbox.get_nowait()
            outcome.reader = attempt.decode.session.worker_id
            work.decodes = False
            joining = Work(outcome.arrival, first_token, end)
            num_pulled = reader.reserve(joining)
        compute.submit(work)

    def _hand_over(self, source: MockWorker, held: Work, reader: MockWorker, joining: Work) -> None:
        source.release(held)
        reader.join(joining)

    def _emit(self, flight: Flight, first: int, count: int, ends: bool, num_cached: int) -> None:
        """To the router that has asked for it."""
        frame = worker_pb2.WorkerFrame()
        emission = frame.emissions.add(slot=flight.slot, position=first)
        emission.token_ids.extend([1] * count)
        emission.num_cached_tokens = num_cached
        if ends:
            emission.finish = LENGTH
        flight.session.handle(frame, self._agenda.now)

    def _stepped(self, served: Served) -> None:
        """A step's frame, and what it lets go on."""
        self._tell()
        changes = served.worker.cache.changes
        for stored, those in itertools.groupby(changes, key=operator.itemgetter(0)):
            kind = Kind.STORED if stored else Kind.REMOVED
            packed = [_KEYS.short(block) for _, block in those]
            for start in range(0, len(packed), EVENT_BLOCKS):
                self._publish(served, kind, b"".join(packed[start : start + EVENT_BLOCKS]))
        changes.clear()
        self._send_load(served)

    def _tell(self) -> None:
        """How evenly sequences lie, as long as there are several for each worker."""
        loads = [sum(r.num_in_flight(name) for r in self._routers) for name in self._workers]
        if sum(loads) >= 4 * len(loads):
            self._busy.append(max(loads) * len(loads) / sum(loads))

    def _beat(self, served: Served) -> None:
        self._send_load(served)
        self._agenda.at(self._agenda.now + BEAT_S, partial(self._beat, served))

    def _send_load(self, served: Served) -> None:
        """All routers hear of it before one of them acts."""
        frame = worker_pb2.WorkerFrame(load=served.worker.load())
        for router in self._routers:
            router.hear(served.info.worker_id, frame, self._agenda.now)
        for router in self._routers:
            router.serve()

    def _publish(self, served: Served, kind: Kind, packed: bytes) -> None:
        assert len(packed) <= MAX_EVENT_KEYS * INDEX_KEY_BYTES
        served.sequence += 1
        event = KvEvent(served.info.worker_id, "1", served.sequence, kind, DEVICE, packed)
        for router in self._routers:
            router.note(event)


def replay(setup: Setup, load: Load, make_placer: PlacerOf) -> Replay:
    """Deterministic: the same setup, load and placer give the same outcomes."""

    async def run(agenda: Agenda) -> Replay:
        return await Cluster(agenda, setup, load, make_placer).run()

    return run_virtual(run)


def _message(number: int, arrival: Arrival) -> common_pb2.TokenRequest:
    return common_pb2.TokenRequest(
        request_id=f"r{number}",
        model=MODEL,
        tenant="t",
        token_ids=bytes(arrival.num_prompt_tokens),
        num_prompt_tokens=arrival.num_prompt_tokens,
        sampling=common_pb2.SamplingParams(
            max_tokens=max(MAX_TOKENS, arrival.num_output_tokens), temperature=0, top_p=1, n=1
        ),
    )
