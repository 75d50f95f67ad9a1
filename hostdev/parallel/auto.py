"""The layout of a network that takes the least time on the processes that are there: measured, searched, and told."""

from typing import NamedTuple

import torch
from torch import nn

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, gib
from hostdev.core.pieces import Piece
from hostdev.device.backend import free_bytes
from hostdev.parallel.costs import Machine, Profile, machine_of, of_all, profile_of
from hostdev.parallel.layout import Inputs, Layout
from hostdev.parallel.mesh import Mesh
from hostdev.parallel.pieces import pieces_of
from hostdev.parallel.plan import cuttable, divides, is_shared, matched, pairable
from hostdev.parallel.ranks import Ranks
from hostdev.parallel.search import Candidate, Layers, Wanted, candidates

_SHOWN = 8


class Chosen(NamedTuple):
    """A layout, and why.

    tried  all candidates, the chosen one first
    """

    mesh: Mesh
    layout: Layout
    tried: list[Candidate]
    profile: Profile
    machine: Machine

    def lines(self) -> list[str]:
        """Return the table, and the reason, as lines of text."""
        machine, best = self.machine, self.tried[0]
        slicing = f", {machine.slicing * 1e6:,.0f} us for a sliced layer" if machine.slicing else ""
        found = [
            f"measured: {machine.bandwidth / 1e9:.2f} GB/s between processes, {machine.latency * 1e6:,.0f} us an "
            f"exchange, {machine.memory / 1e9:.1f} GB/s to add{slicing}",
            f"{'ms a step':>10} {'compute':>8} {'waiting':>8} {'exchange':>8} {'update':>8} {'memory':>10}  layout",
        ]
        for one in self.tried[:_SHOWN]:
            each = (one.seconds, one.compute, one.waiting, one.exchange, one.update)
            fits = "" if one.memory <= machine.available else "  (does not fit)"
            numbers = f"{each[0] * 1e3:10.1f} " + " ".join(f"{value * 1e3:8.1f}" for value in each[1:])
            found.append(f"{numbers} {gib(one.memory):>10}  {described(one)}{fits}")
        more = len(self.tried) - _SHOWN
        if more > 0:
            found.append(f"... and {more} slower ones")
        return [*found, f"chosen: {described(best)}, {reason(self.tried, machine)}"]


def described(one: Candidate) -> str:
    """Return a candidate as options."""
    cut = f" --stage-cut {','.join(one.begins)}" if one.begins else ""
    plan = f" --plan {','.join(f'{name}={strategy}' for name, strategy in one.plan)}" if one.plan else ""
    return f"--mesh {one.mesh}{cut}{plan}"


def reason(tried: list[Candidate], machine: Machine) -> str:
    """Return why the first candidate is the best."""
    best, others = tried[0], [one for one in tried[1:] if one.memory <= machine.available]
    if best.memory > machine.available:
        return f"which needs the least time, though no layout fits the {gib(machine.available)} that are free"
    if not others:
        return "the only one that is possible" if len(tried) == 1 else "the only one that fits"
    other = others[0]
    costs = {
        "compute": other.compute - best.compute, "waiting for stages": other.waiting - best.waiting,
        "exchanges": other.exchange - best.exchange, "the optimizer": other.update - best.update,
    }  # fmt: skip
    most = max(costs, key=lambda name: costs[name])
    longer = (other.seconds / best.seconds - 1) * 100
    return f"as --mesh {other.mesh} would take {longer:.0f}% longer, most of it for {most} ({costs[most] * 1e3:.1f} ms)"


def choose(
    network: nn.Module, inputs: Inputs, ranks: Ranks, *, samples: int, micro_batches: int, given: Layout,
    mesh: Mesh | None, device: torch.device, autocast: torch.dtype | None = None, looked_up: bool = False,
) -> Chosen:  # fmt: skip
    """Return the layout that takes the least time for batches of so many samples; all ranks call it.

    inputs     returns zeros in place of the network's inputs
    given      what is kept: the schedule, stages if it says with what they begin, strategies
    mesh       kept, too; None: it is to be found
    looked_up  the network's inputs are rows, which one rank of those with slices brings to the others

    UserError where nothing is possible. Takes some seconds; the network stays as it is.
    """
    try:
        pieces, has_stages = pieces_of(network), True
    except UserError:
        if mesh is not None and mesh.pipe > 1:
            raise
        pieces, has_stages = [Piece("network", network, (network,))], False
    each = max(1, samples // micro_batches)
    profile = of_all(ranks, profile_of(network, pieces, inputs, each, device, autocast, looked_up))
    strategies = matched(network, given.plan)
    modules = dict(network.named_modules())
    shared = is_shared(network)
    layers = Layers(
        lambda name, strategy, count: name not in shared and divides(modules[name], strategy, count),
        pairable(network, lambda: inputs(2)), has_stages,
    )  # fmt: skip
    wanted = Wanted(
        ranks.size, micro_batches, mesh, given.begins, strategies, given.schedule == "interleaved",
        given.schedule == "gpipe",
    )  # fmt: skip
    free = available_bytes() if device.type == "cpu" else free_bytes(device)
    slices = any(cuttable(module) for module in network.modules()) and (mesh is None or mesh.model > 1)
    machine = machine_of(ranks, free or 1 << 62, slices=slices)
    tried = candidates(profile, machine, layers, wanted)
    best = tried[0]
    layout = Layout(given.schedule, best.begins or None, best.plan)
    return Chosen(best.mesh, layout, tried, profile, machine)
