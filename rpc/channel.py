"""Settings of every gRPC channel and server: bounded messages, quick notice of a dead peer, TLS.

A server reads the certificates anew for each connection. A channel of gRPC keeps those that it was
made with, also when it connects again: who lives long makes a new one when they have changed.
"""

import grpc

from paceline.core.tls import PLAIN, Credentials, TlsConfig, credentials
from paceline.rpc.edge import Edge

MAX_CALLS = 8192  # under way at a server; a worker's own bounds (slots, pins) are far below
HANDSHAKE_MS = 5000  # a connection that says less holds up the stop of a server so long
# gRPC gives a connection up that is not made by then, and fails the calls that wait for it. TCP
# sends a lost first packet again after 1 s; TLS takes four round trips, and work of both ends.
CONNECT_S = 2.5
MAX_MESSAGE_BYTES = 16 << 20  # 128k tokens with keys fit; nothing legal is larger

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),  # routers do, see docs/routing.md
    ("grpc.service_config_disable_resolution", 1),  # which may bring retries, too
    ("grpc.initial_reconnect_backoff_ms", 100),
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
    endpoint: str,
    tls: TlsConfig = PLAIN,
    *,
    authority: str = "",
    is_shared: bool = True,
    connect_s: float = CONNECT_S,
) -> grpc.aio.Channel:
    """A channel to `host:port`. Use one a peer, for as long as the certificates last. `authority`:
    the name whose address this is, told where TLS does not tell another; `is_shared`: may use a
    connection of another channel to it. `connect_s`: how long the peer may take to take the
    connection."""
    options = _channel_options(tls, connect_s)
    options["grpc.use_local_subchannel_pool"] = int(not is_shared)
    if authority and not tls.is_on:
        options["grpc.default_authority"] = authority
    if (held := credentials(tls)) is None:
        return grpc.aio.insecure_channel(endpoint, options=list(options.items()))
    return grpc.aio.secure_channel(endpoint, _of_channel(held), list(options.items()))


def connect_blocking(endpoint: str, tls: TlsConfig = PLAIN) -> grpc.Channel:
    """The same for a thread without an event loop."""
    options = list(_channel_options(tls).items())
    if (held := credentials(tls)) is None:
        return grpc.insecure_channel(endpoint, options=options)
    return grpc.secure_channel(endpoint, _of_channel(held), options)


def make_server(
    edge: Edge | bytes | None = None,
    max_request_bytes: int = MAX_MESSAGE_BYTES,
    tls: TlsConfig = PLAIN,
    *,
    shares_port: bool = False,
) -> grpc.aio.Server:
    """A server whose servicers may raise any PacelineError. `edge`: what stands before them, or
    the secret that callers must show they know (rpc/caller_token.py); None: it is public. `tls`:
    of the port that it will `listen` on; `shares_port`: with other processes of ours."""
    options = dict(_SERVER_OPTIONS) | {
        "grpc.max_receive_message_length": max_request_bytes,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_MS,
        "grpc.so_reuseport": int(shares_port),
    }
    name = tls.name if tls.is_on else ""
    return grpc.aio.server(
        interceptors=(edge if isinstance(edge, Edge) else Edge(edge, peer_name=name),),
        options=list(options.items()),
        maximum_concurrent_rpcs=MAX_CALLS,
    )


def listen(server: grpc.aio.Server, address: str, tls: TlsConfig) -> int:
    """The port that was bound. Raises RuntimeError when it cannot be."""
    if (last := credentials(tls)) is None:
        return server.add_insecure_port(address)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """For a connection that is being made; None: as the one before."""
        nonlocal last
        current = credentials(tls)
        if current is None or current is last:
            return None
        last = current
        return _of_server(current)

    watching = grpc.dynamic_ssl_server_credentials(
        _of_server(last),
        renewed,  # type: ignore[arg-type]  # its stub knows of no None
        require_client_authentication=True,
    )
    return server.add_secure_port(address, watching)


def _of_server(held: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(held.key, held.cert)], held.ca)


def _of_channel(held: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(held.ca, held.key, held.cert)


def _channel_options(tls: TlsConfig, connect_s: float = CONNECT_S) -> dict[str, int | str]:
    options: dict[str, int | str] = dict(_OPTIONS)
    options["grpc.min_reconnect_backoff_ms"] = round(connect_s * 1000)
    if tls.is_on:  # peers are reached by address; their certificates carry the deployment's name
        options["grpc.ssl_target_name_override"] = tls.name
    return options
