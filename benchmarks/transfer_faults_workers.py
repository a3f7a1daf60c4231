"""The workers of transfer_faults as processes, which are killed and stopped."""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.worker_pair import BUSY_STATES
from tests.support.workers import WorkerProcess, start_worker

POOL_MIB = 48
READY_S = 90.0


@dataclass(frozen=True, slots=True)
class Timers:
    silence_s: float
    beat_s: float
    stall_s: float
    stop_s: float  # of SIGSTOP
    patience_s: float  # of a router with a silent worker

    @property
    def settings(self) -> dict[str, object]:
        names = ("silence_s", "beat_s", "stall_s")
        return {name: getattr(self, name) for name in names}

    @property
    def limit_s(self) -> float:
        """Until which a request must have ended, and everything be free."""
        return self.stop_s + 2 * self.silence_s + 8


DEFAULT = Timers(silence_s=6.0, beat_s=1.0, stall_s=4.0, stop_s=10.0, patience_s=3.0)
SHORT = Timers(silence_s=1.5, beat_s=0.2, stall_s=1.5, stop_s=2.5, patience_s=1.0)


@dataclass(slots=True)
class Workers:
    """By what they are here: "source", "reader", "spare", and "successor" while there is one."""

    model: Path
    transport: str
    timers: Timers
    running: dict[str, WorkerProcess] = field(default_factory=dict)

    def start(self, name: str) -> None:
        role = "decode" if name == "reader" else "prefill"
        worker_id = "source" if name == "successor" else name
        settings: dict[str, object] = {
            "worker_id": worker_id,
            "transports": self.transport,
            "pool_mib": POOL_MIB,
        }
        self.running[name] = start_worker(role, self.model, **settings, **self.timers.settings)

    async def until_ready(self, *names: str) -> None:
        for name in names:
            await asyncio.to_thread(self.running[name].wait_until_ready, READY_S)

    def signal(self, name: str, number: int) -> None:
        """To its front and its rank, at the same moment."""
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            front = psutil.Process(self.running[name].pid)
            for process in [*front.children(recursive=True), front]:
                os.kill(process.pid, number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.running[name].process.wait()

    def stop_all(self) -> None:
        for worker in self.running.values():
            worker.process.terminate()
        for worker in self.running.values():
            worker.stop()


def num_held(worker: WorkerProcess) -> int:
    return round(
        sum(worker.metric(f'paceline_worker_pages{{state="{state}"}}') for state in BUSY_STATES)
    )
