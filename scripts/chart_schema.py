"""Writes values.schema.json of the Helm chart: which values there are, and what they may be.

What `settings` may hold comes from the services' configuration, so that the chart refuses a setting
that a service does not know, and those that the chart itself decides. `--check` only compares.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paceline.cli.rebalance import RebalanceConfig
from paceline.core.config import Config, settings_of
from paceline.gateway.config import GatewayConfig
from paceline.gateway.usage import MAX_PROCESSES
from paceline.router.config import RouterConfig
from paceline.worker.config import WorkerConfig

SCHEMA = Path(__file__).parents[1] / "deploy" / "helm" / "paceline" / "values.schema.json"
# Settings that follow from other values; the templates give them.
OWNED = {
    "gateway": {"host", "port", "grpc_port", "probe_port", "processes", "router"}
    | {"model", "model_name", "api_keys"},
    "router": {"host", "port", "probe_port"},
    "rebalance": {"host", "probe_port", "router"},
    "worker": {"worker_id", "host", "port", "probe_port", "advertise_host", "model", "model_name"}
    | {"device", "pool_mib", "num_threads", "transports", "tiers", "run_dir"},
}
OWNED_BY_ALL = {"secret", "redis_url", "drain_timeout_s"}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number"}
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
MAP: Schema = {"type": "object"}
LIST: Schema = {"type": "array"}
TEXTS: Schema = {"type": "array", "items": TEXT}
TEXT_MAP: Schema = {"type": "object", "additionalProperties": TEXT}
MIB: Schema = {"type": "integer", "minimum": 16, "maximum": 1 << 30}
SECONDS: Schema = {"type": "integer", "minimum": 1, "maximum": 86400}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 10000}
TARGET: Schema = {"type": "number", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
CPU: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+|m)?$"}
NAME: Schema = {"type": "string", "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"}
ROLLING: Schema = {"type": ["integer", "string"], "pattern": "^[0-9]+%$", "minimum": 0}
MODEL_PATH: Schema = {"type": "string", "pattern": "^/models(/|$)"}
DIGEST: Schema = {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}
ADDRESS: Schema = {"type": "string", "pattern": "^(https?://.+)?$"}


def choice(*values: str) -> Schema:
    return {"enum": list(values)}


def closed(**properties: Schema) -> Schema:
    """An object with these properties and no other."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def named(pattern: str, kind: Schema) -> Schema:
    """An object whose keys match."""
    return {"type": "object", "additionalProperties": False, "patternProperties": {pattern: kind}}


