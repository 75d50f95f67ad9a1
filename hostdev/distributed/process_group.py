"""The process groups of a run, based on torch.distributed: `Ranks` joins the ranks and creates `Channel`s."""

import os
import socket
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hostdev.core.errors import UserError
from hostdev.distributed.agreement import ADVICE, RankCalls, UnlikeError, Values, compare, format_ranks
from hostdev.distributed.all_reduce import TwoLevelChannel
from hostdev.distributed.channel import HOST_BACKEND, Channel, PeerLostError
from hostdev.distributed.host_memory import connect_host, get_identity, group_by_host, have_levels, require_two_levels
from hostdev.distributed.monitor import LOST_SECONDS, Monitor
from hostdev.distributed.rank_environment import RankEnvironment
from hostdev.distributed.rendezvous import find_interface, make_key_prefix, share_texts, versions
from hostdev.distributed.rendezvous import get_first_line as _short
from hostdev.distributed.rendezvous import meet as _meet
from hostdev.distributed.world import Closable, Mesh, T, World

TIMEOUT = 600.0  # seconds that a rank waits for another within a step
RENDEZVOUS_SECONDS = 60.0  # seconds until the rendezvous must be complete
FLAGS = 2
STOP, SAVE = range(FLAGS)  # flags by index: the number of a received stop signal, and whether a checkpoint is due
_ONE_LEVEL = ("pipe", "model")  # axes along which torch itself exchanges, with the channel's group

_joined: "list[weakref.ref[Ranks]]" = []


def ranks() -> "Ranks | None":
    """Return the ranks that this process has joined, or None for a single process."""
    return _joined[-1]() if _joined else None


