"""Dashboards and alerts ask for what is exported; each alert has a runbook and promtool's word."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.alert_faults import FAULTS
from deploy.observability.boards import BOARDS
from paceline.core.metrics import ALL
from tests.support.promql import named_in, problems

ROOT = Path(__file__).parents[3]
FILES = ROOT / "deploy/helm/paceline/files"
RUNBOOKS = ROOT / "docs/runbooks"
UNIT_TESTS = Path(__file__).with_name("alerts_test.yaml")
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]


NO_PANEL = {"vllm:lora_requests_info"}  # read by routers; adapters are not served
# What vLLM 0.32 exports, with its connector for NIXL and what dashboards read of older ones;
# counters without _total.
VLLM = Path(__file__).with_name("vllm_metrics.txt").read_text().split()


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


def test_every_metric_has_its_place_in_a_dashboard() -> None:
    asked = {
        series
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
        for series in named_in(query.expression).series
    }
    missing = {str(metric) for metric in ALL if not asked & {*metric.samples}}
    assert missing == NO_PANEL


def test_names_that_readers_of_vllm_know_are_exported_or_accounted_for() -> None:
    """docs/metrics.md says of each other one why it is missing, or what to read instead."""
    page = (ROOT / "docs/metrics.md").read_text()
    _, _, rest = page.partition("## Names of vLLM that are missing")
    rows = re.findall(r"^\| (`vllm:.+?) \|", rest.partition("\n## ")[0], re.M)
    told = {name for row in rows for name in re.findall(r"vllm:[a-z_]+", row)}
    exported = {metric.removesuffix("_total") for metric in ALL}
    unknown = {name for name in VLLM if name not in exported and name not in told}
    assert not unknown
    assert not told & exported, "the page says that they are missing"


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
