"""Sources on a pool's own device that are read from: other processes compute there, too."""

import threading


class Neighbours:
    """Thread-safe."""

    def __init__(self) -> None:
        self._num = 0
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return self._num > 0

    def came(self) -> None:
        with self._lock:
            self._num += 1

    def left(self) -> None:
        with self._lock:
            self._num -= 1
