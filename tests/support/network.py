"""Hosts of a test: network namespaces with a link to each other that is slow, late and lossy.

    this namespace ── veth (10.203.x.y/30) ── host i ── wan0 (10.204.0.i) ── forwarder ── others

Routers reach workers over the veth, workers each other over wan0, whose link can be cut.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import tun_forwarder
from tests.support.tun_forwarder import DEVICE, enter

PROGRAMS = ("ip", "tc", "nft")
_FLAGS = struct.Struct("16sH14x")  # struct ifreq
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
MTU = 9000
RATE = "1gbit"
_LOSS = """table inet loss {{
    chain in {{
        type filter hook input priority 0;
        iifname "{device}" numgen random mod 100 < {percent} drop
    }}
}}
"""
# Whoever connects is not heard at first: the kernel sends its first packet again after a second.
_DEAF = """table inet deaf {{
    set heard {{
        type ipv4_addr . inet_service . inet_service
        flags dynamic
        timeout 60s
    }}
    chain first {{
        ip saddr . tcp sport . tcp dport @heard accept
        add @heard {{ ip saddr . tcp sport . tcp dport }} drop
    }}
    chain in {{
        type filter hook input priority 0;
        iifname "{device}" tcp flags & (syn | ack) == syn jump first
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class Host:
    namespace: str
    control: str  # its address for us
    address: str  # for the other hosts

    @property
    def prefix(self) -> list[str]:
        """In front of a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace]

    def set_link(self, *, is_up: bool) -> None:
        """Down, it is cut off the other hosts. At once: a program would take milliseconds."""
        thread = threading.Thread(target=_set_link, args=(self.namespace, is_up))
        thread.start()
        thread.join()

    def lose_first_packets(self) -> None:
        """Of each connection that others make to it, from now on."""
        _run(*self.prefix, "nft", "-f", "-", text=_DEAF.format(device=DEVICE))


def why_not() -> str:
    """Why this process can make no hosts; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"needs {', '.join(missing)}: apt-get install iproute2 nftables"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    probe = f"paceline-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "may not make network namespaces"
    rules = "add table inet probe"
    done = subprocess.run(["ip", "netns", "exec", probe, "nft", rules], capture_output=True)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return "the kernel has no nftables" if done.returncode else ""


@contextmanager
def network(names: Sequence[str], delay_ms: float, loss_percent: int) -> Iterator[list[Host]]:
    """Each packet between two hosts takes `delay_ms` longer; of those that arrive some are lost."""
    hosts = [
        Host(f"paceline-{os.getpid()}-{name}", _control_address(i, 2), f"10.204.0.{i}")
        for i, name in enumerate(names, 1)
    ]
    with ExitStack() as stack:
        for i, host in enumerate(hosts, 1):
            _run("ip", "netns", "add", host.namespace)
            stack.callback(_run, "ip", "netns", "del", host.namespace)
            ours = _join(host, i)
            stack.callback(_run, "ip", "link", "del", ours)  # the kernel would take its time
        stack.enter_context(_forwarder(hosts, delay_ms))
        for host in hosts:
            _limit(host, loss_percent)
        yield hosts


def _control_address(number: int, end: int) -> str:
    """Of host `number`'s veth; other processes have other networks."""
    offset = 4 * (os.getpid() % 2048 * 8 + number) + end
    return f"10.203.{offset >> 8}.{offset & 255}"


def _join(host: Host, number: int) -> str:
    """The name of our end."""
    ours, theirs = f"pl{os.getpid() % 100000}-{number}", "control"
    inside = ("ip", "-n", host.namespace)
    _run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", host.namespace)
    _run("ip", "addr", "add", f"{_control_address(number, 1)}/30", "dev", ours)
    _run("ip", "link", "set", ours, "up")
    _run(*inside, "addr", "add", f"{host.control}/30", "dev", theirs)
    _run(*inside, "link", "set", theirs, "up")
    _run(*inside, "link", "set", "lo", "up")
    return ours


@contextmanager
def _forwarder(hosts: Sequence[Host], delay_ms: float) -> Iterator[None]:
    pairs = [part for host in hosts for part in (host.namespace, host.address)]
    command = [sys.executable, tun_forwarder.__file__, str(delay_ms), *pairs]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        try:
            assert process.stdout.readline() == b"ready\n", "the forwarder did not start"
            yield
        finally:
            process.stdin.close()
            process.wait(timeout=5)


def _limit(host: Host, loss_percent: int) -> None:
    inside = ("ip", "-n", host.namespace)
    _run(*inside, "addr", "add", f"{host.address}/24", "dev", DEVICE)
    _run(*inside, "link", "set", DEVICE, "mtu", str(MTU), "up")
    tbf = ("root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms")
    _run("tc", "-n", host.namespace, "qdisc", "add", "dev", DEVICE, *tbf)
    if loss_percent:
        rules = _LOSS.format(device=DEVICE, percent=loss_percent)
        _run(*host.prefix, "nft", "-f", "-", text=rules)


def _set_link(namespace: str, is_up: bool) -> None:
    """In a thread of its own, which enters the namespace."""
    enter(os.open(Path("/run/netns") / namespace, os.O_RDONLY))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        asked = _FLAGS.pack(DEVICE.encode(), 0)
        name, flags = _FLAGS.unpack(fcntl.ioctl(control, _SIOCGIFFLAGS, asked))
        flags = flags | _IFF_UP if is_up else flags & ~_IFF_UP
        fcntl.ioctl(control, _SIOCSIFFLAGS, _FLAGS.pack(name, flags))


def _run(*command: str, text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr.strip()}"
