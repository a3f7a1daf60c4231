"""UCX for one source, or for all links of one reader: a worker that one thread alone touches.

Others hand that thread their channels and transfers, and wait. (Called from several threads, ucxx
0.52 crashed when a peer died while its endpoint was closed.) ucxx is used without asyncio: each of
its calls releases the GIL.

An endpoint is closed when its messages have ended or have come to a rest. UCX 1.21 may die of a
peer that goes away while bytes for it wait: of one event its TCP first reads, which frees the
endpoint, and then writes (`uct_tcp_iface_handle_events`).

Endpoints always have UCX's error handling, without which a read from a process that was killed
hangs for ever. UCX uses no shared memory then, so those transports are left out, which saves 4 MB
and four descriptors a worker.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import structlog

from paceline.core.errors import ConfigError, PeerGone, shown
from paceline.kv_transfer.ucx_transfer import Flight, UcxTransfer

_log = structlog.get_logger("paceline.kv_transfer")

_POLL_S = 0.05  # between looks at whether the peer lives
_IDLE_S = 1.0
_QUIET_S = 0.2  # without a message that completes: what is in flight is waited for no longer
_LATE_S = 5.0  # UCX should have let go of a closed channel's memory long ago
_OPTIONS = {  # unless UCX_<name> is set
    "TLS": "^posix,sysv,cma",
    "TCP_TX_SEG_SIZE": "1m",  # measured: 1.3 times the throughput of 256k, 2.5 of the default 8k
    "TCP_RX_SEG_SIZE": "1m",
    "RNDV_THRESH": "8192",  # from here on bytes go straight into their destination
}

IsAlive = Callable[[], bool]


class UcxWorker:
    """`address` is what a peer needs to open a channel to it. Thread-safe."""

    def __init__(self) -> None:
        """Raises ConfigError when UCX cannot be started as its environment says."""
        self._api, self._array = _load()
        flags = (self._api.Feature.TAG, self._api.Feature.WAKEUP)
        options = {name: os.environ.get(f"UCX_{name}", value) for name, value in _OPTIONS.items()}
        try:
            self._worker = self._api.UCXWorker(self._api.UCXContext(options, feature_flags=flags))
            self._worker.init_blocking_progress_mode()
        except self._api.UCXError as error:
            raise ConfigError("transport", "ucx", f"UCX cannot be started: {error}") from None
        self.address: bytes = self._worker.address.tobytes()
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()  # for the thread to make
        self._channels: list[UcxChannel] = []
        self._is_closed = False
        self.failure = ""  # why its thread has ended; then nothing is in flight any more
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ucx", daemon=True)
        self._thread.start()

    def open(self, address: bytes, deadline: float) -> "UcxChannel":
        """Raises PeerGone for an address that no transport of this host reaches, when UCX has
        failed, and when it is silent until `deadline`."""
        opened: Future[UcxChannel] = Future()
        self._call(lambda: self._open(address, opened))
        left_s = deadline - time.monotonic()
        self.wait(lambda: opened.done() or bool(self.failure), left_s)
        if opened.cancel():
            raise PeerGone(self.failure or "ucx is silent")
        return opened.result()

    def close(self) -> None:
        """Its channels must be closed."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(PeerGone):
                self._call(lambda: None)
            self._thread.join()
            os.close(self._wake)
            self._worker = None  # its last reference: UCX destroys it

    def submit(self, channel: "UcxChannel", transfer: UcxTransfer, is_send: bool) -> None:
        self._call(lambda: channel.take(transfer, is_send, self._array, self._api.UCXXTag))

    def release(self, channel: "UcxChannel") -> None:
        """Returns when UCX has let go of all memory that the channel was given."""
        self._call(channel.shut)
        began = time.monotonic()
        while not self.wait(lambda: channel.is_released, _LATE_S):
            seconds = round(time.monotonic() - began)
            _log.error("ucx still holds messages of a closed channel", seconds=seconds)

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Until `is_over`, looked at whenever a transfer got on. Returns its last answer."""
        with self._changed:
            return self._changed.wait_for(is_over, timeout_s)

    def _call(self, function: Callable[[], None]) -> None:
        with self._changed:
            if self.failure:
                raise PeerGone(self.failure)
            self._calls.append(function)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def _open(self, address: bytes, opened: "Future[UcxChannel]") -> None:
        try:
            parsed = self._api.UCXAddress.create_from_buffer(address)
            endpoint = self._worker.create_endpoint_from_worker_address(
                parsed, endpoint_error_handling=True
            )
        except (self._api.UCXError, ValueError) as error:
            opened.set_exception(PeerGone(f"ucx cannot reach the peer: {error}"))
            return
        channel = UcxChannel(self, endpoint)
        self._channels.append(channel)
        if not opened.set_running_or_notify_cancel():
            channel.shut()
            return
        opened.set_result(channel)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # the edge of the thread: whoever waits must hear of it
            _log.exception("ucx has failed")
            self._end(f"ucx has failed: {shown(error)}")

    def _end(self, failure: str) -> None:
        """UCX is destroyed before anyone hears that it has let go of the channels' memory."""
        for channel in self._channels:
            channel.drop(failure)
        self._worker = None
        with self._changed:
            self.failure = failure
            self._calls.clear()
            for channel in self._channels:
                channel.is_released = True
            self._changed.notify_all()

    def _serve(self) -> None:
        poll = select.poll()
        for descriptor in (self._worker.epoll_file_descriptor, self._wake):
            poll.register(descriptor, select.POLLIN)
        while not self._is_closed:
            self._make_calls()
            self._worker.progress()
            if self._advance():
                continue
            if self._worker.arm():
                is_closing = any(channel.is_closing for channel in self._channels)
                poll.poll((_POLL_S if is_closing else _IDLE_S) * 1000)

    def _make_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while True:
            with self._changed:
                if not self._calls:
                    return
                call = self._calls.popleft()
            call()
            with self._changed:
                self._changed.notify_all()

    def _advance(self) -> bool:
        changed = sum(channel.advance(self._api.UCXError) for channel in self._channels) > 0
        if changed:
            self._channels = [c for c in self._channels if not c.is_released]
            with self._changed:
                self._changed.notify_all()
        return changed


