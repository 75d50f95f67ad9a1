"""Automatic choice of a layout: measure costs, search, try the best candidates, and explain the choice."""

from typing import NamedTuple

import torch
from torch import nn

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, format_bytes
from hostdev.core.pieces import Piece
from hostdev.device.backend import free_bytes
from hostdev.distributed.mesh import Layout, Mesh
from hostdev.distributed.world import World
from hostdev.ext.parallel.costs import Machine, Profile, measure_machine, measure_profile, take_slowest
from hostdev.ext.parallel.layout import Inputs
from hostdev.ext.parallel.pieces import get_pieces
from hostdev.ext.parallel.plan import cuttable, divides, get_shared_layers, get_slice_dim, matched, pairable
from hostdev.ext.parallel.search import Candidate, Layers, SearchOptions, candidates
from hostdev.ext.parallel.trial import Builder, can_be_copied, time_steps

_SHOWN = 8  # maximum number of candidates in the table
_FINALISTS = 4  # maximum number of candidates whose steps are timed
_NEAR = 2.0  # a finalist's expected time is at most this multiple of the best candidate's
_ALIKE = 1.05  # among finalists within this multiple of the shortest measured time, the expected time decides


class LayoutChoice(NamedTuple):
    """A chosen layout, with all candidates and the costs on which the choice is based.

    Attributes:
        mesh: The chosen mesh.
        layout: The chosen layout.
        tried: All candidates, the chosen one first.
        profile: Measured costs of the network.
        machine: Measured speed of exchanges and of memory.
    """

    mesh: Mesh
    layout: Layout
    tried: list[Candidate]
    profile: Profile
    machine: Machine

    def lines(self) -> list[str]:
        """Return the table of candidates and the reason for the choice as lines of text."""
        machine, best = self.machine, self.tried[0]
        slicing = f", {machine.slicing * 1e6:,.0f} us per sliced layer" if machine.slicing else ""
        found = [
            f"measured: {machine.bandwidth / 1e9:.2f} GB/s between processes, {machine.latency * 1e6:,.0f} us per "
            f"exchange, {machine.memory / 1e9:.1f} GB/s for additions{slicing}",
            f"{'ms/step':>10} {'expected':>8} {'compute':>8} {'waiting':>8} {'exchange':>8} {'update':>8} "
            f"{'memory':>10}  layout",
        ]
        for one in self.tried[:_SHOWN]:
            each = (one.seconds, one.compute, one.waiting, one.exchange, one.update)
            fits = "" if one.memory <= machine.available else "  (does not fit)"
            taken = "-" if one.measured is None else f"{one.measured * 1e3:.1f}"
            numbers = f"{taken:>10} " + " ".join(f"{value * 1e3:8.1f}" for value in each)
            found.append(f"{numbers} {format_bytes(one.memory):>10}  {describe_candidate(one)}{fits}")
        more = len(self.tried) - _SHOWN
        if more > 0:
            found.append(f"... and {more} slower layouts")
        return [*found, f"chosen: {describe_candidate(best)}, {reason(self.tried, machine)}"]


def describe_candidate(one: Candidate) -> str:
    """Return a candidate as command-line options."""
    cut = f" --stage-cut {','.join(one.begins)}" if one.begins else ""
    plan = f" --plan {','.join(f'{name}={strategy}' for name, strategy in one.plan)}" if one.plan else ""
    return f"--mesh {one.mesh}{cut}{plan}"


def reason(tried: list[Candidate], machine: Machine) -> str:
    """Return text that says why the first candidate is chosen."""
    best, others = tried[0], [one for one in tried[1:] if one.memory <= machine.available]
    if best.memory > machine.available:
        return f"the fastest layout, although no layout fits into {format_bytes(machine.available)} of free memory"
    if not others:
        return "the only possible layout" if len(tried) == 1 else "the only layout that fits"
    other = others[0]
    if best.measured is not None and other.measured is not None:
        longer = (other.measured / best.measured - 1) * 100
        if abs(longer) < (_ALIKE - 1) * 100:
            return f"because steps with --mesh {other.mesh} took about as long and are not expected to be faster"
        return f"because steps with --mesh {other.mesh} took {longer:.0f}% longer{_explain_difference(best, other)}"
    longer = (other.seconds / best.seconds - 1) * 100
    return f"because steps with --mesh {other.mesh} would take {longer:.0f}% longer{_explain_difference(best, other)}"


