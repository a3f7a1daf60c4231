"""Pods of the chart: what they run, with what settings, limits, probes and time to end."""

import secrets
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.connection import SSLConnection, parse_url

from benchmarks import chart_objects
from benchmarks.chart_objects import EXAMPLES, Object, Values
from paceline.core.config import parse, settings_of
from paceline.gateway.config import RequestLimits
from paceline.kv_transfer.tiers.config import load_tiers
from tests.support.certificates import Mount
from tests.support.chart import (
    CONFIGS,
    container,
    environment,
    mounts,
    of_kind,
    owner,
    pod,
    rendered,
    volumes,
)

SERVICES = ("gateway", "router", "prefill", "decode")
COLOCATED = {"prefill": None, "decode": None, "pair": {"role": "colocated"}}
# Read by libraries and by the kubelet, not by our configuration.
FOREIGN = {"POD_NAME", "HOME", "REDIS_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


def mib(quantity: str) -> int:
    assert quantity.endswith("Mi")
    return int(quantity[:-2])


def configuration(found: Object, objects: list[Object], folder: Path) -> Any:
    """What the service makes of its container's environment; files are those of `objects`."""
    service = found["args"][0]
    variables = environment(found)
    (folder / "tokenizer.json").touch()
    for name in variables:
        if name.endswith("_MODEL"):
            variables[name] = str(folder)
    if "PACELINE_WORKER_TIERS" in variables:
        name = Path(variables["PACELINE_WORKER_TIERS"]).name
        maps = [item["data"] for item in objects if item["kind"] == "ConfigMap"]
        (folder / name).write_text(next(data[name] for data in maps if name in data))
        variables["PACELINE_WORKER_TIERS"] = str(folder / name)
    if "PACELINE_TLS_CA" in variables:
        mounted = Mount(folder / secrets.token_hex(4))
        for name, path in mounted.environment.items():
            assert Path(variables[name]).name == Path(path).name
            variables[name] = path
    return parse(CONFIGS[service], found["args"][1:], variables, service)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_services_accept_all_that_they_are_given(path: Path, tmp_path: Path) -> None:
    """Each variable is one that its service reads, with a value that it takes."""
    values = chart_objects.example(path)
    objects = chart_objects.render(values)
    libraries = set(values.get("workers", {}).get("env", {}))
    services = 0
    for _, template in chart_objects.pod_templates(objects):
        for found in template["spec"]["containers"]:
            if found["name"] == "redis":
                continue
            config = configuration(found, objects, tmp_path)
            ours = {item.variable for item in settings_of(type(config))}
            assert environment(found).keys() - FOREIGN - libraries <= ours
            services += 1
    assert services >= 4


def test_settings_of_the_values_reach_the_service_unrounded() -> None:
    objects = rendered(
        router={"settings": {"queue_limit": 8, "stall_after_s": 2.5}},
        gateway={"settings": {"max_body_bytes": 2097152}},
        workers={"settings": {"max_running": 7}},
        pools={"decode": {"settings": {"max_running": 9}}},
    )
    gateway, router, prefill, decode = (environment(container(objects, s)) for s in SERVICES)
    assert gateway["PACELINE_GATEWAY_MAX_BODY_BYTES"] == "2097152"
    assert router["PACELINE_ROUTER_STALL_AFTER_S"] == "2.5"
    assert router["PACELINE_ROUTER_QUEUE_LIMIT"] == "8"
    assert prefill["PACELINE_WORKER_MAX_RUNNING"] == "7"
    assert decode["PACELINE_WORKER_MAX_RUNNING"] == "9"


def test_a_pool_may_undo_what_all_have_with_zero_and_empty() -> None:
    workers = {"replicas": 3, "gpus": 1, "runtimeClassName": "nvidia"}
    pools = {"decode": {"replicas": 0, "gpus": 0, "runtimeClassName": ""}}
    objects = rendered(workers=workers, pools=pools)
    assert owner(objects, "prefill")["spec"]["replicas"] == 3
    assert owner(objects, "decode")["spec"]["replicas"] == 0
    assert "runtimeClassName" not in pod(objects, "decode")
    assert environment(container(objects, "decode"))["PACELINE_WORKER_DEVICE"] == "cpu"
    assert environment(container(objects, "prefill"))["PACELINE_WORKER_DEVICE"] == "cuda"


def test_pools_are_as_many_as_are_named() -> None:
    pools = {
        "prefill": None,
        "long": {"role": "prefill", "cpu": "2500m", "model": {"path": "/models/long"}},
        "short": {"role": "prefill", "transports": ["shm", "tcp"], "threads": 5},
    }
    objects = rendered(pools=pools)
    assert of_kind(objects, "Deployment").keys() == {
        *("gateway", "router", "redis"),
        *("long", "short", "decode"),
    }
    long, short = (environment(container(objects, name)) for name in ("long", "short"))
    assert container(objects, "long")["args"] == ["prefill"]
    assert long["PACELINE_WORKER_NUM_THREADS"] == "3"
    assert long["PACELINE_WORKER_MODEL"] == "/models/long"
    assert short["PACELINE_WORKER_NUM_THREADS"] == "5"
    assert short["PACELINE_WORKER_TRANSPORTS"] == "shm,tcp"


def test_the_image_is_the_smallest_that_can() -> None:
    digest = "sha256:" + "0" * 64
    objects = rendered(
        image={"repository": "r/p", "tag": "7", "digests": {"cuda": digest}},
        pools={"decode": {"gpus": 1}},
    )
    images = {service: container(objects, service)["image"] for service in SERVICES}
    assert images == {
        "gateway": "r/p:7-front",
        "router": "r/p:7-front",
        "prefill": "r/p:7-cpu",
        "decode": f"r/p@{digest}",
    }


# --- starting and ending ---


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_aibrix_772_a_pod_is_not_killed_while_its_model_loads(role: str) -> None:
    """https://github.com/vllm-project/aibrix/issues/772: probes killed a pod that was loading.

    Kubernetes begins liveness checks only when the startup probe has passed, and none before init
    containers have ended: the time that a download takes does not count.
    """
    values = {
        "workers": {"loadSeconds": 1203},
        "model": {"volume": {"emptyDir": {}}, "fetch": {"huggingFace": "a/b"}},
    }
    found = container(rendered(**values), role)
    startup = found["startupProbe"]
    assert startup["httpGet"]["path"] == "/readyz"  # not before the model is loaded
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 1203
    assert found["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert found["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert "fetch" in [item["name"] for item in pod(rendered(**values), role)["initContainers"]]


@pytest.mark.parametrize("service", ["gateway", "router"])
def test_front_doors_do_not_restart_for_want_of_workers(service: str) -> None:
    found = container(rendered(), service)
    assert found["startupProbe"]["httpGet"]["path"] == "/livez"
    assert found["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert found["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("service", SERVICES)
def test_kserve_5496_the_grace_period_covers_the_drain(service: str) -> None:
    """https://github.com/kserve/kserve/pull/5496: SIGTERM aborted running requests."""
    drain = {"drainSeconds": 90}
    objects = rendered(gateway=drain, router=drain, workers=drain)
    found = container(objects, service)
    given = [v for k, v in environment(found).items() if k.endswith("DRAIN_TIMEOUT_S")]
    assert given == ["90"]
    pre_stop_s = 0
    if "lifecycle" in found:
        command, seconds = found["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        pre_stop_s = int(seconds)
    assert pod(objects, service)["terminationGracePeriodSeconds"] >= 90 + pre_stop_s + 10


def test_kserve_5496_endpoints_forget_a_pod_before_it_drains() -> None:
    """What a Service leads to waits before SIGTERM; workers are not reached by one."""
    objects = rendered()
    reached = {"gateway", "router"}
    assert {s for s in SERVICES if "lifecycle" in container(objects, s)} == reached
    assert reached <= of_kind(objects, "Service").keys()


@pytest.mark.parametrize("stable", [False, True])
def test_kserve_5496_an_old_worker_goes_when_routers_know_the_new_one(stable: bool) -> None:
    """A worker is ready before a router has found it. Seen in benchmarks.rollout: gateways without
    any decode worker became unready, and clients were turned away."""
    objects = rendered(workers={"stableNames": stable})
    assert owner(objects, "decode")["spec"]["minReadySeconds"] >= 10
    readiness = container(objects, "gateway")["readinessProbe"]
    assert readiness["failureThreshold"] * readiness["periodSeconds"] >= 10


def test_kserve_5496_no_stream_is_cut_by_a_gateway_that_drains_with_the_defaults() -> None:
    longest_s = RequestLimits().request_timeout_s
    given = environment(container(rendered(), "gateway"))["PACELINE_GATEWAY_DRAIN_TIMEOUT_S"]
    assert float(given) >= longest_s


# --- memory, devices, rights ---


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_vllm_37982_workers_get_shared_memory_that_their_limit_counts(role: str) -> None:
    """https://github.com/vllm-project/vllm/issues/37982: 64 MB of /dev/shm, fixed."""
    objects = rendered(workers={"memoryMib": 1000, "poolMib": 300, "shmMib": 500})
    shm = volumes(pod(objects, role))["shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "500Mi"}
    assert mounts(container(objects, role))["/dev/shm"]["name"] == "shm"
    assert mib(container(objects, role)["resources"]["limits"]["memory"]) == 1800


def test_the_memory_limit_counts_the_tiers_and_no_pool_of_a_device() -> None:
    tiers = [
        {"kind": "host", "capacity_mib": 700},
        {"kind": "file", "path": "/var/cache/paceline", "capacity_mib": 9000},
    ]
    decode = {"tiers": tiers, "tierVolume": {"emptyDir": {}}}
    own = {"memoryMib": 1000, "poolMib": 300, "shmMib": 500}
    objects = rendered(workers=own, pools={"prefill": {"gpus": 1}, "decode": decode})
    limits = [container(objects, s)["resources"]["limits"] for s in ("prefill", "decode")]
    assert mib(limits[0]["memory"]) == 1500
    assert mib(limits[1]["memory"]) == 1800 + 700 + 3 * 16 + 64
    assert limits[0]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_pods_run_without_privileges(path: Path) -> None:
    """As the restricted Pod Security Standard asks, and more."""
    for _, template in chart_objects.pod_templates(
        chart_objects.render(chart_objects.example(path))
    ):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for found in [*spec["containers"], *spec.get("initContainers", ())]:
            assert found["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert found["resources"]["limits"]["memory"]


def test_what_services_write_has_a_place() -> None:
    objects = rendered(pools=COLOCATED)
    for role in ("prefill", "decode"):
        found = container(objects, "pair", role)
        home = mounts(found)[environment(found)["HOME"]]
        assert "readOnly" not in home and home["name"] == f"tmp-{role}"
        assert "emptyDir" in volumes(pod(objects, "pair"))[home["name"]]


def test_workers_of_one_pod_share_what_shm_and_cuda_ipc_need_and_nothing_else() -> None:
    """The pod's network namespace, where abstract sockets live, and its processes."""
    pools = {**COLOCATED, "pair": {"role": "colocated", "gpuClaimTemplate": "one-gpu"}}
    objects = rendered(pools=pools)
    spec = pod(objects, "pair")
    assert spec["shareProcessNamespace"] is True
    assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    first, second = spec["containers"]
    assert first["args"] == ["prefill"] and second["args"] == ["decode"]
    ids = [environment(found)["PACELINE_WORKER_WORKER_ID"] for found in (first, second)]
    assert ids == ["the-pod-prefill", "the-pod-decode"]
    ports = [port["containerPort"] for found in (first, second) for port in found["ports"]]
    assert len(set(ports)) == 4
    for found in (first, second):
        assert found["resources"]["claims"] == [{"name": "gpu"}]
        assert environment(found)["PACELINE_WORKER_DEVICE"] == "cuda"
        listens = {environment(found)["PACELINE_WORKER_PORT"]}
        listens.add(environment(found)["PACELINE_WORKER_PROBE_PORT"])
        assert listens == {str(port["containerPort"]) for port in found["ports"]}
    assert not {m["name"] for m in first["volumeMounts"] if "readOnly" not in m} & {
        m["name"] for m in second["volumeMounts"]
    }


def test_rdma_devices_and_networks_reach_the_pod() -> None:
    rdma = {"resource": "rdma/hca", "count": 2, "networks": "infra/fast"}
    objects = rendered(workers={"rdma": rdma, "env": {"UCX_NET_DEVICES": "mlx5_0:1"}})
    found = container(objects, "decode")
    assert found["resources"]["limits"]["rdma/hca"] == 2
    assert environment(found)["UCX_NET_DEVICES"] == "mlx5_0:1"
    annotations = owner(objects, "decode")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["k8s.v1.cni.cncf.io/networks"] == "infra/fast"


# --- tiers, models, keys, Redis ---


def test_tiers_are_what_the_worker_reads(tmp_path: Path) -> None:
    tiers: list[Values] = [{"kind": "host", "capacity_mib": 1048576, "eviction": "arc"}]
    objects = rendered(pools={"decode": {"tiers": tiers}})
    found = container(objects, "decode")
    path = Path(environment(found)["PACELINE_WORKER_TIERS"])
    assert str(path.parent) in mounts(found)
    (tmp_path / "t").write_text(of_kind(objects, "ConfigMap")["decode-tiers"]["data"][path.name])
    (only,) = load_tiers(tmp_path / "t")
    assert only.capacity_mib == 1048576
    assert "PACELINE_WORKER_TIERS" not in environment(container(objects, "prefill"))


def test_workers_start_anew_when_their_tiers_change() -> None:
    def annotation(mib: int) -> str:
        objects = rendered(pools={"decode": {"tiers": [{"kind": "host", "capacity_mib": mib}]}})
        found: str = owner(objects, "decode")["spec"]["template"]["metadata"]["annotations"][
            "paceline/tiers"
        ]
        return found

    assert annotation(100) != annotation(200)


def test_workers_with_stable_names_keep_volumes_of_their_own() -> None:
    claim = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {}}}
    decode = {
        "stableNames": True,
        "tierVolume": {"ephemeral": {"volumeClaimTemplate": claim}},
        "tiers": [{"kind": "file", "path": "/var/cache/paceline/kv", "capacity_mib": 100}],
    }
    objects = rendered(pools={"decode": decode})
    found = of_kind(objects, "StatefulSet")["decode"]["spec"]
    assert found["volumeClaimTemplates"][0]["metadata"]["name"] == "tier"
    assert found["serviceName"] == "demo-decode"
    assert of_kind(objects, "Service")["decode"]["spec"]["clusterIP"] == "None"
    assert mounts(container(objects, "decode"))["/var/cache/paceline"]["name"] == "tier"


def test_a_model_is_fetched_and_verified_before_anything_starts() -> None:
    sums = {"config.json": "ab" * 32, "model.safetensors": "cd" * 32}
    fetch = {"huggingFace": "a/b", "revision": "77", "sha256": sums}
    model = {"path": "/models/m", "volume": {"emptyDir": {}}, "fetch": fetch}
    objects = rendered(model=model)
    download, verify = pod(objects, "decode")["initContainers"]
    assert download["command"] == [
        *("hf", "download", "a/b", "--revision", "77", "--local-dir", "/models/m")
    ]
    assert verify["command"][0] == "sha256sum" and verify["workingDir"] == "/models/m"
    listed = of_kind(objects, "ConfigMap")["model"]["data"]
    assert listed["SHA256SUMS"].split() == [
        *(sums["config.json"], "config.json"),
        *(sums["model.safetensors"], "model.safetensors"),
    ]
    assert listed["TEXTSUMS"].split() == [sums["config.json"], "config.json"]
    assert "readOnly" not in mounts(download)["/models"]
    assert mounts(container(objects, "decode"))["/models"]["readOnly"] is True
    light, verify = pod(objects, "gateway")["initContainers"]
    assert "*.json" in light["command"]  # no weights
    assert verify["command"][-1].endswith("/TEXTSUMS")


def test_sums_of_weights_alone_keep_no_gateway_from_starting() -> None:
    """sha256sum fails where it has nothing to compare."""
    fetch = {"huggingFace": "a/b", "sha256": {"model.safetensors": "cd" * 32}}
    objects = rendered(model={"volume": {"emptyDir": {}}, "fetch": fetch})
    assert [c["name"] for c in pod(objects, "gateway")["initContainers"]] == ["fetch"]
    assert [c["name"] for c in pod(objects, "decode")["initContainers"]] == ["fetch", "verify"]


def test_another_client_can_fetch_the_model() -> None:
    command = ["aws", "s3", "sync", "s3://models/m", "/models/m"]
    fetch = {"image": "aws-cli:2", "command": command, "secret": "s3", "env": {"A": "1"}}
    objects = rendered(model={"volume": {"emptyDir": {}}, "fetch": fetch})
    (download,) = pod(objects, "prefill")["initContainers"]
    assert download["image"] == "aws-cli:2" and download["command"] == command
    assert download["envFrom"] == [{"secretRef": {"name": "s3"}}]


def test_api_keys_come_from_a_secret_whose_changes_are_followed() -> None:
    """A Secret that is mounted whole is renewed in the pod; one file of it (subPath) is not."""
    objects = rendered(gateway={"apiKeysSecret": "tenants"})
    found = container(objects, "gateway")
    path = Path(environment(found)["PACELINE_GATEWAY_API_KEYS"])
    assert "subPath" not in mounts(found)[str(path.parent)]
    assert volumes(pod(objects, "gateway"))["keys"]["secret"] == {"secretName": "tenants"}


def test_the_controller_of_roles_is_one_that_asks_all_routers(tmp_path: Path) -> None:
    settings = {"hold_s": 2.5}
    objects = rendered(router={"replicas": 2}, rebalance={"enabled": True, "settings": settings})
    deployment = owner(objects, "rebalance")["spec"]
    assert deployment["replicas"] == 1 and deployment["strategy"] == {"type": "Recreate"}
    config = configuration(container(objects, "rebalance"), objects, tmp_path)
    assert config.router == ("demo-router:9100", "demo-router-2:9100")
    assert (config.hold_s, config.host, config.probe_port) == (2.5, "0.0.0.0", 9301)
    assert not chart_objects.problems(objects, chart_objects.kubernetes_versions()[-1:])
    assert "demo-rebalance" not in {item["metadata"]["name"] for item in rendered()}


def test_gateways_know_every_router_in_the_same_order() -> None:
    objects = rendered(router={"replicas": 3})
    endpoints = environment(container(objects, "gateway"))["PACELINE_GATEWAY_ROUTER"].split(",")
    assert endpoints == ["demo-router:9100", "demo-router-2:9100", "demo-router-3:9100"]
    services = of_kind(objects, "Service")
    for endpoint in endpoints:
        name = endpoint.removeprefix("demo-").removesuffix(":9100")
        labels = owner(objects, name)["spec"]["template"]["metadata"]["labels"]
        assert services[name]["spec"]["selector"].items() <= labels.items()


def test_a_gateway_serves_all_models_where_pools_differ() -> None:
    one = rendered(model={"name": "base"})
    two = rendered(model={"name": "base"}, pools={"decode": {"model": {"name": "tuned"}}})
    names = [
        environment(container(o, "gateway")).get("PACELINE_GATEWAY_MODEL_NAME") for o in (one, two)
    ]
    assert names == ["base", None]
    assert environment(container(two, "decode"))["PACELINE_WORKER_MODEL_NAME"] == "tuned"


def test_an_external_redis_is_reached_by_tls_with_its_password() -> None:
    external = {
        "host": "redis.example",
        "username": "paceline",
        "passwordSecret": "redis",
        "tls": True,
        "caSecret": "authority",
    }
    objects = rendered(redis={"external": external})
    assert "redis" not in of_kind(objects, "Deployment")
    for service, prefix in (("router", "ROUTER"), ("decode", "WORKER")):
        found = container(objects, service)
        options = parse_url(environment(found)[f"PACELINE_{prefix}_REDIS_URL"])
        assert options["connection_class"] is SSLConnection
        assert (options["host"], options["port"], options["db"]) == ("redis.example", 6379, 0)
        assert (options["username"], options["password"]) == ("paceline", "0123456789abcdef")
        authority = Path(options["ssl_ca_certs"])
        mount = mounts(found)[str(authority.parent)]
        assert volumes(pod(objects, service))[mount["name"]]["secret"]["secretName"] == "authority"


def tls_of(objects: list[Object], service: str) -> tuple[dict[str, str], Object]:
    """Variables of TLS, and the Secret whose files they name."""
    found = container(objects, service)
    variables = {k: v for k, v in environment(found).items() if k.startswith("PACELINE_TLS_")}
    mount = mounts(found)[str(Path(variables["PACELINE_TLS_KEY"]).parent)]
    assert "subPath" not in mount and mount["readOnly"]  # renewed in the pod
    return variables, volumes(pod(objects, service))[mount["name"]]["secret"]


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_gets_the_same_certificate(service: str) -> None:
    objects = rendered(tls={"existing": "ours", "required": True, "fabricEncrypted": True})
    variables, secret = tls_of(objects, service)
    assert secret == {"secretName": "ours", "defaultMode": 0o440}
    assert variables == tls_of(objects, "router")[0]
    assert variables["PACELINE_TLS_ENCRYPTION"] == "required"
    assert variables["PACELINE_TLS_FABRIC_ENCRYPTED"] == "true"
    assert "Certificate" not in {item["kind"] for item in objects}


def test_both_workers_of_a_pod_get_the_certificate() -> None:
    objects = rendered(pools=COLOCATED, tls={"existing": "ours"})
    for role in ("prefill", "decode"):
        found = container(objects, "pair", role)
        assert environment(found)["PACELINE_TLS_ENCRYPTION"] == "auto"
        assert mounts(found)["/etc/paceline/tls"]["name"] == "tls"
    assert volumes(pod(objects, "pair"))["tls"]["secret"]["secretName"] == "ours"


def test_cert_manager_makes_the_certificate_under_the_name_that_services_expect() -> None:
    issuer = {"name": "authority", "kind": "ClusterIssuer"}
    objects = rendered(tls={"issuer": issuer, "name": "paceline.prod"})
    wanted = of_kind(objects, "Certificate")["tls"]["spec"]
    variables, secret = tls_of(objects, "decode")
    assert wanted["secretName"] == secret["secretName"] == "demo-tls"
    assert wanted["dnsNames"] == [variables["PACELINE_TLS_NAME"]] == ["paceline.prod"]
    assert wanted["issuerRef"] == {**issuer, "group": "cert-manager.io"}
    assert {"server auth", "client auth"} <= set(wanted["usages"])


def test_without_a_certificate_nothing_is_encrypted() -> None:
    for service in SERVICES:
        found = container(rendered(), service)
        assert not [name for name in environment(found) if name.startswith("PACELINE_TLS_")]


def test_a_secret_of_yours_replaces_the_one_that_is_made() -> None:
    objects = rendered(secret={"existing": "ours"})
    assert not of_kind(objects, "Secret")
    (given,) = [
        item["valueFrom"]["secretKeyRef"]
        for item in container(objects, "router")["env"]
        if item["name"] == "PACELINE_ROUTER_SECRET"
    ]
    assert given == {"name": "ours", "key": "secret"}
