"""How each service of a local deployment is started: its command, environment and ports."""

import http.client
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import paceline
from paceline.cli.child import Child
from paceline.cli.run_folder import RunFolder

Role = Literal["router", "gateway", "prefill", "decode"]
Settings = Mapping[str, object]

ENV_PREFIX: dict[Role, str] = {
    "router": "PACELINE_ROUTER_",
    "gateway": "PACELINE_GATEWAY_",
    "prefill": "PACELINE_WORKER_",
    "decode": "PACELINE_WORKER_",
}
# Several ranks share the cores of this machine: threads that wait for each other must not spin.
# 200 matrix-vector products in two threads of two busy cores (load 12): 5.3 s spinning, 0.44 s not.
SHARED_CORES = {"OMP_WAIT_POLICY": "passive"}
SECRET_SETTINGS = ("redis_url", "secret")  # by environment: command lines can be read by others
PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ProbeUrl:
    """Where /livez, /readyz and /metrics of a process are."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def not_ready(self) -> str:
        """Why /readyz is not 200; empty when it is."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            text = answer.read(4096).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return "starting"
        finally:
            connection.close()
        return "" if answer.status == 200 else first_reason(text)


def first_reason(text: str) -> str:
    """The first reason in the body of a /readyz: a JSON list, an object with one, or lines."""
    try:
        found = json.loads(text)
    except ValueError:
        found = text.strip().splitlines()
    if isinstance(found, dict):
        found = next((value for value in found.values() if isinstance(value, list)), [])
    return str(found[0]) if isinstance(found, list) and found else "not ready"


def make_child(
    name: str, role: Role, settings: Settings, environment: Mapping[str, str], folder: RunFolder
) -> Child:
    """A service as a child process, with the same interpreter and package as ours."""
    command = [sys.executable, "-P", "-m", "paceline.cli.main", role]
    variables = {**SHARED_CORES, **os.environ, **environment, "PYTHONPATH": python_path()}
    for key, value in settings.items():
        text = as_text(value)
        if key in SECRET_SETTINGS:
            variables[ENV_PREFIX[role] + key.upper()] = text
        else:
            command.append(f"--{key.replace('_', '-')}={text}")
    log_path = folder.path / f"{name}.log"
    not_ready = probe_url(role, settings).not_ready
    return Child(name, command, variables, log_path, not_ready, folder.restore)


def probe_url(role: Role, settings: Settings) -> ProbeUrl:
    port = settings["port"] if role == "gateway" else settings["probe_port"]
    host = str(settings["host"])
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return ProbeUrl(reachable, int(str(port)))


def python_path() -> str:
    """Lets children import this very package, wherever it lies."""
    source = str(Path(paceline.__file__).parents[1])
    return os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))


def as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)
