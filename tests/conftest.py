"""Settings that hold for every test; nothing heavy is imported here."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Two cores run the tests and the processes that they start: one thread a library is enough.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder with a short path: those of sockets, which lie below it, are limited."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        yield Path(folder)
