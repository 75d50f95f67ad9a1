"""Measured costs of a network's pieces and of a machine's exchanges, for the layout search."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hostdev.core.pieces import Piece, run
from hostdev.distributed.channel import Channel
from hostdev.distributed.world import World
from hostdev.ext.parallel.pieces import count_flops
from hostdev.ext.parallel.plan import Inputs, cut_layers, cuttable, resolve_strategies

_REPEATS = 4  # timed runs of each piece
_BLOCK = 1 << 22  # bytes exchanged to measure the bandwidth
_ADDED = 1 << 20, 1 << 26  # least and greatest size, in bytes, of the arrays added to measure additions
_ROW = 4  # calls that are timed together, since ranks do not begin at the same moment
_PASSES = 7  # arrays of the parameters' size that a step of Adam reads (four) or writes (three)


class PieceCost(NamedTuple):
    """The cost of a piece for one micro-batch."""

    name: str
    seconds: float  # duration of its forward and backward passes
    flops: int  # floating-point operations, forward
    parameters: int  # bytes of its parameters
    saved: int  # bytes saved for the backward pass
    given: int  # bytes of its output


class LayerCost(NamedTuple):
    """The cost of a layer that can be sliced, for one micro-batch."""

    name: str
    piece: int  # index of its piece
    share: float  # its share of the piece's floating-point operations
    parameters: int  # bytes of its parameters
    taken: int  # bytes of its input
    given: int  # bytes of its output


class Machine(NamedTuple):
    """The speed of exchanges and of memory on the slowest rank, and the least free memory of a rank."""

    bandwidth: float  # bytes per second that one rank sends to the others, while all ranks exchange
    latency: float  # seconds that an exchange of almost no data takes
    memory: float  # bytes per second that additions read and write
    slicing: float  # extra seconds of a sliced layer per micro-batch, forward and backward, without its exchanges
    available: int  # bytes of free memory on each rank

    def exchange(self, size: float) -> float:
        """Return how many seconds an exchange of `size` bytes takes."""
        return self.latency + size / self.bandwidth

    def update(self, parameters: float) -> float:
        """Return how many seconds an optimizer step over `parameters` bytes of parameters takes."""
        return _PASSES * parameters / self.memory

    def add(self, parameters: float) -> float:
        """Return how many seconds it takes to add one array of `parameters` bytes to another."""
        return 3 * parameters / self.memory


class Profile(NamedTuple):
    """The costs of a network."""

    pieces: list[PieceCost]  # costs of each piece
    layers: list[LayerCost]  # costs of each layer that can be sliced
    inputs: int  # bytes of a micro-batch's inputs, if one rank sends them to the ranks with other slices; otherwise 0


def measure_profile(
    network: nn.Module,
    pieces: Sequence[Piece],
    inputs: Inputs,
    samples: int,
    device: torch.device,
    autocast: torch.dtype | None,
    looked_up: bool,
) -> Profile:
    """Measure the costs of a network's pieces on this rank.

    The network is moved to `device`; its parameters and buffers keep their values. `inputs` is called with a number of
    samples and returns zeros in place of the network's inputs. For `looked_up`, see `auto.choose`.
    """
    buffers = [(one, one.clone()) for one in network.buffers()]
    training = network.training
    network.train()
    try:
        with torch.random.fork_rng(enabled=device.type == "cpu"):
            given = filled(inputs(samples), device)
            network.to(device)
            about = _time_pieces(pieces, given, device, autocast, looking=True)[1]
            timed = [_time_pieces(pieces, given, device, autocast)[0] for _ in range(_REPEATS)]
    finally:
        network.train(training)
        with torch.no_grad():
            for one, before in buffers:
                one.copy_(before)
    flops, layers = _counted(network, pieces, inputs(samples))
    costs = [
        PieceCost(piece.name, min(seconds), flop, sum(one.nbytes for one in piece.parameters), *sizes)
        for piece, seconds, flop, sizes in zip(pieces, zip(*timed, strict=True), flops, about, strict=True)
    ]
    floats = [one for one in torch.utils._pytree.tree_leaves(given) if isinstance(one, Tensor)]
    return Profile(costs, layers, sum(one.nbytes for one in floats) if looked_up else 0)


def take_slowest(ranks: World, profile: Profile) -> Profile:
    """Return the profile with each piece's time on the slowest rank. All ranks call this and get the same times."""
    received = ranks.control.share([piece.seconds for piece in profile.pieces])
    slowest = [max(each) for each in zip(*received, strict=True)]
    return profile._replace(
        pieces=[piece._replace(seconds=second) for piece, second in zip(profile.pieces, slowest, strict=True)]
    )


