"""What goes wrong in the middle of a hand-off, and when: the cases of transfer_faults."""

from dataclasses import dataclass
from enum import StrEnum


class Step(StrEnum):
    """Of the protocol between a reader and its source: what is about to happen when it goes wrong.

    A step is hit without the product's help: by the messages that a proxy between both ends sees,
    by pages that change in the reader's pool, and by stopping the reader's rank, which commits.
    """

    CONNECT = "connect"  # before: the reader's handshake has not reached the source
    READ = "read"  # after the pin: the reader has not heard yet what is pinned
    MID_READ = "mid_read"  # some of the pages are there
    COMMIT = "commit"  # all is read and verified, and not committed
    UNPIN = "unpin"  # the request runs from the pages; the source has not heard of it


class Fault(StrEnum):
    KILL_SOURCE = "kill_source"  # signal 9 to front and rank
    KILL_READER = "kill_reader"
    STOP_SOURCE = "stop_source"  # SIGSTOP to both, SIGCONT after longer than a lease lasts
    STOP_READER = "stop_reader"
    RESET = "reset"  # RST on all connections between the two
    SUCCESSOR = "successor"  # the source dies, and at its addresses answers another process
    EVICT = "evict"  # the lease is revoked and each page of the source allocated anew
    FLIP_SOURCE = "flip_source"  # a byte of a pinned page, in the source's pool
    FLIP_WIRE = "flip_wire"  # a byte on its way
    LOSE_UNPIN = "lose_unpin"
    DUPLICATE = "duplicate"  # every call and every beat reaches the source twice
    REORDER = "reorder"  # unpins after the calls of later requests, beats in pairs swapped


@dataclass(frozen=True, slots=True)
class Case:
    fault: Fault
    step: Step

    def __str__(self) -> str:
        return f"{self.fault} before {self.step}"


# Reader and source shake hands once: cases of that step follow one that ends with a new process.
CONNECT = (
    Fault.KILL_SOURCE,
    Fault.STOP_SOURCE,
    Fault.KILL_READER,
    Fault.STOP_READER,
    Fault.SUCCESSOR,
    Fault.RESET,
    Fault.EVICT,
)
LATER = (*CONNECT, Fault.FLIP_SOURCE)
QUICK = (
    Case(Fault.RESET, Step.CONNECT),
    Case(Fault.FLIP_SOURCE, Step.READ),
    Case(Fault.EVICT, Step.READ),
    Case(Fault.EVICT, Step.COMMIT),
    Case(Fault.RESET, Step.MID_READ),
    Case(Fault.LOSE_UNPIN, Step.UNPIN),
    Case(Fault.DUPLICATE, Step.READ),
    Case(Fault.REORDER, Step.UNPIN),
    Case(Fault.STOP_SOURCE, Step.MID_READ),
    Case(Fault.KILL_SOURCE, Step.MID_READ),
)


def all_cases(transport: str) -> list[Case]:
    cases = [Case(fault, Step.CONNECT) for fault in CONNECT]
    cases += [Case(fault, step) for step in list(Step)[1:] for fault in LATER]
    if transport == "tcp":  # others' bytes do not pass a proxy of ours
        cases.append(Case(Fault.FLIP_WIRE, Step.READ))
    cases.append(Case(Fault.LOSE_UNPIN, Step.UNPIN))
    cases += [Case(Fault.DUPLICATE, Step.READ), Case(Fault.REORDER, Step.UNPIN)]
    return cases


def quick_cases(transport: str) -> list[Case]:
    wire = (Case(Fault.FLIP_WIRE, Step.READ),) if transport == "tcp" else ()
    return [*wire, *QUICK]
