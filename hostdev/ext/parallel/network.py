"""Trains a network without embedding tables on any number of processes, in the user's own training loop."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hostdev.core.errors import UserError
from hostdev.core.launched import require_alone
from hostdev.core.micro_batches import EXCHANGES, TreeSum, cut
from hostdev.device.backend import seed_generators
from hostdev.distributed.dense import DenseExchange, DenseState, Grads, add_lists
from hostdev.distributed.world import ALONE_WORLD, SCHEDULES, World, parse_layout
from hostdev.ext.parallel.auto import LayoutChoice, choose
from hostdev.ext.parallel.parts import Parts, StepResult
from hostdev.ext.parallel.plan import get_slice_dim, like
from hostdev.kernels.counter import key64

Inputs = Callable[[slice], tuple[Any, ...]]


class Network:
    """A network, or this rank's part of it, and the training steps through it.

    ::

        with hostdev.join("data=2,pipe=2") as ranks:
            network = hostdev.parallel.Network(resnet, (images[:1],), ranks=ranks, micro_batches=8)
            sgd = torch.optim.SGD(network.parameters, lr=0.01, momentum=0.9)
            for images, labels in batches:
                loss = network.step(
                    len(images), lambda part: (images[part],), lambda output, part: cross_entropy(output, labels[part])
                )
                sgd.step()
                sgd.zero_grad()

    With the same number of micro-batches, losses and parameters are bit-identical for all sizes of the axes data and
    pipe, and equal up to rounding for all sizes of the axis model (slices).

    Args:
        module: The whole network; the memory of the other ranks' parts is freed.
        example: Example inputs for a few samples: tensors [B, ...], or containers of such tensors.
        ranks: The result of `hostdev.join`; None for a single process, or after `hostdev.alone()`.
        micro_batches: Number of micro-batches in a batch.
        gradients: "mean" for gradients of the batch's mean loss; "sum" for gradients of the micro-batches' summed
            losses.
        schedule: Same as --schedule of hostdev.train.
        stage_cut: Same as --stage-cut of hostdev.train.
        plan: Same as --plan of hostdev.train.
        device: Where the network runs.
        precision: "fp32", or "bf16" for bfloat16 arithmetic over float32 parameters.
        seed: With several micro-batches, the draws of layers such as dropout depend only on this seed, the step and the
            micro-batch's number. With a single micro-batch, layers draw from torch's generators, which are not seeded.
        auto: If given, search for the fastest mesh and layout for batches of this many samples. The search keeps a
            given mesh, plan and stage cut. The attribute `choice` then lists the candidates.

    Raises:
        UserError: The layout does not fit the network or the ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        example: Sequence[Any],  # Any: a tree of tensors for each input
        *,
        ranks: World | None = None,
        micro_batches: int = 1,
        gradients: str = "mean",
        schedule: str | None = None,
        stage_cut: str | None = None,
        plan: str | None = None,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        seed: int = 1,
        auto: int | None = None,
    ) -> None:
        layout = parse_layout(schedule, stage_cut, plan)
        if ranks is None:
            require_alone("a Network", "give the Network ranks=ranks")
            ranks = ALONE_WORLD
        autocast = torch.bfloat16 if precision == "bf16" else None
        shapes = {
            f"parameter {name}": f"{one.dtype} {list(one.shape)}".removeprefix("torch.")
            for name, one in module.named_parameters()
            if get_slice_dim(one) is None
        }
        options = {
            "micro_batches": micro_batches,
            "gradients": gradients,
            "schedule": schedule,
            "plan": plan,
            "stage_cut": stage_cut,
            "precision": precision,
            "seed": seed,
            "auto": auto,
            "the kind of device": torch.device(device).type,
        }
        ranks.agree("network", "hostdev.parallel.Network(...)", {**options, **shapes})
        self.choice: LayoutChoice | None = None
        if auto is not None and ranks.size > 1:
            self.choice = choose(
                module,
                like(example),
                ranks,
                samples=auto,
                micro_batches=micro_batches,
                given=layout,
                mesh=ranks.mesh if ranks.mesh_is_given else None,
                device=torch.device(device),
                autocast=autocast,
                build=Network,
            )
            ranks.mesh, layout = self.choice.mesh, self.choice.layout
        shares, stages = ranks.mesh.data, ranks.mesh.pipe
        if micro_batches < 1 or micro_batches % shares:
            raise UserError(
                f"{micro_batches} micro-batches cannot be divided equally among {shares} ranks; set micro_batches to "
                f"a multiple of {shares}"
            )
        if micro_batches < shares * stages:
            raise UserError(
                f"each rank needs at least {stages} micro-batches, one per stage; set micro_batches to "
                f"{shares * stages} or more, not {micro_batches}"
            )
        for name, value, known in (
            ("gradients", gradients, ("mean", "sum")),
            ("schedule", schedule or SCHEDULES[0], SCHEDULES),
            ("precision", precision, ("fp32", "bf16")),
        ):
            if value not in known:
                raise UserError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        self.module, self.ranks, self.micro_batches = module, ranks, micro_batches
        self._mean, self._seed, self._steps = gradients == "mean", seed, 0
        self._count = micro_batches // shares
        self._first = ranks.share()[0] * self._count
        self._device = torch.device(device)
        self._parts = Parts(module, layout, ranks, like(example), torch.device(device), autocast=autocast)
        # an optimizer needs at least one parameter
        self.parameters = self._parts.parameters or [nn.Parameter(torch.zeros(0))]
        self._exchange: DenseExchange | None = None
        if shares > 1:
            along_data = ranks.device_channel(torch.device(device), "data")
            self._exchange = DenseExchange(
                along_data, self._count, EXCHANGES[0], (ranks.channel("data"), ranks.channel())
            )

    def describe(self) -> str:
        """Return the layout as text; "" if this rank has the whole network."""
        return self._parts.text

    def step(
        self,
        samples: int,
        inputs: Inputs,
        loss: Callable[[Any, slice], Tensor],  # Any: the module's output
    ) -> float:
        """Run a batch forward and backward, add its gradients to the parameters' gradients, and return its loss.

        Args:
            samples: Number of samples in the whole batch, the same on all ranks.
            inputs: Called on the first stage with a slice of the batch's samples; returns the network's inputs for it.
            loss: Called on the last stage with the network's output and that slice; returns the slice's mean loss, [].
        """
        if samples < 1:
            raise ValueError(f"a step needs at least one sample, not {samples}")
        self._begin("step", f"network.step() {self._steps + 1}")
        self.module.train()
        spans = self._spans(samples)
        weights = [(stop - start) / samples if self._mean else 1.0 for start, stop in cut(samples, self.micro_batches)]

        def weighted(number: int, output: Any) -> tuple[Tensor, Tensor]:
            mean = loss(output, slice(*spans[number]))
            weight = weights[self._first + number]
            return (mean * weight if self.micro_batches > 1 else mean), mean.detach()

        def given(number: int) -> tuple[Any, ...]:
            if self.micro_batches > 1:
                drawn = self._steps * self.micro_batches + self._first + number
                seed_generators(self._device, key64(self._seed, "micro-batch", drawn) >> 1)
            return inputs(slice(*spans[number]))

        before = [None if one.grad is None else one.grad.clone() for one in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        ran = self._parts.step(self._steps, [stop - start for start, stop in spans], given, weighted)
        self._steps += 1
        self._reduce(ran)
        self._parts.finish()
        for parameter, grad in zip(self.parameters, before, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad + parameter.grad
        values = self._of_all(ran.values)[:, 0]
        return float(sum(value * weight for value, weight in zip(values.tolist(), weights, strict=True)))

    def clip_grad_norm(self, most: float) -> float:
        """Scale the gradients so that their 2-norm is at most `most`; return the norm before scaling.

        All ranks must call this method. torch.nn.utils.clip_grad_norm_ would see only this rank's slices and stages.
        """
        self._begin("clip_grad_norm")
        norm = self._parts.state.norm()
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
        return float(norm)

    def evaluate(
        self,
        samples: int,
        inputs: Inputs,
        measure: Callable[[Any, slice], Tensor],  # Any: the module's output
    ) -> list[float]:
        """Run a batch forward in evaluation mode, and return the sums of `measure`'s numbers over all micro-batches.

        Args:
            samples: Number of samples in the whole batch, the same on all ranks.
            inputs: Called on the first stage with a slice of the batch's samples; returns the network's inputs for it.
            measure: Called on the last stage with the network's output and that slice; returns numbers, [] or [k].
        """
        self._begin("evaluate")
        training = self.module.training
        self.module.eval()
        try:
            spans = self._spans(samples)
            sizes = [stop - start for start, stop in spans]
            found = dict(self._parts.predict(self._steps, sizes, lambda number: inputs(slice(*spans[number]))))
            values = [
                measure(found[number], slice(*span)).detach() if number in found else None
                for number, span in enumerate(spans)
            ]
        finally:
            self.module.train(training)
        return self._of_all(values).double().sum(0).tolist()

    def state(self, optimizer: torch.optim.Optimizer) -> DenseState:
        """Return the state of the whole network and the optimizer, in host memory; an empty state on all but rank 0.

        All ranks must call this method.
        """
        self._begin("state")
        return self._parts.state.whole(optimizer)

    def save(self, folder: Path | str, optimizer: torch.optim.Optimizer, *, integrated: bool = True) -> None:
        """Write the state of the network and the optimizer to a new folder. All ranks must call this method.

        Args:
            folder: Path of the new folder, in a file system that all ranks share.
            optimizer: The optimizer, with one parameter group.
            integrated: Whether rank 0 gathers everything into one file. If not, each rank writes its slices and stages.

        Raises:
            UserError: The folder exists or cannot be written; raised on all ranks. No incomplete folder is left.
        """
        self._begin("save")
        self._parts.state.save(Path(folder), optimizer, self._steps, integrated=integrated)

    def restore(self, folder: Path | str, optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part from a folder that `save` wrote on any mesh. All ranks must call this method.

        Raises UserError on all ranks, before any change, if the folder is damaged or belongs to another network.
        """
        self._begin("restore")
        self._steps = self._parts.state.restore(Path(folder), optimizer)

    def load(self, state: DenseState, optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part of a whole state, which `state` returned on any mesh. All ranks must call this method.

        Raises UserError if the state belongs to another network.
        """
        self._begin("load")
        self._parts.state.load(dict(state.model), optimizer, dict(state.optimizer))

    def _begin(self, name: str, text: str | None = None) -> None:
        """Count a call that all ranks must make."""
        self.ranks.begin(f"network.{name}", text or f"network.{name}()")

    def _spans(self, samples: int) -> list[tuple[int, int]]:
        """Return the bounds of this rank's micro-batches."""
        return cut(samples, self.micro_batches)[self._first : self._first + self._count]

    def _reduce(self, ran: StepResult) -> None:
        """Set the parameters' gradients to their sums over all micro-batches."""
        if self._exchange is None:
            tree: TreeSum[Grads] = TreeSum(add_lists)
            tree.nodes = list(ran.nodes)
            for parameter, total in zip(ran.parameters, tree.total() or (), strict=False):
                parameter.grad = None if total is None else total.add_(0.0)
            return
        dense = self._exchange.of(ran.parameters)
        dense.finish(self._exchange.reduce_flags(dense.put_nodes(ran.nodes)))

    def _of_all(self, values: Sequence[Tensor | None]) -> Tensor:
        """Return the values of the M micro-batches of all ranks, float32 [M, k]; an empty micro-batch has zeros."""
        k = next((one.numel() for one in values if one is not None), 0)
        mine = torch.zeros(self._count, k)
        for number, one in enumerate(values):
            if one is not None:
                mine[number] = one.reshape(-1).float().cpu()
        mesh = self.ranks.mesh
        received = self.ranks.control.gather(mine.reshape(-1).numpy())
        ends = [mesh.rank(self.ranks.at._replace(data=data, model=0, pipe=mesh.pipe - 1)) for data in range(mesh.data)]
        k = max(len(received[rank]) for rank in ends) // self._count
        parts = [
            torch.from_numpy(received[rank]) if len(received[rank]) else torch.zeros(self._count * k) for rank in ends
        ]
        return torch.cat(parts).view(self.micro_batches, k)
