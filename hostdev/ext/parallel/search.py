"""Layout search: enumerates layouts and sorts them by a cost model. `auto` then times the best.

A step of M micro-batches on a mesh of D x T x P ranks (axes data, model, pipe) takes

    (M / D + P - 1) * t        for the micro-batches, where t is the slowest rank's time for one
    + the additions of gradients, their exchange along data, and the optimizer's step

Here t is the time of the rank's pieces, minus the time that slices save, plus the exchanges with other stages and
between slices; P - 1 is halved if each rank has two stages (Narayanan et al., SC 2021, derive the same bubble). The
network is cut so that the slowest stage takes the least time. The layers' strategies are found as a shortest path
through the layers, as in Jia et al., "Beyond Data and Model Parallelism", MLSys 2019. `costs` measures all quantities
in the cost model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hostdev.core.errors import UserError
from hostdev.distributed.world import Mesh, Plan
from hostdev.ext.parallel.costs import LayerCost, Machine, PieceCost, Profile
from hostdev.ext.parallel.pieces import best_cut

_NONE_SLICED = (
    "--mesh {mesh} divides layers among {count} processes (model={count}), but no layer can be cut into {count} "
    "slices, or --plan leaves no layer to cut; give another --mesh"
)


class SearchOptions(NamedTuple):
    """The constraints of a search."""

    ranks: int  # number of ranks
    micro_batches: int  # number of micro-batches of a step over all ranks
    mesh: Mesh | None = None  # a fixed mesh; None searches for one
    begins: Sequence[str] | None = None  # fixed first pieces of the second and later stages; None searches for them
    strategies: Mapping[str, str] = {}  # fixed strategies by layer name
    interleaved: bool = False  # whether each rank has two stages
    gpipe: bool = False  # whether to run all forward passes before all backward passes
    sliced: bool = False  # whether at least one layer must be sliced if the fixed mesh has an axis `model`


class SliceableLayers(NamedTuple):
    """The layers that can be sliced."""

    able: Callable[[str, str, int], bool]  # whether a layer can be sliced by a strategy over a number of ranks
    pairs: set[tuple[str, str]]  # as returned by `plan.pairable`
    stages: bool  # whether the network can be cut into stages


class Candidate(NamedTuple):
    """A layout, and its cost according to the cost model."""

    mesh: Mesh  # the mesh
    begins: list[str]  # names of the first pieces of the second and later stages
    plan: Plan  # strategies of layers
    compute: float  # seconds of a step's computation
    waiting: float  # seconds of waiting for other stages
    exchange: float  # seconds of exchanges
    update: float  # seconds of gradient additions and of the optimizer
    memory: int  # bytes on the fullest rank: parameters, gradients, two optimizer states, saved activations
    measured: float | None = None  # measured seconds of a step; None if no step was timed

    @property
    def seconds(self) -> float:
        """Seconds of a step according to the cost model."""
        return self.compute + self.waiting + self.exchange + self.update


class _Sliced(NamedTuple):
    """The effect of slicing a stage's layers on one micro-batch."""

    plan: list[tuple[str, str]]
    saved: float  # seconds of computation that this rank saves
    exchange: float  # seconds of additional exchanges
    parameters: float  # bytes of parameters that other ranks hold instead of this rank


def candidates(profile: Profile, machine: Machine, layers: SliceableLayers, wanted: SearchOptions) -> list[Candidate]:
    """Return the best candidate of each possible mesh; raise UserError if no mesh is possible.

    The candidates that fit into memory come first, then the others, each sorted by expected time.
    """
    found = []
    for mesh in [wanted.mesh] if wanted.mesh is not None else meshes(wanted.ranks):
        stages = mesh.pipe * (1 + wanted.interleaved) if mesh.pipe > 1 else 1
        if wanted.micro_batches % mesh.data or wanted.micro_batches < mesh.data * mesh.pipe:
            continue
        if mesh.pipe > 1 and (not layers.stages or len(profile.pieces) < stages):
            continue
        if mesh.pipe == 1 and wanted.begins is not None:
            continue
        if mesh.model == 1 and any(one != "replicate" for one in wanted.strategies.values()):
            continue
        one = _candidate(profile, machine, layers, wanted, mesh, stages)
        if mesh.model > 1 and not one.plan and wanted.mesh is None:
            continue  # nothing is sliced
        if mesh.model > 1 and not one.plan and wanted.sliced:
            one = _sliced_candidate(profile, machine, layers, wanted, mesh, stages)
        found.append(one)
    if not found:
        raise UserError(
            f"no layout of {wanted.ranks} processes fits {wanted.micro_batches} micro-batches and the given options; "
            "give more micro-batches or fewer options"
        )
    return sorted(found, key=lambda one: (one.memory > machine.available, one.seconds))


