"""All workers that the router knows: their links, what may be planned on, the models they serve."""

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import structlog

from paceline.core.keys import narrowed_salt, root_key, tenant_salt
from paceline.router.config import RouterConfig
from paceline.router.metrics import RouterMetrics
from paceline.router.peers import compare_paces, note_failure, readmit
from paceline.router.request import WorkerLife
from paceline.router.takeover import movable
from paceline.router.worker_link import WorkerLink
from paceline.router.worker_session import WorkerSession
from paceline.rpc.convert import role_name
from paceline.v1 import common_pb2, control_pb2, worker_pb2

RECENT_HALF_LIFE_S = 60.0
OTHERS_AVERAGE_S = 5.0  # over so long the share of other routers is smoothed
MAX_OTHERS = 15.0  # what is more is taken for a fault of counting
SHOWN_DIGITS = 12  # of a content digest
MODEL_MEMORY_S = 60.0  # least time that a model without workers is unavailable, then unknown

log = structlog.stdlib.get_logger("paceline.router")


@dataclass(slots=True)
class Revision:
    """The connected workers of one revision of a model."""

    model: str
    context_length: int = 0  # of the worker with the most room
    prefill: list[WorkerSession] = field(default_factory=list)
    decode: list[WorkerSession] = field(default_factory=list)

    def add(self, session: WorkerSession) -> None:
        if session.takes_prompts:
            self.prefill.append(session)
        if not session.is_prefill:
            self.decode.append(session)
        self.context_length = max(self.context_length, session.info.context_length)