def measure_machine(ranks: World, available: int, parameters: int, *, slices: bool) -> Machine:
    """Measure exchanges and additions on all ranks at the same time. All ranks must call this function.

    Args:
        ranks: The ranks of this run.
        available: Bytes of free memory on this rank.
        parameters: Bytes of the network's parameters.
        slices: Whether to measure sliced layers as well.
    """
    channel, W = ranks.channel(), ranks.size
    part = _BLOCK // 4 // W
    values, counts = torch.zeros(part * W), [part] * W
    nothing = torch.zeros(W)
    send = _median_seconds(channel, lambda: channel.all_to_all(values, counts, counts))
    wait = _median_seconds(channel, lambda: channel.all_to_all(nothing, [1] * W, [1] * W))
    size = min(max(parameters, _ADDED[0]), _ADDED[1])
    one, other = torch.zeros(size // 4), torch.zeros(size // 4)
    added = _median_seconds(channel, lambda: one.add_(other))
    found = [
        _BLOCK * (W - 1) / W / max(send - wait, 1e-9),
        wait,
        3 * size / added,
        _measure_slicing(ranks) if slices else 0.0,
        float(available),
    ]
    each = list(zip(*ranks.control.share(found), strict=True))
    bandwidth, latency, memory, slicing, free = (
        min(each[0]),
        max(each[1]),
        min(each[2]),
        max(each[3]),
        min(each[4]),
    )
    return Machine(bandwidth, latency, memory, max(0.0, slicing - latency), int(free))


def _measure_slicing(ranks: World) -> float:
    """Return how many more seconds a tiny layer takes if it is sliced, including one exchange."""
    channel, mesh = ranks.slices(torch.device("cpu"))
    W = channel.ranks
    plain, cut = (nn.Sequential(nn.Linear(W, W), nn.Linear(W, W)) for _ in range(2))
    plan = [("0", "colwise"), ("1", "rowwise")]
    cut_layers(cut, resolve_strategies(cut, plan, W, [], lambda: (torch.zeros(1, W),)), mesh)
    values = torch.zeros(1, W, requires_grad=True)
    each = [_median_seconds(channel, lambda net=net: net(values).sum().backward()) for net in (plain, cut)]  # type: ignore[misc]
    return (each[1] - each[0]) / 2


def _median_seconds(channel: Channel, call: Callable[[], object]) -> float:
    """Return a call's median duration in seconds over several rounds, which all ranks begin together."""
    found = []
    for _ in range(9):
        channel.barrier()
        begin = time.perf_counter()
        for _ in range(_ROW):
            call()
        found.append((time.perf_counter() - begin) / _ROW)
    return sorted(found)[len(found) // 2]


def filled(values: Any, device: torch.device) -> Any:
    """Return the inputs on a device, with random numbers in all floating-point tensors."""

    def drawn(one: Tensor) -> Tensor:
        if not one.is_floating_point():
            return one.to(device)
        return torch.randn(one.shape).to(device, one.dtype).requires_grad_(one.requires_grad)

    return torch.utils._pytree.tree_map_only(Tensor, drawn, values)


def _time_pieces(
    pieces: Sequence[Piece], given: Any, device: torch.device, autocast: torch.dtype | None, *, looking: bool = False
) -> tuple[list[float], list[tuple[int, int]]]:
    """Return each piece's duration in seconds, forward and backward, and a pair of sizes.

    The sizes are the bytes saved for the piece's backward pass (0 unless `looking`), and the bytes of its output.
    """
    seconds, about, values = [], [], given
    for piece in pieces:
        values = values if isinstance(values, tuple) else (values,)
        own = {id(one) for one in piece.parameters}
        kept: dict[int, int] = {}

        def keep(one: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
            if id(one) not in own:
                kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        begin = now(device)
        enabled = autocast is not None
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one) if looking else nullcontext()
        with hooks, torch.autocast(device.type, autocast or torch.bfloat16, enabled=enabled):
            result = run([piece], *values)
        given_here = [one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, Tensor)]
        trained = [one for one in given_here if one.requires_grad]
        leaves = [one for one in torch.utils._pytree.tree_leaves(values) if isinstance(one, Tensor)]
        wanted = [one for one in (*leaves, *piece.parameters) if one.requires_grad]
        if trained and wanted:
            torch.autograd.grad(trained, wanted, [torch.ones_like(one) for one in trained], allow_unused=True)
        seconds.append(now(device) - begin)
        about.append((sum(kept.values()), sum(one.nbytes for one in given_here)))
        values = torch.utils._pytree.tree_map_only(
            Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), result
        )
    return seconds, about


def now(device: torch.device) -> float:
    """Synchronize the device, and return a monotonic time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _counted(network: nn.Module, pieces: Sequence[Piece], given: tuple[Any, ...]) -> tuple[list[int], list[LayerCost]]:
    """Return each piece's floating-point operations, and the costs of the layers that can be sliced."""
    names = {id(module): name for name, module in network.named_modules() if cuttable(module)}
    found: dict[str, LayerCost] = {}
    flops: list[int] = []

    def after(module: nn.Module, taken: tuple[Any, ...], result: Tensor) -> None:
        name, size = names[id(module)], sum(one.nbytes for one in module.parameters())
        work = 2 * taken[0].numel() * result.shape[-1] if isinstance(module, nn.Linear) else 0
        found[name] = LayerCost(name, len(flops), work, size, taken[0].nbytes, result.nbytes)

    hooks = [module.register_forward_hook(after) for module in network.modules() if id(module) in names]
    try:
        count_flops(pieces, given, flops)
    finally:
        for hook in hooks:
            hook.remove()
    layers = [one._replace(share=one.share / max(1, flops[one.piece])) for one in found.values()]
    return flops, layers
