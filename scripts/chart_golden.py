"""Writes what the chart makes of each example, so that a change of it can be read as a diff."""

import sys
from pathlib import Path

from benchmarks.chart_objects import EXAMPLES, ROOT, example, golden, render


def path_of(example: Path) -> Path:
    return ROOT / "tests" / "unit" / "deploy" / "golden" / example.name


def main() -> int:
    for path in EXAMPLES:
        path_of(path).parent.mkdir(exist_ok=True)
        path_of(path).write_text(golden(render(example(path))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
