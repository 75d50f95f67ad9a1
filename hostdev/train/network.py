"""The dense layers of a training run: their passes, their optimizer, a step's losses and its micro-batches.

torch imports its compiler, which takes about a second, in an optimizer's step and at the first call of some other
methods, only to exclude these methods from compilation. Training does not use the compiler, and does not call these
methods from compiled code. `without_compiler` and `DenseAdam` avoid the import. A model may still use `torch.compile`,
which then imports the compiler.
"""

import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from hostdev.core.errors import UserError
from hostdev.core.micro_batches import cut
from hostdev.core.primitive import OpLog, Primitive
from hostdev.data.batch import Batch
from hostdev.device.backend import seed_generators
from hostdev.device.table import DeviceTable
from hostdev.distributed.averages import Averages
from hostdev.distributed.dense import DenseState, broadcast_tensors, get_dense_state
from hostdev.distributed.world import Layout, Mesh, World
from hostdev.host.table import HostTable
from hostdev.kernels.counter import key64
from hostdev.kernels.norm import total
from hostdev.models.model import Model, TargetLoss
from hostdev.models.wide_deep.network import L2_COEFFICIENT, deep_l2
from hostdev.pipeline.results import Outcome
from hostdev.runtime.features import read_ids
from hostdev.runtime.loop import NonFiniteError
from hostdev.runtime.rows import Rows
from hostdev.runtime.runtime import Runtime
from hostdev.train.build import FrozenColumns

_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_MARK = "__dynamo_disable"  # in this attribute, torch's `_disable_dynamo` stores the method to call instead
DENSE_EPS = 1e-8
DEEP = "deep"  # the table that --l2 regularizes


class Losses(NamedTuple):
    """A step's losses: the wide loss has no L2 term, the deep loss includes it."""

    wide: float
    deep: float


class NonFiniteLossError(NonFiniteError):
    """A loss or a gradient is NaN or infinite; no row was updated."""


