"""The pieces of a network, at which stages may begin, and the tensors that pass from one stage to the next."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from hostdev.core.errors import UserError
from hostdev.core.pieces import Piece, run


class Stage(nn.Module):
    """Consecutive pieces of a network as one module."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.pieces = list(pieces)
        self.modules_held = nn.ModuleList(
            _unique(one for piece in pieces for one in piece.holds if isinstance(one, nn.Module))
        )
        self.parameters_held = nn.ParameterList(
            _unique(one for piece in pieces for one in piece.holds if isinstance(one, nn.Parameter))
        )

    def forward(self, *values: Any) -> Any:
        """Run the pieces."""
        return run(self.pieces, *values)


def get_pieces(network: nn.Module) -> list[Piece]:
    """Return the pieces of a network: the result of its method `pieces`, or the modules of an nn.Sequential.

    Raises UserError for any other network, because its `forward` may compute anything between its modules.
    """
    if callable(getattr(network, "pieces", None)):
        pieces = list(network.pieces())  # type: ignore[operator]
    elif isinstance(network, nn.Sequential):
        pieces = _sequential(network)
    else:
        raise UserError(
            f"{type(network).__name__} cannot be cut into stages: it is not an nn.Sequential and has no method "
            "pieces() that returns its parts in order (docs/guides/networks-in-parts.md)"
        )
    held = {id(parameter) for piece in pieces for parameter in piece.parameters}
    if not pieces or len({piece.name for piece in pieces}) < len(pieces):
        raise UserError(
            f"pieces() of {type(network).__name__} returns {'no pieces' if not pieces else 'duplicate names'}; "
            "return one or more pieces with different names"
        )
    own = {id(parameter) for parameter in network.parameters()}
    for piece in pieces:
        if any(id(parameter) not in own for parameter in piece.parameters):
            raise UserError(
                f"piece {piece.name!r} of {type(network).__name__} holds a parameter that the network does not have; "
                "register the parameter in the network"
            )
    left = [name for name, parameter in network.named_parameters() if id(parameter) not in held]
    if left:
        raise UserError(
            f"no piece of {type(network).__name__} holds parameter {left[0]}; add {left[0]} to the `holds` of a piece"
        )
    return pieces


def _sequential(network: nn.Sequential, prefix: str = "") -> list[Piece]:
    found = []
    for name, module in network.named_children():
        if type(module) is nn.Sequential:
            found += _sequential(module, f"{prefix}{name}.")
        else:
            found.append(Piece(prefix + name, module, (module,)))
    return found


def cut(pieces: Sequence[Piece], begins: Sequence[str]) -> list[list[Piece]]:
    """Return each stage's pieces; each piece named in `begins` begins a stage. Raise UserError for wrong names."""
    names = [piece.name for piece in pieces]
    at = [0]
    for name in begins:
        if name not in names:
            raise UserError(f"--stage-cut {name}: the network has no such piece; its pieces are {', '.join(names)}")
        number = names.index(name)
        if number <= at[-1]:
            raise UserError(
                f"--stage-cut {','.join(begins)}: {name} is "
                + (
                    "the first piece, where the first stage begins anyway"
                    if number == 0
                    else f"not after {names[at[-1]]}"
                )
                + f"; the pieces in order are {', '.join(names)}"
            )
        at.append(number)
    return [list(pieces[start:stop]) for start, stop in pairwise([*at, len(pieces)])]


_SAMPLES = (2, 3, 5)  # batch sizes of the fake runs


class SampleShape(NamedTuple):
    """A tensor's shape as a function of the number of samples B; each dimension is slope * B + constant."""

    slopes: tuple[int, ...]
    constants: tuple[int, ...]
    dtype: torch.dtype
    trained: bool  # whether gradients flow back to the tensor

    def of(self, samples: int) -> list[int]:
        """Return the shape for a number of samples."""
        return [slope * samples + constant for slope, constant in zip(self.slopes, self.constants, strict=True)]