class UcxChannel:
    """Messages to and from one peer. Its user has one transfer at a time."""

    def __init__(self, worker: UcxWorker, endpoint: Any) -> None:
        self._worker = worker
        self._endpoint = endpoint
        self._flight: Flight | None = None
        self._num_left, self._rests_since = 0, 0.0  # messages in flight, once it closes
        self.is_closing = False
        self.is_released = False

    def start(self, transfer: UcxTransfer, *, is_send: bool) -> None:
        self._worker.submit(self, transfer, is_send)

    def finish(
        self, transfer: UcxTransfer, num_parts: int, deadline: float, is_alive: IsAlive
    ) -> None:
        """Waits for the first `num_parts` parts. Raises PeerGone, after which the channel must be
        closed: only then nothing is read from or written into the parts any more."""

        def arrived() -> bool:
            is_broken = bool(transfer.error or self._worker.failure)
            return is_broken or transfer.num_done >= num_parts

        while not self._worker.wait(arrived, _POLL_S):
            if not is_alive():
                raise PeerGone("the peer closed the connection")
            if time.monotonic() >= deadline:
                raise PeerGone("the peer is silent")
        if transfer.num_done < num_parts:
            raise PeerGone(f"the transfer broke: {transfer.error or self._worker.failure}")

    def close(self) -> None:
        if not self.is_released:
            with contextlib.suppress(PeerGone):  # then it is released
                self._worker.release(self)

    # The rest is called by the worker's thread.

    def take(self, transfer: UcxTransfer, is_send: bool, array: Any, tag: Any) -> None:
        call = self._endpoint.tag_send if is_send else self._endpoint.tag_recv
        self._flight = Flight(transfer, lambda part, number: call(array(part), tag(number)))

    def shut(self) -> None:
        """Posts nothing more; `advance` closes it and finds out when all that was in flight has
        ended."""
        self.is_closing = True
        self._rests_since = time.monotonic()

    def drop(self, failure: str) -> None:
        """Lets go of UCX, which is being destroyed."""
        if self._flight is not None and not self._flight.transfer.is_over:
            self._flight.transfer.error = failure
        self._flight = self._endpoint = None

    def advance(self, ucx_error: type[Exception]) -> bool:
        """Whether anything has changed."""
        if self.is_closing and self._endpoint is not None and not self._is_at_rest():
            return False
        if self.is_closing:
            self._close_endpoint(ucx_error)
        if self._endpoint is None:
            if self._flight is not None and self._flight.num_in_flight:
                return False
            self._flight = None  # here: its last references to UCX may not go in another thread
            self.is_released = True
            return True
        if self._flight is None or self._flight.transfer.is_over:
            return False
        try:
            return self._flight.advance()
        except ucx_error as error:
            self._flight.transfer.error = str(error) or type(error).__name__
            return True

    def _is_at_rest(self) -> bool:
        num_left = 0 if self._flight is None else self._flight.num_in_flight
        now = time.monotonic()
        if num_left != self._num_left:
            self._num_left, self._rests_since = num_left, now
        return num_left == 0 or now - self._rests_since > _QUIET_S

    def _close_endpoint(self, ucx_error: type[Exception]) -> None:
        """Cancels what is in flight."""
        if self._endpoint is not None:
            try:
                self._endpoint.close_blocking()
            except ucx_error as error:  # what was in flight ends all the same
                _log.warning("an endpoint of ucx did not close", why=str(error))
            finally:
                self._endpoint = None


def _load() -> tuple[Any, Any]:
    """ucxx's core binding, and its wrapper of a buffer.

    What ucxx puts into the environment of UCX is taken out again: it is meant for GPUs, and would
    make nixl, which has a UCX of its own, read in software.
    """
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    before = set(os.environ)
    from ucxx._lib import libucxx
    from ucxx._lib.arr import Array

    for name in set(os.environ) - before:
        if name.startswith("UCX_"):
            del os.environ[name]
    return libucxx, Array
