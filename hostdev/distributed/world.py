"""A run with one process, whose collectives return their input. `process_group.Ranks` is a run with several."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from hostdev.distributed.agreement import Values
from hostdev.distributed.mesh import Mesh, MeshPlace

T = TypeVar("T")


class Closable(Protocol):
    """An object that is closed before the ranks leave."""

    def close(self) -> None:
        """Release its resources."""


class LocalChannel:
    """The collectives of a process group with one member: they return their input."""

    rank, ranks, sent_bytes, network_bytes = 0, 1, 0, 0

    def answering(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because no other rank can be lost."""
        return nullcontext()

    def gather(self, values: Any) -> list[Any]:
        """Return the arrays of all ranks."""
        return [values]

    def gather_first(self, values: Any) -> Any:
        """Return the arrays of all ranks, one after the other, on the first rank."""
        return values

    def share(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return [value]

    def broadcast(self, values: Any) -> None:
        """Overwrite values with those of the first rank: here, leave them unchanged."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class World:
    """This process as rank 0 of 1. `process_group.Ranks` overrides what several processes do together.

    Attributes:
        micro_batches: Micro-batches in a step of this rank, unless the program gives a number; None for steps without.
        label: The rank for files that name it; None for the only process.
    """

    rank, size = 0, 1
    mesh, mesh_is_given = Mesh(), False
    have_parted = is_stuck = False
    micro_batches: int | None = None
    label: int | None = None
    control: Any = LocalChannel()  # Any: `Channel` imports torch, and this module must not

    @property
    def at(self) -> MeshPlace:
        """This rank's index along each axis of the mesh."""
        return self.mesh.place(self.rank)

    def share(self) -> tuple[int, int]:
        """Return the index of this rank's share of the samples, and the number of shares."""
        return self.at.data, self.mesh.data

    @property
    def has_parts(self) -> bool:
        """Return whether ranks hold different parts of the network."""
        return self.mesh.data < self.size

    @property
    def leads(self) -> bool:
        """Return whether this rank looks up the rows of its samples."""
        return self.mesh.leads(self.rank)

    def part(self) -> tuple[int, int] | None:
        """Return (rank, ranks) for `HostTable`, or None for a single process."""
        return None

    def channel(self, axis: str | None = None) -> Any:  # Any: see `control`
        """Return a channel to the ranks along an axis of the mesh."""
        return self.control

    def device_channel(self, device: Any, axis: str | None = None) -> Any:  # Any: a torch.device; see `control`
        """Return a channel for tensors on a device."""
        return self.control

    def slices(self, device: Any, axis: str | None = None) -> tuple[Any, Any]:  # Any: torch's types; see `control`
        """Return a channel, and None in place of a DeviceMesh, because a single rank does not split layers."""
        return self.control, None

    def begin(self, kind: str, text: str) -> None:
        """Count a call that all ranks must make."""

    def agree(self, kind: str, text: str, values: Values | None = None) -> None:
        """Count a call that all ranks must make with equal values."""

    def leave_loop(self, text: str) -> None:
        """Count that a loop is left early; all ranks must leave it together."""

    def contribute(self, flag: int, value: int) -> int:
        """Give a flag's value to the next step; return the flag's maximum over all ranks in the last step."""
        return value

    def request(self, flag: int, wanted: bool) -> bool:
        """Request something of all ranks if it is wanted; return whether a rank requested it in the last step."""
        return wanted

    def find_together(self, find: Callable[[], T], pack: Callable[[T], Any], unpack: Callable[[Any], T]) -> T:
        """Call `find` on rank 0, and return its result on all ranks.

        Args:
            pack: Returns the result as a JSON value for the other ranks.
            unpack: Returns the result from that value.
        """
        # Any: what the channel shares
        return find()

    def require_own_rows(self, table: str) -> None:
        """Raise ValueError if other ranks read this rank's rows ahead, so that nothing else may write to the table."""

    def require_own_gradients(self, message: str) -> None:
        """Raise ValueError with this message if other ranks have gradients of the step."""

    def take_part(self, values: Any, ids: Callable[[], Any]) -> Any:  # Any: of NumPy or torch
        """Return the values of this rank's rows, whose ids `ids` returns, among those of all rows."""
        return values

    def note_loop(self, loop: Closable) -> None:
        """Register an open loop, which must be closed before the ranks leave."""


ALONE_WORLD = World()
