"""The process groups of a run on torch.distributed: `Ranks` are the joined ranks, and create `Channel`s."""

import contextlib
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from hostdev.core.errors import RankError, UserError
from hostdev.distributed.agreement import UnlikeError, Values, compare, format_ranks
from hostdev.distributed.calls import ADVICE, Calls
from hostdev.distributed.mesh import Mesh
from hostdev.distributed.monitor import LOST_SECONDS, Monitor
from hostdev.distributed.rank_environment import RankEnvironment
from hostdev.distributed.rendezvous import find_interface, make_key_prefix, versions
from hostdev.distributed.rendezvous import get_first_line as _short
from hostdev.distributed.rendezvous import meet as _meet
from hostdev.distributed.world import Closable, LocalChannel, World

HOST_BACKEND = "gloo"
TIMEOUT = 600.0  # seconds that a rank waits for another within a step
RENDEZVOUS_SECONDS = 60.0  # seconds until the rendezvous must be complete
FLAGS = 2
STOP, SAVE = range(FLAGS)  # indices of flags: number of a stop signal; whether a checkpoint is due


_joined: "list[weakref.ref[Ranks]]" = []


def ranks() -> "Ranks | None":
    """Return the ranks that this process has joined; None if it is alone."""
    return _joined[-1]() if _joined else None


class PeerLostError(RankError):
    """Another rank stopped answering; the monitor reports which one, and why."""


