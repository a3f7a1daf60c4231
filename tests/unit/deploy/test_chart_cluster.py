"""What surrounds the pods: Services, policies, budgets, routes, scaling, monitoring."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import chart_objects
from benchmarks.chart_objects import Object
from paceline.core import metrics
from tests.support.chart import container, environment, of_kind, owner, pod, rendered

PROMETHEUS = {"prometheus": "http://prometheus:9090"}


def labels_of(objects: list[Object], component: str) -> dict[str, str]:
    labels: dict[str, str] = owner(objects, component)["spec"]["template"]["metadata"]["labels"]
    return labels


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Of matchLabels and of the operator In."""
    equal = selector.get("matchLabels", {}).items() <= labels.items()
    among = selector.get("matchExpressions", ())
    return equal and all(labels.get(one["key"]) in one["values"] for one in among)


# --- Services ---


def test_services_lead_to_ports_of_their_pods() -> None:
    objects = rendered()
    services = of_kind(objects, "Service")
    assert services.keys() == {"router", "gateway", "redis"}
    for component, service in services.items():
        assert service["spec"]["selector"].items() <= labels_of(objects, component).items()
        (found,) = pod(objects, component)["containers"]
        ports = {port["name"] for port in found["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_no_service_leads_to_pods_that_are_not_ready() -> None:
    """A router that drains must not be found by a gateway that looks for one."""
    services = of_kind(rendered(router={"replicas": 2}), "Service").values()
    assert not [one for one in services if one["spec"].get("publishNotReadyAddresses")]


# --- network policies ---


def reachable(objects: list[Object], source: str, target: str, port: int) -> bool:
    """Whether the policies let a pod of one component open a connection to another's port."""
    source_labels, target_labels = labels_of(objects, source), labels_of(objects, target)
    policies = [item["spec"] for item in of_kind(objects, "NetworkPolicy").values()]
    leaves = allows(policies, "egress", "to", source_labels, target_labels, {port})
    containers = pod(objects, target)["containers"]
    names = {p["name"] for c in containers for p in c["ports"] if p["containerPort"] == port}
    arrives = allows(policies, "ingress", "from", target_labels, source_labels, {port, *names})
    return leaves and arrives


def allows(
    policies: list[Object],
    way: str,
    ends: str,
    own: dict[str, str],
    other: dict[str, str],
    ports: set[Any],
) -> bool:
    for policy in policies:
        for rule in policy.get(way, ()) if selects(policy["podSelector"], own) else ():
            fits = not rule.get("ports") or any(one["port"] in ports for one in rule["ports"])
            peers = rule.get(ends)
            is_peer = peers is None or any(
                "podSelector" in peer and selects(peer["podSelector"], other) for peer in peers
            )
            if fits and is_peer:
                return True
    return False


def test_services_reach_what_they_need_and_nothing_else() -> None:
    objects = rendered(networkPolicy={"clients": [], "monitoring": []})
    roles = ("prefill", "decode")
    needed = {
        ("gateway", "router", 9100),
        ("router", "prefill", 9200),
        ("router", "decode", 9200),
        ("router", "redis", 6379),
        ("prefill", "redis", 6379),
        ("decode", "redis", 6379),
        *((a, b, port) for a in roles for b in roles for port in (9200, 40001)),
    }
    components = ("gateway", "router", "prefill", "decode", "redis")
    ports = (8000, 8001, 9100, 9101, 9200, 9201, 6379, 40001)
    given = {
        (a, b, port)
        for a in components
        for b in components
        for port in ports
        if reachable(objects, a, b, port)
    }
    between_workers = {(a, b, port) for a in roles for b in roles for port in ports}
    assert needed <= given <= needed | between_workers  # sources of pages pick their ports


def test_the_controller_of_roles_reaches_routers_alone() -> None:
    objects = rendered(rebalance={"enabled": True})
    components = ("gateway", "router", "prefill", "decode", "redis", "rebalance")
    ports = (8000, 9100, 9101, 9200, 9201, 6379, 9301)
    given = {
        (a, b, port)
        for a, b in [("rebalance", b) for b in components] + [(a, "rebalance") for a in components]
        for port in ports
        if reachable(objects, a, b, port)
    }
    assert given == {("rebalance", "router", 9100)}


def test_everything_is_denied_first() -> None:
    policies = of_kind(rendered(), "NetworkPolicy")
    deny = policies["deny"]["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"] and "ingress" not in deny
    assert deny["egress"] == [{"ports": [{"port": 53, "protocol": p} for p in ("UDP", "TCP")]}]
    for component in ("gateway", "router", "prefill", "decode", "redis"):
        assert selects(deny["podSelector"], labels_of(rendered(), component))


def test_all_reach_a_collector_of_traces_that_is_named() -> None:
    rule = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 4317}]}
    deny = of_kind(rendered(networkPolicy={"egress": [rule]}), "NetworkPolicy")["deny"]["spec"]
    assert deny["egress"][1:] == [rule] and "ingress" not in deny


