"""Strategies of layers: which are cut into slices over the ranks along the model axis, and how.

colwise cuts a layer's outputs, rowwise its inputs (Shoeybi et al., "Megatron-LM", 2019): where a rowwise layer takes
what a colwise one gives, with nothing but elementwise functions between, each rank goes on with its own slice, and one
sum over the ranks follows. Elsewhere a colwise layer's slices are brought together. What has no strategy is replicated:
each rank of the axis computes all of it. The slices, and what the ranks exchange, are torch.distributed.tensor's.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hostdev.core.errors import UserError
from hostdev.core.pieces import Piece, run
from hostdev.parallel.pieces import fake_mode
from hostdev.parallel.plan_text import Plan

# Of each layer that can be cut: the dimension of each of its parameters that a strategy cuts; None: it is replicated.
_CUTS: Mapping[type[nn.Module], Mapping[str, Mapping[str, int | None]]] = {
    nn.Linear: {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1, "bias": None}},
    nn.Embedding: {"colwise": {"weight": 1}, "rowwise": {"weight": 0}},
}
_ELEMENTWISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.ELU,
    nn.Identity,
    nn.Softplus,
    nn.ReLU6,
    nn.Mish,
    nn.Hardswish,
)


class Sliced(NamedTuple):
    """A layer that is cut.

    strategy  "colwise" or "rowwise"
    dims      of its parameters, the dimension that is cut; None: replicated
    joined    a colwise one's slices are brought together at once; a rowwise one is given all, and takes its slice
    """

    strategy: str
    dims: Mapping[str, int | None]
    joined: bool


Strategies = dict[str, Sliced]  # by the layer's name


def settled(
    network: nn.Module, plan: Plan, ranks: int, stages: Sequence[Sequence[Piece]], inputs: Callable[[], tuple[Any, ...]]
) -> Strategies:
    """Return how each layer is cut over so many ranks; UserError where a plan does not fit. Nothing is computed.

    stages  the network's pieces, by stage; none: it is not cut into stages
    inputs  returns tensors in place of the network's inputs
    """
    wanted = {name: strategy for name, strategy in matched(network, plan).items() if strategy != "replicate"}
    modules = dict(network.named_modules())
    for name, strategy in wanted.items():
        for parameter, dim in _CUTS[type(modules[name])][strategy].items():
            value = getattr(modules[name], parameter)
            if value is not None and get_slice_dim(value) is not None:
                raise UserError(f"--plan {name}={strategy}: its {parameter} is marked as sliced by hand; leave it out")
            if dim is not None and value is not None and value.shape[dim] % ranks:  # as `divides` has it
                raise UserError(
                    f"--plan {name}={strategy}: its {parameter} is {list(value.shape)}, and {value.shape[dim]} cannot "
                    f"be cut into {ranks} slices of one size; use another --mesh, or {name}=replicate"
                )
    _require_same_cut(network, wanted)
    pairs = _find_pairs(network, wanted, stages, inputs) if "colwise" in wanted.values() else set()
    kept = {name for pair in pairs for name in pair}
    return {
        name: Sliced(strategy, _CUTS[type(modules[name])][strategy], name not in kept)
        for name, strategy in wanted.items()
    }


def matched(network: nn.Module, plan: Plan) -> dict[str, str]:
    """Return the strategy of each layer that a plan names; UserError where it names what cannot be cut."""
    modules = dict(network.named_modules())
    able = [name for name, module in modules.items() if type(module) in _CUTS]
    found: dict[str, tuple[str, str]] = {}
    for pattern, strategy in plan:
        exact = pattern in modules
        names = [pattern] if exact else [name for name in able if fnmatchcase(name, pattern)]
        if exact and pattern not in able:
            raise UserError(
                f"--plan {pattern}={strategy}: {pattern} is of {type(modules[pattern]).__name__}; only Linear and "
                "Embedding layers can be cut"
            )
        if not names:
            raise UserError(f"--plan {pattern}={strategy}: no layer has such a name; they are {', '.join(able)}")
        for name in names:
            before = found.get(name)
            if before is None or exact:  # what names it counts more than what matches it
                found[name] = (pattern, strategy)
            elif before[0] != name and before[1] != strategy:
                raise UserError(
                    f"--plan: {before[0]}={before[1]} and {pattern}={strategy} both are about {name}; name it itself"
                )
    return {name: found[name][1] for name in able if name in found}


def _require_same_cut(network: nn.Module, wanted: Mapping[str, str]) -> None:
    """UserError where two layers use one parameter and cut it differently."""
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
                    f"--plan: {other} and {name} use one parameter, and {say[other]} and {say[name]} cut it "
                    "differently; give strategies that cut it alike"
                )


def _find_pairs(
    network: nn.Module,
    wanted: Mapping[str, str],
    stages: Sequence[Sequence[Piece]],
    inputs: Callable[[], tuple[Any, ...]],
) -> set[tuple[str, str]]:
    """Return the colwise layers whose output goes to a rowwise one and nowhere else, elementwise, within one stage."""
    names = {id(module): name for name, module in network.named_modules() if name in wanted}
    calls: dict[str, int] = dict.fromkeys(wanted, 0)
    # Of a value: the colwise layer, what it has been on the way, and its version, which changes where it is written to.
    source: dict[int, tuple[str, list[Tensor], int]] = {}
    found: dict[str, tuple[str, list[Tensor]]] = {}  # of a rowwise layer
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
            uses.of.pop(id(result), None)  # those of another one that was there before
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
    """Counts of tensors the calls of torch's that take one, and do not give itself: looks at its shape among them."""

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
    """Mark a parameter as this rank's slice of one that is cut along a dimension over the ranks of the model axis.

    It is saved as slices, and brought together where a checkpoint is of one process; its gradient is added up with
    those of ranks that have the same slice only. What the ranks exchange to compute with it is the caller's own.
    """
    parameter._hostdev_slice = dim  # type: ignore[attr-defined]
    return parameter


