import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

_SCRIPT = """
import logging
from paceline.core import logs
log = logs.configure("router")
log.info("worker up", worker="d0")
logging.getLogger("uvicorn").warning("noisy")
logging.getLogger("uvicorn").info("hidden")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def test_lines_are_json_with_the_service_when_stderr_is_no_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["worker up", "noisy", "failed"]
    assert all(line["service"] == "router" and line["timestamp"] for line in lines)
    assert (lines[0]["level"], lines[0]["worker"]) == ("info", "d0")
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert done.stdout == ""


PACKAGES = [path for path in Path(paceline.__file__).parent.iterdir() if path.is_dir()]
LEVELS = {"debug", "info", "warning", "error", "exception"}


def logged(package: Path) -> Iterator[tuple[str, ast.Call]]:
    """Where each log line is written, and the call."""
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                logger = ast.unparse(node.func.value).rpartition(".")[2]
                if logger in ("log", "_log", "logger") and node.func.attr in LEVELS:
                    yield f"{path.name}:{node.lineno}", node


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_events_are_words_and_requests_have_one_name_in_all_services(package: Path) -> None:
    for place, call in logged(package):
        event = call.args[0]
        if isinstance(event, ast.Constant):
            assert " " in (told := str(event.value)) or "_" not in told, place
        fields = {keyword.arg for keyword in call.keywords}
        assert not fields & {"request", "request_id"}, f"{place}: it is request_ids, a list"


def test_log_lines_are_found_where_there_are_some() -> None:
    found = {package.name for package in PACKAGES if any(logged(package))}
    assert {"gateway", "router", "worker", "engine", "kv_transfer", "offline"} <= found