def test_clients_and_prometheus_reach_only_their_ports() -> None:
    objects = rendered(networkPolicy={"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]})
    rules = of_kind(objects, "NetworkPolicy")["gateway"]["spec"]["ingress"]
    assert rules[0] == {
        "from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "ports": [{"port": "http"}, {"port": "grpc"}],
    }
    assert rules[1]["ports"] == [{"port": "http"}]


def test_policies_can_be_left_out() -> None:
    assert not of_kind(rendered(networkPolicy={"enabled": False}), "NetworkPolicy")


# --- budgets, accounts, placement ---


def test_budgets_cover_every_pod_but_redis() -> None:
    objects = rendered(router={"replicas": 2})
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert budgets.keys() == {"gateway", "router", "router-2", "prefill", "decode"}
    for component, budget in budgets.items():
        assert selects(budget["spec"]["selector"], labels_of(objects, component))
        assert budget["spec"]["maxUnavailable"] == 1  # a minimum would hold up single pods
    assert not of_kind(rendered(podDisruptionBudgets={"enabled": False}), "PodDisruptionBudget")


def test_an_account_of_yours_is_used_and_none_made() -> None:
    objects = rendered(serviceAccount={"create": False, "name": "theirs"})
    assert not of_kind(objects, "ServiceAccount")
    assert pod(objects, "decode")["serviceAccountName"] == "theirs"
    (made,) = of_kind(rendered(), "ServiceAccount").values()
    assert made["automountServiceAccountToken"] is False


def test_pods_go_where_they_are_told() -> None:
    own = {
        "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "priorityClassName": "high",
        "affinity": {"podAntiAffinity": {}},
        "topologySpread": [
            {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
    }
    objects = rendered(gateway=own, router=own, workers=own)
    for component in ("gateway", "router", "prefill", "decode"):
        spec = pod(objects, component)
        for name in ("nodeSelector", "tolerations", "priorityClassName", "affinity"):
            assert spec[name] == own[name], (component, name)
        (constraint,) = spec["topologySpreadConstraints"]
        assert constraint["topologyKey"] == "zone" and constraint["maxSkew"] == 2
        assert selects(constraint["labelSelector"], labels_of(objects, component))


# --- from outside ---


def test_an_ingress_leads_to_the_gateway_and_shows_only_the_api() -> None:
    ingress = {"enabled": True, "host": "llm.example.com", "tlsSecret": "cert"}
    (found,) = of_kind(rendered(gateway={"ingress": ingress}), "Ingress").values()
    (path,) = found["spec"]["rules"][0]["http"]["paths"]
    assert path["path"] == "/v1"  # neither /metrics nor probes
    assert path["backend"]["service"] == {"name": "demo-gateway", "port": {"name": "http"}}
    assert found["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": "cert"}]


def test_a_route_has_no_time_limit_of_its_own() -> None:
    route = {"enabled": True, "parentRefs": [{"name": "public"}]}
    (found,) = of_kind(rendered(gateway={"httpRoute": route}), "HTTPRoute").values()
    (rule,) = found["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    assert rule["backendRefs"] == [{"name": "demo-gateway", "port": 8000}]


# --- scaling ---


def exported() -> set[str]:
    """Names of samples as Prometheus sees them."""
    return {sample for metric in metrics.ALL for sample in metric.samples}


def test_keda_asks_for_metrics_that_exist_by_labels_that_monitors_give() -> None:
    all_targets = {"ttftSeconds": 1, "interTokenSeconds": 0.05}
    scaling = {"kind": "keda", "targets": all_targets}
    gateway = {"autoscaling": {"kind": "keda"}}
    objects = rendered(
        gateway=gateway,
        workers={"autoscaling": scaling},
        autoscaling=PROMETHEUS,
        monitoring={"scrape": True},
    )
    (monitor,) = of_kind(objects, "PodMonitor").values()
    given = {re.sub(r"\W", "_", label) for label in monitor["spec"]["podTargetLabels"]}
    queries = []
    for found in of_kind(objects, "ScaledObject").values():
        queries += [trigger["metadata"]["query"] for trigger in found["spec"]["triggers"]]
    asked = {name for query in queries for name in re.findall(r"([\w:]+)\{", query)}
    assert len(asked) == 6 and asked <= exported()
    labels = {label for query in queries for label in re.findall(r"(\w+)=\"", query)}
    assert labels - {"namespace"} <= given
    assert all('namespace="serving"' in query for query in queries)


@pytest.mark.parametrize(
    ("role", "signals"),
    [
        ("prefill", ["router_queue_length", "requests_waiting", "ttft"]),
        ("decode", ["router_queue_length", "requests_waiting", "kv_cache", "inter_token"]),
        ("colocated", ["router_queue", "requests_waiting", "kv_cache", "inter_token", "ttft"]),
    ],
)
def test_each_role_is_scaled_by_what_it_is_short_of(role: str, signals: list[str]) -> None:
    scaling = {"kind": "keda", "targets": {"ttftSeconds": 1, "interTokenSeconds": 0.05}}
    pools = {"prefill": None, "decode": None, "pool": {"role": role, "autoscaling": scaling}}
    (found,) = of_kind(rendered(pools=pools, autoscaling=PROMETHEUS), "ScaledObject").values()
    queries = [trigger["metadata"]["query"] for trigger in found["spec"]["triggers"]]
    assert len(queries) == len(signals)
    assert all(signal in query for signal, query in zip(signals, queries, strict=True))


def test_a_scaled_pool_has_no_number_of_its_own() -> None:
    """Each upgrade would set it back."""
    scaling = {"kind": "hpa", "minReplicas": 2, "maxReplicas": 5}
    objects = rendered(pools={"decode": {"autoscaling": scaling}})
    assert "replicas" not in owner(objects, "decode")["spec"]
    assert owner(objects, "prefill")["spec"]["replicas"] == 1
    found = of_kind(objects, "HorizontalPodAutoscaler")["decode"]["spec"]
    assert found["scaleTargetRef"]["name"] == "demo-decode"
    assert (found["minReplicas"], found["maxReplicas"]) == (2, 5)
    targets = {
        one["pods"]["metric"]["name"]: one["pods"]["target"]["averageValue"]
        for one in found["metrics"]
        if one["type"] == "Pods"
    }
    assert targets == {"vllm_num_requests_waiting": "4", "vllm_kv_cache_usage_perc": "800m"}


def test_scalers_know_which_kind_they_scale() -> None:
    pools = {"decode": {"autoscaling": {"kind": "hpa"}, "stableNames": True}}
    found = of_kind(rendered(pools=pools), "HorizontalPodAutoscaler")["decode"]
    assert found["spec"]["scaleTargetRef"]["kind"] == "StatefulSet"


# --- monitoring ---


def test_monitors_find_every_service_by_ports_that_it_has() -> None:
    pools = {"pair": {"role": "colocated"}}
    objects = rendered(monitoring={"scrape": True, "labels": {"release": "p"}}, pools=pools)
    (pods,) = of_kind(objects, "PodMonitor").values()
    asked = {endpoint["port"] for endpoint in pods["spec"]["podMetricsEndpoints"]}
    for component in ("router", "prefill", "decode", "pair"):
        assert selects(pods["spec"]["selector"], labels_of(objects, component))
        for found in pod(objects, component)["containers"]:
            assert asked & {port["name"] for port in found["ports"]}
    (gateways,) = of_kind(objects, "ServiceMonitor").values()
    service = of_kind(objects, "Service")["gateway"]
    assert selects(gateways["spec"]["selector"], service["metadata"]["labels"])
    assert pods["metadata"]["labels"]["release"] == "p"


def test_each_process_of_a_gateway_is_scraped_at_a_port_of_its_own() -> None:
    objects = rendered(monitoring={"scrape": True}, gateway={"processes": 3})
    (pods,) = of_kind(objects, "PodMonitor").values()
    assert selects(pods["spec"]["selector"], labels_of(objects, "gateway"))
    assert not of_kind(objects, "ServiceMonitor")  # it would meet one of them, and another later
    asked = {endpoint["port"] for endpoint in pods["spec"]["podMetricsEndpoints"]}
    found = container(objects, "gateway")
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    assert ports.keys() - asked == {"http", "grpc"} and len(ports) == 5
    settings = environment(found)
    assert settings["PACELINE_GATEWAY_PROCESSES"] == "3"
    first = int(settings["PACELINE_GATEWAY_PROBE_PORT"])
    assert [ports[f"probes-{i}"] for i in range(3)] == [first, first + 1, first + 2]
    (_, scrape) = of_kind(objects, "NetworkPolicy")["gateway"]["spec"]["ingress"]
    assert scrape["ports"] == [{"port": first, "endPort": first + 2}]


@pytest.fixture
def chart_with_files(tmp_path: Path) -> Path:
    """The chart with an alert and a dashboard, whatever it holds today."""
    path = tmp_path / "paceline"
    shutil.copytree(chart_objects.CHART, path, ignore=shutil.ignore_patterns("files"))
    (path / "files" / "dashboards").mkdir(parents=True)
    rule = {"alert": "A", "expr": "up == 0", "annotations": {"summary": "{{ $labels.pod }}"}}
    alerts = {"groups": [{"name": "g", "rules": [rule]}]}
    (path / "files" / "alerts.yaml").write_text(yaml.safe_dump(alerts))
    dashboard = {"title": "{{model}}", "panels": [1]}
    (path / "files" / "dashboards" / "kv_transfer.json").write_text(json.dumps(dashboard))
    return path


def test_alerts_and_dashboards_pass_unchanged(chart_with_files: Path) -> None:
    """Grafana and Prometheus have braces of their own."""
    monitoring = {"rules": True, "dashboards": True}
    objects = chart_objects.render({"monitoring": monitoring}, chart_with_files)
    (rule,) = [item for item in objects if item["kind"] == "PrometheusRule"]
    alerts = (chart_with_files / "files" / "alerts.yaml").read_text()
    assert rule["spec"] == yaml.safe_load(alerts)
    (dashboard,) = [item for item in objects if "grafana_dashboard" in str(item)]
    assert dashboard["metadata"]["name"] == "demo-dashboard-kv-transfer"
    assert json.loads(dashboard["data"]["kv_transfer.json"])["title"] == "{{model}}"
    assert not chart_objects.problems(objects, ["1.28.0"])


def test_a_chart_without_alerts_and_dashboards_renders(chart_with_files: Path) -> None:
    shutil.rmtree(chart_with_files / "files")
    monitoring = {"rules": True, "dashboards": True}
    objects = chart_objects.render({"monitoring": monitoring}, chart_with_files)
    kinds = {item["kind"] for item in objects}
    assert "PrometheusRule" not in kinds and "ConfigMap" not in kinds
