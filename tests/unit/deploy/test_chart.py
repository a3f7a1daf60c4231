"""The chart as a whole: valid everywhere, refusing what is wrong, and upgradable."""

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from scripts import chart_golden, chart_schema

from benchmarks import chart_objects
from benchmarks.chart_objects import CHART, EXAMPLES, ROOT, Object, Values
from tests.support.chart import environment, owner, rendered

README = (CHART / "README.md").read_text()
OLDEST, *_, NEWEST = chart_objects.kubernetes_versions()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_helm_finds_nothing_to_complain_about(version: str) -> None:
    report = helm.lint(str(CHART), strict=True, kube_version=f"v{version}")
    assert not [message for message in report["messages"] if "icon" not in str(message)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_renders_what_kubernetes_takes(path: Path) -> None:
    """All versions between are asked by benchmarks.chart."""
    objects = chart_objects.render(chart_objects.example(path))
    assert not chart_objects.problems(objects, [OLDEST, NEWEST])
    assert not chart_objects.names_taken_twice(objects)
    assert chart_golden.path_of(path).read_text() == chart_objects.golden(objects), (
        "run scripts/chart_golden.py and look at what changed"
    )


def test_a_shared_claim_of_a_gpu_is_valid_where_claims_are() -> None:
    pools = {"pair": {"role": "colocated", "gpuClaimTemplate": "one-gpu"}}
    objects = rendered(pools=pools)
    assert not chart_objects.problems(objects, ["1.34.0", NEWEST])


def test_a_wrong_object_is_found() -> None:
    """The check above can fail, for our kinds and for custom ones."""
    wrong: Object = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
    assert not chart_objects.problem_of(wrong, NEWEST)
    assert "portz" in chart_objects.problem_of({**wrong, "spec": {"portz": []}}, NEWEST)
    monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": {}}
    monitor["metadata"] = {"name": "x"}
    assert "spec" in chart_objects.problem_of(monitor, NEWEST)


def test_the_schema_is_that_of_the_services_settings() -> None:
    assert chart_schema.SCHEMA.read_text() == chart_schema.text(), "run scripts/chart_schema.py"


def test_every_value_is_one_of_the_schema() -> None:
    """Both ways: none is unknown, and none lacks a default that says it exists."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(given: Any, schema: Any, where: str) -> None:
        known = schema.get("properties")
        if known is None or where.endswith("settings"):
            return
        assert given.keys() == known.keys() - {"global"}, where
        for name, value in given.items():
            if isinstance(value, dict) and value:
                compare(value, resolve(known[name]), f"{where}.{name}")

    def resolve(schema: Any) -> Any:
        reference = schema.get("$ref", "").removeprefix("#/definitions/")
        return chart_schema.values_schema()["definitions"][reference] if reference else schema

    compare(values, chart_schema.values_schema(), "values")


def test_every_value_is_commented() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    values = [line for line in lines if re.match(r"\s*[A-Za-z]+:", line)]
    assert len(values) > 100
    assert not [line for line in values if "# " not in line]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gateway": {"replicaz": 1}}, "at '/gateway': additional properties 'replicaz'"),
        ({"pools": {"x": {"role": "both"}}}, "at '/pools/x/role': value must be one of 'prefill'"),
        ({"pools": {"x": {}}}, "at '/pools/x': missing property 'role'"),
        ({"pools": {"x": {"role": "decode", "replicas": -1}}}, "'/pools/x/replicas': minimum"),
        ({"pools": {"Bad_Name": {"role": "decode"}}}, "at '/pools': additional properties 'Bad"),
        ({"workers": {"gpus": 2}}, "at '/workers/gpus': value must be one of 0, 1"),
        ({"workers": {"loadSeconds": 0}}, "at '/workers/loadSeconds': minimum: got 0, want 1"),
        ({"workers": {"env": {"PATH": "/"}}}, "at '/workers/env': additional properties 'PATH'"),
        ({"workers": {"tiers": [{"kind": "tape"}]}}, "value must be one of 'host', 'file'"),
        ({"workers": {"tiers": [{"kind": "host"}]}}, "missing property 'capacity_mib'"),
        ({"workers": {"settings": {"port": 1}}}, "at '/workers/settings': additional properties"),
        ({"router": {"settings": {"queue_limt": 1}}}, "additional properties 'queue_limt'"),
        ({"router": {"settings": {"queue_limit": "a"}}}, "got string, want integer"),
        ({"rebalance": {"settings": {"router": "a"}}}, "additional properties 'router'"),
        ({"router": {"drainSeconds": "60s"}}, "got string, want integer"),
        ({"model": {"path": "relative"}}, "at '/model/path'"),
        ({"model": {"volume": {"hostPath": {}, "emptyDir": {}}}}, "'/model/volume': maxProperties"),
        ({"redis": {"external": {"host": "redis://x"}}}, "at '/redis/external/host'"),
        ({"image": {"digests": {"cpu": "latest"}}}, "at '/image/digests/cpu'"),
        ({"tls": {"duration": "90d"}}, "at '/tls/duration'"),
        ({"tls": {"name": ""}}, "at '/tls/name'"),
        ({"gateway": {"ingress": {"enabled": True}}}, "at '/gateway/ingress/host'"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "at '/gateway/httpRoute/parentRefs'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(values: Values, message: str) -> None:
    loaded = chart_objects.chart()
    with pytest.raises(helm.HelmValuesError, match=re.escape(message)):
        loaded.validate_schema(loaded.merge_values(values))


OBJECT_TIER = {"kind": "object", "bucket": "kv-pages", "capacity_mib": 100}
FILE_TIER = {"kind": "file", "path": "/data", "capacity_mib": 100}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pools": {"router": {"role": "decode"}}}, "pools.router: a service has this name"),
        (
            {"rebalance": {"enabled": True}, "workers": {"autoscaling": {"kind": "hpa"}}},
            "rebalance.enabled: pools.decode scales by what its workers were started as",
        ),
        ({"pools": {"decode": {"prefill": {"cpu": "1"}}}}, "sides of a pool with the role"),
        ({"workers": {"tiers": [OBJECT_TIER]}}, "it needs stableNames: true"),
        ({"workers": {"tiers": [FILE_TIER]}}, "path /data is on a read-only file system"),
        ({"workers": {"gpus": 1, "tiers": [OBJECT_TIER]}}, "a pool on a device has no tiers"),
        ({"workers": {"gpus": 1, "gpuClaimTemplate": "x"}}, "exclude each other"),
        ({"tls": {"required": True}}, "tls.required: needs tls.existing or tls.issuer.name"),
        ({"tls": {"existing": "a", "issuer": {"name": "b"}}}, "tls: existing and issuer.name"),
        ({"model": {"fetch": {"huggingFace": "a/b"}}}, "model.fetch needs model.volume.emptyDir"),
        ({"workers": {"strategy": {"maxSurge": 0}}}, "maxSurge and maxUnavailable are both 0"),
        ({"workers": {"autoscaling": {"kind": "keda"}}}, "needs the address of Prometheus"),
        (
            {"workers": {"autoscaling": {"kind": "hpa", "targets": {"ttftSeconds": 1}}}},
            "pools.prefill.autoscaling.targets.ttftSeconds: needs kind: keda",
        ),
        ({"gateway": {"autoscaling": {"kind": "hpa", "minReplicas": 9}}}, "must not be above max"),
        (
            {"gateway": {"autoscaling": {"kind": "hpa", "targets": {"running": 0}}}},
            "leaves every target out",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: Values, message: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=re.escape(message)):
        chart_objects.render(values)


def test_an_upgrade_from_the_chart_before_changes_no_immutable_field() -> None:
    assert not chart_objects.upgrade_changes()


def test_immutable_fields_that_change_are_found() -> None:
    before = rendered()
    after = rendered(pools={"decode": {"stableNames": True}})
    assert not chart_objects.changed_immutables(before, after)  # another kind
    moved = [{**item, "spec": {"selector": {}}} for item in before if "selector" in str(item)]
    assert chart_objects.changed_immutables(before, moved)


def test_selectors_stay_what_the_first_chart_said() -> None:
    for component in ("gateway", "router", "prefill", "decode", "redis"):
        assert owner(rendered(), component)["spec"]["selector"]["matchLabels"] == {
            "app.kubernetes.io/name": "paceline",
            "app.kubernetes.io/instance": "demo",
            "app.kubernetes.io/component": component,
        }


def test_the_install_command_of_the_page_renders() -> None:
    command = README[README.index("helm install") :].split("\n\n")[0].replace("\\\n", " ")
    _, _, release, chart, *options = shlex.split(command)
    assert (ROOT / chart) == CHART and release == "paceline"
    values: Values = {}
    for flag, given in itertools.pairwise(options):
        if flag == "--set":
            path, _, value = given.partition("=")
            *parents, last = path.split(".")
            place = values
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = value
    found = owner(rendered(**values), "decode")["spec"]["template"]["spec"]["containers"][0]
    assert environment(found)["PACELINE_WORKER_MODEL"] == values["model"]["path"]
    assert found["image"].startswith(values["image"]["repository"])


def test_the_page_names_every_group_of_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named = set(re.findall(r"^\| `(\w+)`", README, re.MULTILINE))
    assert named == values.keys()


def test_the_page_leads_to_every_example() -> None:
    for path in EXAMPLES:
        assert f"](../examples/{path.name})" in README
