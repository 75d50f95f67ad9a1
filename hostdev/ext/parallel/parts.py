"""This rank's part of a network (its stages or slices), and training steps through it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hostdev.core.errors import UserError
from hostdev.core.micro_batches import Node, TreeSum
from hostdev.core.timeline import Timeline
from hostdev.distributed.averages import Averages, require_own_averages
from hostdev.distributed.channel import Channel
from hostdev.distributed.dense import Grads, add_lists, broadcast_tensors, take_grads
from hostdev.distributed.world import ALONE_WORLD, Layout, World
from hostdev.ext.parallel.pieces import get_pieces, trace, with_extra_value
from hostdev.ext.parallel.plan import Inputs, Traffic, cut_layers, describe_layout, get_slice_dim, resolve_layout
from hostdev.ext.parallel.single_stage import Ops, SingleStage
from hostdev.ext.parallel.state import NetworkState
from hostdev.ext.parallel.tied import LocalParameters, Tied


class StepResult(NamedTuple):
    """The result of a step on this rank, before gradients are summed over all ranks."""

    parameters: list[Tensor]  # this rank's parameters, in the order of each node's gradients
    nodes: list[Node[Grads]]  # nodes of the summation tree: sums of gradients over this rank's micro-batches
    values: list[Tensor | None]  # values of each micro-batch; None if it is empty or another rank reports the values


class Parts:
    """This rank's part of a network; the memory of the other ranks' parts is freed.

    Args:
        network: The whole network.
        layout: The requested layout.
        ranks: The ranks of this run; None for a single process.
        inputs: Called with a number of samples; returns zeros in place of the network's inputs.
        device: Where the part runs.
        autocast: Dtype of autocast, or None.
        aside: Whether an additional last input, float32 [], bypasses the network and is returned with its output.
        ops: Hooks around the micro-batches' forward and backward passes; the hook `watching` is replaced.

    Attributes:
        text: The layout, for the user; "" if this rank has the whole network.
        leaves: Local tensors of the parameters.
        parameters: Local tensors of this rank's parameters.
        state: Gathers, saves and loads the state of the whole network.

    Raises:
        UserError: The layout does not fit the network or the devices.
    """

    def __init__(
        self,
        network: nn.Module,
        layout: Layout,
        ranks: World | None,
        inputs: Inputs,
        device: torch.device,
        *,
        autocast: torch.dtype | None = None,
        aside: bool = False,
        ops: Ops | None = None,
    ) -> None:
        self._ranks = ranks = ranks or ALONE_WORLD
        self._device, self._mesh = device, ranks.mesh
        mesh = ranks.mesh
        own = with_extra_value if aside else list
        around = (ops or Ops(Timeline()))._replace(watching=lambda number: self._averages.watching(number))
        like = (lambda samples: (*inputs(samples), torch.zeros((), requires_grad=True))) if aside else inputs
        found = resolve_layout(network, layout, mesh, inputs)
        self.text = describe_layout(found, layout, mesh)
        require_own_averages(network)
        crossing = []
        if found.begins:
            crossing = trace(found.stages(own(found.pieces)), like, device=device.type, autocast=autocast)
        broadcast_parameters(network, ranks)
        self._channels: list[Channel] = []
        self._traffic = Traffic(mesh.model)
        slices = ALONE_WORLD.control
        if mesh.model > 1:
            slices, device_mesh = ranks.slices(device, "model")
            self._require_own_backend(slices, "model")
            network.to(device)
            self._traffic = cut_layers(network, found.strategies, device_mesh)
        self.leaves = LocalParameters(network, found.strategies)
        stages = found.stages(own(get_pieces(network))) if found.begins else []
        self.state = NetworkState(network, stages, self.leaves, ranks)
        self._averages = Averages([])
        self._tied: Tied | None = None
        if stages:
            from hostdev.ext.parallel.stages import Stages  # its imports take seconds

            between, host = self._own_backend("pipe"), ranks.channel("pipe")
            self._channels.append(host)
            self._passes: Any = Stages(stages, crossing, between, layout.schedule, device, autocast, around)
            self._tied = Tied(stages, self.leaves, host)
            _release_others(network, self._passes.modules)
            self.leaves.keep(one for module in self._passes.modules for one in module.parameters())
        else:
            self._passes = SingleStage(network, slices, device, autocast, around, aside=aside)
        for module in self._passes.modules:
            module.to(device)
        for module in network.modules():  # including buffers that no piece holds
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))
        held = [one for module in self._passes.modules for one in module.parameters()]
        self.parameters = self.leaves.of(held)
        data = ranks.channel("data") if mesh.data > 1 else None
        self._averages = Averages(self._passes.modules, data)

    def _own_backend(self, axis: str) -> Channel:
        """Return a channel between devices along an axis; raise UserError if the devices have no backend for it."""
        channel: Channel = self._ranks.device_channel(self._device, axis)
        self._require_own_backend(channel, axis)
        self._channels.append(channel)
        return channel

    def _require_own_backend(self, channel: Channel, axis: str) -> None:
        if channel.device.type != self._device.type:
            raise UserError(
                f"--mesh {self._mesh} sends values between devices along {axis}: each process needs its own "
                "device, with a torch.distributed backend; use --device cpu, or a mesh with only the axis data"
            )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent, in training, to ranks with other stages or slices."""
        return round(self._traffic.sent) + sum(channel.sent_bytes for channel in self._channels)

    @property
    def speaks(self) -> bool:
        """Whether this rank reports values: of the ranks with slices of the same layers, only the first does."""
        return self._ranks.at.model == 0

    def step(
        self,
        number: int,
        sizes: Sequence[int],
        inputs: Callable[[int], tuple[Any, ...]],
        loss: Callable[[int, Any], tuple[Tensor, Tensor]],
        on_gradients: Callable[[int], object] | None = None,
    ) -> StepResult:
        """Run a step's micro-batches forward and backward.

        Args:
            number: The step's number, for the timeline.
            sizes: Number of samples in each micro-batch on this rank; may be 0.
            inputs: Called with a micro-batch's number; returns the network's arguments.
            loss: Called with a micro-batch's number and the network's output; returns the scalar to differentiate and
                the values to report.
            on_gradients: Called on the first stage with a micro-batch's number when its inputs have gradients.
        """
        count = len(sizes)
        numbers = [number for number, size in enumerate(sizes) if size]
        values: list[Tensor | None] = [None] * count
        own, tied = self._by_stage()
        first = self._ranks.share()[0] * count
        sums = [_OrderedSum(first, count, numbers, len(each)) for each in own]

        def differentiate(at: int, output: Any) -> Tensor:
            objective, said = loss(numbers[at], output)
            if self.speaks:
                values[numbers[at]] = said
            return objective

        def back(stage: int, at: int) -> None:
            self.leaves.collect()
            here = self._passes.numbers.index(stage)
            sums[here].put(numbers[at], take_grads(own[here]))
            for one in tied[here]:
                assert self._tied is not None
                self._tied.put(stage, numbers[at], one)
            if stage == 0 and on_gradients is not None:
                on_gradients(numbers[at])

        self._passes.train(number, [sizes[one] for one in numbers], lambda at: inputs(numbers[at]), differentiate, back)
        parameters: list[Tensor] = [one for each in own for one in each]
        if self._tied is not None and (owned := self._tied.owned()):
            shared = _OrderedSum(first, count, range(count), len(owned))
            for at, grads in enumerate(zip(*self._tied.gathered(count), strict=True)):
                shared.put(at, list(grads))
            parameters, sums = parameters + owned, [*sums, shared]
        elif self._tied is not None:
            self._tied.gathered(count)
        nodes = [
            Node(each[0].start, each[0].size, [grad for node in each for grad in node.value or []])
            for each in zip(*(one.nodes() for one in sums), strict=True)
        ]
        self._averages.move()
        return StepResult(parameters, nodes, values)

    def finish(self) -> None:
        """Copy the gradients of shared parameters to all stages that use them.

        It must be called after the gradients that `step` returned are summed over all ranks.
        """
        if self._tied is not None:
            self._tied.spread()

    def _by_stage(self) -> tuple[list[list[nn.Parameter]], list[list[nn.Parameter]]]:
        """Return, by stage, the trained parameters that only that stage uses, and those that other stages also use."""
        own, tied = [], []
        for module in self._passes.modules:
            trained = [one for one in self.leaves.of(module.parameters()) if one.requires_grad]
            shared = [self._tied is not None and one in self._tied for one in trained]
            own.append([one for one, is_tied in zip(trained, shared, strict=True) if not is_tied])
            tied.append([one for one, is_tied in zip(trained, shared, strict=True) if is_tied])
        return own, tied

    def predict(
        self, number: int, sizes: Sequence[int], inputs: Callable[[int], tuple[Any, ...]]
    ) -> list[tuple[int, Any]]:
        """Return (number, output) of each non-empty micro-batch, or [] if this rank does not report the outputs."""
        numbers = [number for number, size in enumerate(sizes) if size]
        found = self._passes.predict(number, [sizes[one] for one in numbers], lambda at: inputs(numbers[at]))
        return list(zip(numbers, found, strict=False)) if self.speaks else []


