"""Memory that a channel's ranks share within a host, and the exchange of bytes through it.

Ranks find out which of them share a host, and connect to each other by sockets.
"""

import contextlib
import mmap
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import TransientError, UserError
from hostdev.kernels.pool import Task, run_tasks

HOST_VARIABLE = "HOSTDEV_HOST"  # ranks with different values count as ranks of different hosts
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SPACES = ("net", "user")  # Linux namespaces that decide whether processes can connect
_INDEX = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as the kernel states them

Links = list[socket.socket]
Bytes = npt.NDArray[np.uint8]
Sizes = npt.NDArray[np.int64]
_ATTACHED_BYTES = 32 << 10  # a rank with at most this many bytes for others attaches them to its first message
_STEP_BYTES = 1 << 20  # sizes of shared memory are multiples of this
_PIECE_BYTES = 1 << 20  # bytes that a thread copies at a time
_SPARE = 4  # new memory has the needed size plus 1 / _SPARE of it


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
    """Return the index that a process sends; 0 if it sends none, or runs as another user."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
        with contextlib.suppress(struct.error, OSError):
            return int(_INDEX.unpack(link.recv(_INDEX.size + 1))[0])
    return 0


class HostMemory:
    """Anonymous shared memory: it has no name, and the kernel frees it when the last process that maps it ends."""

    def __init__(self) -> None:
        self.array: Bytes = np.empty(0, np.uint8)

    def grow(self, size: int) -> int | None:
        """Replace the memory if it is smaller than `size`; return the new file descriptor, or None if nothing changes.

        The contents of replaced memory are lost. The caller passes the descriptor to the other ranks and closes it.
        """
        if size <= len(self.array):
            return None
        size = -(-(size + size // _SPARE) // _STEP_BYTES) * _STEP_BYTES
        self.array = np.empty(0, np.uint8)
        descriptor = os.memfd_create("hostdev")
        try:
            os.posix_fallocate(descriptor, 0, size)  # raises an error here instead of SIGBUS on a later write
            self.map(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise TransientError(
                f"cannot allocate {size >> 20} MiB of memory that this host's ranks share for an exchange "
                f"({error.strerror}); use less memory, or give --exchange-levels 1"
            ) from None
        return descriptor

    def map(self, descriptor: int) -> None:
        """Map memory that the first rank has allocated."""
        self.array = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)


class BufferLayout(NamedTuple):
    """The layout of an exchange in a host's shared memory; L of all W ranks are on this host.

    First come the messages to other hosts, then the bytes that this host's ranks send each other, then the messages
    from other hosts. Each message is ordered by receiving rank, then by sending rank.
    """

    sends: Sizes  # [L, W], where each rank writes its bytes for each rank of the channel
    reads: Sizes  # [L, W], where each rank reads the bytes from each rank of the channel
    give: list[int]  # bytes of the messages to each host, 0 for this host
    take: list[int]  # bytes of the messages from each host, 0 for this host
    start: int  # beginning of the messages from other hosts
    size: int


class Layouts:
    """Computes the layouts of a channel's exchanges.

    Args:
        hosts: The ranks of each host.
        here: Index of this host.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], here: int) -> None:
        self.local = np.array(hosts[here])
        self._here = here
        away = [number for number in range(len(hosts)) if number != here]
        self._order = np.concatenate([*(np.array(hosts[number]) for number in away), self.local])  # receivers in order
        pairs = [(index, rank) for number in away for index in range(len(self.local)) for rank in hosts[number]]
        self._receivers, self._senders = np.array(pairs, np.int64).reshape(-1, 2).T
        self._host_of = np.empty(len(self._order), np.int64)
        for number, ranks in enumerate(hosts):
            self._host_of[list(ranks)] = number
        self._hosts = len(hosts)

    def make(self, gives: Sizes, takes: Sizes, *, same: bool = False) -> BufferLayout:
        """Return the layout of an exchange.

        Args:
            gives: Bytes that each rank of this host sends each rank, [L, W]; 0 to itself.
            takes: Bytes that each rank of this host receives from each rank, [L, W]; 0 from itself.
            same: Whether each rank sends the same bytes to all its receivers, which are then all on this host. The
                bytes are stored once.

        Raises:
            RuntimeError: Two ranks of this host expect different sizes.
        """
        given, taken = gives[:, self.local], takes[:, self.local].T
        if (given != taken).any():
            sender, receiver = np.argwhere(given != taken)[0].tolist()
            raise RuntimeError(
                f"rank {self.local[sender]} sends {given[sender, receiver]} bytes to rank {self.local[receiver]}, "
                f"which expects {taken[sender, receiver]}"
            )
        sends, reads = np.zeros_like(gives), np.zeros_like(takes)
        if same:
            ends = np.cumsum(gives.max(1))
            sends[:] = (ends - gives.max(1))[:, None]
            reads[:, self.local] = (ends - gives.max(1))[None]
            none = [0] * self._hosts
            return BufferLayout(sends, reads, none, none, int(ends[-1]), int(ends[-1]))
        ends = np.cumsum(gives[:, self._order].T.ravel())
        sends[:, self._order] = (ends - gives[:, self._order].T.ravel()).reshape(-1, len(gives)).T
        reads[:, self.local] = sends[:, self.local].T
        arriving = takes[self._receivers, self._senders]
        start = int(ends[-1])
        reads[self._receivers, self._senders] = start + np.cumsum(arriving) - arriving
        give, take = (self._sum_by_host(each) for each in (gives, takes))
        return BufferLayout(sends, reads, give, take, start, start + int(arriving.sum()))

    def _sum_by_host(self, sizes: Sizes) -> list[int]:
        total = np.zeros(self._hosts, np.int64)
        np.add.at(total, self._host_of, sizes.sum(0))
        total[self._here] = 0
        return [int(one) for one in total]


