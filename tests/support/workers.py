"""Starts real worker processes on the mock model for tests."""

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.waits import wait_for

SECRET = "a secret of the tests"


@dataclass(slots=True)
class WorkerProcess:
    """A running `paceline prefill` or `paceline decode`."""

    process: "subprocess.Popen[bytes]"
    port: int
    probe_port: int
    host: str = "127.0.0.1"  # where we reach it

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def rank_pids(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def not_ready(self) -> str:
        """Why /readyz is not 200; empty when it is."""
        return probe(self.probe_port, "/readyz", 200, self.host)

    def metric(self, name: str) -> float:
        """Sum over the labels of one metric; 0 when it is not there."""
        lines = [line for line in self.metrics() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def metrics(self) -> list[str]:
        connection = http.client.HTTPConnection(self.host, self.probe_port, timeout=2)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return lines

    def wait_until_ready(self, timeout_s: float = 90.0) -> None:
        wait_for(lambda: self.process.poll() is not None or not self.not_ready(), timeout_s)
        assert self.process.poll() is None, "the worker died at its start"

    def renew(self) -> None:
        """Kills its rank: the next one is a new incarnation, with which peers shake hands anew."""
        os.kill(self.rank_pids()[0], signal.SIGKILL)
        wait_for(self.not_ready)
        self.wait_until_ready()

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()


def start_worker(
    role: str, model: Path, prefix: Sequence[str] = (), /, **settings: object
) -> WorkerProcess:
    """Returns at once; `settings` are fields of WorkerConfig, `prefix` what starts its command."""
    names = ("port", "probe_port")
    ports = {name: int(str(settings.get(name) or free_port())) for name in names}
    given = {"pool_mib": 4, "num_threads": 1, "model": model, **settings, **ports}
    command = [*prefix, sys.executable, "-P", "-m", "paceline.cli.main", role]
    for name, value in given.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = {**os.environ, "PACELINE_WORKER_SECRET": SECRET}
    process = subprocess.Popen(command, env=environment)
    return WorkerProcess(process, ports["port"], ports["probe_port"])


@contextmanager
def until_stopped(started: dict[str, WorkerProcess]) -> Iterator[dict[str, WorkerProcess]]:
    """All of them once they are ready; they are stopped at the end."""
    try:
        for worker in started.values():
            worker.wait_until_ready()
        yield started
    finally:
        for worker in started.values():
            worker.stop()


def probe(port: int, path: str, status: int, host: str = "127.0.0.1") -> str:
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(4096).decode()
        return "" if answer.status == status else text
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()


def flip_a_byte(pid: int, offset: int) -> None:
    """In the pool that the process `pid` has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    start = next(int(line.split("-")[0], 16) for line in maps if "memfd:paceline-kv" in line)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(start + offset)
        (byte,) = memory.read(1)
        memory.seek(start + offset)
        memory.write(bytes([byte ^ 1]))


@contextmanager
def pool_of(pid: int) -> Iterator[int]:
    """A descriptor to read the pool that the process `pid` has made."""
    folder = Path(f"/proc/{pid}/fd")
    links = ((path, os.readlink(path)) for path in folder.iterdir())
    path = next(path for path, link in links if "memfd:paceline-kv" in link)
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port: int = probe_socket.getsockname()[1]
        return port
