"""The Helm chart, rendered by Helm, checked against Kubernetes' schemas and our configuration."""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from paceline.gateway.config import GatewayConfig
from paceline.router.config import RouterConfig
from paceline.worker.config import WorkerConfig

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "paceline"
README = (CHART / "README.md").read_text()
SERVICES = ("gateway", "router", "prefill", "decode")
CONFIGS = {
    "gateway": GatewayConfig,
    "router": RouterConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
}
Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]


@pytest.fixture(scope="module")
def render() -> Render:
    chart = helm.Chart.load(str(CHART))

    def rendered(**values: Any) -> list[Manifest]:
        chart.validate_schema(chart.merge_values(values))
        files = chart.render(values, name="demo", namespace="serving")
        texts = [text for name, text in files.items() if name.endswith(".yaml")]
        return [part for text in texts for part in yaml.safe_load_all(text) if part]

    return rendered


def deployment(manifests: list[Manifest], component: str) -> Manifest:
    (found,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == "Deployment" and manifest["metadata"]["name"] == f"demo-{component}"
    )
    return found


def pod(manifests: list[Manifest], component: str) -> Manifest:
    spec: Manifest = deployment(manifests, component)["spec"]["template"]["spec"]
    return spec


def container(manifests: list[Manifest], component: str) -> Manifest:
    (only,) = pod(manifests, component)["containers"]
    found: Manifest = only
    return found


def environment(manifests: list[Manifest], component: str) -> dict[str, Any]:
    return {item["name"]: item.get("value") for item in container(manifests, component)["env"]}


def mib(quantity: str) -> int:
    assert quantity.endswith("Mi")
    return int(quantity[:-2])


def test_helm_finds_nothing_to_complain_about() -> None:
    report = helm.lint(str(CHART), strict=True)
    assert not [message for message in report["messages"] if "icon" not in str(message)]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"redis": {"url": "redis://elsewhere:6379"}, "secret": {"existing": "ours"}},
        {"prefill": {"gpus": 2, "tolerations": [{"operator": "Exists"}]}},
        {"router": {"settings": {"queue_limit": 8}}, "model": {"name": "demo"}},
    ],
)
def test_every_manifest_is_valid_for_kubernetes(
    render: Render, values: Manifest, version: str
) -> None:
    for manifest in render(**values):
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("service", SERVICES)
def test_every_variable_is_a_setting_of_its_service(render: Render, service: str) -> None:
    config = CONFIGS[service]
    known = {config.env_prefix + field.name.upper() for field in dataclasses.fields(config)}
    given = environment(render(model={"name": "demo"}), service)
    unknown = {name for name in given if name.startswith("PACELINE_")} - known
    assert not unknown
    assert config.env_prefix + "SECRET" in given


def test_settings_of_the_values_reach_the_service_and_win(render: Render) -> None:
    manifests = render(
        router={"settings": {"queue_limit": 8, "stall_after_s": 2.5}},
        decode={"settings": {"pool_mib": 77}},
        gateway={"settings": {"max_body_bytes": 2097152}},
    )
    assert environment(manifests, "gateway")["PACELINE_GATEWAY_MAX_BODY_BYTES"] == "2097152"
    assert environment(manifests, "router")["PACELINE_ROUTER_STALL_AFTER_S"] == "2.5"
    assert environment(manifests, "router")["PACELINE_ROUTER_QUEUE_LIMIT"] == "8"
    assert environment(manifests, "decode")["PACELINE_WORKER_POOL_MIB"] == "77"
    assert environment(manifests, "prefill")["PACELINE_WORKER_POOL_MIB"] == "2048"


