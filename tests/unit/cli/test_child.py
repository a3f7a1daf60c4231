import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli import child as child_module
from paceline.cli.child import Child
from paceline.cli.roles import python_path
from tests.support.waits import wait_for


def make_child(folder: Path, code: str) -> Child:
    command = [sys.executable, "-S", "-c", code]
    return Child("some", command, dict(os.environ), folder / "some.log", lambda: "")


def test_output_goes_to_a_private_log_and_its_tail_is_shown(tmp_path: Path) -> None:
    child = make_child(tmp_path, "for i in range(100): print('line', i)")
    child.start()
    assert child.wait(10) == 0
    assert child.tail(2) == "line 98\nline 99"
    assert child.log_path.stat().st_mode & 0o777 == 0o600


def test_end_says_whether_it_left_by_itself(tmp_path: Path) -> None:
    polite = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print(1, flush=True)"
    child = make_child(tmp_path, f"{polite}; signal.pause()")
    child.start()
    wait_for(child.tail)
    assert child.end(10)
    assert child.ending() == "ended with exit code 0"


def test_one_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    child = make_child(tmp_path, deaf)
    child.start()
    wait_for(child.tail)
    began = time.monotonic()
    assert not child.end(0.2)
    assert time.monotonic() - began < 5
    assert child.ending() == "was killed by SIGKILL"


def test_it_dies_with_its_parent_even_by_kill_9(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from paceline.cli.child import Child; "
        f"c = Child('x', [sys.executable, '-c', 'import time; time.sleep(600)'], {{}}, "
        f"Path({str(tmp_path / 'x.log')!r}), lambda: ''); "
        "c.start(); print(c.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        os.kill(grandchild, 0)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_alive(grandchild))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_log_that_grows_without_end_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = make_child(tmp_path, "print('x' * 1000)")
    child.start()
    assert child.wait(10) == 0
    child.bound_log()
    assert child.log_path.stat().st_size == 1001
    monkeypatch.setattr(child_module, "MAX_LOG_BYTES", 1000)
    child.bound_log()
    assert child.log_path.stat().st_size == 0


def test_a_deleted_log_can_be_read_and_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "MAX_LOG_BYTES", 1000)
    child = make_child(tmp_path, "print('x' * 1000); print('the end')")
    child.start()
    child.log_path.unlink(missing_ok=True)
    assert child.wait(10) == 0
    assert child.tail(1) == "the end"
    child.bound_log()
    assert child.tail() == ""


def test_without_a_place_for_its_log_it_runs_all_the_same(tmp_path: Path) -> None:
    child = make_child(tmp_path / "gone", "print('here')")
    child.start()
    assert child.wait(10) == 0
    assert child.tail() == "here"
    child.close()
    assert child.tail() == ""
