"""Two hosts on this one, joined by a link with a delay and a rate: network namespaces, whose packets a thread forwards.

The link works like `tc qdisc add dev eth0 root netem delay 0.5ms rate 1gbit` on both hosts, but needs no kernel module.
Each host has a TUN device. A thread takes the packets of both, holds each for the delay and for the time that the rate
takes, and gives it to the other host. It counts the packets, which have up to 64 KiB, because the devices take TCP's
segments undivided.
"""

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

_TUN, _DEVICE = "/dev/net/tun", "eth0"
_SET_DEVICE, _SET_OFFLOADS = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD
_DEVICE_FLAGS = 0x0001 | 0x1000 | 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
_OFFLOADS = 0x01 | 0x02  # TUN_F_CSUM, TUN_F_TSO4
_HEADER_BYTES = 10  # before each packet: which checksum and segments the device left undone
_MOST_BYTES = _HEADER_BYTES + (1 << 16)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TIMER_SLACK = 29  # PR_SET_TIMERSLACK
_IDLE_SECONDS = 0.05


class Sent(NamedTuple):
    """What both hosts have sent over the link."""

    packets: int
    bytes: int


class Link:
    """A link between two hosts, for commands that `inside` prefixes.

    Args:
        name: Name of the benchmark, for its error messages.
        delay: Seconds that a packet takes.
        rate: Bytes per second in each direction.
    """

    def __init__(self, name: str, delay: float, rate: float) -> None:
        self._name, self._delay, self._rate = name, delay, rate
        self.addresses = ["10.213.78.1", "10.213.78.2"]
        self._spaces = [f"bench{os.getpid()}-{number}" for number in (0, 1)]
        self._devices: list[int] = []
        self._packets = self._bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="link", daemon=True)

    def __enter__(self) -> "Link":
        self._require()
        try:
            for space, address in zip(self._spaces, self.addresses, strict=True):
                _ip("netns", "add", space)
                self._devices.append(_open_device(space))
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", _DEVICE)
                for device in ("lo", _DEVICE):
                    _ip("-n", space, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            said = (getattr(error, "stderr", None) or str(error).encode()).decode().strip()
            sys.exit(f"bench {self._name}: no network namespaces with TUN devices here: {said}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._remove()

    def inside(self, number: int) -> list[str]:
        """Return the beginning of a command that runs on a host."""
        return ["ip", "netns", "exec", self._spaces[number]]

    @property
    def sent(self) -> Sent:
        """What has been sent so far."""
        return Sent(self._packets, self._bytes)

    def _require(self) -> None:
        lacks = [
            *(["Linux"] if sys.platform != "linux" else []),
            *(["root, to make network namespaces"] if sys.platform == "linux" and os.geteuid() else []),
            *(["the program ip (iproute2)"] if shutil.which("ip") is None else []),
            *([_TUN] if not Path(_TUN).exists() else []),
        ]
        if lacks:
            sys.exit(f"bench {self._name} needs {', '.join(lacks)}")

    def _remove(self) -> None:
        for device in self._devices:
            os.close(device)
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _forward(self) -> None:
        ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)  # wake up as precisely as possible
        queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]
        free = [0.0, 0.0]  # when a direction has sent all earlier packets
        while not self._end.is_set():
            now = time.perf_counter()
            due = min((queue[0][0] for queue in queues if queue), default=now + _IDLE_SECONDS)
            readable, _, _ = select.select(self._devices, [], [], max(0.0, due - now))
            now = time.perf_counter()
            for number, queue in enumerate(queues):
                if self._devices[number] in readable:
                    packet = os.read(self._devices[number], _MOST_BYTES)
                    size = len(packet) - _HEADER_BYTES
                    self._packets, self._bytes = self._packets + 1, self._bytes + size
                    free[number] = max(free[number], now) + size / self._rate
                    queue.append((free[number] + self._delay, packet))
                while queue and queue[0][0] <= now:
                    os.write(self._devices[1 - number], queue.popleft()[1])


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _open_device(space: str) -> int:
    """Make a TUN device in a network namespace, and return its descriptor, which stays in this process."""
    c: Any = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        namespace = os.open(path, os.O_RDONLY)
        try:
            if c.setns(namespace, _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"{path}: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(namespace)

    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(f"/run/netns/{space}")
        device = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", _DEVICE.encode(), _DEVICE_FLAGS))
        fcntl.ioctl(device, _SET_OFFLOADS, _OFFLOADS)
    finally:
        enter(f"/proc/self/fd/{before}")
        os.close(before)
    return device