def reference(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def settings(service: str, config: type[Config]) -> Schema:
    """What `paceline SERVICE --help` lists, less what the chart decides."""
    properties = {}
    for item in settings_of(config):
        is_shared = not item.variable.startswith(config.env_prefix)  # as those of tls are
        if not is_shared and item.name not in OWNED[service] | OWNED_BY_ALL:
            kind = JSON_TYPES.get(item.kind, "string")
            properties[item.name] = {"type": kind, "description": item.help}
    return closed(**properties)


def autoscaling(*targets: str) -> Schema:
    return closed(
        kind=choice("none", "hpa", "keda"),
        minReplicas=COUNT | {"minimum": 1},
        maxReplicas=COUNT | {"minimum": 1},
        downSeconds=COUNT | {"maximum": 3600},
        targets=closed(**dict.fromkeys(targets, TARGET)),
    )


def placement() -> dict[str, Schema]:
    return {
        "podAnnotations": TEXT_MAP,
        "nodeSelector": TEXT_MAP,
        "tolerations": LIST,
        "affinity": MAP,
        "topologySpread": reference("topologySpread"),
        "priorityClassName": NAME,
    }


def topology_spread() -> Schema:
    constraint = closed(
        maxSkew={"type": "integer", "minimum": 1},
        topologyKey=TEXT,
        whenUnsatisfiable=choice("DoNotSchedule", "ScheduleAnyway"),
        minDomains={"type": "integer", "minimum": 1},
    )
    return {"type": "array", "items": constraint}


def service(name: str, config: type[Config]) -> dict[str, Schema]:
    """What gateway, router and workers have in common."""
    return {
        "replicas": COUNT,
        "cpu": CPU,
        "memoryMib": MIB,
        "drainSeconds": SECONDS,
        "settings": settings(name, config) if name != "worker" else reference("workerSettings"),
        **placement(),
    }


def tiers() -> Schema:
    """As `kv_transfer/tiers/config.py` reads them."""
    mib = {"type": "integer", "minimum": 1, "maximum": 1 << 30}
    name = {"type": "string", "pattern": "^[a-z0-9_-]{1,32}$"}
    segment = mib | {"maximum": 1024}
    kinds: dict[str, dict[str, Schema]] = {
        "host": {"eviction": choice("lru", "arc")},
        "file": {"path": TEXT, "segment_mib": segment},
        "object": {
            "bucket": TEXT | {"minLength": 3},
            "prefix": TEXT,
            "endpoint": ADDRESS,
            "region": TEXT,
            "segment_mib": segment,
        },
    }
    required = {"host": [], "file": ["path"], "object": ["bucket"]}
    forms = [
        {
            "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
            "then": closed(kind=TEXT, name=name, capacity_mib=mib, **own)
            | {"required": ["capacity_mib", *required[kind]]},
        }
        for kind, own in kinds.items()
    ]
    kind = {"properties": {"kind": choice(*kinds)}, "required": ["kind"]}
    return {"type": "array", "maxItems": 8, "items": {**MAP, **kind, "allOf": forms}}


def worker() -> dict[str, Schema]:
    libraries = "^(UCX|NIXL|NCCL|CUDA|OMP|AWS|RAPIDS)_[A-Z0-9_]+$"
    return {
        **service("worker", WorkerConfig),
        "model": closed(name=TEXT, path=MODEL_PATH),
        "threads": COUNT,
        "poolMib": MIB,
        "shmMib": MIB,
        "device": {"type": "string", "pattern": "^(cpu|cuda(:[0-9]{1,3})?)?$"},
        "gpus": {"type": "integer", "enum": [0, 1]},
        "gpuResource": TEXT | {"minLength": 1},
        "gpuClaimTemplate": NAME,
        "runtimeClassName": NAME,
        "rdma": closed(resource=TEXT, count=COUNT | {"minimum": 1}, networks=TEXT),
        "transports": {"type": "array", "minItems": 1, "items": transports()},
        "env": named(libraries, {"type": ["string", "number"]}),
        "tiers": reference("tiers"),
        "tierVolume": MAP | {"maxProperties": 1},
        "tierSecret": NAME,
        "group": closed(prefill=COUNT | {"minimum": 1, "maximum": 63}, topology=TEXT),
        "stableNames": FLAG,
        "loadSeconds": SECONDS,
        "autoscaling": reference("workerAutoscaling"),
        "strategy": closed(maxSurge=ROLLING, maxUnavailable=ROLLING),
    }


def transports() -> Schema:
    return choice("auto", "multi", "cuda_ipc", "shm", "nixl", "ucx", "tcp")


def pools() -> Schema:
    ours = worker()
    of_pods = {"replicas", "autoscaling", "strategy", "stableNames", "rdma", "drainSeconds"}
    of_pods |= {"gpuClaimTemplate", "runtimeClassName", "group", *placement()}
    side = closed(**{name: kind for name, kind in ours.items() if name not in of_pods})
    roles = choice("prefill", "decode", "colocated", "group")
    pool = closed(role=roles, prefill=side, decode=side, **ours)
    return named("^[a-z]([-a-z0-9]{0,18}[a-z0-9])?$", pool | {"required": ["role"]})


def model() -> Schema:
    fetch = closed(
        huggingFace=TEXT | {"pattern": "^([^/ ]+/[^/ ]+)?$"},
        revision=TEXT | {"minLength": 1},
        tokenSecret=NAME,
        image=TEXT,
        command=TEXTS,
        env=TEXT_MAP,
        secret=NAME,
        sha256=named(".", TEXT | {"pattern": "^[0-9a-f]{64}$"}),
    )
    return closed(name=TEXT, path=MODEL_PATH, volume=MAP | {"maxProperties": 1}, fetch=fetch)


def tls() -> Schema:
    hours = TEXT | {"pattern": "^([0-9]+(h|m|s))+$"}
    return closed(
        existing=NAME,
        issuer=closed(name=NAME, kind=TEXT | {"minLength": 1}, group=TEXT | {"minLength": 1}),
        duration=hours,
        renewBefore=hours,
        name=NAME | {"minLength": 1},
        required=FLAG,
        fabricEncrypted=FLAG,
    )


def redis() -> Schema:
    external = closed(
        host=TEXT | {"pattern": r"^[A-Za-z0-9.:\[\]-]*$"},
        port=PORT,
        database=COUNT,
        username=TEXT,
        passwordSecret=NAME,
        tls=FLAG,
        caSecret=NAME,
    )
    return closed(
        image=TEXT | {"minLength": 1},
        cpu=CPU,
        memoryMib=MIB,
        nodeSelector=TEXT_MAP,
        tolerations=LIST,
        external=external,
    )


def gateway() -> Schema:
    ingress = closed(enabled=FLAG, className=NAME, annotations=TEXT_MAP, host=TEXT, tlsSecret=NAME)
    is_on = {"properties": {"enabled": {"const": True}}, "required": ["enabled"]}
    needs_host = {"properties": {"host": {"minLength": 1}}, "required": ["host"]}
    ingress |= {"if": is_on, "then": needs_host}
    route = closed(enabled=FLAG, parentRefs=LIST, hostnames=TEXTS)
    needs_parents = {"properties": {"parentRefs": {"minItems": 1}}, "required": ["parentRefs"]}
    route |= {"if": is_on, "then": needs_parents}
    kinds = choice("ClusterIP", "LoadBalancer", "NodePort")
    return closed(
        **service("gateway", GatewayConfig),
        processes=COUNT | {"minimum": 1, "maximum": MAX_PROCESSES},
        apiKeysSecret=NAME,
        service=closed(type=kinds, annotations=TEXT_MAP),
        ingress=ingress,
        httpRoute=route,
        autoscaling=autoscaling("running"),
        strategy=closed(maxSurge=ROLLING, maxUnavailable=ROLLING),
    )


def rebalance() -> Schema:
    ours = settings("rebalance", RebalanceConfig)
    return closed(enabled=FLAG, cpu=CPU, memoryMib=MIB, settings=ours, **placement())


def values_schema() -> Schema:
    router = service("router", RouterConfig) | {"replicas": COUNT | {"minimum": 1, "maximum": 3}}
    image = closed(
        repository=TEXT | {"minLength": 1},
        tag=TEXT,
        digests=closed(front=DIGEST, cpu=DIGEST, cuda=DIGEST),
        pullPolicy=choice("Always", "IfNotPresent", "Never"),
        pullSecrets=TEXTS,
    )
    monitoring = closed(
        labels=TEXT_MAP, scrape=FLAG, intervalSeconds=SECONDS, rules=FLAG, dashboards=FLAG
    )
    network = closed(enabled=FLAG, clients=LIST, monitoring=LIST, egress=LIST, workerEgress=LIST)
    properties = {
        "global": MAP,
        "image": image,
        "model": model(),
        "secret": closed(existing=NAME),
        "tls": tls(),
        "redis": redis(),
        "gateway": gateway(),
        "router": closed(**router),
        "rebalance": rebalance(),
        "workers": closed(**worker()),
        "pools": pools(),
        "serviceAccount": closed(create=FLAG, name=NAME, annotations=TEXT_MAP),
        "podDisruptionBudgets": closed(enabled=FLAG),
        "networkPolicy": network,
        "autoscaling": closed(prometheus=ADDRESS),
        "monitoring": monitoring,
    }
    definitions = {
        "workerSettings": settings("worker", WorkerConfig),
        "workerAutoscaling": autoscaling(
            "queue", "waiting", "kvUsage", "ttftSeconds", "interTokenSeconds"
        ),
        "tiers": tiers(),
        "topologySpread": topology_spread(),
    }
    draft = "http://json-schema.org/draft-07/schema#"
    return {"$schema": draft, "definitions": definitions, **closed(**properties)}


def text() -> str:
    return json.dumps(values_schema(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if it would change")
    if not parser.parse_args().check:
        SCHEMA.write_text(text())
    elif SCHEMA.read_text() != text():
        print(f"{SCHEMA.name} is out of date: run scripts/chart_schema.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
