"""Runs the quick form of every benchmark that needs no device; prints a table of their figures."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MAX_S = 900


def main() -> int:
    table = Table("benchmark", "figure", "value")
    failed = 0
    for name in benchmarks():
        print(f"== {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        figures = measure(name)
        table.add_section()
        if figures is None:
            failed += 1
            table.add_row(name, "failed", "")
        for key, value in (figures or {}).items():
            table.add_row(name, key, f"{value:.4g}" if isinstance(value, float) else str(value))
        print(f"== {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    Console().print(table)
    return min(failed, 1)


def benchmarks() -> list[str]:
    """Modules of benchmarks/ that can be run: with a `main`, which those for devices have not."""
    paths = sorted((ROOT / "benchmarks").glob("*.py"))
    return [path.stem for path in paths if "\ndef main(" in path.read_text()]


def measure(name: str) -> dict[str, Any] | None:
    """The figures of the JSON line that it prints last; None when it fails."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=MAX_S)
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["figures"]
    except (subprocess.TimeoutExpired, ValueError, IndexError, KeyError) as error:
        print(f"== {name} failed: {error}", file=sys.stderr)
        return None
    return figures if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
