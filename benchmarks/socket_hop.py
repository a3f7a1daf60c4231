"""How long a message takes between two processes that slept: the floor of a streamed token's hop.

A token passes four sockets between the engine and the client. What one costs depends on the
machine at that moment (how deep its cores sleep, what else has emptied their caches), as memcpy
does, and a factor of five between two hours was seen on shared machines.
"""

import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

NUM_MESSAGES = 40


def send_each(to: Connection, gap_s: float) -> None:
    for _ in range(NUM_MESSAGES):
        time.sleep(gap_s)
        to.send_bytes(time.monotonic_ns().to_bytes(8, "little"))


def socket_hop_ms(gap_s: float) -> float:
    """Median milliseconds from send to received over a Unix socket, one message each gap_s."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=send_each, args=(theirs, gap_s))
    sender.start()
    theirs.close()
    hops = []
    for _ in range(NUM_MESSAGES):
        sent_ns = int.from_bytes(ours.recv_bytes(8), "little")
        hops.append((time.monotonic_ns() - sent_ns) / 1e6)
    sender.join()
    return median(hops)
