"""A source in a process of its own, which tests stop and kill.

Run as a program: exports a pool of random bytes by one transport, prints its address in hex, and
stays until its standard input ends.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NUM_PAGES = 64
SEED = 11
INCARNATION = "in-a-process"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class SourceProcess:
    process: subprocess.Popen[str]
    address: bytes


@contextmanager
def source_process(transport: str, run_dir: Path) -> Iterator[SourceProcess]:
    """Starts one; kills it at the end, whatever state it is in."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PYTHONPATH": path, "TMPDIR": str(run_dir)}
    process = subprocess.Popen(
        [sys.executable, __file__, transport],
        cwd=run_dir,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        yield SourceProcess(process, bytes.fromhex(process.stdout.readline()))
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def main() -> None:
    from paceline.kv_transfer import registry
    from paceline.kv_transfer.base import TransportSettings
    from tests.contract.pools import LARGE, make_pool

    pool = make_pool(LARGE, NUM_PAGES, SEED, sys.argv[1])
    source = registry.make_source(sys.argv[1], pool, TransportSettings(INCARNATION))
    source.start()
    print(source.address().hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
