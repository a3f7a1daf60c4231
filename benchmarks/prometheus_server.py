"""A real Prometheus that scrapes a deployment, with the alerts of the chart on a faster clock."""

import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.cli.cluster import Cluster
from paceline.cli.ports import free_port

ALERTS = Path(__file__).resolve().parents[1] / "deploy/helm/paceline/files/alerts.yaml"
MINUTE_S = 1.0  # what a minute of the alerts lasts
SCRAPE_MS, EVALUATE_MS = 250, 500
RATE_WINDOW = "5s"  # what Grafana would put for $__rate_interval
START_S = 30.0


def program() -> str | None:
    """Path of `prometheus`, None where it is not on PATH."""
    return shutil.which("prometheus")


def scaled(text: str) -> str:
    """Rules with each window and each `for` shortened: a minute becomes MINUTE_S."""

    def shorten(found: re.Match[str]) -> str:
        minutes = int(found[2]) * (60 if found[3] == "h" else 1)
        return f"{found[1]}{round(minutes * MINUTE_S * 1000)}ms"

    return re.sub(r"(\[|for: )(\d+)([mh])\b", shorten, text)


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an instant query. Raises HTTPError for an expression that is wrong."""
        return self._series("query", {"query": grafana_free(expression)})

    def query_range(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """Series over unix seconds, with a point a second."""
        times = {"start": str(start), "end": str(end), "step": "1"}
        return self._series("query_range", {"query": grafana_free(expression), **times})

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = self._get("alerts", {})["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def rules(self) -> list[dict[str, Any]]:
        found = self._get("rules", {})["groups"]
        return [rule for group in found for rule in group["rules"]]

    def _series(self, path: str, parameters: Mapping[str, str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get(path, parameters)["result"]
        return found

    def _get(self, path: str, parameters: Mapping[str, str]) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read())["data"]


def grafana_free(expression: str) -> str:
    """An expression of a panel, as Grafana would send it."""
    return expression.replace("$__rate_interval", RATE_WINDOW)


@contextmanager
def prometheus(cluster: Cluster, *ports: int) -> Iterator[Prometheus]:
    """Scrapes all processes of `cluster`, and what else listens on `ports`; keeps nothing."""
    path = program()
    assert path is not None, "see `program`"
    with tempfile.TemporaryDirectory(prefix="paceline-prometheus-") as name:
        folder, address = Path(name), f"127.0.0.1:{free_port('127.0.0.1')}"
        (folder / "alerts.yaml").write_text(scaled(ALERTS.read_text()))
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration(cluster, ports)))
        command = [path, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}"]
        command += [f"--web.listen-address={address}", "--log.level=error"]
        process = subprocess.Popen(command, cwd=folder)
        try:
            server = Prometheus(f"http://{address}")
            _wait_ready(server.url, process)
            yield server
        finally:
            process.terminate()
            process.wait()


def configuration(cluster: Cluster, ports: Sequence[int]) -> dict[str, Any]:
    targets = [f"{url.host}:{url.port}" for url in cluster.urls.values()]
    targets += [f"127.0.0.1:{port}" for port in ports]
    return {
        "global": {
            "scrape_interval": f"{SCRAPE_MS}ms",
            "scrape_timeout": f"{SCRAPE_MS}ms",
            "evaluation_interval": f"{EVALUATE_MS}ms",
        },
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "paceline", "static_configs": [{"targets": targets}]}],
    }


def _wait_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=1):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError("prometheus did not start") from None
            time.sleep(0.1)
