"""The mesh of ranks, and a run with one process, whose collectives return their input.

`process_group.Ranks` is a run with several processes. On a mesh, a network's work is split among ranks by samples
(data), stages (pipe) and slices of layers (model). Ranks are numbered as in torch.distributed.device_mesh: the index
along the last axis varies fastest. Neighbours along `model` have consecutive ranks, because they exchange most;
neighbours along `pipe` are farthest apart.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

from hostdev.core.errors import UserError
from hostdev.core.micro_batches import get_nodes
from hostdev.distributed.agreement import Values

AXES = ("pipe", "data", "model")  # outermost first
SCHEDULES = ("1f1b", "gpipe", "interleaved")  # orders of micro-batches through the stages
STRATEGIES = ("colwise", "rowwise", "replicate")  # ways to slice a layer
Plan = Sequence[tuple[str, str]]  # a layer's name or a pattern of names, and its strategy
T = TypeVar("T")


class Mesh(NamedTuple):
    """Number of ranks along each axis."""

    data: int = 1
    model: int = 1
    pipe: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.model * self.pipe

    def place(self, rank: int) -> "MeshPlace":
        """Return a rank's index along each axis."""
        outer, model = divmod(rank, self.model)
        pipe, data = divmod(outer, self.data)
        return MeshPlace(data, model, pipe)

    def rank(self, place: "MeshPlace") -> int:
        """Return the rank with these indices."""
        return (place.pipe * self.data + place.data) * self.model + place.model

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks whose indices differ along this axis only, in order."""
        found: dict[MeshPlace, list[int]] = {}
        for rank in range(self.size):
            found.setdefault(self.place(rank)._replace(**{axis: 0}), []).append(rank)
        return list(found.values())

    def leads(self, rank: int) -> bool:
        """Return whether a rank looks up its samples' rows: only ranks with the first slice of the first stage do."""
        place = self.place(rank)
        return place.pipe == 0 and place.model == 0

    def nodes(self, micro_batches: int) -> list[list[tuple[int, int]]]:
        """Return the (start, size) of each rank's nodes (`core.micro_batches`) in the sums of row gradients.

        `micro_batches` is the number of micro-batches for each index along data.
        """
        shares = [
            range(self.place(rank).data * micro_batches, (self.place(rank).data + 1) * micro_batches)
            for rank in range(self.size)
        ]
        return [get_nodes(share.start, share.stop) if self.leads(rank) else [] for rank, share in enumerate(shares)]

    def __str__(self) -> str:
        """Return the mesh as a value of `--mesh`."""
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in self._fields if getattr(self, axis) > 1) or "data=1"


class MeshPlace(NamedTuple):
    """A rank's index along each axis."""

    data: int
    model: int
    pipe: int


class Layout(NamedTuple):
    """How a network is to be divided on a mesh that has stages or slices.

    Attributes:
        schedule: Order of micro-batches through the stages, one of `SCHEDULES`.
        begins: Names of the first pieces of the second and later stages; None cuts the network into stages of
            similar cost.
        plan: Pairs of a name, or a pattern of names, of layers and the strategy by which to slice them.
    """

    schedule: str = SCHEDULES[0]
    begins: Sequence[str] | None = None
    plan: Plan = ()


def parse_layout(schedule: str | None, stage_cut: str | None, plan: str | None) -> Layout:
    """Return the layout that `--schedule`, `--stage-cut` and `--plan` describe; raise UserError for a wrong plan."""
    begins = None if stage_cut is None else stage_cut.split(",")
    return Layout(schedule or SCHEDULES[0], begins, parse_plan(plan) if plan else ())


def parse_mesh(text: str) -> Mesh:
    """Return the mesh of a `--mesh` value, such as data=2,pipe=2; raise UserError if it is invalid."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, number = (each.strip() for each in part.partition("="))
        if axis not in Mesh._fields or not equals:
            raise UserError(
                f"--mesh {text}: {part.strip() or 'nothing'!r} is not data=N, model=N or pipe=N; name each axis "
                "with several processes, such as data=2,pipe=2"
            )
        if axis in sizes:
            raise UserError(f"--mesh {text}: {axis} is given twice; give each axis once")
        if not (number.isascii() and number.isdigit() and int(number) > 0):
            raise UserError(f"--mesh {text}: {axis}={number} must be a number of processes, 1 or more")
        sizes[axis] = int(number)
    return Mesh(**sizes)


def parse_plan(text: str) -> Plan:
    """Return the plan of a `--plan` value, such as deep.0=colwise,deep.2=rowwise; raise UserError if it is invalid."""
    strategies: dict[str, str] = {}
    for part in text.split(","):
        name, equals, strategy = (each.strip() for each in part.partition("="))
        if not name or not equals or strategy not in STRATEGIES:
            raise UserError(
                f"--plan {text}: {part.strip() or 'nothing'!r} is not LAYER=STRATEGY with one of "
                f"{', '.join(STRATEGIES)}; give, for example, deep.0=colwise,deep.2=rowwise"
            )
        if name in strategies:
            raise UserError(f"--plan {text}: {name} is given twice; give each layer once")
        strategies[name] = strategy
    return list(strategies.items())


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
        micro_batches: Default number of micro-batches in a step of this rank; None for steps without micro-batches.
        label: The rank, as logs and files name it; None for a single process.
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
        """Return `value`; see `Ranks.contribute` for several processes."""
        return value

    def request(self, flag: int, wanted: bool) -> bool:
        """Return `wanted`; see `Ranks.request` for several processes."""
        return wanted

    def find_together(self, find: Callable[[], T], pack: Callable[[T], Any], unpack: Callable[[Any], T]) -> T:
        """Call `find` on rank 0, and return its result on all ranks.

        Args:
            find: Returns the result.
            pack: Returns the result as a JSON value for the other ranks.
            unpack: Returns the result from that value.
        """
        # Any: a JSON value
        return find()

    def require_own_rows(self, table: str) -> None:
        """Raise ValueError if other ranks read this rank's rows ahead, so that nothing else may write to the table."""

    def require_own_gradients(self, message: str) -> None:
        """Raise ValueError with this message if other ranks have gradients of the step."""

    def take_part(self, values: Any, ids: Callable[[], Any]) -> Any:  # Any: of NumPy or torch
        """Return the values of this rank's rows, whose ids `ids` returns; `values` has those of all rows of a table."""
        return values

    def note_loop(self, loop: Closable) -> None:
        """Register an open loop, which must be closed before the ranks leave."""


ALONE_WORLD = World()