@pytest.mark.parametrize("service", SERVICES)
def test_aibrix_772_a_pod_is_not_killed_while_its_model_loads(render: Render, service: str) -> None:
    """https://github.com/vllm-project/aibrix/issues/772: probes killed a pod that was loading.

    Kubernetes begins liveness checks only when the startup probe has passed.
    """
    found = container(render(decode={"loadSeconds": 1203}, prefill={"loadSeconds": 1203}), service)
    startup = found["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 1203
    assert found["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert found["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_vllm_37982_workers_get_shared_memory_that_their_limit_counts(
    render: Render, role: str
) -> None:
    """https://github.com/vllm-project/vllm/issues/37982: 64 MB of /dev/shm, fixed."""
    values = {"memoryMib": 1000, "poolMib": 300, "shmMib": 500}
    manifests = render(**{role: values})
    volumes = {volume["name"]: volume for volume in pod(manifests, role)["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "500Mi"}
    mounts = {m["mountPath"]: m["name"] for m in container(manifests, role)["volumeMounts"]}
    assert mounts["/dev/shm"] == "shm"
    assert mib(container(manifests, role)["resources"]["limits"]["memory"]) == 1800


@pytest.mark.parametrize("service", SERVICES)
def test_kserve_5496_the_grace_period_covers_the_drain(render: Render, service: str) -> None:
    """https://github.com/kserve/kserve/pull/5496: SIGTERM aborted running requests."""
    manifests = render(**{service: {"drainSeconds": 90}})
    drain = [v for k, v in environment(manifests, service).items() if k.endswith("DRAIN_TIMEOUT_S")]
    assert drain == ["90"]
    pre_stop_s = container(manifests, service)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod(manifests, service)["terminationGracePeriodSeconds"] > 90 + pre_stop_s


@pytest.mark.parametrize("service", [*SERVICES, "redis"])
def test_pods_run_without_privileges(render: Render, service: str) -> None:
    manifests = render()
    assert pod(manifests, service)["securityContext"]["runAsNonRoot"] is True
    assert pod(manifests, service)["automountServiceAccountToken"] is False
    assert container(manifests, service)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container(manifests, service)["resources"]["limits"]["memory"]


def test_gpus_make_workers_run_on_cuda(render: Render) -> None:
    manifests = render(decode={"gpus": 1})
    assert container(manifests, "decode")["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert environment(manifests, "decode")["PACELINE_WORKER_DEVICE"] == "cuda"
    assert environment(manifests, "prefill")["PACELINE_WORKER_DEVICE"] == "cpu"


def test_names_fit_together(render: Render) -> None:
    manifests = render()
    services = {m["metadata"]["name"]: m for m in manifests if m["kind"] == "Service"}
    assert environment(manifests, "gateway")["PACELINE_GATEWAY_ROUTER"] == "demo-router:9100"
    assert services.keys() == {"demo-router", "demo-gateway", "demo-redis"}
    for name, service in services.items():
        component = name.removeprefix("demo-")
        labels = deployment(manifests, component)["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {port["name"] for port in container(manifests, component)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@pytest.mark.parametrize(
    "values",
    [
        {"gateway": {"replicaz": 1}},
        {"prefill": {"replicas": -1}},
        {"decode": {"loadSeconds": 0}},
        {"model": {"path": "relative"}},
        {"redis": {"url": "http://elsewhere"}},
        {"router": {"settings": {"Queue-Limit": 1}}},
    ],
)
def test_wrong_values_are_refused(render: Render, values: Manifest) -> None:
    with pytest.raises(helm.HelmValuesError):
        render(**values)


def test_what_workers_compile_and_cache_has_a_place(render: Render) -> None:
    manifests = render()
    for role in ("prefill", "decode"):
        mounts = {m["mountPath"]: m for m in container(manifests, role)["volumeMounts"]}
        assert "readOnly" not in mounts[environment(manifests, role)["HOME"]]


def test_the_page_names_every_value_and_no_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    known = set()
    for section, fields in values.items():
        for name in fields:
            known.add(f"{section}.{name}")
    table = [line for line in README.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`([\w.]+)`", line.split("|")[1])}
    expanded = set()
    for name in named:
        section, _, field = name.partition(".")
        sections = {"SERVICE": SERVICES, "WORKER": ("prefill", "decode")}.get(section, (section,))
        expanded |= {f"{one}.{field}" for one in sections}
    assert expanded == known


def test_the_install_command_of_the_page_renders(render: Render) -> None:
    command = README[README.index("helm install") :].split("\n\n")[0].replace("\\\n", " ")
    _, _, release, chart, *options = shlex.split(command)
    assert (CHART.parents[2] / chart) == CHART and release == "paceline"
    values: Manifest = {}
    for flag, given in itertools.pairwise(options):
        if flag == "--set":
            path, _, value = given.partition("=")
            *parents, last = path.split(".")
            place = values
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = value
    manifests = render(**values)
    assert environment(manifests, "decode")["PACELINE_WORKER_MODEL"] == values["model"]["path"]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.30", strict=True)
    assert "service/paceline-gateway 8000" in README
