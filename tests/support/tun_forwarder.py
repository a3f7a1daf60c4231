"""Joins hosts of a test by TUN devices: what one sends reaches the other after a delay.

Run as a program with the delay in milliseconds and pairs of a network namespace and an address:
each namespace gets a device `wan0`. Prints a line when all are there, and goes on until its
standard input ends. (netem would do the same; not every kernel has it.)
"""

import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path

DEVICE = "wan0"
MAX_PACKET = 65536
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    delay_s = float(sys.argv[1]) / 1000
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    devices = {}
    for namespace, address in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        enter(os.open(Path("/run/netns") / namespace, os.O_RDONLY))
        devices[socket.inet_aton(address)] = new_device()
    enter(own)
    print("ready", flush=True)
    forward(devices, delay_s)


def enter(namespace: int) -> None:
    """The calling thread; takes the descriptor."""
    failed = _libc.setns(namespace, _CLONE_NEWNET)
    os.close(namespace)
    if failed:
        raise OSError(ctypes.get_errno(), "setns")


def new_device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_NO_PI))
    return device


def forward(devices: dict[bytes, int], delay_s: float) -> None:
    poll = select.poll()
    for device in devices.values():
        poll.register(device, select.POLLIN)
    poll.register(0, select.POLLIN)
    due: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(0.0, due[0][0] - time.monotonic()) if due else 1.0
        ready = poll.poll(wait_s * 1000)
        if any(fd == 0 for fd, _ in ready):
            return
        for device, _ in ready:
            receive(device, due, delay_s)
        while due and due[0][0] <= time.monotonic():
            send(devices, due.popleft()[1])


def receive(device: int, due: deque[tuple[float, bytes]], delay_s: float) -> None:
    try:
        for _ in range(64):
            due.append((time.monotonic() + delay_s, os.read(device, MAX_PACKET)))
    except OSError:  # nothing more, or the device is down
        return


def send(devices: dict[bytes, int], packet: bytes) -> None:
    device = devices.get(packet[16:20])  # IPv4's destination
    if device is not None:
        try:
            os.write(device, packet)
        except OSError:  # down: the packet is lost
            return


if __name__ == "__main__":
    main()