class Ranks(World):
    """The ranks of a run after their rendezvous.

    Args:
        env: The rank environment of this process.
        on_fault: Called in a thread with the failed rank and the cause.
        timeout: Seconds that a rank waits for another within a step.
        meeting: Seconds until the rendezvous must be complete.
        backend: Backend for buffers on devices: see `device_channel`.
        mesh: How the ranks share the network; None means that each has the whole network and its share of the samples.
        values: Further values, by name, that must be equal on all ranks; see `compare`.
        levels: With 1, every rank exchanges with every other. With 2, ranks exchange within their host, and one rank of
            each host exchanges with other hosts. None means 2 if there are several hosts and one has several ranks.

    Raises:
        UserError: The rendezvous failed, or two levels have no effect.
        UnlikeError: The versions, the mesh or the values differ; raised on all ranks.
        ValueError: The mesh has a different number of ranks.
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
        levels: int | None = None,
    ) -> None:
        self.env, self._backend, self.levels = env, backend, levels
        _joined[:] = [weakref.ref(self)]
        self.mesh, self.mesh_is_given = mesh or Mesh(data=env.ranks), mesh is not None
        if self.mesh.size != env.ranks:
            raise ValueError(f"the mesh {self.mesh} has {self.mesh.size} ranks, but {env.ranks} ranks were started")
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._kept: list[Channel] = []
        self._made = 0  # number of channels created
        self._slices: dict[Any, tuple[Channel, Any]] = {}
        self.rank = self.label = env.rank
        self.size, self.micro_batches = env.ranks, 1
        self.failed = False  # whether this rank, or one that it waited for, has failed
        self.have_left = False  # whether all ranks have left together
        self._loops: list[weakref.ref[Closable]] = []
        self.calls = RankCalls(env.rank, env.ranks)
        alike = {**versions(), "the mesh": str(self.mesh), **(values or {})}
        self.store = _meet(env, meeting, alike)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", find_interface(env))
        self.monitor = Monitor(env, make_key_prefix(env), self.calls, on_fault)
        # Flags that this rank contributes to each step, and each flag's maximum over all ranks in the last step.
        self.contributed = [0] * FLAGS
        self.reduced = [0] * FLAGS
        self._within = timedelta(seconds=timeout)
        self.monitor.start()
        try:
            self._identities = share_texts(self.store, env, "identity", get_identity(self.rank))
            if levels == 2:
                require_two_levels(group_by_host(range(self.size), self._identities))
            dist.init_process_group(
                HOST_BACKEND,
                store=PrefixStore("groups", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=meeting),
            )
            self.control = self.channel()  # for the main thread
            self.control.barrier()
        except UserError:  # raised on all ranks
            self.monitor.stop()
            raise
        except (RuntimeError, PeerLostError) as error:
            self.monitor.lost()
            time.sleep(LOST_SECONDS + 1)  # if a rank is gone, the monitor ends this process during the sleep
            why = f"all ranks have joined but cannot reach each other: {_short(error)}; check GLOO_SOCKET_IFNAME"
            self.monitor.fail(why)
            raise UserError(f"rank {self.rank} of {self.size}: {why}") from None

    @property
    def have_parted(self) -> bool:  # type: ignore[override]
        """Return whether ranks no longer wait for each other: all have left, one failed, or their calls differ."""
        return self.failed or self.have_left or self.calls.wrong is not None

    @property
    def is_stuck(self) -> bool:  # type: ignore[override]
        """Return whether other ranks make different calls, and so will not answer."""
        return self.calls.wrong is not None

    def leave_loop(self, text: str) -> None:
        """Count that a loop is left early: see `RankCalls.leave`."""
        self.calls.leave(text)

    def contribute(self, flag: int, value: int) -> int:
        """Give a flag's value to the next step; return the flag's maximum over all ranks in the last step."""
        self.contributed[flag] = value
        return self.reduced[flag]

    def request(self, flag: int, wanted: bool) -> bool:
        """Request something of all ranks if rank 0 wants it; return whether rank 0 requested it in the last step."""
        requested = bool(self.reduced[flag])
        self.contributed[flag] = int(wanted and not requested and self.rank == 0)
        return requested

    def find_together(self, find: Callable[[], T], pack: Callable[[T], Any], unpack: Callable[[Any], T]) -> T:
        """Call `find` on rank 0, and return its result on all ranks: see `World.find_together`."""
        # Any: a JSON value
        if self.rank:
            return unpack(self.control.share(None)[0])
        result = find()
        self.control.share(pack(result))
        return result

    def require_own_rows(self, table: str) -> None:
        """Raise ValueError, because other ranks read this rank's rows ahead."""
        raise ValueError(
            f"table {table!r}: other ranks already have its rows for the next batches; write to the table "
            "between loops, or create the Runtime with depth=0"
        )

    def require_own_gradients(self, message: str) -> None:
        """Raise ValueError with this message, because other ranks have gradients of the step."""
        raise ValueError(message)

    def take_part(self, values: Any, ids: Callable[[], Any]) -> Any:  # Any: of NumPy or torch
        """Return the values of this rank's rows, whose ids `ids` returns; `values` has those of all rows of a table."""
        return values[ids()]

    def note_loop(self, loop: Closable) -> None:
        """Register an open loop, which is closed before the ranks leave."""
        self._loops = [*(known for known in self._loops if known() is not None), weakref.ref(loop)]

    def channel(self, axis: str | None = None) -> Channel:
        """Return a new channel; all ranks must create their channels in the same order.

        Each thread that calls collectives needs its own channel, so that the order of calls is the same on every rank.

        Args:
            axis: The axis of the mesh along which the channel connects ranks; None connects all ranks.
        """
        return self._channel(HOST_BACKEND, None, axis, one_level=axis in _ONE_LEVEL)

    def device_channel(self, device: torch.device, axis: str | None = None, *, one_level: bool = False) -> Channel:
        """Return a new channel for tensors on a device; all ranks must create their channels in the same order.

        The channel's buffers are on the device if torch has a backend for this kind of device, such as NCCL, and each
        rank has its own device. Otherwise they are in host memory. Raises UserError if the requested backend cannot be
        used.

        With `one_level`, a single process group connects all ranks of the channel, even if `levels` is 2.
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
                "but another rank also uses that device, or not all ranks use this kind of device"
                if name == backends[rank]
                else (f"for which this torch has {backends[rank] or 'no backend but ' + HOST_BACKEND}")
            )
            raise UserError(f"--dist-backend {name}: {where}, {why}; leave out --dist-backend, or use {HOST_BACKEND}")
        if own is None or not possible or HOST_BACKEND in wanted:
            return self._channel(HOST_BACKEND, None, axis, one_level=one_level or axis in _ONE_LEVEL)
        # If a rank is gone, the monitor ends all ranks and names it; NCCL's watchdog would abort this process earlier.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        channel = self._channel(own, device, axis, one_level=True)
        for rank, error in enumerate(self.control.share(channel.try_out())):
            if error:
                raise UserError(
                    f"rank {rank}: {own} does not work with {names[rank]}: {error}; use --dist-backend gloo"
                )
        self._kept.append(channel)  # kept until `leave`, because closing it may wait for other ranks
        return channel

    def slices(self, device: torch.device, axis: str | None = None) -> tuple[Channel, Any]:  # Any: a DeviceMesh
        """Return a channel for tensors on a device, and the channel's torch DeviceMesh.

        All ranks must call this method in the same order. The channel and the DeviceMesh are cached for each set of
        groups of ranks, because DTensor treats two meshes of the same ranks as one.
        """
        from torch.distributed.device_mesh import DeviceMesh  # its import takes a second

        groups = self.mesh.groups(axis) if axis is not None else [list(range(self.size))]
        key = device.type, tuple(map(tuple, groups))
        if key not in self._slices:
            channel = self.device_channel(device, axis, one_level=True)
            mesh = DeviceMesh.from_group(channel.group, device.type, mesh_dim_names=("model",))
            self._slices[key] = channel, mesh
        return self._slices[key]

    def _channel(
        self, backend: str, device: torch.device | None, axis: str | None, *, one_level: bool = False
    ) -> Channel:
        groups = [list(range(self.size))] if axis is None else self.mesh.groups(axis)
        self._made += 1
        for members in groups:  # all ranks must create all groups
            hosts = group_by_host(members, self._identities)
            if not one_level and self.levels != 1 and have_levels(hosts):
                made = self._make_two_levels(members, hosts)
            else:
                group = dist.new_group(members, backend=backend, timeout=self._within)
                made = None
                if self.rank in members:
                    index = members.index(self.rank)
                    made = Channel(index, len(members), group, self.monitor.lost, backend, device, hosts)
            if made is not None:
                mine = made
        self._channels.add(mine)
        return mine

    def _make_two_levels(self, members: list[int], hosts: list[list[int]]) -> Channel | None:
        """Return this rank's channel between `members`, or None if it is not a member. All ranks must call this."""
        first = [members[indices[0]] for indices in hosts]
        group = dist.new_group(first, backend=HOST_BACKEND, timeout=self._within)
        if self.rank not in members:
            return None
        index = members.index(self.rank)
        local = next(indices for indices in hosts if index in indices)
        key, place = f"host/{self._made}/{members[local[0]]}", local.index(index)
        links = connect_host(self.store, key, place, len(local), self._within.total_seconds())
        return TwoLevelChannel(index, hosts, None if place else group, self.monitor.lost, links)

    def part(self) -> tuple[int, int]:
        """Return (rank, ranks) for `HostTable`."""
        return self.rank, self.size

    def begin(self, kind: str, text: str) -> None:
        """Count a call that all ranks must make: see `RankCalls.begin`."""
        self.calls.begin(kind, text)

    def agree(self, kind: str, text: str, values: Values | None = None) -> None:
        """Count a call that all ranks must make with equal values; raise UnlikeError on all ranks if anything differs.

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
        # If a group's thread releases tensors while Python exits, it takes the interpreter's lock, and the process
        # aborts (torch 2.13).
        for channel in list(self._channels):
            channel.let_go()
        self.have_left = True


def _get_backend(device: torch.device) -> str | None:
    """Return torch's collective backend for this kind of device, or None if this build of torch has none."""
    if device.type == "cpu":
        return None
    backend = dist.Backend.default_device_backend_map.get(device.type)
    return backend if backend is not None and dist.is_backend_available(backend) else None


def _get_device_name(device: torch.device) -> str:
    """Return a device's name that is unique among all hosts. An index may mean different devices in two processes."""
    if device.type == "cpu":
        return f"the CPU of {socket.gethostname()}"
    module = torch.get_device_module(device)
    about = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return f"{device.type} {getattr(about, 'uuid', device.index)} of {socket.gethostname()}"
