"""Automatic choice of a layout: enumerate the layouts, take steps in each, and explain the choice."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, format_bytes
from hostdev.core.pieces import Piece
from hostdev.device.backend import free_bytes
from hostdev.distributed.world import Layout, Mesh, Plan, World
from hostdev.ext.parallel.pieces import count_saved, get_pieces
from hostdev.ext.parallel.plan import (
    Inputs,
    ResolvedLayout,
    get_shared_layers,
    get_slice_dim,
    matched,
    resolve_layout,
    sliceable,
)

_TRIAL_SECONDS = 6.0  # target for the sum of the times of all finalists' steps
_FIRST_ROUNDS = 2  # number of steps that each layout takes before the finalists are picked
_ROUNDS = 3, 25  # minimum and maximum number of measured steps of a finalist
_SHOWN = 8  # maximum number of candidates in the table
_FINALISTS = 4  # maximum number of candidates that take more steps, in turn
_NEAR = 2.0  # a finalist's time is at most this multiple of the best candidate's
_ALIKE = 1.05  # among finalists within this multiple of the shortest time, the first in the order of `meshes` is chosen
_STATES = 4  # arrays of the parameters' size: parameters, gradients, two optimizer states
_NONE_SLICED = (
    "--mesh {mesh} divides layers among {count} processes (model={count}), but no layer can be cut into {count} "
    "slices, or --plan leaves no layer to cut; give another --mesh"
)
Builder = Callable[..., Any]  # takes the arguments of `hostdev.parallel.Network`, and returns a network


class Candidate(NamedTuple):
    """A layout, the memory that it takes, and the duration of its steps."""

    mesh: Mesh  # the mesh
    begins: list[str]  # names of the first pieces of the second and later stages
    plan: Plan  # slicing strategies of the layers
    memory: int  # bytes on the fullest rank: parameters, gradients, two optimizer states, saved activations
    measured: float | None = None  # median seconds of a step; None if no step was timed

    def __str__(self) -> str:
        """Return the candidate as command-line options."""
        cut = f" --stage-cut {','.join(self.begins)}" if self.begins else ""
        plan = f" --plan {_plan_text(self.plan)}" if self.plan else ""
        return f"--mesh {self.mesh}{cut}{plan}"


class LayoutChoice(NamedTuple):
    """A chosen layout, with all candidates.

    Attributes:
        mesh: The chosen mesh.
        layout: The chosen layout.
        tried: All candidates, the chosen one first.
        available: Bytes of free memory on the rank that has the least.
    """

    mesh: Mesh
    layout: Layout
    tried: list[Candidate]
    available: int

    def lines(self) -> list[str]:
        """Return the table of candidates and the reason for the choice as lines of text."""
        lines = [f"{'ms/step':>10} {'memory':>10}  layout"]
        for candidate in self.tried[:_SHOWN]:
            fits = "" if candidate.memory <= self.available else "  (does not fit)"
            taken = "-" if candidate.measured is None else f"{candidate.measured * 1e3:.1f}"
            lines.append(f"{taken:>10} {format_bytes(candidate.memory):>10}  {candidate}{fits}")
        more = len(self.tried) - _SHOWN
        if more > 0:
            lines.append(f"... and {more} slower layouts")
        return [*lines, f"chosen: {self.tried[0]}, {explain(self.tried, self.available)}"]


def explain(tried: Sequence[Candidate], available: int) -> str:
    """Return text that says why the first candidate is chosen."""
    best, others = tried[0], [candidate for candidate in tried[1:] if candidate.memory <= available]
    if best.memory > available:
        return f"the layout with the least memory, although no layout fits into {format_bytes(available)} that are free"
    if not others:
        return "the only possible layout" if len(tried) == 1 else "the only layout that fits"
    other = others[0]
    if best.measured is None or other.measured is None:
        return "the first of the layouts that fit, as no steps were timed: the network cannot be copied"
    longer = (other.measured / best.measured - 1) * 100
    if abs(longer) < (_ALIKE - 1) * 100:
        return (
            f"because steps with --mesh {other.mesh} took about as long, and samples are preferred to stages, and "
            "stages to slices"
        )
    return f"because steps with --mesh {other.mesh} took {longer:.0f}% longer"


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
    """Time steps in all layouts that fit into memory, and return the fastest layout. All ranks must call this function.

    Args:
        network: The whole network, which is left unchanged: copies of it take the steps.
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
    sample = inputs(max(1, samples // micro_batches))
    tried = enumerate_layouts(network, inputs, sample, ranks.size, micro_batches, given, mesh, device, autocast)
    free = available_bytes() if device.type == "cpu" else free_bytes(device)
    available = min(ranks.control.share(free or 1 << 62))
    fitting = [candidate for candidate in tried if candidate.memory <= available]
    if len(fitting) > 1 and _can_be_copied(network, ranks):
        sent = sum(value.nbytes for value in _tensors(sample)) if looked_up else 0
        trials = _Trials(network, inputs, ranks, samples, micro_batches, given.schedule, device, autocast, sent, build)
        fitting = trials.measure(fitting, available) or fitting
    too_large = [candidate for candidate in tried if candidate.memory > available]
    best, *_ = tried = [*fitting, *sorted(too_large, key=lambda candidate: candidate.memory)]
    return LayoutChoice(best.mesh, Layout(given.schedule, best.begins or None, best.plan), tried, available)


def meshes(ranks: int) -> list[Mesh]:
    """Return all meshes with a given number of ranks: samples before stages, and stages before slices."""
    every = [
        Mesh(data, model, ranks // data // model)
        for data in range(1, ranks + 1)
        if ranks % data == 0
        for model in range(1, ranks // data + 1)
        if ranks // data % model == 0
    ]
    return sorted(every, key=lambda mesh: (-mesh.data, mesh.model))


def enumerate_layouts(
    network: nn.Module,
    inputs: Inputs,
    sample: tuple[Any, ...],
    ranks: int,
    micro_batches: int,
    given: Layout,
    mesh: Mesh | None,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> list[Candidate]:
    """Return the possible layouts, without measuring them; `sample` has the network's inputs for one micro-batch.

    Stages are cut by the number of floating-point operations. Layers are sliced in up to three ways: only the largest
    layer or pair, all pairs, or all layers.

    Raises:
        UserError: No layout is possible, or `given` does not fit the network.
    """
    try:
        pieces = get_pieces(network)
    except UserError:  # such a network has one stage
        pieces = [Piece("network", network, (network,))]
    sizes = count_saved(pieces, sample, device.type, autocast)
    saved = {piece.name: size for piece, size in zip(pieces, sizes, strict=True)}
    fixed = matched(network, given.plan)
    candidates: list[Candidate] = []
    problem: UserError | None = None
    for tried in meshes(ranks) if mesh is None else [mesh]:
        if micro_batches % tried.data or micro_batches < tried.data * tried.pipe:
            continue
        if tried.pipe == 1 and given.begins is not None:
            continue
        if tried.model == 1 and any(strategy != "replicate" for strategy in fixed.values()):
            continue
        plans: list[Plan] = [()]
        if tried.model > 1:
            plans = enumerate_plans(network, fixed, tried.model, lambda: inputs(2))
        if not plans and mesh is not None:
            if _is_whole(network):
                raise UserError(_NONE_SLICED.format(mesh=mesh, count=mesh.model))
            plans = [()]
        for plan in plans:
            try:
                resolved = resolve_layout(network, given._replace(plan=plan), tried, inputs)
            except UserError as error:
                problem = error
                continue
            count = micro_batches // tried.data
            memory = _count_memory(network, pieces, saved, resolved, tried, count, given.schedule)
            candidates.append(Candidate(tried, resolved.begins, plan, memory))
    if not candidates:
        if mesh is not None and problem is not None:
            raise problem
        raise UserError(
            f"no layout of {ranks} processes fits {micro_batches} micro-batches and the given options; "
            "give more micro-batches or fewer options"
        ) from problem
    return candidates


def enumerate_plans(
    network: nn.Module, fixed: Mapping[str, str], ranks: int, inputs: Callable[[], tuple[Any, ...]]
) -> list[Plan]:
    """Return ways to slice layers beside the `fixed` strategies: the largest layer or pair, all pairs, all layers."""
    kept = [(name, strategy) for name, strategy in fixed.items() if strategy != "replicate"]
    units = sliceable(network, ranks, inputs, without={*fixed, *get_shared_layers(network)})
    modules = dict(network.named_modules())

    def size(unit: Plan) -> int:
        return sum(parameter.nbytes for name, _ in unit for parameter in modules[name].parameters())

    ways = [[], [max(units, key=size)] if units else [], [unit for unit in units if len(unit) == 2], units]
    plans = dict.fromkeys((*kept, *(layer for unit in way for layer in unit)) for way in ways)
    return sorted(filter(None, plans), key=len)


def _count_memory(
    network: nn.Module,
    pieces: Sequence[Piece],
    saved: Mapping[str, int],
    resolved: ResolvedLayout,
    mesh: Mesh,
    count: int,
    schedule: str,
) -> int:
    """Return the bytes that a layout takes on the fullest rank, where `count` micro-batches pass through each stage."""
    modules = dict(network.named_modules())
    cut = {
        id(modules[name]._parameters[key])
        for name, sliced in resolved.strategies.items()
        for key, dim in sliced.dims.items()
        if dim is not None
    }
    stages = resolved.stages(pieces)
    totals = []
    for rank in range(mesh.pipe):
        in_flight = 1
        if mesh.pipe > 1:
            ahead = mesh.pipe - rank + (mesh.pipe if schedule == "interleaved" else 0)
            in_flight = count if schedule == "gpipe" else min(count, ahead)
        here = [piece for stage in stages[rank :: mesh.pipe] for piece in stage]
        nbytes = {id(parameter): parameter.nbytes for piece in here for parameter in piece.parameters}
        parameters = sum(size // (mesh.model if key in cut else 1) for key, size in nbytes.items())
        totals.append(_STATES * parameters + in_flight * sum(saved[piece.name] for piece in here))
    return max(totals)


def _is_whole(network: nn.Module) -> bool:
    """Return whether no parameter is marked by `sliced`."""
    return all(get_slice_dim(parameter) is None for parameter in network.parameters())


def _can_be_copied(network: nn.Module, ranks: World) -> bool:
    """Return whether all ranks can copy a network; False for parameters marked by `sliced`, which fit only one mesh."""
    possible = _is_whole(network)
    if possible:
        try:
            copy.deepcopy(network)
        except Exception:
            possible = False
    return all(ranks.control.share(possible))


class _Trials(NamedTuple):
    """Takes steps with Adam in layouts; `choose` describes the fields. All ranks must call the methods."""

    network: nn.Module
    inputs: Inputs
    ranks: World
    samples: int
    micro_batches: int
    schedule: str
    device: torch.device
    autocast: torch.dtype | None
    sent: int  # bytes of a micro-batch's inputs that one rank sends to the ranks with the other slices
    build: Builder

    def measure(self, tried: Sequence[Candidate], available: int) -> list[Candidate]:
        """Return the candidates that fit the network, in the order of choice, with the seconds of their steps.

        Each takes a few steps. The best ones, whose copies fit into `available` bytes together, then take more in turn.
        """
        before, kind = self.ranks.mesh, None if self.device.type == "cpu" else self.device.type
        with torch.random.fork_rng([self.device] if kind else [], device_type=kind or "cuda"):
            torch.manual_seed(1)  # the same values on all ranks
            values = filled(self.inputs(self.samples), self.device)
            try:
                timed = [each for candidate in tried for each in self._time([candidate], values, _FIRST_ROUNDS)]
                finalists = pick_finalists(timed, available)
                rest = [candidate for candidate in timed if candidate not in finalists]
                if len(finalists) > 1:
                    rounds = round(_TRIAL_SECONDS / max(sum(map(_seconds, finalists)), 1e-9))
                    finalists = self._time(finalists, values, min(_ROUNDS[1], max(_ROUNDS[0], rounds)))
            finally:
                self.ranks.mesh = before
        return order_measured(finalists, rest)

    def _time(self, tried: Sequence[Candidate], values: Any, rounds: int) -> list[Candidate]:
        """Take steps in some layouts in turn; return those that fit the network, with the median of their seconds.

        One copy of the network for each layout is in memory at the same time.
        """
        made = [(candidate, self._make_trial(candidate, values)) for candidate in tried]
        trials = [(candidate, step) for candidate, step in made if step is not None]
        for _, step in trials:
            step()
        seconds = [[step() for _, step in trials] for _ in range(rounds)]
        medians = [statistics.median(each) for each in zip(*seconds, strict=True)]
        return [candidate._replace(measured=second) for (candidate, _), second in zip(trials, medians, strict=True)]

    def _make_trial(self, candidate: Candidate, values: Any) -> Callable[[], float] | None:
        """Return a function that takes a step in a layout and returns the seconds of the slowest rank.

        None if the layout does not fit the network. All ranks get the same result.
        """
        ranks, control = self.ranks, self.ranks.control
        ranks.mesh = candidate.mesh
        try:
            network = self.build(
                copy.deepcopy(self.network),
                self.inputs(1),
                ranks=ranks,
                micro_batches=self.micro_batches,
                schedule=self.schedule,
                stage_cut=",".join(candidate.begins) or None,
                plan=_plan_text(candidate.plan) or None,
                device=self.device,
                precision="fp32" if self.autocast is None else "bf16",
            )
        except UserError:
            return None
        adam = torch.optim.Adam(network.parameters, fused=True)
        slices = ranks.channel("model") if candidate.mesh.model > 1 and self.sent else None
        rows = torch.zeros(self.sent // 4)

        def get_inputs(part: slice) -> Any:
            if slices is not None:
                slices.broadcast(rows)
            return _slice_inputs(values, part)

        def step() -> float:
            ranks.mesh = candidate.mesh
            control.barrier()
            begin = now(self.device)
            network.step(self.samples, get_inputs, lambda output, _: _mean(output))
            adam.step()
            adam.zero_grad()
            return float(max(control.share(now(self.device) - begin)))

        return step


def _seconds(candidate: Candidate) -> float:
    return candidate.measured or 0.0


def pick_finalists(tried: Sequence[Candidate], available: int) -> list[Candidate]:
    """Return the best measured candidates whose copies fit into memory together, in the order of `tried`."""
    order = sorted(tried, key=_seconds)
    picked: list[Candidate] = []
    for candidate in order[:_FINALISTS]:
        fits = candidate.memory + sum(other.memory for other in picked) <= available
        if fits and _seconds(candidate) <= _NEAR * _seconds(order[0]):
            picked.append(candidate)
    return [candidate for candidate in tried if candidate in picked]


def order_measured(finalists: Sequence[Candidate], rest: Sequence[Candidate]) -> list[Candidate]:
    """Return all candidates: first the one to choose, then the other finalists, then the rest, each by measured time.

    `finalists` are in the order of `meshes`.
    """
    shortest = min(map(_seconds, finalists), default=0.0)
    best = [candidate for candidate in finalists if _seconds(candidate) <= _ALIKE * shortest][:1]
    others = sorted((candidate for candidate in finalists if candidate not in best), key=_seconds)
    return [*best, *others, *sorted(rest, key=_seconds)]


def filled(values: Any, device: torch.device) -> Any:
    """Return the inputs on a device, with random numbers in all floating-point tensors."""

    def drawn(zeros: Tensor) -> Tensor:
        if not zeros.is_floating_point():
            return zeros.to(device)
        return torch.randn(zeros.shape).to(device, zeros.dtype).requires_grad_(zeros.requires_grad)

    return torch.utils._pytree.tree_map_only(Tensor, drawn, values)


def now(device: torch.device) -> float:
    """Synchronize the device, and return a monotonic time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _plan_text(plan: Plan) -> str:
    return ",".join(f"{name}={strategy}" for name, strategy in plan)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _slice_inputs(values: tuple[Any, ...], part: slice) -> tuple[Any, ...]:
    """Return some samples of the network's inputs as new tensors."""

    def taken(value: Tensor) -> Tensor:
        return value.detach()[part].requires_grad_(value.requires_grad)

    return torch.utils._pytree.tree_map_only(Tensor, taken, values)  # type: ignore[no-any-return]


def _mean(output: Any) -> Tensor:
    """Reduce a network's output to a scalar that can be differentiated."""
    return torch.stack([value.float().mean() for value in _tensors(output) if value.requires_grad]).sum()
