import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.cli import main as cli
from paceline.cli.roles import python_path
from paceline.core.config import convert, parse, settings_of
from tests.support.mock_model import write_mock_model


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


def test_a_setting_is_written_in_full() -> None:
    done = paceline("up", "--model", ".", "--prefil", "2")
    assert done.returncode == 2
    assert "unrecognized arguments: --prefil 2" in done.stderr


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
        (["up", "--model", "."], f"model='{Path.cwd()}': there is no config.json"),
        (["gateway"], "model='': name the folder of a model"),
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
def test_help_of_each_command_lists_every_setting_as_it_is_given(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert cli.COMMANDS[command].summary[1:] in shown
    config = cli.resolve(cli.COMMANDS[command].config)
    for item in settings_of(config):
        if item.is_secret:
            assert f"Set in the environment only: {item.variable}: " in shown
            assert f"--{item.name}" not in shown
            continue
        found = re.search(rf"\[default: ([^;]+); env: {item.variable}\]", shown)
        assert found, item.name
        if found[1] != "none":
            assert convert(item.name, found[1], item.kind) == item.default
        else:
            assert item.default in ("", (), Path())


def test_services_start_by_hand_as_the_help_says(tmp_path: Path) -> None:
    """Up to their start: their settings are complete, and they share a secret and a Redis."""
    model = write_mock_model(tmp_path / "mock")
    by_hand = cli.help_text().partition("Each service by hand")[2].splitlines()[1:]
    services = [line.split() for line in by_hand if line.strip().startswith("paceline ")]
    exports = "\n".join(line for line in by_hand if line.strip().startswith("export "))
    script = f"set -eu\n{exports}\nenv -0"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    environment = dict(line.partition("=")[::2] for line in done.stdout.split("\0") if line)
    assert [words[1] for words in services] == ["router", "prefill", "decode", "gateway"]
    configs = []
    for _, name, *arguments in services:
        given = [str(model) if word == "DIR" else word for word in arguments]
        config = cli.resolve(cli.COMMANDS[name].config)
        configs.append(parse(config, given, environment, name))
    assert len({config.secret for config in configs}) == 1
    assert len({config.redis_url for config in configs[:3]}) == 1
    router, gateway = configs[0], configs[3]
    assert gateway.links.router == (f"127.0.0.1:{router.port}",)


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


def test_only_a_setting_of_the_command_points_to_its_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_mock_model(tmp_path / "mock", architectures=["Strange"])
    assert cli.main(["up", "--model", str(model), "--port", "0"]) == 2
    assert "--help" not in capsys.readouterr().err
    assert cli.main(["up", "--model", str(model), "--transport", "udp"]) == 2
    assert capsys.readouterr().err == (
        "paceline: transport='udp': must be one of auto, multi, cuda_ipc, shm, nixl, ucx, tcp "
        "(see `paceline up --help`)\n"
    )