class Channel(LocalChannel):
    """A process group. One thread at a time calls its collectives, in the same order on every rank.

    Args:
        rank: This rank within the group.
        ranks: Number of ranks in the group.
        group: The group of torch.distributed.
        lost: Called when a rank stops answering.
        backend: Name of torch.distributed's backend.
        device: Device of the buffers of `all_to_all` and `all_reduce`; None for host memory. On an accelerator both
            are queued on the current stream, and the group has no other collective.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        group: Any,
        lost: Callable[[], None],
        backend: str = HOST_BACKEND,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.ranks, self.group, self._lost = rank, ranks, group, lost
        self.backend, self.device = backend, torch.device("cpu") if device is None else device
        self.sent_bytes = 0  # bytes sent to other ranks
        self._end = weakref.finalize(self, _close, group)
        self._end.atexit = False  # at exit, the operating system closes the sockets

    def let_go(self) -> None:
        """Release the destroyed group; return once its threads have ended."""
        self._end.detach()
        self.group = None  # the last reference

    def all_to_all(
        self, values: Tensor, counts: Sequence[int], receive: Sequence[int], row: int = 1, out: Tensor | None = None
    ) -> Tensor:
        """Send each rank its part of a flat buffer, and return the values received from all ranks, by rank.

        Args:
            values: A tensor of any dtype, 1-dimensional, C-contiguous.
            counts: Number of rows for each rank.
            receive: Number of rows from each rank.
            row: Number of values per row.
            out: Receives the values; None for new memory.
        """
        if out is None:
            out = torch.empty(sum(receive) * row, dtype=values.dtype, device=self.device)
        own = slice(sum(counts[: self.rank]) * row, sum(counts[: self.rank + 1]) * row)
        self.sent_bytes += (len(values) - (own.stop - own.start)) * values.element_size()
        splits = [n * row for n in receive], [n * row for n in counts]
        with self.answering():
            dist.all_to_all_single(out, values, *splits, group=self.group)
        return out

    def try_out(self) -> str:
        """Exchange one number with each rank, which allocates device memory; return an error's text, or "" for none."""
        try:
            one = torch.ones(self.ranks, device=self.device)
            received = torch.empty_like(one)
            dist.all_to_all_single(received, one, group=self.group)
            return "" if bool((received == 1).all()) else "it returns wrong values"
        except RuntimeError as error:
            return str(error).strip().replace("\n", " ")

    def all_reduce(self, values: Tensor) -> None:
        """Overwrite values with their sum over all ranks, added in an unspecified order."""
        self.sent_bytes += 2 * (self.ranks - 1) * values.nbytes // self.ranks
        with self.answering():
            dist.all_reduce(values, group=self.group)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A context that raises PeerLostError if another rank stops answering within it."""
        try:
            yield
        except RuntimeError as error:
            self._lost()
            raise PeerLostError(f"another rank stopped answering ({_short(error)})") from None

    def exchange_counts(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Send counts[rank] to each rank; return what each rank sent to this one. Both are int64 [W, any]."""
        flat = torch.from_numpy(np.ascontiguousarray(counts)).view(-1)
        each = [counts.shape[1]] * self.ranks
        return self.all_to_all(flat, each, each).numpy().reshape(counts.shape)

    def gather(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the arrays of all ranks, by rank. They are 1-dimensional, of one dtype and any lengths."""
        lengths = self.exchange_counts(np.full((self.ranks, 1), len(values), np.int64))[:, 0].tolist()
        flat = torch.from_numpy(np.tile(values, self.ranks))
        return np.split(self.all_to_all(flat, [len(values)] * self.ranks, lengths).numpy(), np.cumsum(lengths)[:-1])

    def share(self, value: Any) -> list[Any]:
        """Return the JSON values that all ranks pass, by rank."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        return [json.loads(each.tobytes()) for each in self.gather(text)]

    def broadcast(self, values: Tensor) -> None:
        """Overwrite values in host memory with those of the group's first rank."""
        with self.answering():
            dist.broadcast(values, group_src=0, group=self.group)

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        self.exchange_counts(np.zeros((self.ranks, 1), np.int64))


class Ranks(World):
    """The ranks of a run after their rendezvous.

    Args:
        env: The rank environment of this process.
        on_fault: Called in a thread with the failed rank and the cause.
        timeout: Seconds that a rank waits for another within a step.
        meeting: Seconds until the rendezvous must be complete.
        backend: Backend for buffers on devices: see `device_channel`.
        mesh: How the ranks share the network; None means that each has the whole network and its part of the samples.
        values: Further values, by name, that must be equal on all ranks; see `compare`.

    Raises:
        UserError: The rendezvous failed.
        UnlikeError: The versions, the mesh or the values differ; raised on all ranks.
        ValueError: The mesh has another number of ranks.
    """

    def __init__(
        self,
        env: RankEnvironment,
        on_fault: Callable[[int, str], None],
        *,
        timeout: float = TIMEOUT,
        meeting: float = RENDEZVOUS_SECONDS,
        backend: str | None = None,
        mesh: Mesh | None = None,
        values: Values | None = None,
    ) -> None:
        self.env, self._backend = env, backend
        _joined[:] = [weakref.ref(self)]
        self.mesh, self.mesh_is_given = mesh or Mesh(data=env.ranks), mesh is not None
        if self.mesh.size != env.ranks:
            raise ValueError(f"the mesh {self.mesh} has {self.mesh.size} ranks, but {env.ranks} ranks were started")
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._kept: list[Channel] = []
        self._slices: dict[Any, tuple[Channel, Any]] = {}
        self.rank, self.size = env.rank, env.ranks
        self.failed = False  # whether this rank, or one that it waited for, has failed
        self.have_left = False  # whether all ranks have left together
        self._loops: list[weakref.ref[Closable]] = []
        self.calls = Calls(env.rank, env.ranks)
        alike = {**versions(), "the mesh": str(self.mesh), **(values or {})}
        self.store = _meet(env, meeting, alike)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", find_interface(env))
        self.monitor = Monitor(env, make_key_prefix(env), self.calls, on_fault)
        # Flags that this rank contributes to each step, and their maximum over all ranks since the last step.
        self.contributed = [0] * FLAGS
        self.reduced = [0] * FLAGS
        self._within = timedelta(seconds=timeout)
        self.monitor.start()
        try:
            dist.init_process_group(
                HOST_BACKEND,
                store=PrefixStore("groups", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=meeting),
            )
            self.control = self.channel()  # for the main thread
            self.control.barrier()
        except (RuntimeError, PeerLostError) as error:
            self.monitor.lost()
            time.sleep(LOST_SECONDS + 1)  # if a rank is gone, the monitor ends this process during the sleep
            why = f"all ranks have joined but cannot reach each other: {_short(error)}; check GLOO_SOCKET_IFNAME"
            self.monitor.fail(why)
            raise UserError(f"rank {self.rank} of {self.size}: {why}") from None

    @property
    def have_parted(self) -> bool:  # type: ignore[override]
        """Return whether ranks no longer wait for each other: all have left, or one failed or is in another call."""
        return self.failed or self.have_left or self.calls.wrong is not None

    def note_loop(self, loop: Closable) -> None:
        """Register an open loop, which is closed before the ranks leave."""
        self._loops = [*(known for known in self._loops if known() is not None), weakref.ref(loop)]

    def channel(self, axis: str | None = None) -> Channel:
        """Return a new channel; all ranks must create theirs in the same order.

        Each thread that calls collectives needs its own channel, so that its order is the same on every rank.

        Args:
            axis: Connect the ranks along this axis of the mesh; None connects all.
        """
        return self._channel(HOST_BACKEND, None, axis)

    def device_channel(self, device: torch.device, axis: str | None = None) -> Channel:
        """Return a new channel for tensors on a device; all ranks must create theirs in the same order.

        Its buffers are on the device if torch has a backend for this kind of device, such as NCCL, and each rank has
        its own device. Otherwise they are in host memory. Raises UserError if the requested backend is not possible.
        """
        own = _get_backend(device)
        said = self.control.share([self._backend, own, _get_device_name(device)])
        wanted, backends, names = map(list, zip(*said, strict=True))
        possible = own is not None and len(set(backends)) == 1 and len(set(names)) == self.size
        for rank, name in enumerate(wanted):
            if name in (None, HOST_BACKEND, own if possible else None):
                continue
            where = f"rank {rank}'s dense layers are on {names[rank]}"
            why = (
                "which another rank also uses, or other ranks use another kind of device"
                if name == backends[rank]
                else (f"for which this torch has {backends[rank] or 'no backend but ' + HOST_BACKEND}")
            )
            raise UserError(f"--dist-backend {name}: {where}, {why}; leave it out, or use {HOST_BACKEND}")
        if own is None or not possible or HOST_BACKEND in wanted:
            return self.channel(axis)
        # If a rank is gone, the monitor ends all ranks and names it; NCCL's watchdog would abort this process earlier.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        channel = self._channel(own, device, axis)
        for rank, error in enumerate(self.control.share(channel.try_out())):
            if error:
                raise UserError(
                    f"rank {rank}: {own} does not work with {names[rank]}: {error}; use --dist-backend gloo"
                )
        self._kept.append(channel)  # until `leave`: closing it may wait for other ranks
        return channel

    def slices(self, device: torch.device, axis: str | None = None) -> tuple[Channel, Any]:  # Any: a DeviceMesh
        """Return a channel for tensors on a device, and its torch DeviceMesh; all ranks call it in the same order.

        Both are cached for each set of groups: DTensor treats two meshes of the same ranks as one, and uses the first.
        """
        from torch.distributed.device_mesh import DeviceMesh  # its import takes a second

        groups = self.mesh.groups(axis) if axis is not None else [list(range(self.size))]
        key = device.type, tuple(map(tuple, groups))
        if key not in self._slices:
            channel = self.device_channel(device, axis)
            mesh = DeviceMesh.from_group(channel.group, device.type, mesh_dim_names=("model",))
            self._slices[key] = channel, mesh
        return self._slices[key]

    def _channel(self, backend: str, device: torch.device | None, axis: str | None) -> Channel:
        mine, group = list(range(self.size)), None
        for members in [mine] if axis is None else self.mesh.groups(axis):  # all ranks must create all groups
            made = dist.new_group(members, backend=backend, timeout=self._within)
            if self.rank in members:
                mine, group = members, made
        channel = Channel(mine.index(self.rank), len(mine), group, self.monitor.lost, backend, device)
        self._channels.add(channel)
        return channel

    def part(self) -> tuple[int, int]:
        """Return (rank, ranks) for `HostTable`."""
        return self.rank, self.size

    def begin(self, kind: str, text: str) -> None:
        """Begin a call that all ranks make: see `Calls.begin`."""
        self.calls.begin(kind, text)

    def agree(self, kind: str, text: str, values: Values | None = None) -> None:
        """Begin a call that all ranks make with equal values; raise UnlikeError on all ranks otherwise.

        Args:
            kind: Kind of the `Call`.
            text: Text of the `Call`.
            values: Values that must be equal; see `compare`.
        """
        self.calls.begin(kind, text)
        said = self.control.share([kind, text, dict(values or {}), self.calls.last.number])
        self.calls.catch_up(max(one[3] for one in said))
        kinds = [one[0] for one in said]
        if len(set(kinds)) > 1:
            calls: dict[str, list[int]] = {}
            for rank, (_, one, *_) in enumerate(said):
                calls.setdefault(one, []).append(rank)
            each = ", and ".join(
                f"{format_ranks(mine)} {'are' if len(mine) > 1 else 'is'} in {one}" for one, mine in calls.items()
            )
            raise UnlikeError(f"{each}: {ADVICE}")
        compare([one[2] for one in said], text)

    def leave(self, text: str = "the end of hostdev.join()") -> None:
        """Close the open loops, and leave the run once all ranks have made this call."""
        for known in reversed(self._loops):
            if (loop := known()) is not None:
                loop.close()
        self.agree("end", text)
        self.monitor.stop()
        self.control.barrier()
        _joined.clear()
        self._kept.clear()
        self._slices.clear()
        dist.destroy_process_group()
        # A group's thread that releases tensors while Python exits takes the interpreter's lock, which aborts the
        # process (torch 2.13).
        for channel in list(self._channels):
            channel.let_go()
        self.have_left = True


def _get_backend(device: torch.device) -> str | None:
    """Return torch's collective backend for this kind of device; None if this build has none."""
    if device.type == "cpu":
        return None
    backend = dist.Backend.default_device_backend_map.get(device.type)
    return backend if backend is not None and dist.is_backend_available(backend) else None


def _get_device_name(device: torch.device) -> str:
    """Return a device's name that is unique among all hosts; an index may mean different devices in two processes."""
    if device.type == "cpu":
        return f"the CPU of {socket.gethostname()}"
    module = torch.get_device_module(device)
    about = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return f"{device.type} {getattr(about, 'uuid', device.index)} of {socket.gethostname()}"


def _close(group: Any) -> None:
    if dist.is_initialized():
        with contextlib.suppress(ValueError):  # raised if all groups are already closed
            dist.destroy_process_group(group)
