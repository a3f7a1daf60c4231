"""All bounds of the HTTP port: fixed ones, and those that follow from settings."""

import resource
from dataclasses import dataclass

from paceline.gateway.config import ClientLimits

MAX_HEAD_BYTES = 64 << 10  # as received, within PIECE_BYTES
MAX_FIELDS = 256  # of a head
PIECE_BYTES = 8 << 10  # parsed at a time: the parser tells what it found, not where a head ended
PEER_CHECK_S = 0.5  # between looks whether a client is there from whom nothing is read
SHUTDOWN_BODY_S = 1.0  # a body that is on its way at shutdown
CUT_S = 2.0  # after the drain timeout, to tell running requests that they are cut
LINGER_S = 2.0  # a refused client that still sends would otherwise miss the answer
MAX_DISCARD_BYTES = 64 << 20  # of a refused body
_CONNECTIONS_A_REQUEST = 4  # idle ones beside the running requests


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Those that the settings of a gateway give."""

    read_timeout_s: float  # a head, a body, or the next bytes that a client takes of its answer
    max_body_bytes: int
    max_connections: int


def http_limits(clients: ClientLimits) -> HttpLimits:
    """Connections also take at most half of the files that the process may open: accept() must
    not run out."""
    max_connections = _CONNECTIONS_A_REQUEST * clients.max_concurrent_requests
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files != resource.RLIM_INFINITY:
        max_connections = min(max_connections, max_files // 2)
    return HttpLimits(clients.read_timeout_s, clients.max_body_bytes, max_connections)
