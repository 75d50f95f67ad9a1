"""The layout of a network on a mesh: where the network is cut into stages, and which layers are sliced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hostdev.core.errors import UserError
from hostdev.core.pieces import Piece
from hostdev.distributed.mesh import Layout as Layout  # a public name of this package
from hostdev.distributed.mesh import Mesh
from hostdev.ext.parallel.pieces import balanced, count_flops, cut, get_pieces
from hostdev.ext.parallel.plan import Strategies, get_slice_dim, resolve_strategies

Inputs = Callable[[int], tuple[Any, ...]]  # called with a number of samples; returns zeros as a network's inputs


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
