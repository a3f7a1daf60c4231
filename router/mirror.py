"""The index kept equal to what workers publish: snapshot, then events in sequence, per worker.

A worker's events are numbered per incarnation. After a snapshot taken at number n, events up to n
are old news; the tail itself must rise by one. Anything else is a gap, and costs this worker a new
snapshot, which replaces its views. So does a digest that differs: whatever went wrong, here or in
Redis, is mended in seconds. What was known before counts until the new views are whole, so that no
worker looks empty because Redis was.
"""

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.keys import INDEX_KEY_BYTES, KEY_BYTES
from paceline.router.index import PrefixIndex, View
from paceline.rpc.redis_schema import (
    DEVICE,
    DIGEST_BYTES,
    MAX_EVENT_KEYS,
    MAX_TIER_CHARS,
    MAX_TIERS,
    Digest,
    Field,
    Kind,
)

Owner = tuple[tuple[str, str], str]  # of a view: (worker id, incarnation), tier
MAX_EVENT_BYTES = MAX_EVENT_KEYS * INDEX_KEY_BYTES


class RefusedRecord(Exception):
    """What was read is not what a worker writes. The text is a label: few and fixed."""


@dataclass(frozen=True, slots=True)
class KvEvent:
    worker_id: str
    incarnation: str
    sequence: int
    kind: Kind
    tier: str
    keys: bytes


def parse_event(fields: dict[bytes, bytes]) -> KvEvent:
    """Checks one entry of the stream, which anyone may have written."""
    keys = fields.get(_name(Field.KEYS), b"")
    if len(keys) > MAX_EVENT_BYTES:
        raise RefusedRecord("event_size")
    try:
        kind = Kind(fields[_name(Field.KIND)].decode())
        worker_id = fields[_name(Field.WORKER)].decode()
        incarnation = fields[_name(Field.INCARNATION)].decode()
        sequence = parse_sequence(fields[_name(Field.SEQUENCE)])
        tier = parse_tier(fields[_name(Field.TIER)])
    except (KeyError, ValueError):
        raise RefusedRecord("event_form") from None
    if len(keys) % INDEX_KEY_BYTES or (kind == Kind.DIGEST and len(keys) != DIGEST_BYTES):
        raise RefusedRecord("event_form")
    return KvEvent(worker_id, incarnation, sequence, kind, tier, keys)


def _name(field: Field) -> bytes:
    return field.encode()


def parse_sequence(raw: bytes) -> int:
    if not raw.isdigit() or len(raw) > 19:
        raise RefusedRecord("sequence_form")
    return int(raw)


def parse_tier(raw: bytes) -> str:
    if not raw.isascii() or len(raw) > MAX_TIER_CHARS:
        raise RefusedRecord("tier_form")
    return raw.decode() or DEVICE


class Diverged(Exception):
    """What we hold of a worker is not what it says it holds."""


