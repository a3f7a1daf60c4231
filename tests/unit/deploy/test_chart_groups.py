"""Pools with the role `group`: a LeaderWorkerSet of a decode worker and its prefill workers."""

import re
from typing import Any

import helm_python as helm
import pytest

from benchmarks import chart_objects
from benchmarks.chart_objects import Object
from tests.support.chart import environment, mounts, of_kind, rendered, volumes

NEWEST = chart_objects.kubernetes_versions()[-1]
PROMETHEUS = {"prometheus": "http://prometheus:9090"}


def group(**values: Any) -> dict[str, Any]:
    return {"prefill": None, "decode": None, "rack": {"role": "group", **values}}


def templates(objects: list[Object]) -> tuple[Object, Object]:
    """Of the leader, which decodes, and of the others."""
    parts = of_kind(objects, "LeaderWorkerSet")["rack"]["spec"]["leaderWorkerTemplate"]
    return parts["leaderTemplate"], parts["workerTemplate"]


def test_a_group_is_one_decode_worker_and_its_prefill_workers() -> None:
    objects = rendered(pools=group(replicas=3, group={"prefill": 2}))
    found = of_kind(objects, "LeaderWorkerSet")["rack"]["spec"]
    assert (found["replicas"], found["leaderWorkerTemplate"]["size"]) == (3, 3)
    leader, other = templates(objects)
    assert [c["args"] for c in leader["spec"]["containers"]] == [["decode"]]
    assert [c["args"] for c in other["spec"]["containers"]] == [["prefill"]]
    assert "rack" not in of_kind(objects, "Deployment")


def test_a_group_is_what_kubernetes_takes() -> None:
    tiers = [{"kind": "host", "capacity_mib": 100}]
    pools = group(group={"prefill": 1, "topology": "example.com/rack"}, decode={"tiers": tiers})
    objects = rendered(pools=pools, workers={"rdma": {"resource": "rdma/hca"}})
    assert not chart_objects.problems(objects, [NEWEST])
    annotations = of_kind(objects, "LeaderWorkerSet")["rack"]["metadata"]["annotations"]
    assert annotations == {"leaderworkerset.sigs.k8s.io/exclusive-topology": "example.com/rack"}


def test_a_wrong_pod_of_a_group_is_found() -> None:
    (wrong,) = of_kind(rendered(pools=group()), "LeaderWorkerSet").values()
    parts = wrong["spec"]["leaderWorkerTemplate"]
    leader = {**parts["leaderTemplate"], "spec": {**parts["leaderTemplate"]["spec"], "volumez": []}}
    changed = {**wrong["spec"], "leaderWorkerTemplate": {**parts, "leaderTemplate": leader}}
    assert "volumez" in chart_objects.problem_of({**wrong, "spec": changed}, NEWEST)
    assert "replicaz" in chart_objects.problem_of(
        {**wrong, "spec": {**wrong["spec"], "replicaz": 1}}, NEWEST
    )


def test_a_group_surges_as_a_whole_and_counts_once_routers_know_it() -> None:
    """LeaderWorkerSets know no minReadySeconds: readiness itself waits as long."""
    strategy = {"maxSurge": 2, "maxUnavailable": 1}
    objects = rendered(pools=group(strategy=strategy))
    found = of_kind(objects, "LeaderWorkerSet")["rack"]["spec"]
    assert found["rolloutStrategy"]["rollingUpdateConfiguration"] == strategy
    for template in templates(objects):
        (container,) = template["spec"]["containers"]
        probe = container["readinessProbe"]
        assert probe["successThreshold"] * probe["periodSeconds"] == 10
        assert container["livenessProbe"].get("successThreshold", 1) == 1  # no other is allowed


def test_each_side_has_its_own_values_and_shares_the_rest() -> None:
    sides = {"prefill": {"settings": {"max_batch_tokens": 4096}}, "decode": {"poolMib": 4096}}
    objects = rendered(pools=group(**sides), workers={"poolMib": 512})
    leader, other = ({**environment(t["spec"]["containers"][0])} for t in templates(objects))
    assert leader["PACELINE_WORKER_POOL_MIB"] == "4096"
    assert other["PACELINE_WORKER_POOL_MIB"] == "512"
    assert other["PACELINE_WORKER_MAX_BATCH_TOKENS"] == "4096"
    assert "PACELINE_WORKER_MAX_BATCH_TOKENS" not in leader
    assert leader["PACELINE_WORKER_WORKER_ID"] == other["PACELINE_WORKER_WORKER_ID"] == "the-pod"


def test_pods_of_a_group_are_found_by_policies_monitors_and_budgets() -> None:
    """By the role of the pod and the name of the pool, as those of other pools."""
    objects = rendered(pools=group())
    labels = [template["metadata"]["labels"] for template in templates(objects)]
    assert [found["paceline/role"] for found in labels] == ["decode", "prefill"]
    budget = of_kind(objects, "PodDisruptionBudget")["rack"]["spec"]["selector"]["matchLabels"]
    for found in labels:
        assert budget.items() <= found.items()


def test_every_volume_that_a_pod_of_a_group_mounts_is_there() -> None:
    tiers = [{"kind": "host", "capacity_mib": 100}]
    objects = rendered(pools=group(tiers=tiers), tls={"existing": "ours"})
    for template in templates(objects):
        names = volumes(template["spec"]).keys()
        (container,) = template["spec"]["containers"]
        assert {mount["name"] for mount in mounts(container).values()} <= names
    assert of_kind(objects, "ConfigMap")["rack-tiers"]["data"].keys() == {
        "prefill.yaml",
        "decode.yaml",
    }


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_groups_are_scaled_by_all_that_their_workers_are_short_of(kind: str) -> None:
    pools = group(autoscaling={"kind": kind})
    objects = rendered(pools=pools, autoscaling=PROMETHEUS)
    scaler = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[kind]
    target = of_kind(objects, scaler)["rack"]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": "demo-rack",
    }
    assert "replicas" not in of_kind(objects, "LeaderWorkerSet")["rack"]["spec"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (group(stableNames=True), "pools.rack.stableNames: workers of a group keep their names"),
        (group(strategy={"maxSurge": 0, "maxUnavailable": 0}), "no pod could ever be replaced"),
    ],
)
def test_what_a_group_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=re.escape(message)):
        chart_objects.render({"pools": values})


def test_object_tiers_need_no_stable_names_in_a_group() -> None:
    """Pods of a group are named by their number."""
    tier = {"kind": "object", "bucket": "kv-pages", "capacity_mib": 100}
    assert rendered(pools=group(tiers=[tier]))