def read_losses(squares: Any, shares: list[float], has_l2: bool, step: int, results: list[npt.NDArray[Any]]) -> Losses:
    """Compute the losses from a step's results.

    Args:
        squares: With --l2 table, the sums of squares of the table's weights; otherwise None.
        shares: Each micro-batch's share of the batch's samples.
        has_l2: Whether the deep losses include an L2 term. If so, they are already multiplied by their micro-batches'
            weights.
        step: The step's number, for errors.
        results: Arrays from the device: the wide and deep losses [M, 2]; the squares, if the device computed them; and
            a flag that is not 0 if the update was skipped.
    """
    losses, *more, skipped = results
    each = losses.tolist()
    wide = sum(share * wide for share, (wide, _) in zip(shares, each, strict=True) if share)
    deep = sum(deep for _, deep in each) if has_l2 else wide
    if squares is not None:
        deep = wide + L2_COEFFICIENT / 2 * total(more[0] if more else squares)
    if skipped[0] or not np.isfinite([wide, deep]).all():
        what = f"wide_loss {wide}, deep_loss {deep}"
        which = "the loss" if not np.isfinite([wide, deep]).all() else "a gradient"
        raise NonFiniteLossError(f"{which} is not finite ({what}); no row was updated", step)
    return Losses(wide, deep)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch's optimizers from importing torch's compiler in this context, unless it is already imported."""
    methods = () if "torch._dynamo" in sys.modules else (getattr(Optimizer, name) for name in _METHODS)
    plain = (getattr(method, "__wrapped__", None) for method in methods)  # None if torch does not wrap it
    changed = [function for function in plain if function is not None and not hasattr(function, _MARK)]
    for function in changed:
        setattr(function, _MARK, function)
    try:
        yield
    finally:
        for function in changed:
            delattr(function, _MARK)


class DenseAdam(torch.optim.Adam):
    """torch's Adam, whose step does not import the compiler."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step, as torch's Adam does."""
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)


class MicroBatches:
    """This rank's share of the micro-batches of each batch.

    Args:
        count: Micro-batches per batch, over all ranks.
        gradients: "mean" to weight each micro-batch's mean loss by its number of samples; "sum" to add the mean losses.
        seed: Seed of the training run.
        device: Device whose random generators the layers use.
        share: Index of this rank's share, from 0, and the number of shares.
    """

    def __init__(self, count: int, gradients: str, seed: int, device: torch.device, share: tuple[int, int]) -> None:
        self.count, self._gradients, self._seed, self._device = count, gradients, seed, device
        number, shares = share
        self.here = count // shares
        self._first = number * self.here
        self._begun = 0  # micro-batches started on this rank, over all steps

    def begin(self, count: int = 1) -> None:
        """Record that `count` more micro-batches have started."""
        self._begun += count

    def start_after(self, step: int) -> None:
        """Count as if `step` steps had been taken; used when a training run resumes."""
        self._begun = step * self.here

    @property
    def number(self) -> int:
        """The index of this rank's next micro-batch within its step."""
        return self._begun % self.here

    def divide(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this rank's micro-batches of each batch."""
        for batch in batches:
            if self.count == 1:
                yield batch
                continue
            mine = cut(batch.step_rows, self.count)[self._first : self._first + self.here]
            begin = mine[0][0]
            yield from batch.split([0, *(stop - begin for _, stop in mine)])

    def shares(self, batch: Batch) -> list[float]:
        """Return each micro-batch's share of the step's samples, for the micro-batches of all ranks."""
        return [(stop - start) / batch.step_rows for start, stop in cut(batch.step_rows, self.count)]

    def weight(self, batch: Batch) -> float | None:
        """Return the weight of a micro-batch's loss, or None if batches are not divided into micro-batches."""
        if self.count == 1:
            return None
        return len(batch) / batch.step_rows if self._gradients == "mean" else 1.0

    def seed_layers(self, number: int) -> None:
        """Seed the generators of layers such as dropout for micro-batch `number`; without micro-batches, do nothing."""
        if self.count > 1:
            step = self._begun // self.here
            key = key64(self._seed, "micro-batch", step * self.count + self._first + number)
            seed_generators(self._device, key >> 1)


Table: TypeAlias = HostTable | DeviceTable

# A micro-batch's logits, and the micro-batch. The logits are None if it has no samples, or if another rank has them.
Scored: TypeAlias = Generator[tuple[npt.NDArray[Any] | None, Batch], None, None]


class Setup(NamedTuple):
    """The training run that a network is part of.

    Attributes:
        l2: Regularization of the table "deep": "none", "batch" or "table".
        precision: "fp32", or "bf16" for the dense layers' arithmetic over float32 weights.
        lr: Learning rate of Adam.
        tables: The tables, by name.
        log: Records the durations of the passes and of the optimizer.
        loss: Computes a micro-batch's loss from the model's outputs, the labels and the samples' weights.
        frozen: Detaches the rows of frozen columns from the graph; None if there are none.
    """

    model: Model
    runtime: Runtime
    micro_batches: MicroBatches
    world: World
    l2: str
    precision: str
    lr: float
    tables: Mapping[str, Table]
    log: OpLog
    loss: TargetLoss
    frozen: FrozenColumns | None = None

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the dense layers' arithmetic; None for float32."""
        return torch.bfloat16 if self.precision == "bf16" else None

    def detach(self, rows: Any) -> Any:
        """Return a model's rows, with the rows of frozen columns detached from the graph."""
        return rows if self.frozen is None else self.frozen.detach(rows)


class Result:
    """The result of a step; its losses may still be on the way from the device."""

    def __init__(self, rows: int, outcome: Outcome) -> None:
        self.rows = rows
        self._outcome = outcome

    @property
    def value(self) -> Losses:
        """The step's losses. Waits for the device; raises NonFiniteLossError if a loss or gradient is not finite."""
        losses: Losses = self._outcome.get()
        return losses


class DenseNetwork:
    """Base class of a model's dense layers on this rank, with the optimizer and the end of each step.

    `WholeNetwork` has all layers on each rank. Networks that are divided over ranks are extensions: kind "network" of
    `hostdev.core.registry`.

    Attributes:
        description: Describes the parts of a network that is divided over ranks; None for a whole network.

    Args:
        setup: The training run.
        parameters: Parameters of this rank's layers, on the device.
    """

    description: str | None = None

    def __init__(self, setup: Setup, parameters: Sequence[Tensor]) -> None:
        self.setup, self.parameters = setup, list(parameters)
        self.timeline = setup.runtime.pipeline.timeline
        self.device = setup.runtime.device
        self.adam = DenseAdam(self.parameters, lr=setup.lr, eps=DENSE_EPS, fused=True)
        self._start_adam()
        self._adam_step = Primitive("Adam", self.adam.step, scope="network", log=setup.log)

    @classmethod
    def require(cls, model: Model, layout: Layout, mesh: Mesh | None, sample: Batch, *, searched: bool) -> None:
        """Raise UserError if the layout does not fit the model's layers, before processes wait for each other.

        Args:
            mesh: The mesh; None if it is to be chosen.
            sample: A batch with the shapes of the model's inputs.
            searched: Whether `choose` will be called; no layer then needs a strategy yet.
        """
        raise NotImplementedError

    @classmethod
    def choose(
        cls, model: Model, layout: Layout, mesh: Mesh | None, sample: Batch, *, world: World, **options: Any
    ) -> tuple[Mesh, Layout, list[str]]:
        """Measure layouts on all ranks; return the fastest mesh and layout, and lines about the measurements.

        Args:
            layout: The parts of the layout that are fixed.
            mesh: A fixed mesh; None searches for a mesh.
            sample: A batch with the shapes of the model's inputs.
            world: The ranks.
            options: samples and micro_batches of a step over all ranks, device, and autocast: a dtype, or None.
        """
        raise NotImplementedError

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that this rank has sent in training to ranks with other parts; None for a whole network."""
        return None

    def train(self, parts: Iterable[Batch]) -> Generator[Result, None, None]:
        """Take a step per batch; see `Trainer.train`."""
        raise NotImplementedError

    def score(self, parts: Iterable[Batch]) -> Scored:
        """Yield the logits of each of this rank's micro-batches, and the micro-batch.

        The logits are None if the micro-batch has no samples, or if another rank has the logits.
        """
        raise NotImplementedError

    def state(self) -> DenseState:
        """Return the state of the whole network and its optimizer; empty on ranks above 0 of a divided network."""
        raise NotImplementedError

    def load(self, model: Any, optimizer: Any) -> None:
        """Load this rank's part of a state that `state` returned."""
        raise NotImplementedError

    def _start_adam(self) -> None:
        """Create the optimizer's state by a step without updates, so that it exists even if the first step fails."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.adam.found_inf = torch.ones((), device=self.device)  # type: ignore[attr-defined]
        self.adam.step()
        self.adam.zero_grad()

    def finish(self, rows: Rows, batch: Batch, losses: Tensor, squares: Any = None) -> Outcome:
        """Queue a check that losses and gradients are finite, and Adam's step; return the outcome with the losses.

        Args:
            rows: Rows of the step's last micro-batch.
            batch: The step's last micro-batch.
            losses: Wide and deep losses of all micro-batches, float32 [M, 2].
            squares: With --l2 table, the sums of squares of the table's weights; otherwise None.
        """
        looked_at, results = [losses], [losses]
        if isinstance(squares, Tensor):  # on the device, and possibly not computed yet
            looked_at.append(squares.sum().float())
            results.append(squares)
        elif squares is not None:
            looked_at.append(torch.full((), total(squares), device=self.device))
        shares = self.setup.micro_batches.shares(batch)
        read = partial(read_losses, squares, shares, self.setup.l2 != "none", rows.step)
        outcome = rows.guard(self.adam, looked_at, results, read)
        with self.timeline.span("optimizer", rows.number):
            self._adam_step()
        return outcome


class WholeNetwork(DenseNetwork):
    """A network whose layers are all on this rank.

    Args:
        setup: The training run.
        reading: Arguments of `Runtime.train` and `predict` that define how to read batches.
    """

    def __init__(self, setup: Setup, reading: Mapping[str, Any]) -> None:
        broadcast_tensors([*setup.model.parameters(), *setup.model.buffers()], setup.world.control)
        super().__init__(setup, list(setup.model.to(setup.runtime.device).parameters()))
        self._reading = reading
        divided = setup.micro_batches.count > 1
        # without micro-batches, the layers update their averages themselves
        self._averages = Averages([setup.model] if divided else [], setup.world.channel())
        self._forward = Primitive(
            "DenseForward", _objective, scope="network", log=setup.log
        )  # a bound method would be a reference cycle
        self._backward = Primitive("DenseBackward", Tensor.backward, scope="network", log=setup.log)
        self._table_l2: Callable[[], Any] | None = None
        if setup.l2 == "table":
            table = setup.tables[DEEP]
            table_l2 = Primitive("TableL2", table.partial_squares, scope=DEEP, log=setup.log)
            table_l2.add_prim_attr("primitive_target", table.primitive_target)
            self._table_l2 = table_l2

    def train(self, parts: Iterable[Batch]) -> Generator[Result, None, None]:
        """Take a step per batch; see `Trainer.train`."""
        many = self.setup.micro_batches.count > 1
        micro_batches = self.setup.micro_batches.here if many else None
        loop = self.setup.runtime.train(parts, **self._reading, micro_batches=micro_batches, reduce_early=many)
        with loop:
            for (batch, dense, label, weight), rows in loop:
                outcome = self._step(rows, batch, dense, label, weight)
                result = [Result(batch.step_rows, outcome)] if outcome is not None else []
                del batch, dense, label, weight, rows, outcome  # the loop reads ahead once these are released
                if result:
                    yield result.pop()

    def _step(self, rows: Rows, batch: Batch, dense: Tensor, label: Tensor, weight: Tensor | None) -> Outcome | None:
        """Queue a micro-batch's passes; if it is the step's last, also queue Adam and return the outcome."""
        micro = self.setup.micro_batches
        if self._table_l2 is not None:
            self.setup.runtime.write_back()  # the table is read as a whole
        self.adam.zero_grad()
        values = squares = None
        if len(batch):
            micro.seed_layers(micro.number)
            with self.timeline.span("forward", rows.number), self._averages.watching(micro.number):
                wide, objective, deep = self._forward(self, rows, dense, (label, weight), micro.weight(batch))
            squares = self._table_l2() if self._table_l2 is not None else None
            with self.timeline.span("backward", rows.number):
                self._backward(objective)
            values = torch.stack([wide, deep])
        losses = rows.reduce(self.parameters, values)
        micro.begin()
        if not rows.is_due:
            return None
        self._averages.move()
        assert losses is not None  # the last micro-batch has a sample
        return self.finish(rows, batch, losses, squares)

    def objective(
        self, rows: Rows, dense: Tensor, targets: tuple[Tensor, Tensor | None], weight: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the detached wide loss, the deep loss (`weight` x wide loss + L2 term), and the deep loss detached.

        `targets` are the labels, and the samples' weights if there are any.
        """
        wide = self.setup.loss(self._logits(dense, rows), *targets)
        objective = wide if weight is None else wide * weight
        if self.setup.l2 != "none":
            unique, counts = rows.unique(DEEP)
            objective = objective + deep_l2(unique, counts if self.setup.l2 == "batch" else None)
        return wide.detach(), objective, objective.detach()

    def _logits(self, dense: Tensor, rows: Rows) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.setup.autocast is not None):
            logits: Tensor = self.setup.model(dense, self.setup.detach(rows))
        return logits

    def score(self, parts: Iterable[Batch]) -> Scored:
        """For each of this rank's micro-batches, yield its logits (None if it has no samples) and the micro-batch."""
        with closing(self.setup.runtime.predict(parts, **self._reading)) as loop:
            for (batch, dense, *_), rows in loop:
                outcome = None
                if len(batch):
                    outcome = rows.to_host([self._logits(dense, rows)], lambda results: results[0])
                yield None if outcome is None else outcome.get(), batch

    def state(self) -> DenseState:
        """Return the layers' and the optimizer's state."""
        return get_dense_state(self.setup.model, self.adam)

    def load(self, model: Any, optimizer: Any) -> None:
        """Load the layers' and the optimizer's state."""
        self.setup.model.load_state_dict(model)
        self.adam.load_state_dict(optimizer)


def _objective(network: WholeNetwork, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return network.objective(*arguments)


def inputs_like(model: Model, sample: Batch, autocast: torch.dtype | None, samples: int) -> tuple[Any, ...]:
    """Return zeros with the shapes of the network's inputs for this number of samples."""
    given, rows = model.ids(sample), {}
    for name, feature in model.features.items():
        ids = read_ids(name, feature, given[name])
        if feature.pooling is None and ids.shape is not None and ids.shape[0] != ids.samples:
            raise UserError(
                f"feature {name!r} has no pooling and a varying number of ids, but a network that is split over "
                'processes needs inputs of fixed sizes; set pooling="sum" or "mean"'
            )
        per_sample = [] if ids.shape is None else list(ids.shape[1:])
        tables = (feature.tables,) if feature.is_single else feature.tables
        values = tuple(
            torch.zeros(
                [samples, *per_sample, model.tables[table].dim],
                requires_grad=True,
                dtype=autocast if autocast is not None and model.tables[table].dim > 1 else torch.float32,
            )
            for table in tables
        )
        rows[name] = values[0] if feature.is_single else values
    return torch.zeros(samples, sample.dense.shape[1]), rows
