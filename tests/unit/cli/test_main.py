import os
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from paceline.cli import main as cli
from paceline.cli.roles import python_path


def paceline(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "paceline.cli.main", *arguments, **environment)


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env={**os.environ, "PYTHONPATH": python_path(), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_lists_every_command_and_is_instant() -> None:
    taken_s = []
    for _ in range(5):  # the best of five: other processes may be busy
        began = time.monotonic()
        done = paceline("--help")
        taken_s.append(time.monotonic() - began)
    assert done.returncode == 0
    for command in cli.COMMANDS:
        assert f"  {command} " in done.stdout
    assert min(taken_s) < 0.3


def test_no_command_shows_the_help_and_fails() -> None:
    done = paceline()
    assert done.returncode == 2
    assert "Commands:" in done.stdout


def test_an_unknown_command_is_answered_with_the_nearest_one() -> None:
    done = paceline("gatway")
    assert done.returncode == 2
    assert done.stderr == (
        "paceline: there is no command 'gatway'. Did you mean 'gateway'? "
        "`paceline --help` lists them.\n"
    )


def test_version() -> None:
    assert paceline("version").stdout.startswith("paceline 0.")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["up"], "model=''"),
        (["up", "--model", "/nonexistent"], "model='/nonexistent'"),
        (["up", "--model", "/nonexistent", "--port", "many"], "port='many'"),
        (["demo-model", "--wheel", "/nonexistent.whl"], "wheel='/nonexistent.whl'"),
        (["router", "--port", "70000"], "port=70000"),
        (["gateway", "--model", "/nonexistent"], "model='/nonexistent'"),
        (["prefill", "--model", "/nonexistent"], "="),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(arguments: Sequence[str], field: str) -> None:
    done = paceline(*arguments, PACELINE_ROUTER_SECRET="s" * 32)
    assert done.returncode == 2
    assert field in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_of_each_command_lists_its_settings_with_their_variables(command: str) -> None:
    done = paceline(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "PACELINE_" in done.stdout


@pytest.mark.parametrize("command", ["gateway", "router"])
def test_front_services_start_without_torch(command: str) -> None:
    code = (
        "import sys; from paceline.cli.main import COMMANDS, resolve; "
        f"c = COMMANDS[{command!r}]; resolve(c.config); resolve(c.run); "
        "sys.exit('torch' in sys.modules)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(name: str, argv: Sequence[str]) -> int:
        raise OSError(28, "No space left on device", "/somewhere/log")

    monkeypatch.setattr(cli, "run_command", full)
    assert cli.main(["up"]) == 1
    assert capsys.readouterr().err == (
        "paceline: the disk is full while writing /somewhere/log: free some space and try again\n"
    )
