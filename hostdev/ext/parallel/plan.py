"""Slicing strategies and layouts: which layers are sliced over the ranks along the model axis, and how.

colwise slices a layer's outputs, rowwise its inputs (Shoeybi et al., "Megatron-LM", 2019). If a rowwise layer consumes
a colwise layer's output with only elementwise functions in between, each rank continues with its own slice, and one sum
over the ranks follows. Otherwise a colwise layer's slices are gathered immediately. Layers without a strategy are
replicated: each rank of the axis computes them in full. torch.distributed.tensor provides the slices and collectives.

A layout says where a network is cut into stages, and which layers are sliced.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hostdev.core.errors import UserError
from hostdev.core.pieces import Piece, run
from hostdev.distributed.world import STRATEGIES, Mesh, Plan
from hostdev.distributed.world import Layout as Layout  # a public name of this package
from hostdev.ext.parallel.pieces import balanced, count_flops, cut, fake_mode, get_pieces

# The dimension along which each strategy slices a layer's parameters; None if they are replicated.
_CUTS: Mapping[type[nn.Module], Mapping[str, Mapping[str, int | None]]] = {
    nn.Linear: {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1, "bias": None}},
    nn.Embedding: {"colwise": {"weight": 1}, "rowwise": {"weight": 0}},
}
_ELEMENTWISE = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU),
    *(nn.ELU, nn.Identity, nn.Softplus, nn.ReLU6, nn.Mish, nn.Hardswish),
)
Inputs = Callable[[int], tuple[Any, ...]]  # called with a number of samples; returns zeros as a network's inputs


class Sliced(NamedTuple):
    """A sliced layer."""

    strategy: str  # "colwise" or "rowwise"
    dims: Mapping[str, int | None]  # the sliced dimension of each of its parameters; None if replicated
    joined: bool  # colwise: whether output slices are gathered immediately; rowwise: whether the input arrives whole


Strategies = dict[str, Sliced]  # by layer name


def resolve_strategies(
    network: nn.Module, plan: Plan, ranks: int, stages: Sequence[Sequence[Piece]], inputs: Callable[[], tuple[Any, ...]]
) -> Strategies:
    """Return how each layer in a plan is sliced; raise UserError if the plan does not fit.

    The network runs only on fake tensors. `stages` has the network's pieces by stage; it is empty if the network is not
    cut into stages. `inputs` returns zeros in place of the network's inputs.
    """
    wanted = {name: strategy for name, strategy in matched(network, plan).items() if strategy != "replicate"}
    modules = dict(network.named_modules())
    for name, strategy in wanted.items():
        for parameter, dim in _CUTS[type(modules[name])][strategy].items():
            value = getattr(modules[name], parameter)
            if value is not None and get_slice_dim(value) is not None:
                raise UserError(
                    f"--plan {name}={strategy}: {name}.{parameter} is already marked by hostdev.parallel.sliced; "
                    "leave the layer out of the plan"
                )
            if dim is not None and value is not None and value.shape[dim] % ranks:  # the same test as in `divides`
                raise UserError(
                    f"--plan {name}={strategy}: {name}.{parameter} has shape {list(value.shape)}, but "
                    f"{value.shape[dim]} cannot be cut into {ranks} equal slices; use another --mesh, or "
                    f"{name}=replicate"
                )
    _require_same_cut(network, wanted)
    pairs = _find_pairs(network, wanted, stages, inputs) if "colwise" in wanted.values() else set()
    kept = {name for pair in pairs for name in pair}
    return {
        name: Sliced(strategy, _CUTS[type(modules[name])][strategy], name not in kept)
        for name, strategy in wanted.items()
    }


def matched(network: nn.Module, plan: Plan) -> dict[str, str]:
    """Return the strategy of each layer that a plan names; raise UserError if a named layer cannot be sliced."""
    modules = dict(network.named_modules())
    able = [name for name, module in modules.items() if type(module) in _CUTS]
    found: dict[str, tuple[str, str]] = {}
    for pattern, strategy in plan:
        exact = pattern in modules
        names = [pattern] if exact else [name for name in able if fnmatchcase(name, pattern)]
        if exact and pattern not in able:
            raise UserError(
                f"--plan {pattern}={strategy}: {pattern} is a {type(modules[pattern]).__name__}; only Linear and "
                "Embedding layers can be sliced"
            )
        if not names:
            raise UserError(f"--plan {pattern}={strategy}: no layer has such a name; the layers are {', '.join(able)}")
        for name in names:
            before = found.get(name)
            if before is None or exact:  # an exact name overrides a pattern
                found[name] = (pattern, strategy)
            elif before[0] != name and before[1] != strategy:
                raise UserError(
                    f"--plan: {before[0]}={before[1]} and {pattern}={strategy} both match {name}; add {name}=STRATEGY"
                )
    return {name: found[name][1] for name in able if name in found}


def _require_same_cut(network: nn.Module, wanted: Mapping[str, str]) -> None:
    """Raise UserError if two layers share a parameter and slice it differently."""
    users: dict[int, tuple[str, int | None]] = {}
    for name, module in network.named_modules():
        for parameter, value in module._parameters.items():
            if value is None:
                continue
            dim = _CUTS[type(module)][wanted[name]][parameter] if name in wanted else None
            other, its = users.setdefault(id(value), (name, dim))
            if its != dim:
                say = {each: f"{each}={wanted.get(each, 'replicate')}" for each in (other, name)}
                raise UserError(
                    f"--plan: {other} and {name} share a parameter, but {say[other]} and {say[name]} cut it "
                    "differently; give strategies that cut it the same way"
                )


def _find_pairs(
    network: nn.Module,
    wanted: Mapping[str, str],
    stages: Sequence[Sequence[Piece]],
    inputs: Callable[[], tuple[Any, ...]],
) -> set[tuple[str, str]]:
    """Return the pairs (colwise layer, rowwise layer) that can compute on slices without gathering them in between.

    Both layers are in one stage. Only the rowwise layer consumes the colwise layer's output, directly or through
    elementwise layers.
    """
    names = {id(module): name for name, module in network.named_modules() if name in wanted}
    calls: dict[str, int] = dict.fromkeys(wanted, 0)
    # By a value's id: the colwise layer that it comes from, the tensors from that layer's output to the value, and the
    # value's version, which every write to it changes.
    source: dict[int, tuple[str, list[Tensor], int]] = {}
    found: dict[str, tuple[str, list[Tensor]]] = {}  # by rowwise layer: its colwise layer, the tensors between the two
    hooks, uses = [], _UseCounter()

    def after(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            calls[name] += 1
        value = given[0] if given else None
        begin, way, version = source.get(id(value), ("", [], 0))
        as_given = value is not None and bool(way) and value._version - getattr(module, "inplace", False) == version
        if name is not None and wanted[name] == "rowwise" and as_given:
            found[name] = begin, way
        if id(result) != id(value):
            uses.of.pop(id(result), None)  # forget the count of an earlier tensor with the same id
        if name is not None and wanted[name] == "colwise":
            source[id(result)] = (name, [result], result._version)
        elif type(module) in _ELEMENTWISE and as_given:
            source[id(result)] = (begin, [*way, result], result._version)

    for module in network.modules():
        if id(module) in names or type(module) in _ELEMENTWISE:
            hooks.append(module.register_forward_hook(after))
    try:
        with fake_mode([network]) as fake:
            given = fake(inputs())
            pieces = [piece for stage in stages for piece in stage]
            with uses:
                uses.count(run(pieces, *given) if pieces else network(*given))
    finally:
        for hook in hooks:
            hook.remove()
    stage_of = {
        id(module): number
        for number, stage in enumerate(stages)
        for piece in stage
        for one in piece.holds
        if isinstance(one, nn.Module)
        for module in one.modules()
    }
    modules = dict(network.named_modules())
    return {
        (begin, name)
        for name, (begin, way) in found.items()
        if calls[begin] == calls[name] == 1
        and all(uses.of[id(value)] == 1 for value in way)
        and stage_of.get(id(modules[begin])) == stage_of.get(id(modules[name]))
    }


class _UseCounter(TorchFunctionMode):
    """Counts the torch calls that consume each tensor, including those that only read its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[int] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func != Tensor._version.__get__:  # type: ignore[attr-defined]
            self.count((args, kwargs), but=result)
        return result

    def count(self, values: Any, but: Any = None) -> None:
        leaves = torch.utils._pytree.tree_leaves(values)
        self.of.update(id(one) for one in leaves if isinstance(one, Tensor) and one is not but)


