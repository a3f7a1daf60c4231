"""Reader side of leases: says every second, from a thread of its own, which ones we live on.

A busy event loop must not cost a lease, so each source gets a synchronous channel and a thread.
"""

import threading
import time
from collections.abc import Iterator

import grpc

from paceline.core.tls import credentials
from paceline.rpc import caller_token
from paceline.rpc.channel import connect_blocking
from paceline.v1 import kv_pb2, kv_pb2_grpc
from paceline.worker.config import WorkerConfig


class LeaseBeats:
    """Beats to one source. All calls are thread-safe; `start` before use, `close` at the end."""

    def __init__(
        self,
        endpoint: str,
        reader: tuple[str, str],
        config: WorkerConfig,
    ) -> None:
        self._endpoint = endpoint
        self._tls = config.tls
        self._credentials = credentials(config.tls)
        self._channel = connect_blocking(endpoint, config.tls)
        self._reader = reader
        self._secret = config.secret.encode()
        self._beat_s = config.timers.beat_s
        self._silence_s = config.timers.silence_s
        self._held: set[str] = set()
        self._lost: set[str] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._last_beat = self._last_reply = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lease-beats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hold(self, lease_id: str) -> None:
        with self._lock:
            self._held.add(lease_id)

    def drop(self, lease_id: str) -> None:
        with self._lock:
            self._held.discard(lease_id)
            self._lost.discard(lease_id)

    def is_lost(self, lease_id: str) -> bool:
        """The source said so, or we were paused for so long that it must have."""
        with self._lock:
            late = time.monotonic() - self._last_beat > self._silence_s
            return late or lease_id in self._lost

    @property
    def unanswered_s(self) -> float:
        """How long the source has not answered."""
        with self._lock:
            return time.monotonic() - self._last_reply

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._channel.close()  # ends the call, wherever it waits
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed.is_set():
            over = threading.Event()
            stub = kv_pb2_grpc.KvTransferServiceStub(self._channel)  # type: ignore[no-untyped-call]
            try:
                token = caller_token.metadata(self._secret)
                for reply in stub.KeepLeases(self._beats(over), metadata=token):
                    with self._lock:
                        self._last_reply = time.monotonic()
                        self._lost.update(set(reply.unknown_lease_ids) & self._held)
            except (grpc.RpcError, ValueError):  # broken; ValueError: closed meanwhile
                self._closed.wait(self._beat_s / 2)
                self._renew_channel()
            finally:
                over.set()

    def _renew_channel(self) -> None:
        """If certificates have changed since: a channel connects with its own for ever."""
        current = credentials(self._tls)
        with self._lock:
            if current is not self._credentials and not self._closed.is_set():
                self._channel.close()
                self._channel = connect_blocking(self._endpoint, self._tls)
                self._credentials = current

    def _beats(self, over: threading.Event) -> Iterator[kv_pb2.LeaseBeat]:
        worker, incarnation = self._reader
        while not (self._closed.is_set() or over.is_set()):
            with self._lock:
                if time.monotonic() - self._last_beat > self._silence_s:
                    self._lost |= self._held  # we were paused
                self._last_beat = time.monotonic()
                held = sorted(self._held)
            yield kv_pb2.LeaseBeat(
                reader_worker=worker, reader_incarnation=incarnation, lease_ids=held
            )
            over.wait(self._beat_s)