class WorkerMirror:
    """One incarnation's keys in the index, a view for each tier of its own. `needs_snapshot` until
    one was taken."""

    def __init__(
        self, index: PrefixIndex, owners: dict[View, Owner], worker_id: str, incarnation: str
    ) -> None:
        """`owners`: of all mirrors' views; this one keeps its own in it."""
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.needs_snapshot = True
        self.snapshot_after = 0.0  # not before: a worker that gaps for ever costs one a second
        self.last_sequence: int | None = None  # None: nothing published when it was taken
        self.lagging_at: int | None = None  # set by who compares it with Redis
        self._index = index
        self._owners = owners
        self._views: dict[str, View] = {}  # by tier
        self._former: dict[str, View] = {}  # while others are filled
        self._tail: int | None = None  # last number seen in the stream
        self._settled_at = 0  # digests up to here may differ from a snapshot that took its time

    def apply(self, event: KvEvent) -> None:
        """Takes an event into the view of its tier. Raises Diverged on a digest that differs."""
        last = self.last_sequence
        is_old = last is not None and event.sequence <= last
        if event.kind == Kind.CLEARED and not is_old:
            self.begin_snapshot(event.sequence)  # the worker tells all again; a digest ends it
            self._tail = event.sequence
            return
        if self._tail is not None and event.sequence != self._tail + 1:
            self.needs_snapshot = True
        self._tail = event.sequence
        if self.needs_snapshot or is_old:
            return
        if last is not None and event.sequence != last + 1:
            self.needs_snapshot = True
            return
        self.last_sequence = event.sequence
        match event.kind:
            case Kind.STORED:
                if (view := self._view_of(event.tier)) is not None:
                    self._index.store(view, event.keys)
            case Kind.REMOVED:
                if (view := self._view_of(event.tier)) is not None:
                    self._index.remove(view, event.keys)
            case Kind.DIGEST:
                self._drop_former()
                self._compare(event)

    def begin_snapshot(self, sequence: int | None) -> None:
        """Opens new views; `add` fills them. Events up to `sequence` are in what is added."""
        if self._former:
            self._retire(self._views)  # those were not filled, either
        else:
            self._former = self._views
        self._views = {}
        self.last_sequence = sequence
        self._tail = None
        self._settled_at = 0
        self.needs_snapshot = False

    def end_snapshot(self, sequence: int | None) -> None:
        """`sequence`: after the last member was read. Events up to there may be in what was added;
        their turn still comes, and from then on all is as the worker has it."""
        self._settled_at = sequence or 0
        self._drop_former()

    def add(self, keys: list[bytes]) -> int:
        """Adds members of a snapshot; returns how many of them were refused."""
        good: dict[bytes, list[bytes]] = {}  # by tier
        for key in keys:
            good.setdefault(key[INDEX_KEY_BYTES:], []).append(key[:INDEX_KEY_BYTES])
        num_added = 0
        for raw, members in good.items():
            view = self._view_of(raw.decode(errors="replace") or DEVICE)
            if view is not None:
                members = [key for key in members if len(key) == INDEX_KEY_BYTES]
                self._index.store(view, b"".join(members))
                num_added += len(members)
        return len(keys) - num_added

    def drop(self) -> None:
        """Forgets what the worker holds, at once."""
        self._retire(self._views)
        self._views = {}
        self._drop_former()

    def _drop_former(self) -> None:
        self._retire(self._former)
        self._former = {}

    def _retire(self, views: dict[str, View]) -> None:
        for view in views.values():
            self._index.retire(view)
            del self._owners[view]

    def _compare(self, event: KvEvent) -> None:
        view = self._view_of(event.tier)
        if view is None or event.sequence <= self._settled_at:
            return
        ours = self._index.digest(view)
        if ours is not None and ours != Digest.unpack(event.keys):
            self.needs_snapshot = True
            raise Diverged

    def _view_of(self, tier: str) -> View | None:
        """None: there are too many, or it is no name."""
        view = self._views.get(tier)
        if view is None and len(tier) <= MAX_TIER_CHARS and len(self._views) <= MAX_TIERS:
            view = self._views[tier] = self._index.open()
            self._owners[view] = (self.worker_id, self.incarnation), tier
        return view


class HeldBlocks(NamedTuple):
    """Leading blocks of a request that each (worker id, incarnation) says it holds."""

    in_best_tier: dict[tuple[str, str], int]
    in_pool: dict[tuple[str, str], int]  # from where others may pull them


class MirrorSet:
    """Mirrors of all workers, by worker id; what the planner asks."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.workers: dict[str, WorkerMirror] = {}
        self._owners: dict[View, Owner] = {}

    def follow(self, worker_id: str, incarnation: str) -> None:
        """From now on this incarnation counts; what an older one held is void."""
        mirror = self.workers.get(worker_id)
        if mirror is None or mirror.incarnation != incarnation:
            self.drop(worker_id)
            mirror = WorkerMirror(self.index, self._owners, worker_id, incarnation)
            self.workers[worker_id] = mirror

    def drop(self, worker_id: str) -> None:
        if mirror := self.workers.pop(worker_id, None):
            mirror.drop()

    def find(self, event: KvEvent) -> WorkerMirror | None:
        mirror = self.workers.get(event.worker_id)
        return mirror if mirror is not None and mirror.incarnation == event.incarnation else None

    def held_blocks(self, block_keys: bytes) -> HeldBlocks:
        in_best_tier: dict[tuple[str, str], int] = {}
        in_pool: dict[tuple[str, str], int] = {}
        owners = self._owners
        for view, num_blocks in self.index.match(block_keys, KEY_BYTES).items():
            worker, tier = owners[view]
            if num_blocks > in_best_tier.get(worker, 0):
                in_best_tier[worker] = num_blocks
            if tier == DEVICE and num_blocks > in_pool.get(worker, 0):
                in_pool[worker] = num_blocks
        return HeldBlocks(in_best_tier, in_pool)
