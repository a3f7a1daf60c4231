"""Names and bounds of what workers write to Redis and routers read.

    pl:1:worker:<worker id>               signed WorkerInfo, under a lease
    pl:1:keys:<worker id>:<incarnation>   set of what it holds: 16-byte index keys, each followed
                                          by the name of the tier if that is not the pool
    pl:1:seq:<worker id>:<incarnation>    number of the last event in that set
    pl:1:events                           stream of what all workers store and remove

An event's fields are below. Its number rises by one an event, per incarnation.
"""

from enum import StrEnum

PREFIX = "pl:1:"
EVENTS = PREFIX + "events"
WORKER_PREFIX = PREFIX + "worker:"

KEYS_TTL_MS = 10_000  # of a set and its number; every beat renews it
LEASE_BEATS = 3  # a record lasts so many beats of its worker

DEVICE = "device"  # the tier that is the pool
MAX_TIER_CHARS = 32

MAX_EVENT_KEYS = 256
MAX_EVENTS = 16_384  # times MAX_EVENT_KEYS keys of 16 bytes: 64 MiB at the very most


class Field(StrEnum):
    """Of an event in the stream."""

    WORKER = "w"
    INCARNATION = "i"
    SEQUENCE = "s"  # decimal
    KIND = "k"
    KEYS = "b"  # packed index keys
    TIER = "t"


class Kind(StrEnum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # all keys so far; what is held is stored again in the events after it


def worker_name(worker_id: str) -> str:
    return WORKER_PREFIX + worker_id


def keys_name(worker_id: str, incarnation: str) -> str:
    return f"{PREFIX}keys:{worker_id}:{incarnation}"


def sequence_name(worker_id: str, incarnation: str) -> str:
    return f"{PREFIX}seq:{worker_id}:{incarnation}"
