"""Settings of every gRPC channel and server: bounded messages, quick notice of a dead peer."""

import grpc

from paceline.rpc.edge import Edge

MAX_CALLS = 8192  # under way at a server; a worker's own bounds (slots, pins) are far below
HANDSHAKE_MS = 5000  # a connection that says less holds up the stop of a server so long
CONNECT_S = 0.1  # gRPC gives a connection up that is not made by then
MAX_MESSAGE_BYTES = 16 << 20  # 128k tokens with keys fit; nothing legal is larger

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", round(1000 * CONNECT_S)),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_concurrent_streams", MAX_CALLS // 2),  # of one connection
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a share
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]


def connect(
    endpoint: str, *, authority: str = "", is_shared: bool = True, connect_s: float = CONNECT_S
) -> grpc.aio.Channel:
    """A channel to `host:port`. Use one a peer, for as long as the peer lives. `authority`: the
    name whose address this is; `is_shared`: may use a connection of another channel to it.
    `connect_s`: how long the peer may take to take the connection."""
    options: dict[str, int | str] = dict(_OPTIONS)
    options["grpc.use_local_subchannel_pool"] = int(not is_shared)
    options["grpc.min_reconnect_backoff_ms"] = round(connect_s * 1000)
    if authority:
        options["grpc.default_authority"] = authority
    return grpc.aio.insecure_channel(endpoint, options=list(options.items()))


def connect_blocking(endpoint: str) -> grpc.Channel:
    """The same for a thread without an event loop."""
    return grpc.insecure_channel(endpoint, options=_OPTIONS)


def make_server(
    edge: Edge | bytes | None = None, max_request_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Server:
    """A server whose servicers may raise any PacelineError. `edge`: what stands before them, or
    the secret that callers must show they know (rpc/caller_token.py); None: it is public."""
    options = dict(_SERVER_OPTIONS) | {
        "grpc.max_receive_message_length": max_request_bytes,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_MS,
    }
    return grpc.aio.server(
        interceptors=(edge if isinstance(edge, Edge) else Edge(edge),),
        options=list(options.items()),
        maximum_concurrent_rpcs=MAX_CALLS,
    )
