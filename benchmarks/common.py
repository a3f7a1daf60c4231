"""The convention of all benchmarks: `python -m benchmarks.NAME [--quick] [--peer]`, from the root.
Some take `--only PART` besides.

Progress goes to stderr. The last line on stdout is one JSON object: name, commit, machine, figures.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MEMCPY_BYTES = 64 << 20
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Options:
    quick: bool  # a minute at most, for `make bench`
    peer: bool  # also measure what others offer, where it is installed
    only: str = ""  # the part to measure; empty: all


Figures = Mapping[str, float]


def publish(name: str, measure: Callable[[Options], Figures], parts: Collection[str] = ()) -> int:
    """Parses the command line, measures and prints the result. Returns the exit status.

    `parts`: what can be measured alone.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a shorter run")
    parser.add_argument("--peer", action="store_true", help="also measure peers")
    if parts:
        parser.add_argument("--only", default="", choices=parts, help="measure one part alone")
    options = Options(**vars(parser.parse_args()))
    figures = {key: round(value, 4) for key, value in measure(options).items()}
    result = {"name": name, "commit": commit(), "machine": machine(), "figures": figures}
    print(json.dumps(result), flush=True)
    return 0


def run_in(environment: Mapping[str, str]) -> None:
    """Starts this process anew where its environment is another: OpenMP looks at its own once,
    when it is loaded."""
    if dict(environment) != dict(os.environ):
        os.execve(sys.executable, sys.orig_argv, dict(environment))


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def median_seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median time of `call`, after one call that does not count."""
    call()
    return statistics.median(seconds(call) for _ in range(repeats))


def memcpy_gb_s(repeats: int = REPEATS) -> float:
    """GB/s of one 64 MiB memcpy: the yardstick of this machine at this moment."""
    return Memcpy().gb_s(repeats)


class Memcpy:
    """Two warm buffers for repeated measurements."""

    def __init__(self) -> None:
        self._source = np.ones(MEMCPY_BYTES, dtype=np.uint8)
        self._destination = np.zeros(MEMCPY_BYTES, dtype=np.uint8)

    def __call__(self) -> None:
        ctypes.memmove(self._destination.ctypes.data, self._source.ctypes.data, MEMCPY_BYTES)

    def gb_s(self, repeats: int = REPEATS) -> float:
        return MEMCPY_BYTES / median_seconds(self, repeats) / 1e9


def machine() -> dict[str, str | int]:
    return {"cpu": cpu_model(), "cores": os.cpu_count() or 0, "python": platform.python_version()}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Short hash of the checkout, with + when it has changes; empty outside of one."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()
