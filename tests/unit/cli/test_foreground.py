"""`make up` in a terminal of its own: Ctrl-C reaches what make runs, and make ends well."""

import os
import pty
import shutil
import sys
from pathlib import Path

import pytest

from paceline.cli.roles import python_path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, signal, sys
from paceline.cli.foreground import own_foreground
signal.signal(signal.SIGINT, lambda *_: sys.exit(int(os.environ["ENDS_WITH"])))
with own_foreground(os.environ):
    print("it is up", flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make up` looks at, with a paceline that does nothing."""
    for folder in ("core", "router", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    sources = ("core/_native.c", "router/_native.c")
    for name in ("pyproject.toml", "constraints.txt", *sources, ".venv/.installed"):
        (tmp_path / name).touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    program = tmp_path / ".venv" / "bin" / "paceline"
    run = f"exec {sys.executable} -P {tmp_path}/program.py"
    program.write_text(f'#!/bin/sh\n[ "$1" = demo-model ] && exec echo /model\n{run}\n')
    program.chmod(0o755)
    return tmp_path


def make_up(checkout: Path, ends_with: int) -> tuple[int, str]:
    """Its exit code and all that the terminal showed, with a Ctrl-C once it is up."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["ENDS_WITH"], os.environ["PYTHONPATH"] = str(ends_with), python_path()
        os.execvp("make", ["make", "-C", str(checkout), "up"])
    shown = ""
    while part := read(terminal):
        shown += part
        if "it is up" in part:
            os.write(terminal, b"\x03")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def read(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode()
    except OSError:  # the other end is closed
        return ""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.timeout(60)
def test_ctrl_c_is_no_error_of_make(checkout: Path) -> None:
    code, shown = make_up(checkout, ends_with=0)
    assert code == 0, shown
    assert "***" not in shown


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.timeout(60)
def test_what_fails_under_make_still_fails(checkout: Path) -> None:
    code, shown = make_up(checkout, ends_with=1)
    assert code == 2
    assert "*** " in shown