def sliced(parameter: nn.Parameter, dim: int = 0) -> nn.Parameter:
    """Mark a parameter as this rank's slice of a larger parameter, which is sliced over the ranks of the model axis.

    Checkpoints save the slices as one parameter, and any mesh can load them; the gradient is summed over the ranks with
    the same slice. The network itself must exchange the values that its computation needs.

    Args:
        parameter: This rank's slice.
        dim: The dimension along which the larger parameter is sliced.
    """
    parameter._hostdev_slice = dim  # type: ignore[attr-defined]
    return parameter


def get_slice_dim(parameter: Tensor) -> int | None:
    """Return the dimension along which a parameter is sliced, or None if it is not sliced."""
    found: int | None = getattr(parameter, "_hostdev_slice", None)
    return found


class Traffic:
    """Counts the bytes that this rank sends to ranks with other slices in training, assuming ring collectives."""

    def __init__(self, ranks: int) -> None:
        self._away = (ranks - 1) / ranks
        self.sent = 0.0

    def watch(self, layer: nn.Module, how: Sliced) -> None:
        """Count the exchanges of a sliced layer, forward and backward."""
        layer.register_forward_hook(partial(self._count, how))

    def _count(self, how: Sliced, layer: nn.Module, taken: tuple[Any, ...], given: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        bytes_in = (
            taken[0].numel() * taken[0].element_size() if taken[0].requires_grad else 0
        )  # a DTensor's numel() counts the whole tensor
        bytes_out = given.numel() * given.element_size()
        if how.strategy == "colwise":
            self.sent += self._away * (bytes_out * how.joined + 2 * bytes_in)
        else:
            self.sent += self._away * (2 * bytes_out + bytes_in * how.joined)


def cut_layers(network: nn.Module, strategies: Mapping[str, Sliced], mesh: Any) -> Traffic:
    """Slice layers over a DeviceMesh with torch's parallelize_module; return the counter of exchanged bytes.

    The layers' parameters become DTensors. A `LocalParameters` made afterwards holds this rank's slices of them, marked
    by `sliced`, in the same memory.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    aliases, traffic = _find_aliases(network), Traffic(mesh.size())
    modules = dict(network.named_modules())
    for name, one in strategies.items():
        whole = Replicate()
        if one.strategy == "colwise":
            style: Any = ColwiseParallel(output_layouts=whole if one.joined else Shard(-1))
        else:
            style = RowwiseParallel(input_layouts=whole if one.joined else Shard(-1))
        parallelize_module(modules[name], mesh, style, src_data_rank=None)
        traffic.watch(modules[name], one)
    for (first, key), *others in aliases:  # layers keep sharing their parameters
        for module, other in others:
            module._parameters[other] = first._parameters[key]
    return traffic


def _find_aliases(network: nn.Module) -> Iterator[list[tuple[nn.Module, str]]]:
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in network.modules():
        for key, value in module._parameters.items():
            if value is not None:
                found.setdefault(id(value), []).append((module, key))
    return (users for users in found.values() if len(users) > 1)


def cuttable(module: nn.Module) -> bool:
    """Return whether a layer's type can be sliced."""
    return type(module) in _CUTS


def divides(module: nn.Module, strategy: str, ranks: int) -> bool:
    """Return whether a strategy can cut a layer into equal slices; False if a parameter is marked by `sliced`."""
    values = [(getattr(module, name), dim) for name, dim in _CUTS[type(module)][strategy].items()]
    return all(value is None or dim is None or value.shape[dim] % ranks == 0 for value, dim in values) and not any(
        value is not None and get_slice_dim(value) is not None for value, _ in values
    )


def get_shared_layers(network: nn.Module) -> set[str]:
    """Return the names of the layers that share a parameter with another layer."""
    names = {id(module): name for name, module in network.named_modules()}
    return {names[id(module)] for users in _find_aliases(network) for module, _ in users}


def pairable(network: nn.Module, inputs: Callable[[], tuple[Any, ...]]) -> set[tuple[str, str]]:
    """Return the pairs of Linear layers that can be sliced together, the first colwise and the second rowwise.

    Only the second layer consumes the first layer's output, directly or through elementwise layers.
    """
    names = [name for name, module in network.named_modules() if type(module) is nn.Linear]
    found: set[tuple[str, str]] = set()
    for first in range(2):
        kinds = ("colwise", "rowwise") if not first else ("rowwise", "colwise")
        wanted = {name: kinds[number % 2] for number, name in enumerate(names)}
        found |= _find_pairs(network, wanted, [], inputs)
    return found


def sliceable(
    network: nn.Module, ranks: int, inputs: Callable[[], tuple[Any, ...]], *, without: Container[str] = ()
) -> list[Plan]:
    """Return the strategies of the layers that can be sliced over a number of ranks, except the layers `without`.

    Layers that can be sliced together come first, in pairs. Other layers are sliced colwise if possible, else rowwise.
    """
    modules = dict(network.named_modules())
    units: list[Plan] = []
    free = {name for name, module in modules.items() if cuttable(module) and name not in without}
    for pair in sorted(pairable(network, inputs)):
        unit = list(zip(pair, STRATEGIES, strict=False))
        if free.issuperset(pair) and all(divides(modules[name], how, ranks) for name, how in unit):
            free.difference_update(pair)
            units.append(unit)
    for name in [name for name in modules if name in free]:
        ways = [how for how in ("colwise", "rowwise") if divides(modules[name], how, ranks)]
        units += [[(name, how)] for how in ways[:1]]
    return units


class ResolvedLayout(NamedTuple):
    """A layout that fits a network."""

    pieces: list[Piece]  # pieces of the network; empty if the network is not cut into stages
    begins: list[str]  # names of the first pieces of the second and later stages
    strategies: Strategies  # strategies of the sliced layers

    def stages(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """Return the pieces of each stage."""
        return cut(pieces, self.begins)


def resolve_layout(
    network: nn.Module, layout: Layout, mesh: Mesh, inputs: Inputs, *, searched: bool = False
) -> ResolvedLayout:
    """Return a network's layout on a mesh; raise UserError if the layout does not fit.

    The network runs only on fake tensors, which have shapes but no values. If `searched`, no layer needs a strategy
    yet, because a search will choose strategies.
    """
    pieces: list[Piece] = []
    begins: list[str] = []
    if mesh.pipe > 1:
        pieces = get_pieces(network)
        begins = _begins(pieces, layout, mesh.pipe, lambda: inputs(2))
    elif layout.begins is not None:
        raise UserError(
            f"--stage-cut {','.join(layout.begins)} has no effect without --mesh pipe=N; leave out --stage-cut"
        )
    if layout.plan and mesh.model == 1:
        raise UserError("--plan has no effect without --mesh model=N; leave out --plan")
    stages = cut(pieces, begins) if pieces else []
    strategies = resolve_strategies(network, layout.plan, mesh.model, stages, lambda: inputs(2))
    whole = all(get_slice_dim(one) is None for one in network.parameters())
    if mesh.model > 1 and whole and not strategies and not searched:
        raise UserError(
            f"--mesh {mesh} divides layers among {mesh.model} processes (model={mesh.model}), but no layer is sliced. "
            "Give --plan; or, if the network slices its own parameters, mark them with hostdev.parallel.sliced"
        )
    return ResolvedLayout(pieces, begins, strategies)


def _begins(pieces: Sequence[Piece], layout: Layout, pipe: int, inputs: Callable[[], tuple[Any, ...]]) -> list[str]:
    several = layout.schedule == "interleaved"
    if layout.begins is None:
        return balanced(pieces, count_flops(pieces, inputs()), pipe * (1 + several))
    cut(pieces, layout.begins)
    stages = len(layout.begins) + 1
    if several and (stages % pipe or stages == pipe):
        raise UserError(
            f"--stage-cut {','.join(layout.begins)} makes {stages} stages, but --schedule interleaved needs the same "
            f"number of stages, at least two, on each of {pipe} processes; give {2 * pipe - 1} names for "
            f"{2 * pipe} stages, {3 * pipe - 1} names for {3 * pipe}, ..."
        )
    if not several and stages != pipe:
        raise UserError(
            f"--stage-cut {','.join(layout.begins)} makes {stages} stages, but --mesh pipe={pipe} needs {pipe} stages; "
            f"give {pipe - 1} name{'s' * (pipe > 2)}"
        )
    return list(layout.begins)


def describe_layout(settled: ResolvedLayout, layout: Layout, mesh: Mesh) -> str:
    """Return a resolved layout as text for the user."""
    parts = []
    if settled.begins:
        stages = [(stage[0].name, stage[-1].name) for stage in settled.stages(settled.pieces)]
        names = [first if first == last else f"{first} to {last}" for first, last in stages]
        parts.append(f"{len(names)} stages by {layout.schedule}: {', '.join(names)}")
    if settled.strategies:
        each = ", ".join(f"{name} {one.strategy}" for name, one in settled.strategies.items())
        parts.append(f"slices over {mesh.model}: {each}")
    return "; ".join(parts)


def like(example: Mapping[str, Any] | Sequence[Any]) -> Inputs:
    """Return a function that creates zeros for any number of samples, shaped like example tensors [B, ...]."""

    def zeros(samples: int) -> tuple[Any, ...]:
        return torch.utils._pytree.tree_map_only(  # type: ignore[no-any-return]
            torch.Tensor,
            lambda one: torch.zeros((samples, *one.shape[1:]), dtype=one.dtype, requires_grad=one.requires_grad),
            tuple(example),
        )

    return zeros
