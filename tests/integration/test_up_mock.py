"""`paceline up` as a user meets it, and Cluster as tests and benchmarks use it: real processes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.cli.ports import free_port
from paceline.cli.roles import python_path
from paceline.cli.run_folder import RunFolder
from paceline.cli.setup_error import SetupError
from tests.support.mock_model import write_mock_model
from tests.support.waits import wait_for

BOOT_S = 90.0  # far above what it takes; the machine may be busy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(tmp_path_factory.mktemp("models") / "mock")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    spec = ClusterSpec(model, ready_timeout_s=BOOT_S, run_parent=tmp_path_factory.mktemp("run"))
    with Cluster(spec) as cluster:
        yield cluster


def chat(base_url: str, text: str = "What is the capital of France?") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": "mock", "messages": messages, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


@pytest.mark.timeout(180)
def test_a_deployment_answers_over_http_through_prefill_and_decode(cluster: Cluster) -> None:
    assert set(cluster.processes) == {"redis", "router", "gateway", "prefill-0", "decode-0"}
    answer = chat(cluster.base_url, "long enough to be prefilled apart from decode " * 2)
    assert answer["usage"]["completion_tokens"] == 8
    with urllib.request.urlopen(f"{cluster.urls['router']}/metrics", timeout=5) as metrics:
        assert 'plans_total{kind="split"} 1.0' in metrics.read().decode()


@pytest.mark.timeout(180)
def test_everything_but_the_front_door_is_private(cluster: Cluster) -> None:
    assert cluster.run_dir.stat().st_mode & 0o777 == 0o700
    for child in cluster.processes.values():
        assert cluster.secret not in " ".join(psutil.Process(child.pid).cmdline())
        for listening in listeners(child.pid):
            assert listening in ("127.0.0.1", "::1"), child.name


def listeners(pid: int) -> set[str]:
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    found = [c for p in family for c in p.net_connections("tcp") if c.status == "LISTEN"]
    return {connection.laddr.ip.removeprefix("::ffff:") for connection in found}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_is_killed_comes_back_after_the_run_folder_was_deleted(cluster: Cluster) -> None:
    shutil.rmtree(cluster.run_dir)
    for name in ("redis", "router", "decode-0"):
        cluster.kill(name)
    wait_for(
        lambda: all(c.is_running for c in cluster.processes.values()) and keeps(cluster, 3), BOOT_S
    )
    cluster.wait_ready()
    wait_for(lambda: served(cluster), BOOT_S)
    assert sorted(path.suffix for path in cluster.run_dir.iterdir()) == ["", ".conf", *[".log"] * 3]
    assert cluster.run_dir.stat().st_mode & 0o777 == 0o700


def keeps(cluster: Cluster, num_restarts: int) -> bool:
    return sum(child.num_starts - 1 for child in cluster.processes.values()) >= num_restarts


def served(cluster: Cluster) -> bool:
    """The gateway has found the new router, and that one its workers."""
    try:
        return bool(chat(cluster.base_url, "after that, " * 20)["usage"]["completion_tokens"] == 8)
    except urllib.error.HTTPError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_worker_that_is_killed_comes_back(cluster: Cluster) -> None:
    first = cluster.processes["prefill-0"].pid
    cluster.kill("prefill-0")
    wait_for(lambda: cluster.processes["prefill-0"].pid != first, BOOT_S)
    cluster.wait_ready()
    assert chat(cluster.base_url, "again, " * 20)["usage"]["completion_tokens"] == 8


class Up:
    """A running `paceline up` with the mock model."""

    def __init__(self, model: Path, run_dir: Path, port: int = 0, **environment: str) -> None:
        command = [sys.executable, "-P", "-m", "paceline.cli.main", "up", "--model", str(model)]
        command += ["--port", str(port), "--run-dir", str(run_dir)]
        variables = {**os.environ, "PYTHONPATH": python_path(), **environment}
        self.shown, self.said = run_dir / "stdout", run_dir / "stderr"
        with open(self.shown, "w") as stdout, open(self.said, "w") as stderr:
            self.process = subprocess.Popen(command, env=variables, stdout=stdout, stderr=stderr)

    def wait_until_ready(self) -> str:
        """The URL of the gateway."""
        wait_for(
            lambda: "Ctrl-C" in self.shown.read_text() or self.process.poll() is not None, BOOT_S
        )
        found = re.search(r"is ready after .* s: (\S+)", self.shown.read_text())
        assert found, self.said.read_text()
        return found[1]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def start_up(model: Path, run_dir: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(port: int = 0, **environment: str) -> Up:
        started.append(Up(model, run_dir, port, **environment))
        return started[-1]

    yield start
    for up in started:
        up.process.kill()
        up.process.wait()


@pytest.mark.timeout(180)
def test_up_shows_a_curl_that_works_and_ctrl_c_drains(
    start_up: Callable[..., Up], run_dir: Path
) -> None:
    up = start_up()
    url = up.wait_until_ready()
    shown = up.shown.read_text()
    command = shown[shown.index("curl") : shown.index("\n\n", shown.index("curl"))]
    answer = subprocess.run(["sh", "-c", f"{command} -s --fail"], capture_output=True, timeout=60)
    assert json.loads(answer.stdout)["object"] == "chat.completion"
    assert f"{url}/metrics" in shown
    assert "of mock: prefill on prefill-0, decode on decode-0" in explained(shown)
    family = up.family()
    assert len(family) >= 7  # five processes, and a rank for each worker
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert not [process for process in family if process.is_running()]
    assert sorted(path.name for path in run_dir.iterdir()) == ["stderr", "stdout"]
    order = re.findall(r"^(\S+) +stopped$", up.said.read_text(), re.MULTILINE)
    assert order[:2] == ["gateway", "router"]
    assert order[-1] == "redis"


def explained(shown: str) -> str:
    """What the router says of the last decision, asked as `up` says."""
    why = re.search(r"why +(.+\)) \S*paceline (explain .+)", shown)
    assert why, shown
    command = f"{why[1]} exec {sys.executable} -P -m paceline.cli.main {why[2]}"
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(
        ["sh", "-c", command],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_kill_9_of_up_leaves_nothing_behind_for_long(
    start_up: Callable[..., Up], run_dir: Path
) -> None:
    up = start_up()
    up.wait_until_ready()
    family = up.family()
    up.process.kill()
    up.process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert len(list(run_dir.iterdir())) == 3
    start_up().wait_until_ready()
    names = sorted(path.name for path in run_dir.iterdir())
    assert len(names) == 3, "the folder of the killed one is gone, this one has its own"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("signals", [[signal.SIGHUP], [signal.SIGTERM, signal.SIGTERM]])
def test_a_closed_terminal_drains_and_so_does_one_order_that_comes_twice(
    start_up: Callable[..., Up], run_dir: Path, signals: list[signal.Signals]
) -> None:
    up = start_up()
    up.wait_until_ready()
    for number in signals:
        up.process.send_signal(number)
        time.sleep(0.05)
    assert up.process.wait(60) == 0
    assert sorted(path.name for path in run_dir.iterdir()) == ["stderr", "stdout"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_signal_while_things_start_ends_them(start_up: Callable[..., Up], run_dir: Path) -> None:
    up = start_up()
    wait_for(lambda: "router " in up.said.read_text(), BOOT_S)
    family = up.family()
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(30) == 0
    assert not psutil.wait_procs(family, timeout=10)[1]
    said = up.said.read_text()
    assert said.endswith("paceline: stopped before everything was ready\n")
    assert set(re.findall(r"^(\S+) +stopped$", said, re.MULTILINE)) >= {"redis", "router"}
    assert "does not answer" not in said
    assert sorted(path.name for path in run_dir.iterdir()) == ["stderr", "stdout"]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("is_ready", [False, True])
def test_signals_that_interrupt_each_other_end_it(
    start_up: Callable[..., Up], is_ready: bool
) -> None:
    up = start_up()
    if is_ready:
        up.wait_until_ready()
    wait_for(lambda: "router " in up.said.read_text(), BOOT_S)
    family = up.family()
    for _ in range(300):
        up.process.send_signal(signal.SIGINT)
    up.process.wait(30)
    assert not psutil.wait_procs(family, timeout=10)[1]


@pytest.mark.timeout(180)
def test_a_second_deployment_needs_no_more_than_another_port(start_up: Callable[..., Up]) -> None:
    port = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port + 1)):
        up = start_up(port)
        assert up.wait_until_ready() == f"http://127.0.0.1:{port}"
    said = f"paceline: port {port + 1} is taken; gRPC of the gateway gets a free one"
    assert said in up.said.read_text()
    found = re.search(r"gRPC +127.0.0.1:(\d+)", up.shown.read_text())
    assert found and int(found[1]) != port + 1
    socket.create_connection(("127.0.0.1", int(found[1]))).close()


@pytest.mark.timeout(180)
def test_a_service_that_cannot_start_is_shown_with_the_end_of_its_log(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    up = Up(write_mock_model(tmp_path_factory.mktemp("mock"), head_dim="wide"), run_dir)
    assert up.process.wait(60) == 1
    said = up.said.read_text()
    assert "ended with exit code 2 while it started; the end of " in said
    assert "\npaceline: head_dim='wide': must be" in said
    assert "Traceback" not in said
    assert "fork_posix" not in said
    assert len(list(run_dir.iterdir())) == 3
    RunFolder(run_dir).remove()
    assert sorted(path.name for path in run_dir.iterdir()) == ["stderr", "stdout"]


def test_a_failed_start_stops_what_had_started(model: Path, run_dir: Path) -> None:
    spec = ClusterSpec(model, settings={"router": {"queue_limit": 0}}, run_parent=run_dir)
    cluster = Cluster(spec)
    with pytest.raises(SetupError, match="router ended with exit code 2"):
        cluster.start()
    assert not any(child.is_running for child in cluster.processes.values())
