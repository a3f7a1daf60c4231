"""docs/operations.md: its values render, one after the other, and its metrics and links exist.

Its commands run in tests/integration/test_operations.py.
"""

import copy
import re

import pytest
import yaml

from benchmarks import chart_objects
from benchmarks.chart_objects import ROOT, Values
from paceline.core.metrics import ALL

PAGE = ROOT / "docs" / "operations.md"
TEXT = PAGE.read_text()
OLDEST, *_, NEWEST = chart_objects.kubernetes_versions()
BASE: Values = {"model": {"path": "/models/llama"}}


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)
    return found


def laid_over(below: Values, above: Values) -> Values:
    """As Helm lays the files of --values over each other."""
    made = copy.deepcopy(below)
    for name, value in above.items():
        is_deeper = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = laid_over(made[name], value) if is_deeper else copy.deepcopy(value)
    return made


def stages() -> list[Values]:
    """The values after each block, from first to last."""
    found = [BASE]
    for block in blocks("yaml"):
        found.append(laid_over(found[-1], yaml.safe_load(block)))
    return found


def test_each_step_renders_what_kubernetes_takes() -> None:
    assert len(stages()) > 6
    for values in stages():
        assert not chart_objects.problems(chart_objects.render(values), [OLDEST, NEWEST])


def test_no_step_changes_what_an_upgrade_may_not() -> None:
    rendered = [chart_objects.render(values) for values in stages()]
    for before, after in zip(rendered, rendered[1:], strict=False):
        assert not chart_objects.changed_immutables(before, after)


def test_the_next_generation_has_the_majority_of_decode_workers() -> None:
    values = next(v for v in stages() if "decode-next" in v.get("pools", {}))
    pools = values["pools"]
    assert pools["decode-next"]["replicas"] > pools["decode"]["replicas"]
    objects = {item["metadata"]["name"]: item for item in chart_objects.render(values)}
    for name in ("decode", "decode-next", "prefill", "prefill-next"):
        assert objects[f"demo-{name}"]["spec"]["replicas"] == pools[name]["replicas"]


def test_metrics_that_are_named_exist() -> None:
    names = {sample for metric in ALL for sample in (metric, *metric.samples)}
    named = set(re.findall(r"\b((?:paceline|vllm:)_?[a-z]+_[a-z_]+)", TEXT))
    whole = {name for name in named if not name.endswith("_")}
    unknown = {name for name in whole if not any(known.startswith(name) for known in names)}
    assert len(whole) > 8 and not unknown


@pytest.mark.parametrize("page", ["README.md", "deploy/helm/paceline/README.md"])
def test_pages_of_a_newcomer_lead_there(page: str) -> None:
    assert "docs/operations.md" in (ROOT / page).read_text()


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 8
    for link in links:
        assert (PAGE.parent / link).exists(), link