def _explain_difference(best: Candidate, other: Candidate) -> str:
    """Return text that names the largest extra cost of `other`; "" if the cost model does not find `other` slower."""
    costs = {
        "compute": other.compute - best.compute,
        "waiting for stages": other.waiting - best.waiting,
        "exchanges": other.exchange - best.exchange,
        "the optimizer": other.update - best.update,
    }
    most = max(costs, key=lambda name: costs[name])
    return f", mostly due to {most} ({costs[most] * 1e3:.1f} ms)" if other.seconds > best.seconds else ""


def choose(
    network: nn.Module,
    inputs: Inputs,
    ranks: World,
    *,
    samples: int,
    micro_batches: int,
    given: Layout,
    mesh: Mesh | None,
    device: torch.device,
    autocast: torch.dtype | None = None,
    looked_up: bool = False,
    build: Builder,
) -> LayoutChoice:
    """Measure costs for a few seconds, and return the fastest layout. All ranks must call this function.

    Args:
        network: The whole network. It is moved to `device`; its parameters and buffers keep their values.
        inputs: Called with a number of samples; returns zeros in place of the network's inputs.
        ranks: The ranks of this run.
        samples: Number of samples in a batch over all ranks.
        micro_batches: Number of micro-batches in a step over all ranks.
        given: The parts of the layout that are fixed: the schedule, and optionally the stage cuts and strategies.
        mesh: A fixed mesh; None searches for a mesh.
        device: Where the network will run.
        autocast: Dtype of autocast, or None.
        looked_up: Whether the network's inputs are rows of tables, which one rank looks up and sends to the ranks with
            the other slices.
        build: Builds a network in a layout whose steps are timed; see `trial.Builder`.

    Raises:
        UserError: No layout is possible, or `given` does not fit the network.
    """
    try:
        pieces, has_stages = get_pieces(network), True
    except UserError:
        if mesh is not None and mesh.pipe > 1:
            raise
        pieces, has_stages = [Piece("network", network, (network,))], False
    each = max(1, samples // micro_batches)
    profile = take_slowest(ranks, measure_profile(network, pieces, inputs, each, device, autocast, looked_up))
    strategies = matched(network, given.plan)
    modules = dict(network.named_modules())
    shared = get_shared_layers(network)
    layers = Layers(
        lambda name, strategy, count: name not in shared and divides(modules[name], strategy, count),
        pairable(network, lambda: inputs(2)),
        has_stages,
    )
    wanted = SearchOptions(
        ranks.size,
        micro_batches,
        mesh,
        given.begins,
        strategies,
        given.schedule == "interleaved",
        given.schedule == "gpipe",
        sliced=all(get_slice_dim(one) is None for one in network.parameters()),
    )
    free = available_bytes() if device.type == "cpu" else free_bytes(device)
    slices = any(cuttable(module) for module in network.modules()) and (mesh is None or mesh.model > 1)
    parameters = sum(one.nbytes for one in network.parameters())
    machine = measure_machine(ranks, free or 1 << 62, parameters, slices=slices)
    tried = candidates(profile, machine, layers, wanted)

    def layout_of(one: Candidate) -> Layout:
        return Layout(given.schedule, one.begins or None, one.plan)

    last = _pick_finalists(tried, machine)
    if len(last) > 1 and can_be_copied(network, ranks):
        seconds = time_steps(
            network,
            inputs,
            ranks,
            [(one.mesh, layout_of(one)) for one in last],
            [one.seconds for one in last],
            samples=samples,
            micro_batches=micro_batches,
            device=device,
            autocast=autocast,
            build=build,
        )
        carried = micro_batches * machine.exchange(profile.inputs) if looked_up else 0.0
        taken = [
            one._replace(measured=second + carried / one.mesh.data * (one.mesh.model > 1))
            for one, second in zip(last, seconds, strict=True)
            if second is not None
        ]
        rest = [one for one in tried if one not in last]
        tried = [*_order_measured(taken), *rest] or tried
    best = tried[0]
    return LayoutChoice(best.mesh, layout_of(best), tried, profile, machine)


def _order_measured(taken: list[Candidate]) -> list[Candidate]:
    """Return the measured candidates: first the one to choose, then the others in the order of measured time."""
    order = sorted(taken, key=lambda one: one.measured or 0.0)
    alike = [one for one in order if (one.measured or 0.0) <= _ALIKE * (order[0].measured or 0.0)]
    return sorted(order, key=lambda one: one is not min(alike, key=lambda each: each.seconds))


def _pick_finalists(tried: list[Candidate], machine: Machine) -> list[Candidate]:
    """Return the best candidates that fit into memory together; `choose` times them, as the cost model may be wrong."""
    found: list[Candidate] = []
    for one in tried[:_FINALISTS]:
        fits = one.memory + sum(each.memory for each in found) <= machine.available
        if fits and one.seconds <= _NEAR * tried[0].seconds:
            found.append(one)
    return found
