"""Names and bounds of what workers write to Redis and routers read.

    pl:1:worker:<worker id>               signed WorkerInfo, under a lease
    pl:1:keys:<worker id>:<incarnation>   set of what it holds: 16-byte index keys, each followed
                                          by the name of the tier if that is not the pool
    pl:1:seq:<worker id>:<incarnation>    number of the last event in that set
    pl:1:events                           stream of what all workers store and remove

An event's fields are below. Its number rises by one an event, per incarnation. Every DIGEST_S a
worker says the digest of what each of its tiers holds at that number.
"""

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "pl:1:"
EVENTS = PREFIX + "events"
WORKER_PREFIX = PREFIX + "worker:"

KEYS_TTL_MS = 10_000  # of a set and its number; every beat renews it
LEASE_BEATS = 3  # a record lasts so many beats of its worker

DEVICE = "device"  # the tier that is the pool
MAX_TIERS = 6  # of a worker, beside its pool
MAX_TIER_CHARS = 32

DIGEST_S = 2.0
DIGEST_BYTES = 32
MAX_EVENT_KEYS = 256
MAX_EVENTS = 16_384  # times MAX_EVENT_KEYS keys of 16 bytes: 64 MiB at the very most


class Field(StrEnum):
    """Of an event in the stream."""

    WORKER = "w"
    INCARNATION = "i"
    SEQUENCE = "s"  # decimal
    KIND = "k"
    KEYS = "b"  # packed index keys, or a digest
    TIER = "t"


class Kind(StrEnum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # all keys so far; what is held is stored again until the next digest
    DIGEST = "digest"  # of one tier, with all events before it


@dataclass(frozen=True, slots=True)
class Digest:
    """Of a set of index keys: equal sets have equal ones, others hardly ever by accident."""

    num_keys: int = 0
    xor: int = 0  # of the keys, as big-endian numbers of 128 bits

    def changed(self, num_keys: int, xor: int) -> "Digest":
        """With so many keys more (or fewer), whose XOR is `xor`."""
        return Digest(self.num_keys + num_keys, self.xor ^ xor)

    def pack(self) -> bytes:
        return self.num_keys.to_bytes(DIGEST_BYTES // 2) + self.xor.to_bytes(DIGEST_BYTES // 2)

    @classmethod
    def unpack(cls, packed: bytes) -> "Digest":
        middle = DIGEST_BYTES // 2
        return cls(int.from_bytes(packed[:middle]), int.from_bytes(packed[middle:]))


def worker_name(worker_id: str) -> str:
    return WORKER_PREFIX + worker_id


def keys_name(worker_id: str, incarnation: str) -> str:
    return f"{PREFIX}keys:{worker_id}:{incarnation}"


def sequence_name(worker_id: str, incarnation: str) -> str:
    return f"{PREFIX}seq:{worker_id}:{incarnation}"