def get_slice_dim(parameter: Tensor) -> int | None:
    """Return the dimension along which a parameter is a slice; None: it is whole."""
    found: int | None = getattr(parameter, "_hostdev_slice", None)
    return found


class Traffic:
    """Bytes that this rank sends to those with other slices in training, where gathers and sums go round a ring."""

    def __init__(self, ranks: int) -> None:
        self._away = (ranks - 1) / ranks
        self.sent = 0.0

    def watch(self, layer: nn.Module, how: Sliced) -> None:
        """Count what a layer that is cut exchanges, forward and back."""
        layer.register_forward_hook(partial(self._count, how))

    def _count(self, how: Sliced, layer: nn.Module, taken: tuple[Any, ...], given: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        came = (
            taken[0].numel() * taken[0].element_size() if taken[0].requires_grad else 0
        )  # a DTensor's are the whole's
        gave = given.numel() * given.element_size()
        if how.strategy == "colwise":
            self.sent += self._away * (gave * how.joined + 2 * came)
        else:
            self.sent += self._away * (2 * gave + came * how.joined)


def cut_layers(network: nn.Module, strategies: Mapping[str, Sliced], mesh: Any) -> Traffic:
    """Cut the layers that are here over the ranks of a DeviceMesh, by torch's parallelize_module.

    Their parameters become slices, marked as `sliced` does: leaves that optimizers take, of which the layers' own
    DTensors are views. Returns what counts the bytes that they exchange.
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
    for (first, key), *others in aliases:  # a parameter of several layers stays one
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
    """Tell whether a layer is of a kind that can be cut."""
    return type(module) in _CUTS


def divides(module: nn.Module, strategy: str, ranks: int) -> bool:
    """Tell whether a layer can be cut by a strategy into so many slices of one size."""
    values = [(getattr(module, name), dim) for name, dim in _CUTS[type(module)][strategy].items()]
    return all(value is None or dim is None or value.shape[dim] % ranks == 0 for value, dim in values) and not any(
        value is not None and get_slice_dim(value) is not None for value, _ in values
    )


def get_shared_layers(network: nn.Module) -> set[str]:
    """Return the layers that have a parameter which another one has, too."""
    names = {id(module): name for name, module in network.named_modules()}
    return {names[id(module)] for users in _find_aliases(network) for module, _ in users}


def pairable(network: nn.Module, inputs: Callable[[], tuple[Any, ...]]) -> set[tuple[str, str]]:
    """Return the layers of which the second takes what the first gives, elementwise, and nobody else does."""
    names = [name for name, module in network.named_modules() if type(module) is nn.Linear]
    found: set[tuple[str, str]] = set()
    for first in range(2):
        kinds = ("colwise", "rowwise") if not first else ("rowwise", "colwise")
        wanted = {name: kinds[number % 2] for number, name in enumerate(names)}
        found |= _find_pairs(network, wanted, [], inputs)
    return found
