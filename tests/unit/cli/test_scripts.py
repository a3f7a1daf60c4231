"""Scripts of the Makefile, copied into a small checkout of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").touch()
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "env", "dirname", "df", "tail", "rm"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def install(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / "install.sh", "demo"],
        env={"PATH": str(checkout / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
    )


def add_tool(checkout: Path, name: str, text: str) -> None:
    tool = checkout / "bin" / name
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)


def test_a_missing_compiler_is_said_plainly(checkout: Path) -> None:
    done = install(checkout)
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: a C compiler is missing")
    assert not (checkout / ".venv").exists()


def test_a_missing_or_old_python_is_said_plainly(checkout: Path) -> None:
    add_tool(checkout, "gcc", "exit 0")
    add_tool(checkout, "python3", "exit 1")  # too old: the check of its version fails
    done = install(checkout)
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: Python 3.11 or newer is missing")


def test_a_missing_venv_module_is_said_plainly(checkout: Path) -> None:
    add_tool(checkout, "gcc", "exit 0")
    add_tool(checkout, "python3.11", 'case "$2" in *ensurepip*) exit 1;; esac')
    done = install(checkout)
    assert done.returncode == 1
    assert "cannot make virtual environments (Debian: apt install python3-venv)" in done.stderr


def check_sizes(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "scripts" / "check_sizes.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def function(num_lines: int) -> str:
    return "def some() -> None:\n" + "    pass\n" * (num_lines - 1)


def test_small_code_passes_the_size_check(checkout: Path) -> None:
    (checkout / "core" / "some.py").write_text(function(9))
    assert check_sizes(checkout).returncode == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (function(81), "core/some.py:1 some has 81 lines, at most 80 are allowed"),
        (function(10), "the median function has 10 lines"),
        (function(2) + "x = 1\n" * 499, "core/some.py has 501 lines, at most 500"),
        (function(9) + "x = 1\n" * 122, "the median file has 131 lines"),
    ],
)
def test_code_that_outgrows_its_limits_is_named(checkout: Path, text: str, complaint: str) -> None:
    (checkout / "core" / "some.py").write_text(text)
    done = check_sizes(checkout)
    assert done.returncode == 1
    assert complaint in done.stderr
