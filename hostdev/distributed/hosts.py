"""Finds the ranks that share a host, and connects them by sockets."""

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostdev.core.errors import UserError

HOST_VARIABLE = "HOSTDEV_HOST"  # ranks with different values count as ranks of different hosts
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SPACES = ("net", "user")  # Linux namespaces that decide whether processes can connect
_INDEX = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as the kernel states them

Links = list[socket.socket]


def get_identity(rank: int) -> str:
    """Return text that is equal on two ranks if they run on the same host and can share memory.

    Such ranks have the same running kernel, network namespace, user namespace and user. On systems other than Linux,
    the text is different on each rank.
    """
    try:
        spaces = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in _SPACES]
        kernel = [_BOOT.read_text().strip(), *spaces, str(os.getuid())]
    except OSError:
        kernel = [f"rank {rank}"]
    return " ".join([*kernel, os.environ.get(HOST_VARIABLE, "")])


def group_by_host(ranks: Sequence[int], identities: Sequence[str]) -> list[list[int]]:
    """Return, for each host, the indices of its ranks in a group; hosts are ordered by their lowest index.

    Args:
        ranks: The ranks of the group.
        identities: The identity of each rank of the run.
    """
    hosts: dict[str, list[int]] = {}
    for index, rank in enumerate(ranks):
        hosts.setdefault(identities[rank], []).append(index)
    return list(hosts.values())


def have_levels(hosts: Sequence[Sequence[int]]) -> bool:
    """Return whether there are several hosts, at least one with several ranks."""
    return len(hosts) > 1 and max(map(len, hosts)) > 1


def require_two_levels(hosts: Sequence[Sequence[int]]) -> None:
    """Raise UserError if two levels of exchange have no effect."""
    if not have_levels(hosts):
        where = "all ranks are on one host" if len(hosts) == 1 else "each rank is on a different host"
        raise UserError(f"--exchange-levels 2 has no effect, because {where}; leave out --exchange-levels")


def connect_host(store: Any, key: str, mine: int, count: int, seconds: float) -> Links:
    """Connect a channel's ranks on this host to the first of them. All of them must call this function.

    Args:
        store: The store of the run.
        key: The store's key under which the first rank announces its address.
        mine: Index of this rank among the host's ranks.
        count: Number of the host's ranks.
        seconds: Timeout of the call and of the returned sockets.

    Returns:
        On the first rank, its sockets to the other ranks, in order. On each other rank, its socket to the first rank.

    Raises:
        RuntimeError: A rank does not connect in time.
    """
    try:
        made = _call(store, key, seconds) if mine else _answer(store, key, count, seconds)
        if mine:
            made[0].sendall(_INDEX.pack(mine))
    except OSError as error:
        raise RuntimeError(f"ranks of this host cannot connect to each other: {error}") from None
    for link in made:
        link.settimeout(seconds)
    return made


def _call(store: Any, key: str, seconds: float) -> Links:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(seconds)
    link.connect(b"\0" + store.get(key))
    return [link]


def _answer(store: Any, key: str, count: int, seconds: float) -> Links:
    """Listen at an abstract address, which leaves no file behind, until all other ranks have connected."""
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        name = f"hostdev-{secrets.token_hex(16)}"
        listening.bind(b"\0" + name.encode())
        listening.listen(count)
        store.set(key, name)
        while len(found) < count - 1:
            listening.settimeout(max(0.001, until - time.monotonic()))
            link, _ = listening.accept()
            link.settimeout(max(0.001, until - time.monotonic()))
            index = _read_index(link)
            if 0 < index < count and index not in found:
                found[index] = link
            else:
                link.close()
    return [found[index] for index in sorted(found)]


def _read_index(link: socket.socket) -> int:
    """Return the index that a process sends, or 0 if the process is not a rank of this run."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
        with contextlib.suppress(struct.error, OSError):
            return int(_INDEX.unpack(link.recv(_INDEX.size + 1))[0])
    return 0
