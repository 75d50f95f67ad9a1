"""Automatic choice of a layout: measure costs, search, try the best candidates, and explain the choice."""

import copy
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, format_bytes
from hostdev.core.pieces import Piece
from hostdev.device.backend import free_bytes
from hostdev.distributed.world import Layout, Mesh, World
from hostdev.ext.parallel.costs import Machine, Profile, filled, measure_machine, measure_profile, now, take_slowest
from hostdev.ext.parallel.pieces import get_pieces
from hostdev.ext.parallel.plan import Inputs, cuttable, divides, get_shared_layers, get_slice_dim, matched, pairable
from hostdev.ext.parallel.search import Candidate, SearchOptions, SliceableLayers, candidates

_TRIAL_SECONDS = 6.0  # for all trials together
Builder = Callable[..., Any]  # has the arguments of `hostdev.parallel.Network`, and returns one
_ROUNDS = 3, 25  # minimum and maximum number of measured steps of a layout
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
        build: Builds a network in a layout whose steps are timed; see `Builder`.

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
    layers = SliceableLayers(
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
    if len(last) > 1 and _can_be_copied(network, ranks):
        seconds = _time_steps(
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


def _can_be_copied(network: nn.Module, ranks: World) -> bool:
    """Return whether all ranks can copy a network; False if it has parameters marked by `sliced` and fits one mesh."""
    possible = all(get_slice_dim(one) is None for one in network.parameters())
    if possible:
        try:
            copy.deepcopy(network)
        except Exception:
            possible = False
    return all(ranks.control.share(possible))


def _time_steps(
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
            rounds = min(most, max(least, round(_TRIAL_SECONDS / max(sum(expected), 1e-9))))
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