def broadcast_parameters(network: nn.Module, ranks: World) -> None:
    """Overwrite all tensors with those of rank 0.

    A parameter marked by `plan.sliced` is overwritten with that of the first rank along the data axis instead.
    """
    tensors = [*network.parameters(), *network.buffers()]
    slices = [tensor for tensor in tensors if get_slice_dim(tensor) is not None]
    broadcast_tensors((tensor for tensor in tensors if get_slice_dim(tensor) is None), ranks.control)
    if slices:  # no channel without slices: an unused channel may close while another rank still connects to it
        broadcast_tensors(slices, ranks.channel("data"))


def _release_others(network: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Free the memory of the parameters that only other ranks use."""
    held = {id(one) for module in modules for one in module.parameters()}
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in held:
                setattr(module, name, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))


class _OrderedSum:
    """Sums a stage's gradients over micro-batches, as a tree. The micro-batches may finish in any order."""

    def __init__(self, first: int, count: int, numbers: Sequence[int], parameters: int) -> None:
        self._first = first  # number of this rank's first micro-batch; places its nodes in the tree
        self._tree: TreeSum[Grads] = TreeSum(add_lists)
        self._waiting: dict[int, Grads] = {
            number: [None] * parameters for number in range(count) if number not in numbers
        }
        self._next = 0

    def put(self, number: int, grads: Grads) -> None:
        self._waiting[number] = grads
        self._advance()

    def _advance(self) -> None:
        while self._next in self._waiting:
            self._tree.put(Node(self._first + self._next, 1, self._waiting.pop(self._next)))
            self._next += 1

    def nodes(self) -> list[Node[Grads]]:
        self._advance()
        return self._tree.nodes