class Slices(NamedTuple):
    """A rank's buffer in an exchange, with the position and the size of each rank's bytes in it."""

    buffer: Bytes
    starts: Sizes  # [W]
    sizes: Sizes  # [W], 0 for the rank itself


class HostExchange:
    """Exchanges among a channel's ranks on one host, through shared memory that the first rank allocates.

    The other ranks send the first rank the sizes of their parts, and the first rank replies with the positions. Once
    all ranks have written, the first rank exchanges messages with other hosts, and then notifies the other ranks.
    Notifications pass through sockets, so a waiting rank sleeps, and notices if the process that it waits for ends.

    Args:
        hosts: The channel's ranks on each host.
        here: Index of this host.
        mine: Index of this rank on this host.
        links: Result of `connect_host`.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], here: int, mine: int, links: Links) -> None:
        self._layouts, self._mine, self._links = Layouts(hosts, here), mine, links
        self._ranks = sum(map(len, hosts))
        self._memory = HostMemory()
        self._number = 0  # number of the current exchange
        self._end = weakref.finalize(self, _close, links)
        self._end.atexit = False  # at exit, the operating system closes the sockets

    def close(self) -> None:
        """Close the sockets."""
        self._end()

    def run(
        self, given: Slices, taken: Slices, between: Callable[[Bytes, BufferLayout], None] | None, *, same: bool = False
    ) -> None:
        """Exchange bytes between the ranks of this host, which must all call this method.

        Args:
            given: The bytes that this rank sends.
            taken: The buffer into which the bytes for this rank are written.
            between: Called on the first rank; exchanges the messages between hosts. None if ranks send nothing to other
                hosts.
            same: See `Layouts.make`.

        Raises:
            RuntimeError: A rank has ended, does not answer in time, or is in a different call.
            TransientError: There is not enough memory.
        """
        self._number += 1
        try:
            if self._mine:
                self._follow(given, taken, same=same)
            else:
                self._lead(given, taken, between, same=same)
        except BaseException:
            self.close()  # an exchange cannot resume in the middle; the other ranks notice closed sockets at once
            raise

    def _follow(self, given: Slices, taken: Slices, *, same: bool) -> None:
        head = np.concatenate([[self._number, 0], given.sizes, taken.sizes])
        if same:
            given = given._replace(sizes=_keep_first(given.sizes))
        head[1] = attaches = int(given.sizes.sum()) <= _ATTACHED_BYTES
        _send(self._links[0], [head, _join_parts(given)] if attaches else [head])
        places, descriptor = self._receive(0)
        if descriptor is not None:
            self._memory.map(descriptor)
            os.close(descriptor)
        sends, reads = places.view(np.int64)[1:].reshape(2, -1)
        if not attaches:
            _copy(self._memory.array, sends, given.buffer, given.starts, given.sizes)
            _send(self._links[0], [np.array([self._number])])
            self._receive(0)
        _copy(taken.buffer, taken.starts, self._memory.array, reads, taken.sizes)

    def _lead(
        self, given: Slices, taken: Slices, between: Callable[[Bytes, BufferLayout], None] | None, *, same: bool
    ) -> None:
        W, others = self._ranks, range(1, len(self._links) + 1)
        messages = [self._receive(index - 1)[0] for index in others]
        heads = np.array([message[: 8 * (2 + 2 * W)].view(np.int64)[1:] for message in messages], np.int64)
        heads = heads.reshape(-1, 1 + 2 * W)
        gives, takes = np.vstack([given.sizes, heads[:, 1 : 1 + W]]), np.vstack([taken.sizes, heads[:, 1 + W :]])
        layout = self._layouts.make(gives, takes, same=same)
        if same:
            gives = np.array([_keep_first(sizes) for sizes in gives])
        descriptor = self._memory.grow(layout.size)
        memory, writing = self._memory.array, [index for index in others if not heads[index - 1, 0]]
        try:
            for index in writing:
                self._send_places(index, layout, descriptor)
            _copy(memory, layout.sends[0], given.buffer, given.starts, gives[0])
            for index, message in zip(others, messages, strict=True):
                if index not in writing:
                    starts = 8 * (2 + 2 * W) + np.cumsum(gives[index]) - gives[index]
                    _copy(memory, layout.sends[index], message, starts, gives[index])
            for index in writing:
                self._receive(index - 1)
            if between is not None:
                between(memory, layout)
            for index in others:
                if index in writing:
                    _send(self._links[index - 1], [np.array([self._number])])
                else:
                    self._send_places(index, layout, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        _copy(taken.buffer, taken.starts, memory, layout.reads[0], taken.sizes)

    def _send_places(self, index: int, layout: BufferLayout, descriptor: int | None) -> None:
        places = np.concatenate([[self._number], layout.sends[index], layout.reads[index]])
        _send(self._links[index - 1], [places], [] if descriptor is None else [descriptor])

    def _receive(self, link: int) -> tuple[Bytes, int | None]:
        """Return a message, and the file descriptor that was sent with it; the latter is None if there is none.

        Raises RuntimeError if no message arrives, or if the message belongs to a different exchange.
        """
        most = 8 * (2 + 2 * self._ranks) + _ATTACHED_BYTES
        try:
            message, descriptors, *_ = socket.recv_fds(self._links[link], most, 1)
        except OSError as error:
            raise RuntimeError(self._describe(link, error)) from None
        found = np.frombuffer(message, np.uint8)
        if not message:
            raise RuntimeError(f"rank {self._name(link)} of this host has closed its connection")
        if int(found[:8].view(np.int64)[0]) != self._number:
            raise RuntimeError(f"rank {self._name(link)} of this host is in a different call")
        return found, descriptors[0] if descriptors else None

    def _describe(self, link: int, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"rank {self._name(link)} of this host has not answered within {self._links[link].gettimeout():g} s"
        return f"rank {self._name(link)} of this host has ended ({error.strerror})"

    def _name(self, link: int) -> int:
        return int(self._layouts.local[0 if self._mine else link + 1])


def _close(links: Links) -> None:
    for link in links:
        link.close()


def _send(link: socket.socket, parts: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
    """Send arrays as one message; raise RuntimeError if the receiver has ended."""
    try:
        socket.send_fds(link, list(parts), list(descriptors))
    except OSError as error:
        raise RuntimeError(f"a rank of this host has ended ({error.strerror or error})") from None


def _join_parts(part: Slices) -> Bytes:
    """Return a copy of the bytes for other ranks, ordered by rank."""
    joined = np.empty(int(part.sizes.sum()), np.uint8)
    _copy(joined, np.cumsum(part.sizes) - part.sizes, part.buffer, part.starts, part.sizes)
    return joined


def _keep_first(sizes: Sizes) -> Sizes:
    """Return the sizes with all but the first nonzero size set to 0."""
    kept = np.zeros_like(sizes)
    first = sizes.argmax()  # all nonzero sizes are equal
    kept[first] = sizes[first]
    return kept


def _copy(target: Bytes, to: Sizes, source: Bytes, at: Sizes, sizes: Sizes) -> None:
    """Copy parts of a buffer to another buffer with the host threads; merge parts that are contiguous in both."""
    used = np.flatnonzero(sizes)
    if not len(used):
        return
    to, at, sizes = to[used], at[used], sizes[used]
    apart = (np.diff(to) != sizes[:-1]) | (np.diff(at) != sizes[:-1])
    first = np.concatenate([[0], np.flatnonzero(apart) + 1])
    tasks: list[Task] = []
    for begin, start, size in zip(
        to[first].tolist(), at[first].tolist(), np.add.reduceat(sizes, first).tolist(), strict=True
    ):
        if size <= _PIECE_BYTES:
            target[begin : begin + size] = source[start : start + size]
            continue
        tasks += [
            (_copy_range, piece, min(piece + _PIECE_BYTES, size), (target[begin:], source[start:]))
            for piece in range(0, size, _PIECE_BYTES)
        ]
    if tasks:
        run_tasks(tasks)


def _copy_range(start: int, stop: int, target: Bytes, source: Bytes) -> None:
    target[start:stop] = source[start:stop]
