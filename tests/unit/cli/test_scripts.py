"""Scripts of the Makefile, copied into a small checkout of their own."""

import os
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
    for tool in ("bash", "env", "dirname", "df", "tail", "tr", "rm", "sleep", "touch"):
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
    tool.unlink(missing_ok=True)
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


PIP = """\
Obtaining file:///checkout
  Installing build dependencies: started
  Installing build dependencies: still running...
  Installing build dependencies: finished with status 'done'
  Preparing editable metadata (pyproject.toml): finished with status 'done'
Requirement already satisfied: numpy in ./.venv/lib (from paceline)
Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.1 MB)
Collecting rich==14.1.0
  Downloading rich-14.1.0-py3-none-any.whl (243 kB)
Building wheels for collected packages: paceline
Installing collected packages: torch, rich, paceline
Successfully installed paceline-0.1.0 rich-14.1.0 torch-2.13.0
"""


def add_venv(checkout: Path, pip: str) -> None:
    """Its python knows two things: where Python.h is, and pip."""
    add_tool(checkout, "gcc", "exit 0")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / "Python.h").touch()
    add_tool(checkout, "python", f'case "$1" in -c) echo {checkout};; *) {pip};; esac')
    (checkout / "bin" / "python").rename(checkout / ".venv" / "bin" / "python")


def test_each_phase_of_an_installation_is_a_line(checkout: Path) -> None:
    (checkout / "said").write_text(PIP)
    (checkout / "bin" / "cat").symlink_to(shutil.which("cat") or "")
    add_venv(checkout, f"cat {checkout}/said; echo 'WARNING: an index is not there' >&2")
    done = install(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "Installing paceline[demo] into .venv",
        "Fetching what builds paceline …",
        "  Installing build dependencies: still running...",
        "Finding and fetching packages …",
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.1 MB)",
        "Building what has no wheel, and paceline itself …",
        "Unpacking 3 packages …",
    ]


def test_an_installation_tells_how_many_packages_are_unpacked(checkout: Path) -> None:
    """pip tells nothing of it, for a minute. Those that were there before do not count."""
    (checkout / "bin" / "mkdir").symlink_to(shutil.which("mkdir") or "")
    packages = checkout / ".venv" / "lib" / "python3.11" / "site-packages"
    write = f"mkdir -p {packages}/$name.dist-info; echo >{packages}/$name.dist-info/RECORD"
    wait = f"while [ ! -e {checkout}/seen ]; do sleep 0.05; done"
    add_venv(checkout, f"for name in torch rich; do {write}; done; {wait}")
    (packages / "numpy.dist-info").mkdir(parents=True)
    (packages / "numpy.dist-info" / "RECORD").touch()
    os.utime(packages / "numpy.dist-info" / "RECORD", (0, 0))
    with subprocess.Popen(
        [checkout / "scripts" / "install.sh", "demo"],
        env={"PATH": str(checkout / "bin")},
        stdout=subprocess.PIPE,
        text=True,
    ) as script:
        assert script.stdout is not None
        assert next(script.stdout) == "Installing paceline[demo] into .venv\n"
        assert "  2 unpacked\n" in iter(script.stdout.readline, "  3 unpacked\n")
        (checkout / "seen").touch()
        assert script.stdout.read() == ""
    assert script.returncode == 0


def test_an_index_that_does_not_answer_is_spoken_of(checkout: Path) -> None:
    retry = "WARNING: Retrying (Retry(total=4)) after connection broken: /simple/torch/"
    add_venv(checkout, f"echo '{retry}' >&2; echo 'WARNING: an index is not secure' >&2")
    done = install(checkout)
    assert (done.returncode, done.stderr) == (0, f"{retry}\n")


def test_an_installation_that_fails_says_how_much_room_there_is(checkout: Path) -> None:
    add_tool(checkout, "df", "echo '  8104'")
    add_venv(checkout, "echo no room >&2; exit 1")
    done = install(checkout)
    assert done.returncode == 1
    assert done.stderr == "no room\npaceline: installing failed: the disk is full (8104 KiB free)\n"


def check_sizes(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "scripts" / "check_sizes.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def function(num_lines: int) -> str:
    return "def some() -> None:\n" + "    pass\n" * (num_lines - 1)


def test_small_code_passes_the_size_check(checkout: Path) -> None:
    (checkout / "core" / "some.py").write_text(function(8))
    assert check_sizes(checkout).returncode == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (function(81), "core/some.py:1 some has 81 lines, at most 80 are allowed"),
        (function(9), "the median function has 9 lines"),
        (function(2) + "x = 1\n" * 499, "core/some.py has 501 lines, at most 500"),
        (function(8) + "x = 1\n" * 113, "the median file has 121 lines"),
    ],
)
def test_code_that_outgrows_its_limits_is_named(checkout: Path, text: str, complaint: str) -> None:
    (checkout / "core" / "some.py").write_text(text)
    done = check_sizes(checkout)
    assert done.returncode == 1
    assert complaint in done.stderr