class Fleet:
    """`on_change` is called after anything that may let a waiting request go on."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.links: dict[str, WorkerLink] = {}
        self.on_change: Callable[[], None] = _nothing
        self.on_models: Callable[[], None] = _nothing
        self.on_lost: Callable[[WorkerLife], None] = _ignore  # not of those that drained
        self._config = config
        self._metrics = metrics
        self._secret = config.secret.encode()
        self._last_usable: dict[tuple[str, int], float] = {}  # by content digest, context length
        self._models: dict[str, control_pb2.ModelInfo] = {}  # by name
        self._revisions: dict[str, Revision] = {}  # by content digest
        self._known: dict[str, control_pb2.ModelInfo] = {}  # by it, also of those gone of late
        self._reported: set[tuple[str, str, str]] = set()  # revisions, as metrics name them
        self.others = 0.0  # load of other routers on the same workers, over that of this one
        self._decayed_at = asyncio.get_running_loop().time()

    def sessions(self) -> Iterator[WorkerSession]:
        return (link.session for link in self.links.values() if link.session is not None)

    def session_of(self, worker_id: str, incarnation: str) -> WorkerSession | None:
        link = self.links.get(worker_id)
        session = None if link is None else link.session
        return session if session is not None and session.incarnation == incarnation else None

    def has_ended(self, life: WorkerLife) -> bool | None:
        """Whether this life of a worker is over; None: nobody knows."""
        worker_id, incarnation = life
        link = self.links.get(worker_id)
        if link is None:
            return True  # its lease has run out, and it is not connected
        if link.session is not None and link.session.lost is None:
            return link.session.incarnation != incarnation
        return link.is_gone or None

    def revision(self, content_digest: str) -> Revision | None:
        return self._revisions.get(content_digest)

    async def dialled(self) -> None:
        """Returns when each worker that is known now has answered, or failed to."""
        await asyncio.gather(*(link.dialled.wait() for link in self.links.values()))

    def add(self, info: worker_pb2.WorkerInfo) -> None:
        """A record says that this worker is there."""
        link = self.links.get(info.worker_id)
        if link is None:
            self.links[info.worker_id] = WorkerLink(info, self._config, self)
        else:
            link.point_to(info.endpoint, info.incarnation)

    async def remove(self, worker_id: str) -> None:
        await self.links.pop(worker_id).close()

    async def close(self) -> None:
        for worker_id in list(self.links):
            await self.remove(worker_id)

    def usable(self, content_digest: str, now: float, num_tokens: int = 0) -> list[WorkerSession]:
        """Workers that may get work of this model and have room for `num_tokens`.

        Draining, stale and stuck ones may not.
        """
        found = [
            session
            for session in self.sessions()
            if session.info.content_digest == content_digest
            and session.info.context_length >= num_tokens
            and session.is_usable(now, self._config.stale_after_s)
        ]
        for session in found:
            if not session.is_prefill:
                self._note_usable(session, now)
        return found

    def last_usable(self, content_digest: str, num_tokens: int = 0) -> float:
        """When a decode worker with so much room was usable."""
        times = (
            time
            for (digest, context_length), time in self._last_usable.items()
            if digest == content_digest and context_length >= num_tokens
        )
        return max(times, default=float("-inf"))

    def context_length(self, content_digest: str) -> int:
        """Of the worker with the most room; as it was listed, while there is none."""
        if revision := self._revisions.get(content_digest):
            return revision.context_length
        known = self._known.get(content_digest)
        return 0 if known is None else known.context_length

    def open_now(
        self, sessions: Iterable[WorkerSession], now: float, num_tokens: int
    ) -> list[WorkerSession]:
        """Those that may get work, have room for `num_tokens`, and a free slot."""
        stale_after_s, num_slots = self._config.stale_after_s, self._config.max_slots_per_worker
        return [s for s in sessions if s.can_take(now, stale_after_s, num_slots, num_tokens)]

    def digest_of(self, request: common_pb2.TokenRequest) -> str | None:
        """The content digest that a request's keys are rooted in; None: of no worker we know."""
        salt = self._salt_of(request)
        revisions, known = self._revisions.items(), self._known.items()
        digests = {digest for digest, revision in revisions if revision.model == request.model}
        digests |= {digest for digest, info in known if info.name == request.model}
        return next((d for d in sorted(digests) if root_key(d, salt) == request.root_key), None)

    def root_key(self, content_digest: str, request: common_pb2.TokenRequest) -> bytes:
        """Of the request's keys, if it were made for this revision."""
        return root_key(content_digest, self._salt_of(request))

    def _salt_of(self, request: common_pb2.TokenRequest) -> bytes:
        part = request.cache_salt if request.HasField("cache_salt") else None
        return narrowed_salt(tenant_salt(self._secret, request.tenant), part)

    def successor(self, content_digest: str, now: float, num_tokens: int) -> str | None:
        """Once no decode worker of a revision is there, or all of them drain: the revision with
        most of those that serve the same model, with the same tokenizer and template, and have room
        for `num_tokens`."""
        revision, known = self._revisions.get(content_digest), self._known.get(content_digest)
        remain = revision is not None and any(not s.load.draining for s in revision.decode)
        if remain or known is None:
            return None
        tally: Tally[str] = Tally()
        for session in self.sessions():
            if not session.is_prefill and _is_read_alike(session.info, known):
                has_room = session.info.context_length >= num_tokens
                if has_room and session.is_usable(now, self._config.stale_after_s):
                    tally[session.info.content_digest] += 1
        del tally[content_digest]
        return max(tally, key=tally.__getitem__, default=None)

    def models(self) -> list[control_pb2.ModelInfo]:
        """Also those whose decode workers were lost a short time ago: `unavailable`."""
        return list(self._models.values())

    def has_decode_worker(self) -> bool:
        return any(not model.unavailable for model in self._models.values())

    def refresh_models(self, now: float) -> None:
        """Of several revisions of a model, the one that most decode workers serve is listed,
        with the context of the one with the most room."""
        tally: dict[str, Tally[bytes]] = {}
        room: dict[bytes, int] = {}
        self._group()
        for digest in self._revisions:
            self.usable(digest, now)
        for session in self.sessions():
            if not session.load.draining and not session.is_prefill:
                info = _model_of(session.info)
                vote = info.SerializeToString()
                tally.setdefault(info.name, Tally())[vote] += 1
                room[vote] = max(room.get(vote, 0), session.info.context_length)
                info.context_length = room[vote]
                self._known[info.content_digest] = info
        self._report_revisions()
        listed = {}
        for name, votes in tally.items():
            vote = votes.most_common(1)[0][0]
            listed[name] = control_pb2.ModelInfo.FromString(vote)
            listed[name].context_length = room[vote]
        memory_s = self._forget_times(now)
        for name, info in self._models.items():
            if name not in listed and now - self.last_usable(info.content_digest) < memory_s:
                listed[name] = control_pb2.ModelInfo()
                listed[name].CopyFrom(info)
                listed[name].unavailable = True
        if listed != self._models:
            self._models = listed
            self.on_models()

    def _group(self) -> None:
        self._revisions = {}
        for session in self.sessions():
            info = session.info
            self._revisions.setdefault(info.content_digest, Revision(info.model)).add(session)

    def report(self) -> None:
        """Brings the gauges of workers up to date."""
        now, num_quarantined, num_ejected = asyncio.get_running_loop().time(), 0, 0
        for session in self.sessions():
            self._metrics.worker_in_flight.labels(session.worker_id).set(session.num_in_flight)
            self._metrics.late.inc(session.num_late)
            session.num_late = 0
            num_quarantined += now < session.quarantined_until
            num_ejected += now < session.health.ejected_until
        self._metrics.quarantined.set(num_quarantined)
        self._metrics.ejected.set(num_ejected)

    def _report_revisions(self) -> None:
        """Series are never cleared: another thread may be reading them."""
        found = Tally(map(_revision, self.sessions()))
        for revision, num_workers in found.items():
            self._metrics.revision_workers.labels(*revision).set(num_workers)
        for revision in self._reported - found.keys():
            self._metrics.revision_workers.remove(*revision)
        self._reported = set(found)

    def session_up(self, session: WorkerSession) -> None:
        """Called by its link."""
        self._join(session)
        self._metrics.worker_in_flight.labels(session.worker_id).set(0)
        self._model_change()
        self._give_work(session)

    def _give_work(self, came: WorkerSession) -> None:
        """Of what waits at its peers."""
        now = asyncio.get_running_loop().time()
        revision = self._revisions.get(came.info.content_digest)
        if revision is None or not came.is_usable(now, self._config.stale_after_s):
            return
        flights = list(movable(came, revision.prefill if came.is_prefill else revision.decode))
        for flight in flights:
            flight.listener.on_moved(flight)
        if flights:
            log.info("a worker takes over", worker=came.worker_id, num_requests=len(flights))

    def role_changed(self, session: WorkerSession, info: worker_pb2.WorkerInfo) -> None:
        """Called by its link. No plan is made by the old role any more."""
        self._leave(session)
        session.take_role(info)
        session.recent_requests = 0.0  # of another kind
        log.info("role changed", worker=session.worker_id, role=role_name(session.info.role))
        self._join(session)
        self._model_change()
        self._give_work(session)

    def session_lost(self, session: WorkerSession, reason: str) -> None:
        self._leave(session)
        self._metrics.worker_in_flight.remove(session.worker_id)
        self._metrics.worker_lost.labels("drained" if session.load.draining else reason).inc()
        if not session.load.draining:
            self.on_lost(session.life)
        self._model_change()

    def _join(self, session: WorkerSession) -> None:
        """Those of its role. It starts with their recent load: new is not idle."""
        recent = [s.recent_requests for s in self.sessions() if s.is_prefill == session.is_prefill]
        session.recent_requests = sum(recent) / max(1, len(recent) - 1)
        self._metrics.worker_up.labels(session.worker_id, role_name(session.info.role)).set(1)

    def _leave(self, session: WorkerSession) -> None:
        """Requests wait from now on for another one of its role."""
        self._metrics.worker_up.remove(session.worker_id, role_name(session.info.role))
        if not session.is_prefill:
            self._note_usable(session, asyncio.get_running_loop().time())

    def session_changed(self, session: WorkerSession) -> None:
        """A frame came."""
        self.on_change()

    def _model_change(self) -> None:
        self.refresh_models(asyncio.get_running_loop().time())
        self.on_change()

    def _forget_times(self, now: float) -> float:
        """Those too old to be asked for again. Returns how long they are remembered."""
        memory_s = max(MODEL_MEMORY_S, self._config.worker_wait_s)
        times = self._last_usable.items()
        self._last_usable = {key: time for key, time in times if now - time <= memory_s}
        kept = self._revisions.keys() | {digest for digest, _ in self._last_usable}
        self._known = {digest: info for digest, info in self._known.items() if digest in kept}
        return memory_s

    def _note_usable(self, session: WorkerSession, now: float) -> None:
        info = session.info
        self._last_usable[info.content_digest, info.context_length] = now

    def decay(self, now: float) -> None:
        """At most once a second: halves what is recent every RECENT_HALF_LIFE_S, compares workers
        with their peers, and notes how much of the load on them is of other routers."""
        elapsed_s = now - self._decayed_at
        if elapsed_s < 1:
            return
        self._decayed_at = now
        for peers in self._peers():
            compare_paces(peers)
            readmit(peers, now, self._config.stale_after_s)
        factor = 0.5 ** (elapsed_s / RECENT_HALF_LIFE_S)
        ours = theirs = 0
        for session in self.sessions():
            session.recent_requests *= factor
            ours += session.num_in_flight
            theirs += max(0, session.num_reported - session.num_in_flight)
        measured = min(theirs / max(1, ours), MAX_OTHERS)
        self.others += min(1.0, elapsed_s / OTHERS_AVERAGE_S) * (measured - self.others)

    def note_failures(self, sessions: Iterable[WorkerSession], now: float) -> None:
        """Of an attempt that failed for one of them."""
        for session in sessions:
            revision = self._revisions.get(session.info.content_digest)
            if revision is not None:
                by_role = revision.prefill if session.is_prefill else revision.decode
                note_failure(session, by_role, now, self._config.stale_after_s)

    def _peers(self) -> Iterator[list[WorkerSession]]:
        """Those of each role and revision."""
        for revision in self._revisions.values():
            yield revision.prefill
            yield revision.decode


def _model_of(info: worker_pb2.WorkerInfo) -> control_pb2.ModelInfo:
    """All but the context length: workers of one model may have pools of different sizes."""
    return control_pb2.ModelInfo(
        name=info.model,
        content_digest=info.content_digest,
        serving_digest=info.serving_digest,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
    )


def _is_read_alike(info: worker_pb2.WorkerInfo, known: control_pb2.ModelInfo) -> bool:
    """The same tokens mean the same text to both."""
    mine = info.model, info.serving_digest, info.vocab_size
    return mine == (known.name, known.serving_digest, known.vocab_size)


def _revision(session: WorkerSession) -> tuple[str, str, str]:
    """As metrics name it."""
    info = session.info
    return info.model, info.content_digest[:SHOWN_DIGITS], role_name(session.info.role)


def _nothing() -> None:
    return None


def _ignore(_: WorkerLife) -> None:
    return None
