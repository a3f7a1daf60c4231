"""A tiny kubelet: runs rendered pods as processes, exactly as their manifests say.

    Pod          a network namespace with an address of its own; its containers' processes
    Container    image's entry point + args, env, mounts, user, read-only root; probes; preStop
    start ─ startup probe ─ ready ⇄ not ready ─ terminate: preStop, SIGTERM, grace, SIGKILL

What it does not do: images (this machine's system and checkout stand in for ours), limits of CPU
and memory, seccomp, pull policies, back-off. `in_own_network` must have been called before. Its
processes die with it.
"""

import asyncio
import base64
import contextlib
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chart_objects import ROOT, Object

SANDBOX = ROOT / "benchmarks" / "sandbox.sh"
SOURCE = "/opt/paceline"  # where the checkout is in a container
NODE_ADDRESS = "198.18.0.1"
LOOK_AGAIN_S = 0.02
DEFAULT_GRACE_S = 30
_numbers = itertools.count(1)


class PodFailed(Exception):
    """A container ended, or a probe gave it up."""


def in_own_network() -> None:
    """Starts this program again in namespaces that end with it. Exits unless root does."""
    if os.geteuid():
        sys.exit("namespaces of its own: only root may make them")
    if os.environ.get("PACELINE_OWN_NETWORK") != "1":
        os.environ["PACELINE_OWN_NETWORK"] = "1"
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execvp("unshare", ["unshare", "--net", "--mount", *again])
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "br0", "type", "bridge")
    run("ip", "address", "add", f"{NODE_ADDRESS}/16", "dev", "br0")
    run("ip", "link", "set", "br0", "up")


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@dataclass
class Node:
    """What pods are made from: Secrets, ConfigMaps, names of Services, a folder for logs."""

    folder: Path
    objects: list[Object]
    hosts: dict[str, str]  # name → address
    entry_points: Mapping[str, list[str]] = field(default_factory=dict)  # of images but ours

    def named(self, kind: str, name: str) -> Object:
        (found,) = (o for o in self.objects if (o["kind"], o["metadata"]["name"]) == (kind, name))
        return found

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.named("Secret", name)["data"][key]).decode()


class Pod:
    """One pod of a Deployment's template. `start`, wait until `is_ready`, `terminate`."""

    def __init__(self, node: Node, owner: str, template: Object) -> None:
        number = next(_numbers)
        self.node = node
        self.name = f"{owner}-{number}"
        self.address = f"198.18.1.{number}"
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: Object = template["spec"]
        self.is_terminating = False
        self.was_unready = False  # between SIGTERM and its end
        self.containers = [Container(self, spec) for spec in self.spec["containers"]]
        self._network = f"pod-{number}"

    @property
    def is_ready(self) -> bool:
        return all(container.is_ready for container in self.containers)

    @property
    def restarts(self) -> int:
        return sum(container.restarts for container in self.containers)

    def in_network(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self._network, *command]

    async def start(self) -> None:
        """Raises PodFailed when a container does not become ready."""
        await asyncio.to_thread(self._make_network)  # may take a while: a lock of the kernel
        await asyncio.gather(*(container.start() for container in self.containers))

    def _make_network(self) -> None:
        end = f"veth{self._network.removeprefix('pod-')}"
        run("ip", "netns", "add", self._network)
        run(
            "ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", self._network
        )
        run("ip", "link", "set", end, "master", "br0", "up")
        run(*self.in_network("ip", "link", "set", "lo", "up"))
        run(*self.in_network("ip", "address", "add", f"{self.address}/16", "dev", "eth0"))
        run(*self.in_network("ip", "link", "set", "eth0", "up"))

    async def terminate(self) -> list[int]:
        """Exit statuses; -9 of what the grace period did not suffice for."""
        self.is_terminating = True
        grace_s = self.spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
        return await asyncio.gather(*(c.terminate(grace_s) for c in self.containers))

    def folder_of(self, volume: Object) -> Path:
        """What a volume is on this machine. Memory volumes are made where they are mounted."""
        path: Path = self.node.folder / self.name / "volumes" / volume["name"]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)  # fsGroup
        if "secret" in volume:
            source = self.node.named("Secret", volume["secret"]["secretName"])
            data = {key: base64.b64decode(text) for key, text in source["data"].items()}
        elif "configMap" in volume:
            source = self.node.named("ConfigMap", volume["configMap"]["name"])
            data = {key: text.encode() for key, text in source["data"].items()}
        elif "emptyDir" in volume:
            data = {}
        else:
            raise ValueError(f"volume {volume['name']}: no such source here: {sorted(volume)}")
        for key, content in data.items():
            (path / key).write_bytes(content)
        return path


