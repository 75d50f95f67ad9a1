"""Trials: time a few steps of each of the best layouts, in turn."""

import copy
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hostdev.core.errors import UserError
from hostdev.distributed.mesh import Layout, Mesh
from hostdev.distributed.world import World
from hostdev.ext.parallel.costs import filled, now
from hostdev.ext.parallel.layout import Inputs
from hostdev.ext.parallel.plan import get_slice_dim

_SECONDS = 6.0  # for all trials together
Builder = Callable[..., Any]  # has the arguments of `hostdev.parallel.Network`, and returns one
_ROUNDS = 3, 25  # minimum and maximum number of measured steps of a layout


def can_be_copied(network: nn.Module, ranks: World) -> bool:
    """Return whether all ranks can copy a network; False if it has parameters marked by `sliced` and fits one mesh."""
    possible = all(get_slice_dim(one) is None for one in network.parameters())
    if possible:
        try:
            copy.deepcopy(network)
        except Exception:
            possible = False
    return all(ranks.control.share(possible))


def time_steps(
    network: nn.Module,
    inputs: Inputs,
    ranks: World,
    layouts: Sequence[tuple[Mesh, Layout]],
    expected: Sequence[float],
    *,
    samples: int,
    micro_batches: int,
    device: torch.device,
    autocast: torch.dtype | None,
    build: Builder,
) -> list[float | None]:
    """Return each layout's seconds per step with Adam, or None for a layout that does not fit the network.

    All ranks must call this function. The network is left unchanged; one copy for each layout is in memory at the same
    time. `expected` has the expected seconds per step of each layout, the same on all ranks.
    """
    before = ranks.mesh
    kind = None if device.type == "cpu" else device.type
    with torch.random.fork_rng([device] if kind else [], device_type=kind or "cuda"):
        torch.manual_seed(1)  # the same values on all ranks
        values = filled(inputs(samples), device)
        try:
            trials = [
                _make_trial(network, inputs, ranks, *each, micro_batches, device, autocast, build) for each in layouts
            ]
            there = [one for one in trials if one is not None]
            for one in there:
                one.step(samples, values)
            least, most = _ROUNDS
            rounds = min(most, max(least, round(_SECONDS / max(sum(expected), 1e-9))))
            seconds = [[one.step(samples, values) for one in there] for _ in range(rounds)]
        finally:
            ranks.mesh = before
    medians = iter([statistics.median(each) for each in zip(*seconds, strict=True)])
    return [None if one is None else next(medians) for one in trials]


class _Trial:
    """A copy of a network in one layout, with an optimizer."""

    def __init__(self, network: Any, ranks: World, mesh: Mesh, device: torch.device) -> None:
        self._network, self._ranks, self._mesh, self._device = network, ranks, mesh, device
        self._adam = torch.optim.Adam(network.parameters, fused=True)

    def step(self, samples: int, values: tuple[Any, ...]) -> float:
        """Take a step; return the seconds of the slowest rank."""
        self._ranks.mesh = self._mesh
        self._ranks.control.barrier()
        begin = now(self._device)
        self._network.step(samples, lambda part: _slice_inputs(values, part), lambda output, _: _mean(output))
        self._adam.step()
        self._adam.zero_grad()
        return float(max(self._ranks.control.share(now(self._device) - begin)))


def _make_trial(
    network: nn.Module,
    inputs: Inputs,
    ranks: World,
    mesh: Mesh,
    layout: Layout,
    micro_batches: int,
    device: torch.device,
    autocast: torch.dtype | None,
    build: Builder,
) -> _Trial | None:
    """Return a trial, or None if the layout does not fit the network. All ranks get the same result."""
    ranks.mesh = mesh
    try:
        trial_network = build(
            copy.deepcopy(network),
            inputs(1),
            ranks=ranks,
            micro_batches=micro_batches,
            schedule=layout.schedule,
            stage_cut=",".join(layout.begins) if layout.begins else None,
            plan=",".join(f"{name}={strategy}" for name, strategy in layout.plan) or None,
            device=device,
            precision="fp32" if autocast is None else "bf16",
        )
    except UserError:
        return None
    return _Trial(trial_network, ranks, mesh, device)


def _slice_inputs(values: tuple[Any, ...], part: slice) -> tuple[Any, ...]:
    """Return some samples of the network's inputs as new tensors."""

    def taken(one: Tensor) -> Tensor:
        return one.detach()[part].requires_grad_(one.requires_grad)

    return torch.utils._pytree.tree_map_only(Tensor, taken, values)  # type: ignore[no-any-return]


def _mean(output: Any) -> Tensor:
    """Reduce a network's output to a scalar that can be differentiated."""
    trained = [one for one in torch.utils._pytree.tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]
    return torch.stack([one.float().mean() for one in trained]).sum()
