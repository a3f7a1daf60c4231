"""Dashboards and alerts ask for what is exported; each alert has a runbook and promtool's word."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.alert_faults import FAULTS
from deploy.observability.panels import BOARDS
from tests.support.promql import problems

ROOT = Path(__file__).parents[3]
FILES = ROOT / "deploy/helm/paceline/files"
RUNBOOKS = ROOT / "docs/runbooks"
UNIT_TESTS = Path(__file__).with_name("alerts_test.yaml")
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_asks_for_what_is_exported(board: Any) -> None:
    for panel in board.panels:
        assert panel.queries, panel.title
        for query in panel.queries:
            assert not problems(query.expression), panel.title


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_the_file_of_a_dashboard_has_its_panels(board: Any) -> None:
    made = json.loads((FILES / f"dashboards/{board.uid}.json").read_text())
    shown = [
        (panel["title"], [(q["expr"], q["legendFormat"]) for q in panel["targets"]])
        for panel in made["panels"]
    ]
    meant = [(p.title, [(q.expression, q.legend) for q in p.queries]) for p in board.panels]
    assert shown == meant, "run python -m deploy.observability.build"
    assert made["uid"] == board.uid


def test_there_is_no_dashboard_without_panels_of_ours() -> None:
    assert {path.stem for path in FILES.glob("dashboards/*")} == {board.uid for board in BOARDS}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exported_and_has_a_runbook(rule: dict[str, Any]) -> None:
    assert not problems(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    runbook = ROOT / rule["annotations"]["runbook"]
    assert runbook == RUNBOOKS / f"{rule['alert']}.md"
    assert runbook.read_text().startswith(f"# {rule['alert']}\n")


def test_each_alert_has_one_fault_that_is_injected() -> None:
    injected = [name for fault in FAULTS for name in fault.alerts]
    assert sorted(injected) == sorted(rule["alert"] for rule in ALERTS)


def test_no_runbook_is_left_of_an_alert_that_is_gone() -> None:
    names = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert names == {rule["alert"] for rule in ALERTS}


def test_expressions_that_ask_for_what_is_not_there_are_found() -> None:
    assert problems("sum(rate(paceline_router_lost_total[5m]))") == [
        "no metric paceline_router_lost_total"
    ]
    wrong = 'sum by (tenant) (rate(paceline_router_requests_total{code="x"}[5m]))'
    assert [problem.split(" in ")[0] for problem in problems(wrong)] == [
        "no label code",
        "no label tenant",
    ]


def test_each_alert_fires_and_stays_silent_as_promtool_says() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH; CONTRIBUTING.md tells where it comes from")
    tested = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tested
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    silent = {
        case["alertname"]
        for test in tested
        for case in test["alert_rule_test"]
        if not case.get("exp_alerts")
    }
    assert fired == silent == {rule["alert"] for rule in ALERTS}
    done = subprocess.run(
        [promtool, "test", "rules", str(UNIT_TESTS)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stdout + done.stderr
