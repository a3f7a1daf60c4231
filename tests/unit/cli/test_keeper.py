import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import keeper as keeper_module
from paceline.cli.child import Child
from paceline.cli.keeper import Keeper
from tests.support.waits import wait_for


class Looks(dict[str, Child]):
    """Children, and how often they were looked at."""

    num = 0

    def values(self) -> Any:
        self.num += 1
        return super().values()


class Watched:
    """One sleeping child under a keeper, and what the keeper said."""

    def __init__(self, folder: Path, code: str = "import signal; signal.pause()") -> None:
        command = [sys.executable, "-S", "-c", code]
        self.child = Child("some", command, dict(os.environ), folder / "log", lambda: "")
        self.said: list[str] = []
        self.keeper = Keeper(lambda child: child.start(), lambda name, text: self.said.append(text))
        self.child.start()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 20
        while not any(text in said for said in self.said):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(keeper_module, "POLL_S", 0.02)
    watched = Watched(tmp_path)
    yield watched
    watched.keeper.stop()
    watched.child.end(0)


def test_one_that_dies_is_reported_and_started_again(watched: Watched) -> None:
    watched.keeper.start({"some": watched.child}, restart=True)
    first = watched.child.pid
    watched.child.send(signal.SIGKILL)
    watched.wait_for("started again")
    assert "was killed by SIGKILL; starting it again in 0.05 s" in watched.said[0]
    assert watched.child.is_running
    assert watched.child.pid != first
    assert watched.keeper.num_restarts == 1


def test_one_that_keeps_dying_is_started_less_and_less_often(watched: Watched) -> None:
    watched.child.command = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    watched.keeper.start({"some": watched.child}, restart=True)
    watched.child.send(signal.SIGKILL)
    for backoff_s in ("0.05", "0.1", "0.2"):
        watched.wait_for(f"starting it again in {backoff_s} s")


def test_one_that_lived_steadily_starts_again_at_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "STEADY_S", 0.0)
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 60.0)
    watched.keeper.start({"some": watched.child}, restart=True)
    watched.child.send(signal.SIGKILL)
    watched.wait_for("started again")
    assert "starting it again at once;" in watched.said[0]


def test_one_that_starts_at_once_does_not_wait_for_another_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "STEADY_S", 0.0)
    monkeypatch.setattr(keeper_module, "POLL_S", 0.02)
    looks = Looks(some=Watched(tmp_path).child)
    seen: list[int] = []
    keeper = Keeper(lambda child: child.start(), lambda name, text: seen.append(looks.num))
    looks["some"].end(0)
    keeper.start(looks, restart=True)
    wait_for(lambda: len(seen) == 2)
    keeper.stop()
    looks["some"].end(0)
    died, started = seen
    assert died == started


def test_without_restart_it_is_reported_once_and_stays_down(watched: Watched) -> None:
    watched.keeper.start({"some": watched.child}, restart=False)
    watched.child.send(signal.SIGKILL)
    watched.wait_for("it stays down")
    time.sleep(0.2)
    assert not watched.child.is_running
    assert len(watched.said) == 1


def test_nothing_starts_after_stop(watched: Watched) -> None:
    watched.keeper.start({"some": watched.child}, restart=True)
    watched.keeper.stop()
    watched.child.end(0)
    time.sleep(0.2)
    assert watched.said == []


def test_a_log_that_was_deleted_stops_nobody_from_being_looked_after(watched: Watched) -> None:
    watched.keeper.start({"some": watched.child}, restart=True)
    watched.child.log_path.unlink()
    time.sleep(0.1)
    watched.child.send(signal.SIGKILL)
    watched.wait_for("started again")
    assert watched.child.is_running and watched.child.log_path.exists()


def test_one_that_cannot_be_started_is_tried_again_later(watched: Watched) -> None:
    starts = iter([OSError(11, "Resource temporarily unavailable"), RuntimeError("no thread")])

    def spawn(child: Child) -> None:
        for error in starts:
            raise error
        child.start()

    watched.keeper = Keeper(spawn, lambda name, text: watched.said.append(text))
    watched.keeper.start({"some": watched.child}, restart=True)
    watched.child.send(signal.SIGKILL)
    watched.wait_for("started again")
    assert "Resource temporarily unavailable; once more in 0.1 s" in watched.said[1]
    assert watched.said[2] == "cannot be started: no thread; once more in 0.2 s"
    assert watched.child.is_running