class Container:
    """The process of one container, started again when its liveness probe gives it up."""

    def __init__(self, pod: Pod, spec: Object) -> None:
        self.pod = pod
        self.spec = spec
        self.is_ready = False
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._process = await self._spawn(self._entry_point() + self.spec.get("args", []))
        await self._probe_until("startupProbe", good=True)
        self._watch = asyncio.create_task(self._keep_watch())
        while not self.is_ready:
            if self._has_ended():
                raise PodFailed(f"{self.pod.name}: ended with {self._process.returncode}")
            await asyncio.sleep(LOOK_AGAIN_S)

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def terminate(self, grace_s: float) -> int:
        """preStop, SIGTERM, SIGKILL when the grace period is over. Returns the exit status."""
        assert self._process is not None and self._watch is not None
        deadline = time.monotonic() + grace_s
        before_stop = self.spec.get("lifecycle", {}).get("preStop")
        if before_stop is not None:
            hook = await self._spawn(before_stop["exec"]["command"])
            await hook.wait()
        self._watch.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        looking = asyncio.create_task(self._see_unready())
        try:
            async with asyncio.timeout(max(2.0, deadline - time.monotonic())):
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()
        finally:
            looking.cancel()
            self.is_ready = False

    async def _see_unready(self) -> None:
        """Asks often, as nobody would: a drain of nothing is over before the next probe."""
        assert self._process is not None
        while await self._probe(self.spec["readinessProbe"]):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN_S)
        self.pod.was_unready |= self._process.returncode is None

    # --- the process ---

    def _entry_point(self) -> list[str]:
        """`command`, or what the image says."""
        if "command" in self.spec:
            command: list[str] = self.spec["command"]
            return command
        ours = [sys.executable, "-P", "-m", "paceline.cli.main"]
        return self.pod.node.entry_points.get(self.spec["image"], ours)

    async def _spawn(self, command: list[str]) -> asyncio.subprocess.Process:
        variables = self.environment()
        known = re.compile(r"\$\((\w+)\)")
        words = [known.sub(lambda m: variables.get(m[1], m[0]), word) for word in command]
        folder = self.pod.node.folder / self.pod.name
        root = folder / f"root-{self.spec['name']}-{next(_numbers)}"
        root.mkdir(parents=True)
        security = self.pod.spec["securityContext"]
        read_only = str(self.spec["securityContext"]["readOnlyRootFilesystem"]).lower()
        binds, memory = self._mounts()
        sandbox = [str(SANDBOX), str(root), str(security["runAsUser"]), read_only, binds, memory]
        with (folder / f"{self.spec['name']}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self.pod.in_network("unshare", "--mount", *sandbox, "--", *words),
                env=variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        """The image's, then the manifest's; nothing of ours."""
        variables = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
        variables |= {"PYTHONPATH": f"{SOURCE}/src", "PYTHONDONTWRITEBYTECODE": "1"}
        for item in self.spec.get("env", ()):
            if "value" in item:
                known = r"\$\((\w+)\)"
                value = re.sub(known, lambda match: variables[match[1]], item["value"])
            elif "secretKeyRef" in item["valueFrom"]:
                value = self.pod.node.secret(**item["valueFrom"]["secretKeyRef"])
            else:
                path = item["valueFrom"]["fieldRef"]["fieldPath"]
                fields = {"metadata.name": self.pod.name, "status.podIP": self.pod.address}
                value = fields[path]
            variables[item["name"]] = value
        return variables

    def _mounts(self) -> tuple[str, str]:
        """BINDS and TMPFS of sandbox.sh: the manifest's volumes first, then the image."""
        volumes = {volume["name"]: volume for volume in self.pod.spec.get("volumes", ())}
        binds, memory = [], []
        for mount in self.spec.get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                size = volume["emptyDir"]["sizeLimit"].removesuffix("Mi")
                memory.append(f"{mount['mountPath']} {size}m")
            else:
                mode = "ro" if mount.get("readOnly") else "rw"
                binds.append(f"{mode} {self.pod.folder_of(volume)} {mount['mountPath']}")
        hosts = self.pod.node.folder / "hosts"
        lines = [f"{address} {name}" for name, address in self.pod.node.hosts.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        image = [f"ro {hosts} /etc/hosts", f"ro {ROOT} {SOURCE}"]
        for path in dict.fromkeys((sys.prefix, sys.base_prefix)):
            if not path.startswith("/usr"):
                image.append(f"ro {path} {path}")
        return "\n".join(binds + image), "\n".join(memory)

    # --- probes ---

    async def _keep_watch(self) -> None:
        await asyncio.gather(self._keep_alive(), self._keep_readiness())

    async def _keep_alive(self) -> None:
        while True:
            await self._probe_until("livenessProbe", good=False)
            self.restarts += 1
            assert self._process is not None
            self._process.kill()
            await self._process.wait()
            self._process = await self._spawn(self._entry_point() + self.spec.get("args", []))
            await self._probe_until("startupProbe", good=True)

    async def _keep_readiness(self) -> None:
        while True:
            await self._probe_until("readinessProbe", good=True)
            self.is_ready = True
            await self._probe_until("readinessProbe", good=False)
            self.is_ready = False

    async def _probe_until(self, name: str, *, good: bool) -> None:
        """Until it is good, or (`good=False`) bad, in a row as often as its thresholds say. Raises
        PodFailed when a startup probe is bad too often."""
        probe = self.spec[name]
        most_bad, least_good = probe.get("failureThreshold", 3), probe.get("successThreshold", 1)
        num_bad = num_good = 0
        while True:
            is_good = await self._probe(probe)
            num_good, num_bad = (num_good + 1, 0) if is_good else (0, num_bad + 1)
            if num_good == least_good if good else num_bad == most_bad:
                return
            if name == "startupProbe" and (num_bad == most_bad or self._has_ended()):
                raise PodFailed(f"{self.pod.name}: its startup probe failed {num_bad} times")
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _probe(self, probe: Object) -> bool:
        kind: Any = probe.get("httpGet") or probe["tcpSocket"]
        ports = {port["name"]: port["containerPort"] for port in self.spec["ports"]}
        port = ports.get(kind["port"], kind["port"])
        try:
            async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
                return await _answers(self.pod.address, port, kind.get("path"))
        except (OSError, TimeoutError, EOFError):
            return False


async def _answers(host: str, port: int, path: str | None) -> bool:
    """Whether a connection is taken and, with a path, a GET of it is answered well."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if path is None:
            return True
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        return 200 <= status < 400
    finally:
        writer.close()


class ServiceProxy:
    """A Service's address: connections go to a ready pod that it selects, and stay with it."""

    def __init__(self, service: Object, address: str, pods: Callable[[], list[Pod]]) -> None:
        self._service = service
        self._address = address
        self._pods = pods
        self._turns = itertools.count()
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        run("ip", "address", "add", f"{self._address}/32", "dev", "br0")
        for port in self._service["spec"]["ports"]:
            serve = self._serve_port(port["targetPort"])
            self._servers.append(await asyncio.start_server(serve, self._address, port["port"]))

    def endpoints(self) -> list[Pod]:
        selector = self._service["spec"]["selector"].items()
        chosen = [pod for pod in self._pods() if selector <= pod.labels.items()]
        return [pod for pod in chosen if pod.is_ready and not pod.is_terminating]

    def _serve_port(
        self, target: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            endpoints = self.endpoints()
            if not endpoints:
                writer.transport.abort()
                return
            pod = endpoints[next(self._turns) % len(endpoints)]
            ports = [p for c in pod.containers for p in c.spec["ports"] if p["name"] == target]
            try:
                far = await asyncio.open_connection(pod.address, ports[0]["containerPort"])
            except OSError:
                writer.transport.abort()
                return
            await asyncio.gather(_pipe(reader, far[1]), _pipe(far[0], writer))

        return serve


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the near end is over; the far end is told, or cut if the near end was."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()


class Deployment:
    """The pods of a rendered Deployment, or of a LeaderWorkerSet group by group, replaced as with
    maxSurge 1, maxUnavailable 0."""

    def __init__(self, node: Node, rendered: Object) -> None:
        self.name: str = rendered["metadata"]["name"]
        self._node = node
        self._spec = rendered["spec"]
        self._templates = list(_templates(rendered["spec"]))
        self._replicas: list[list[Pod]] = []
        self.ended: list[Pod] = []
        self.exits: list[int] = []

    @property
    def pods(self) -> list[Pod]:
        return [pod for replica in self._replicas for pod in replica]

    async def start(self) -> None:
        self._replicas = [self._make() for _ in range(self._spec["replicas"])]
        await asyncio.gather(*(pod.start() for pod in self.pods))

    async def roll(self) -> None:
        for old in list(self._replicas):
            new = self._make()
            self._replicas.append(new)
            await asyncio.gather(*(pod.start() for pod in new))
            await asyncio.sleep(self._spec.get("minReadySeconds", 0))
            await self._end(old)

    async def stop(self) -> None:
        await asyncio.gather(*(self._end(replica) for replica in list(self._replicas)))

    async def _end(self, replica: list[Pod]) -> None:
        for exits in await asyncio.gather(*(pod.terminate() for pod in replica)):
            self.exits += exits
        self._replicas.remove(replica)
        self.ended += replica

    def _make(self) -> list[Pod]:
        return [Pod(self._node, self.name, template) for template in self._templates]


def _templates(spec: Object) -> Iterator[Object]:
    """Of the pods of one replica."""
    if group := spec.get("leaderWorkerTemplate"):
        yield group["leaderTemplate"]
        yield from itertools.repeat(group["workerTemplate"], group["size"] - 1)
    else:
        yield spec["template"]
