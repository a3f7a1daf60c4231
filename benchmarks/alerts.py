"""Every alert fires on its fault and clears after it; every panel shows data while requests run.

A deployment of the mock model under load, scraped by a real Prometheus (2.42 or newer, on PATH)
with the alerts of the chart on a clock sixty times as fast. One fault after the other is injected
into it and mended. While an alert fires, the commands of its runbook are run.

alerts           alerts whose fault was injected: all, with --quick those of the first two faults
silent_alerts    that did not fire on their fault
stuck_alerts     that did not clear after it
false_alarms     that fired while nothing was wrong
failed_commands  commands in runbooks that ended with an error
panels, empty_panels   queries of panels, and those without data
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.alert_faults import FAULTS, Deployment, Fault, deployed
from benchmarks.common import Options, publish, show
from benchmarks.prometheus_server import ALERTS, Prometheus, program, prometheus
from deploy.observability.boards import BOARDS

RUNBOOKS = ALERTS.parents[4] / "docs/runbooks"
WARM_S = 20.0  # rates of all windows that panels use
FIRE_S, CLEAR_S = 60.0, 120.0
COMMAND_S = 20.0
NUM_QUICK = 2  # faults


def measure(options: Options) -> dict[str, float]:
    if program() is None:
        show(
            "prometheus is not on PATH: nothing was measured (CONTRIBUTING.md tells how to get it)"
        )
        return {"skipped": 1}
    with (
        tempfile.TemporaryDirectory(prefix="paceline-alerts-") as folder,
        deployed(Path(folder)) as deployment,
        prometheus(deployment.cluster, deployment.rebalance_port) as server,
    ):
        return watch(deployment, server, FAULTS[:NUM_QUICK] if options.quick else FAULTS)


def watch(deployment: Deployment, server: Prometheus, faults: Sequence[Fault]) -> dict[str, float]:
    names = [name for fault in faults for name in fault.alerts]
    show("nothing is wrong")
    time.sleep(WARM_S)
    empty, false_alarms = empty_panels(server), server.firing()
    for title in (*empty, *false_alarms):
        show(f"  empty or false: {title}")
    silent, failed = set(names), list[str]()
    stuck = set[str]()
    for fault in faults:
        show(f"{fault.text}: {', '.join(fault.alerts)}")
        silent -= fire(fault, deployment, server, failed)
        fault.mend(deployment)
        if not waited(lambda: not server.firing(), CLEAR_S):
            stuck |= server.firing()
    for text in (*sorted(silent), *sorted(stuck), *failed):
        show(f"  silent, stuck or failed: {text}")
    return {
        "alerts": len(names),
        "silent_alerts": len(silent),
        "stuck_alerts": len(stuck),
        "false_alarms": len(false_alarms),
        "failed_commands": len(failed),
        "panels": sum(len(panel.queries) for board in BOARDS for panel in board.panels),
        "empty_panels": len(empty),
    }


def fire(fault: Fault, deployment: Deployment, server: Prometheus, failed: list[str]) -> set[str]:
    """Injects it until its alerts fire; those that did."""
    fired: set[str] = set()

    def all_fired() -> bool:
        fault.go_on(deployment)
        fresh = (server.firing() & set(fault.alerts)) - fired
        for name in fresh:
            show(f"  {name} fires")
            failed.extend(failing_commands(name, deployment.environment()))
        fired.update(fresh)
        return fired == set(fault.alerts)

    fault.inject(deployment)
    waited(all_fired, FIRE_S)
    return fired


def empty_panels(server: Prometheus) -> list[str]:
    """Titles of panels with a query that finds nothing."""
    return [
        f"{board.title} / {panel.title} / {query.legend}"
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
        if not server.query(query.expression)
    ]


def failing_commands(alert: str, environment: Mapping[str, str]) -> list[str]:
    """Runs each block of a runbook."""
    failed = []
    for commands in shell_blocks((RUNBOOKS / f"{alert}.md").read_text()):
        script = f"set -eo pipefail\n{commands}"
        done = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, timeout=COMMAND_S
        )
        if done.returncode:
            failed.append(f"{alert}: {commands!r} ended with {done.returncode}: {done.stderr!r}")
    return failed


def shell_blocks(page: str) -> list[str]:
    return [part.split("```")[0] for part in page.split("```sh\n")[1:]]


def waited(condition: Callable[[], bool], timeout_s: float) -> bool:
    """True once it holds, False when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.25)
    return True


def main() -> int:
    return publish("alerts", measure)


if __name__ == "__main__":
    sys.exit(main())