def meshes(ranks: int) -> list[Mesh]:
    """Return all meshes with a given number of ranks."""
    return [
        Mesh(data, model, ranks // data // model)
        for data in range(1, ranks + 1)
        if ranks % data == 0
        for model in range(1, ranks // data + 1)
        if ranks // data % model == 0
    ]


def _sliced_candidate(
    profile: Profile, machine: Machine, layers: SliceableLayers, wanted: SearchOptions, mesh: Mesh, stages: int
) -> Candidate:
    """Return the fastest candidate with at least one sliced layer; raise UserError if no layer can be sliced."""
    free = [layer.name for layer in profile.layers if layer.name not in wanted.strategies]
    ways = [
        {name: strategy}
        for name in free
        for strategy in ("colwise", "rowwise")
        if layers.able(name, strategy, mesh.model)
    ]
    ways += [
        {first: "colwise", second: "rowwise"}
        for first, second in sorted(layers.pairs)
        if first in free
        and second in free
        and layers.able(first, "colwise", mesh.model)
        and layers.able(second, "rowwise", mesh.model)
    ]
    found = [
        _candidate(profile, machine, layers, wanted._replace(strategies={**wanted.strategies, **way}), mesh, stages)
        for way in ways
    ]
    if not found:
        raise UserError(_NONE_SLICED.format(mesh=mesh, count=mesh.model))
    return min(found, key=lambda one: (one.memory > machine.available, one.seconds))


def _candidate(
    profile: Profile, machine: Machine, layers: SliceableLayers, wanted: SearchOptions, mesh: Mesh, stages: int
) -> Candidate:
    pieces, count = profile.pieces, wanted.micro_batches // mesh.data
    names = [piece.name for piece in pieces]
    if stages == 1:
        starts = [0]
    elif wanted.begins is not None:
        starts = [0, *(names.index(name) for name in wanted.begins)]
    else:
        crossing = [2 * machine.exchange(piece.given) for piece in pieces]
        starts = best_cut([piece.seconds for piece in pieces], crossing, stages)
    edges = [*starts, len(pieces)]
    plan: list[tuple[str, str]] = []
    compute, exchange, parameters, saved = [], [], [], []
    for number in range(len(starts)):
        here = range(edges[number], edges[number + 1])
        own = [layer for layer in profile.layers if layer.piece in here]
        sliced = _strategies(own, pieces, machine, layers, wanted, mesh, count)
        plan += sliced.plan
        compute.append(sum(pieces[one].seconds for one in here) - sliced.saved)
        crossing_bytes = [pieces[edge - 1].given for edge in edges[number : number + 2] if 0 < edge < len(pieces)]
        looked_up = machine.exchange(profile.inputs) if mesh.model > 1 and number == 0 and profile.inputs else 0.0
        exchange.append(sliced.exchange + looked_up + sum(2 * machine.exchange(size) for size in crossing_bytes))
        parameters.append(sum(pieces[one].parameters for one in here) - sliced.parameters)
        saved.append(sum(pieces[one].saved for one in here))
    by_rank = [range(rank, len(starts), mesh.pipe) for rank in range(mesh.pipe)]
    busy = [sum(compute[one] + exchange[one] for one in own) for own in by_rank]
    rounds = 1 + wanted.interleaved if mesh.pipe > 1 else 1
    slowest = max(range(mesh.pipe), key=busy.__getitem__)
    held = max(sum(parameters[one] for one in own) for own in by_rank)
    work = count * sum(compute[one] for one in by_rank[slowest])
    moved = count * sum(exchange[one] for one in by_rank[slowest])
    along_data = 0.0
    if mesh.data > 1:
        part = held * (mesh.data - 1) / mesh.data
        along_data = 2 * machine.exchange(part) + machine.add(held)
    memory = max(
        sum(4 * parameters[one] + saved[one] * _in_flight(wanted, mesh, count, rank) for one in own)
        for rank, own in enumerate(by_rank)
    )
    return Candidate(
        mesh,
        [names[start] for start in starts[1:]],
        plan,
        work,
        (mesh.pipe - 1) * busy[slowest] / rounds,
        moved + along_data,
        (count - 1) * machine.add(held) + machine.update(held),
        int(memory),
    )


def _in_flight(wanted: SearchOptions, mesh: Mesh, count: int, rank: int) -> int:
    """Return the number of micro-batches whose activations a rank's stage holds at the same time."""
    if mesh.pipe == 1:
        return 1
    return count if wanted.gpipe else min(count, mesh.pipe - rank + (mesh.pipe if wanted.interleaved else 0))


def _strategies(
    own: Sequence[LayerCost],
    pieces: Sequence[PieceCost],
    machine: Machine,
    layers: SliceableLayers,
    wanted: SearchOptions,
    mesh: Mesh,
    count: int,
) -> _Sliced:
    """Return the fastest strategies for a stage's layers, and their effect."""
    T = mesh.model
    if T == 1:
        return _Sliced([], 0.0, 0.0, 0.0)
    away = (T - 1) / T

    def gain(layer: LayerCost) -> float:
        return pieces[layer.piece].seconds * layer.share * away

    def held(layer: LayerCost) -> float:
        """Return the seconds per micro-batch that slicing saves on additions and updates of a layer's parameters."""
        size = layer.parameters * away
        along_data = 0.0
        if mesh.data > 1:
            along_data = machine.add(size) + 2 * size * (mesh.data - 1) / mesh.data / machine.bandwidth
        return (machine.update(size) + (count - 1) * machine.add(size) + along_data) / count

    def joined(layer: LayerCost, strategy: str) -> float:
        gathered, summed = (layer.given, layer.taken) if strategy == "colwise" else (layer.taken, layer.given)
        return machine.slicing + machine.exchange(gathered * away) + machine.exchange(2 * summed * away)

    def may(layer: LayerCost, strategy: str) -> bool:
        given = wanted.strategies.get(layer.name)
        return given == strategy or (given is None and layers.able(layer.name, strategy, T))

    # best[i]: seconds added by the best strategies of the first i layers, and their effect
    best: list[tuple[float, _Sliced]] = [(0.0, _Sliced([], 0.0, 0.0, 0.0))]
    for at, layer in enumerate(own):
        before = best[at][1]
        ways: list[tuple[_Sliced, list[tuple[str, str]], float, list[LayerCost]]] = []
        if wanted.strategies.get(layer.name, "replicate") == "replicate":
            ways.append((before, [], 0.0, []))
        for strategy in ("colwise", "rowwise"):
            if may(layer, strategy):
                ways.append((before, [(layer.name, strategy)], joined(layer, strategy), [layer]))
        if at and (own[at - 1].name, layer.name) in layers.pairs:
            first = own[at - 1]
            if may(first, "colwise") and may(layer, "rowwise"):
                cost = 2 * machine.slicing
                cost += machine.exchange(2 * layer.given * away) + machine.exchange(2 * first.taken * away)
                ways.append((best[at - 1][1], [(first.name, "colwise"), (layer.name, "rowwise")], cost, [first, layer]))
        made = []
        for base, plan, cost, cut in ways:
            sliced = _Sliced(
                base.plan + plan,
                base.saved + sum(map(gain, cut)),
                base.exchange + cost,
                base.parameters + sum(one.parameters * away for one in cut),
            )
            less = sum(held(one) for one in own[: at + 1] if one.name in dict(sliced.plan))
            made.append((sliced.exchange - sliced.saved - less, sliced))
        if not made:
            raise UserError(
                f"--plan: layer {layer.name} cannot be sliced by its strategy over {T} processes; leave the layer out"
            )
        best.append(min(made, key=lambda one: one[0]))
    return best[-1][1]