class Traced(NamedTuple):
    """The tensors that a stage passes on to the next stage.

    Attributes:
        shapes: The shapes of the distinct tensors.
        places: For each value that the stage returns, its index in `shapes`; a tensor may be returned several times.
        draws: Whether the stage draws from torch's generator, as dropout does.
    """

    shapes: list[SampleShape]
    places: list[int]
    draws: bool

    def once(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the distinct tensors among the values that the stage returns."""
        return [values[self.places.index(number)] for number in range(len(self.shapes))]

    def all_of(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Expand the distinct tensors to the values that the stage returned, in which tensors may repeat."""
        return [values[number] for number in self.places]


def trace(
    stages: Sequence[Sequence[Piece]],
    inputs: Callable[[int], Any],
    *,
    device: str = "cpu",
    autocast: torch.dtype | None = None,
) -> list[Traced]:
    """Run all stages on fake tensors, and return a description of the tensors that each stage passes on.

    Args:
        stages: Pieces of each stage.
        inputs: Called with a number of samples; returns the first stage's arguments.
        device: Device type on which the stages will run.
        autocast: Dtype of autocast, or None.

    Raises:
        UserError: A value cannot cross to the next stage: it is not a tensor, it is not contiguous, its number of
            dimensions varies, or its size is not a linear function of the number of samples.
    """
    runs = [_run_fake(stages, inputs(samples), device, autocast) for samples in _SAMPLES]
    found = []
    for number, stage in enumerate(stages):
        each = [one[number] for one in runs]
        last = number == len(stages) - 1
        name = stage[-1].name
        places, shapes = each[0].places, []
        for at in range(len(each[0].values)):
            values = [one.values[at] for one in each]
            if not last:
                _require_crossing(name, values)
            sizes = list(zip(*(value.shape for value in values), strict=True))
            slopes = tuple(second - first for first, second, _ in sizes)
            constants = tuple(first - _SAMPLES[0] * slope for (first, _, _), slope in zip(sizes, slopes, strict=True))
            shapes.append(SampleShape(slopes, constants, values[0].dtype, each[0].trained[at]))
            if not last and shapes[-1].of(_SAMPLES[2]) != list(values[2].shape):
                raise UserError(
                    f"piece {name!r} returns a value whose size is not linear in the number of samples, so no stage "
                    "can end after this piece; cut elsewhere"
                )
        found.append(Traced(shapes, places, each[0].draws))
    return found


def _require_crossing(name: str, values: Sequence[Any]) -> None:
    if not all(isinstance(value, Tensor) for value in values):
        raise UserError(
            f"piece {name!r} returns a {type(values[0]).__name__}, but only tensors can cross to another stage, so "
            "no stage can end after this piece; cut elsewhere"
        )
    if not all(value.is_contiguous() for value in values):
        raise UserError(
            f"piece {name!r} returns a value that is not contiguous; call contiguous() on the value, or cut elsewhere"
        )
    if len({value.dim() for value in values}) > 1:
        raise UserError(
            f"piece {name!r} returns a value whose number of dimensions depends on the number of samples, so no "
            "stage can end after this piece; cut elsewhere"
        )


def count_flops(pieces: Sequence[Piece], inputs: tuple[Any, ...]) -> list[int]:
    """Return the floating-point operations of each piece's forward pass, counted on fake tensors."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, which takes time at each start

    counters = [FlopCounterMode(display=False) for _ in pieces]
    _run_within(pieces, inputs, counters)
    return [counter.get_total_flops() for counter in counters]


def count_saved(
    pieces: Sequence[Piece], inputs: tuple[Any, ...], device: str, autocast: torch.dtype | None
) -> list[int]:
    """Return the bytes that each piece saves for its backward pass, besides parameters, counted on fake tensors."""
    kept: list[dict[int, Any]] = [{} for _ in pieces]  # storages, by id

    def watch(own: set[int], kept: dict[int, Any]) -> AbstractContextManager[Any]:
        def keep(value: Tensor) -> Tensor:
            if id(value) not in own:
                kept[value.untyped_storage()._cdata] = value.untyped_storage()
            return value

        return torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value)

    own = [{id(one) for one in piece.parameters} for piece in pieces]
    with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
        _run_within(pieces, inputs, list(map(watch, own, kept)))
    return [sum(storage.nbytes() for storage in storages.values()) for storages in kept]


def _run_within(
    pieces: Sequence[Piece], inputs: tuple[Any, ...], contexts: Sequence[AbstractContextManager[Any]]
) -> None:
    """Run pieces on fake tensors, each in its own context."""
    with fake_mode(one for piece in pieces for one in piece.holds) as fake:
        result: Any = fake(inputs)
        for piece, context in zip(pieces, contexts, strict=True):
            with context:
                result = run([piece], *(result if isinstance(result, tuple) else (result,)))


def balanced(pieces: Sequence[Piece], costs: Sequence[float], count: int) -> list[str]:
    """Cut pieces into `count` stages so that the costliest stage costs as little as possible.

    Among equally good cuts, those whose stages begin with pieces that have parameters are preferred. Returns the names
    of the pieces at which the second and later stages begin. Raises UserError for too few pieces.
    """
    n, sums = len(pieces), [0, *accumulate(costs)]
    if n < count:
        raise UserError(f"the network has {n} pieces, too few for {count} stages; use fewer stages")
    bare = [not piece.parameters for piece in pieces]
    # best[k][i], for the first i pieces in k stages: cost of the costliest one, number of unwanted cuts, last cut
    best: list[list[tuple[float, int, int]]] = [[(float("inf"), 0, 0)] * (n + 1) for _ in range(count + 1)]
    best[0][0] = (0, 0, 0)
    for k in range(1, count + 1):
        for i in range(k, n + 1):
            best[k][i] = min(
                (max(best[k - 1][j][0], sums[i] - sums[j]), best[k - 1][j][1] + bare[j], j) for j in range(k - 1, i)
            )
    begins, at = [], n
    for k in range(count, 0, -1):
        at = best[k][at][2]
        begins.append(pieces[at].name)
    return begins[-2::-1]


def with_extra_value(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces that take an extra last input and return it unchanged as the last output."""

    def append_extra(call: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def both(*values: Any) -> tuple[Any, ...]:
            result = call(*values[:-1])
            return (*(result if isinstance(result, tuple) else (result,)), values[-1])

        return both

    return [piece._replace(call=append_extra(piece.call)) for piece in pieces]


@contextmanager
def fake_mode(held: Iterable[Any]) -> Iterator[Callable[[Any], Any]]:
    """A context in which modules run on fake tensors, which have shapes but no values.

    Args:
        held: The modules that will run, among other objects. Their buffers are left unchanged.

    Yields:
        A function that replaces the tensors in a nested structure by fake ones.
    """
    modules = [module for one in held if isinstance(one, nn.Module) for module in one.modules()]
    # without momentum, a BatchNorm layer reads its counter's value, which a fake tensor lacks
    counting = [one for one in modules if isinstance(one, _NormBase) and one.momentum is None]
    buffers = [
        (module, name, value) for module in modules for name, value in module._buffers.items() if value is not None
    ]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.enable_grad():
        for module, name, value in buffers:
            module._buffers[name] = fake.from_tensor(value)
        for one in counting:
            one.momentum = 0.5
        try:
            yield lambda values: torch.utils._pytree.tree_map_only(Tensor, fake.from_tensor, values)
        finally:
            for module, name, value in buffers:
                module._buffers[name] = value
            for one in counting:
                one.momentum = None


class _DrawDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether an operation draws from torch's generator."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _StageOutput(NamedTuple):
    """A stage's fake output: its distinct tensors, and the index of each returned value among them."""

    values: list[Any]
    places: list[int]
    draws: bool
    trained: list[bool]


def _run_fake(
    stages: Sequence[Sequence[Piece]], values: tuple[Any, ...], device: str, autocast: torch.dtype | None
) -> list[_StageOutput]:
    found = []
    cast = torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None)
    draws = _DrawDetector()  # type: ignore[no-untyped-call]
    with fake_mode(one for stage in stages for piece in stage for one in piece.holds) as fake, draws:
        result: Any = fake(values)
        for stage in stages:
            draws.seen = False
            with cast:
                result = run(stage, *(result if isinstance(result, tuple) else (result,)))
            given = list(result) if isinstance(result, tuple) else [result]
            numbers = {number: place for place, number in enumerate(dict.fromkeys(map(id, given)))}
            found.append(_StageOutput(_unique(given), [numbers[id(one)] for one in given], draws.seen, []))
        ends = [one for one in found[-1].values if isinstance(one, Tensor) and one.requires_grad]
        for each in found:
            each.trained.extend(_find_trained(ends, each.values))
    return found


def _find_trained(ends: Sequence[Tensor], values: Sequence[Any]) -> list[bool]:
    """Return, for each value, whether gradients flow back to it from the network's outputs."""
    at = [number for number, one in enumerate(values) if isinstance(one, Tensor) and one.requires_grad]
    if not at or not ends:
        return [False] * len(values)
    ones = [torch.ones_like(end) for end in ends]
    grads = torch.autograd.grad(ends, [values[number] for number in at], ones, retain_graph=True, allow_unused=True)
    received = {number for number, grad in zip(at, grads, strict=True) if grad is not None}
    return [number in received for number in range(len(values))]


def _unique(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())
