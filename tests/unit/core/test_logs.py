import json
import subprocess
import sys

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
