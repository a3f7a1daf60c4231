"""A TCP proxy whose connections a test holds up, breaks, or damages a byte of."""

import contextlib
import socket
import struct
import threading
import time

Pair = tuple[socket.socket, socket.socket]  # to who connected, to the target

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER


class TcpProxy:
    """Forwards what connects to `port`, here, to `target`: (host, port), which may be replaced."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[Pair] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._flows = threading.Event()
        self._flows.set()
        self.bytes_per_s = 0.0  # of each connection and direction; 0: as fast as it goes
        self._flip_after: int | None = None
        self.num_flipped = 0
        self.num_accepted = 0
        self._threads[0].start()

    def cut(self) -> None:
        """Ends every connection in order; new ones work."""
        for pair in list(self._pairs):  # not those that are made meanwhile
            for end in pair:
                _shut(end, socket.SHUT_RDWR)

    def reset(self) -> None:
        """Breaks every connection with a RST to both ends; new ones work."""
        pairs, self._pairs = list(self._pairs), []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        for pair in pairs:
            for end in pair:
                _shut(end, socket.SHUT_RD)  # who waits for bytes lets go of it
                end.close()

    def pause(self) -> None:
        """Accepts, but forwards nothing until `resume`."""
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def flip_a_byte(self, after: int) -> None:
        """Of what comes from the target: one, `after` bytes from now, of whichever connection."""
        self._flip_after = after

    def close(self) -> None:
        self.resume()
        _shut(self._listener, socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        for end in (self._listener, *(end for pair in self._pairs for end in pair)):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self.target)
                except OSError:  # the target is down: as if nobody listened here
                    near.close()
                    continue
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pairs.append((near, far))
                self.num_accepted += 1
                for pair in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._forward, args=pair, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, destination: socket.socket) -> None:
        with contextlib.suppress(OSError):
            is_answer = source.getpeername() == self.target
            while data := source.recv(1 << 16):
                self._flows.wait()
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                destination.sendall(self._flipped(data) if is_answer else data)
            destination.shutdown(socket.SHUT_RDWR)

    def _flipped(self, data: bytes) -> bytes:
        after = self._flip_after
        if after is None:
            return data
        if after >= len(data):
            self._flip_after = after - len(data)
            return data
        self._flip_after = None
        self.num_flipped += 1
        return data[:after] + bytes([data[after] ^ 1]) + data[after + 1 :]


def _shut(end: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(how)
