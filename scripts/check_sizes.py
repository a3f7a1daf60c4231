"""Keeps files and functions small enough to read: fails when the code outgrows its limits.

Files: median ≤ 120 lines, none above 500. Functions: median ≤ 8 lines, 90th percentile ≤ 30, none
above 80. Product code and tests are judged apart; generated code is not.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_PRODUCT = {"tests", "scripts", "benchmarks", "src", "build", "docs", "deploy", "proto"}
FILE_MEDIAN, FILE_MAX = 120, 500
FUNCTION_MEDIAN, FUNCTION_P90, FUNCTION_MAX = 8, 30, 80


@dataclass(frozen=True, slots=True)
class Size:
    where: str
    lines: int


def main() -> int:
    packages = [p.parent for p in ROOT.glob("*/__init__.py") if p.parent.name not in NOT_PRODUCT]
    product = [path for package in packages for path in package.rglob("*.py")]
    others = [p for folder in ("tests", "benchmarks", "scripts") for p in python_files(folder)]
    problems = [*judge(product), *too_long(file_sizes(others), FILE_MAX)]
    for problem in problems:
        print(f"sizes: {problem}", file=sys.stderr)
    return bool(problems)


def python_files(folder: str) -> Iterator[Path]:
    return (ROOT / folder).rglob("*.py")


def judge(paths: list[Path]) -> Iterator[str]:
    files = file_sizes(paths)
    functions = [size for path in paths for size in function_sizes(path)]
    code_files = [size for size in files if size.lines > 1]  # an empty __init__.py is no file
    lines = sorted(size.lines for size in functions)
    p90 = lines[int(0.9 * len(lines))]
    figures = (
        ("median file", statistics.median(s.lines for s in code_files), FILE_MEDIAN),
        ("median function", statistics.median(lines), FUNCTION_MEDIAN),
        ("90th percentile of functions", p90, FUNCTION_P90),
    )
    for name, value, limit in figures:
        print(f"{name}: {value:g} lines (at most {limit})")
        if value > limit:
            yield f"the {name} has {value:g} lines, at most {limit} are allowed"
    yield from too_long(files, FILE_MAX)
    yield from too_long(functions, FUNCTION_MAX)


def too_long(sizes: list[Size], limit: int) -> Iterator[str]:
    for size in sizes:
        if size.lines > limit:
            yield f"{size.where} has {size.lines} lines, at most {limit} are allowed"


def file_sizes(paths: list[Path]) -> list[Size]:
    return [Size(name(path), len(path.read_text().splitlines())) for path in paths]


def function_sizes(path: Path) -> Iterator[Size]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            yield Size(f"{name(path)}:{node.lineno} {node.name}", lines)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
