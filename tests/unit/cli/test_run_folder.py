"""Run folders come and go with their owners, and nobody else's are touched."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.roles import python_path
from paceline.cli.run_folder import MARK, RunFolder
from paceline.cli.setup_error import SetupError


def folder_of_a_killed_owner(parent: Path) -> Path:
    code = (
        "import signal; from pathlib import Path; from paceline.cli.run_folder import RunFolder; "
        f"print(RunFolder(Path({str(parent)!r})).path, flush=True); signal.pause()"
    )
    command = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        found = Path(owner.stdout.readline().strip())
        RunFolder(parent).remove()
        assert found.is_dir(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
    (found / "router.log").touch()
    return found


def test_what_a_killed_owner_left_is_swept_out_by_the_next_one(tmp_path: Path) -> None:
    left = folder_of_a_killed_owner(tmp_path)
    assert left.is_dir()
    folder = RunFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [folder.path]
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_what_a_failed_start_left_is_there_until_the_next_one(tmp_path: Path) -> None:
    failed = RunFolder(tmp_path)
    failed.leave()
    assert failed.path.is_dir()
    RunFolder(tmp_path).remove()
    assert not list(tmp_path.iterdir())


def test_a_secret_is_there_for_its_owner_alone_and_no_longer_than_the_deployment(
    tmp_path: Path,
) -> None:
    for end in (RunFolder.keep, RunFolder.leave):
        folder = RunFolder(tmp_path)
        folder.write_secret("s3cret")
        assert folder.secret_path.read_text() == "s3cret"
        assert folder.secret_path.stat().st_mode & 0o777 == 0o600
        end(folder)
        assert folder.path.is_dir()
        assert not folder.secret_path.exists()


def test_what_is_in_use_kept_or_not_ours_stays(tmp_path: Path) -> None:
    alive, kept = RunFolder(tmp_path), RunFolder(tmp_path)
    kept.keep()
    unmarked = tmp_path / "paceline-rank"
    unmarked.mkdir(mode=0o700)
    open_to_all = tmp_path / "paceline-open"
    open_to_all.mkdir()
    (open_to_all / MARK).touch()
    open_to_all.chmod(0o755)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / MARK).touch()
    (tmp_path / "paceline-link").symlink_to(elsewhere)
    RunFolder(tmp_path).remove()
    for path in (alive.path, kept.path, unmarked, open_to_all / MARK, elsewhere / MARK):
        assert path.exists()


def test_one_that_was_deleted_is_made_again_and_still_ours(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    folder.restore()
    folder.restore()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    RunFolder(tmp_path / "run").remove()
    assert folder.path.is_dir()
    folder.remove()


def test_one_that_others_can_look_into_is_not_used_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    shutil.rmtree(folder.path)
    folder.path.mkdir()
    folder.path.chmod(0o777)
    with pytest.raises(SetupError, match="belongs to somebody else now"):
        folder.restore()


@pytest.mark.parametrize("place", ["/proc", "/dev/null"])
def test_a_place_for_no_folder_is_named(place: str) -> None:
    with pytest.raises(SetupError, match=f"no folder can be made in {place}: .*--run-dir"):
        RunFolder(Path(place))
