"""Parts of a rendered chart, by the names that Kubernetes gives them."""

import functools
import json
import re
from typing import Any

from benchmarks import chart_objects
from benchmarks.chart_objects import Object, Values
from paceline.cli.rebalance import RebalanceConfig
from paceline.core.config import Config
from paceline.gateway.config import GatewayConfig
from paceline.router.config import RouterConfig
from paceline.worker.config import WorkerConfig

CONFIGS: dict[str, type[Config]] = {
    "gateway": GatewayConfig,
    "router": RouterConfig,
    "rebalance": RebalanceConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
}
SECRET = "0123456789abcdef"  # of every key that an environment takes from a Secret


def rendered(**values: Any) -> list[Object]:
    """Objects of the chart with these values; not to be changed."""
    return _rendered(json.dumps(values, sort_keys=True))


@functools.lru_cache(maxsize=64)
def _rendered(text: str) -> list[Object]:
    values: Values = json.loads(text)
    return chart_objects.render(values)


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    """Name without the release's → object."""
    prefix = f"{chart_objects.RELEASE}-"
    found = [item for item in objects if item["kind"] == kind]
    return {item["metadata"]["name"].removeprefix(prefix): item for item in found}


def owner(objects: list[Object], component: str) -> Object:
    both = of_kind(objects, "Deployment") | of_kind(objects, "StatefulSet")
    return both[component]


def pod(objects: list[Object], component: str) -> Object:
    spec: Object = owner(objects, component)["spec"]["template"]["spec"]
    return spec


def container(objects: list[Object], component: str, name: str = "") -> Object:
    containers: list[Object] = pod(objects, component)["containers"]
    (found,) = [item for item in containers if not name or item["name"] == name]
    return found


def environment(found: Object) -> dict[str, str]:
    """Variables of a container as its process sees them."""
    variables: dict[str, str] = {}
    for item in found.get("env", ()):
        if "value" in item:
            known = r"\$\((\w+)\)"
            value = re.sub(known, lambda match: variables[match[1]], item["value"])
        elif "secretKeyRef" in item["valueFrom"]:
            value = SECRET
        else:
            path = item["valueFrom"]["fieldRef"]["fieldPath"]
            value = {"metadata.name": "the-pod", "status.podIP": "10.0.0.7"}[path]
        variables[item["name"]] = value
    return variables


def mounts(found: Object) -> dict[str, Object]:
    return {mount["mountPath"]: mount for mount in found["volumeMounts"]}


def volumes(found: Object) -> dict[str, Object]:
    return {volume["name"]: volume for volume in found["volumes"]}
