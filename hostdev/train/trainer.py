"""Training, evaluation and checkpoints of a model with its tables, on top of `hostdev.Runtime`."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.loading import load_tables, require_tables, values_of
from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.tree import to_tree
from hostdev.checkpoint.writer import AsyncWriter, Content
from hostdev.core.errors import UserError
from hostdev.core.micro_batches import EXCHANGES, cut
from hostdev.core.primitive import OpLog, Primitive
from hostdev.core.timeline import Timeline
from hostdev.data.batch import Batch
from hostdev.device.backend import is_accelerator, seed_generators
from hostdev.device.table import DeviceTable
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.world import ALONE_WORLD
from hostdev.host.server import ParameterServer
from hostdev.host.table import HostTable
from hostdev.kernels.counter import key64
from hostdev.kernels.norm import total
from hostdev.models.model import Model
from hostdev.models.wide_deep.loss import deep_l2, wide_loss
from hostdev.parallel.averages import Averages, require_own_averages
from hostdev.parallel.layout import Layout
from hostdev.parallel.parts import broadcast_parameters
from hostdev.parallel.state import DenseState, get_dense_state
from hostdev.pipeline.hooks import PipelineHooks
from hostdev.pipeline.outcome import Outcome
from hostdev.runtime.digest import names_in_checkpoint, state_sha256
from hostdev.runtime.rows import Rows
from hostdev.runtime.runtime import Runtime
from hostdev.runtime.spec import CacheSpec, Feature
from hostdev.runtime.step import Step
from hostdev.train.losses import Losses, read_losses
from hostdev.train.room import HostBudget, estimate_host_memory, make_host_budget, require_copies, require_room
from hostdev.train.scores import Scores
from hostdev.train.staged import Staged
from hostdev.train.together import Together

DENSE_EPS = 1e-8
DEEP = "deep"  # the table that --l2 regularizes


class Evaluation(NamedTuple):
    """The quality of the model on a split."""

    auc: float
    logloss: float
    rows: int


class Result:
    """A batch's step; its losses may still be in transfer from the device."""

    def __init__(self, rows: int, outcome: Outcome) -> None:
        self.rows = rows
        self._outcome = outcome

    @property
    def value(self) -> Losses:
        """The losses; waits for them, and raises NonFiniteLossError."""
        losses: Losses = self._outcome.get()
        return losses


class Trainer:
    """Train, evaluate and save a model with its tables.

    Args:
        model: Declares its tables and computes logits from dense columns and rows. It is moved to the device.
        host_device_mix: Place the tables, and the ops on them, on the host.
        precision: "fp32", or "bf16" for the dense layers' arithmetic over float32 weights.
        lr: Learning rate of the dense layers' Adam. None: the model's.
        most_uses, saves: Ids in a batch at most, and whether checkpoints will be saved; both need memory.
        micro_batches: Parts of a batch. Their gradients are summed in an order that depends on this number alone.
        gradients: "mean" weights a micro-batch by its samples; "sum" adds the micro-batches' means.
        ranks: Processes that share the micro-batches and the tables' rows. None: this process alone.
        l2: Regularization of the table "deep": "none", "batch" or "table".
        layout: Stages and slices of the model, if the ranks' mesh has any.
        sample: A batch with the shapes of the model's inputs; required with `layout`.
        cache, depth, log, timeline, dense_exchange, hooks: As for `Runtime`.
    """

    def __init__(
        self,
        model: Model,
        *,
        host_device_mix: bool,
        device: torch.device,
        l2: str = "none",
        precision: str = "fp32",
        seed: int,
        lr: float | None = None,
        log: OpLog | None = None,
        most_uses: int = 0,
        cache: CacheSpec | dict[str, CacheSpec] | None = None,
        depth: int = 0,
        saves: bool = False,
        timeline: Timeline | None = None,
        micro_batches: int = 1,
        gradients: str = "mean",
        ranks: Ranks | None = None,
        layout: Layout | None = None,
        sample: Batch | None = None,
        dense_exchange: str = EXCHANGES[0],
        hooks: PipelineHooks | None = None,
    ) -> None:
        if l2 != "none" and DEEP not in model.tables:
            raise UserError(f"--l2 {l2} requires Wide & Deep's table deep, which this model lacks; leave it out")
        if cache is not None and l2 == "table":
            raise UserError("--l2 table cannot be combined with a cache: each step would write it back; use --l2 batch")
        if l2 == "table" and micro_batches > 1:
            raise UserError("--l2 table cannot be combined with --micro-batches, each of which adds it; use --l2 batch")
        require_own_averages(model)
        log = log or OpLog()
        self._micro_batches, self._gradients, self._seed = micro_batches, gradients, seed
        self.ranks, world = ranks, ranks or ALONE_WORLD
        share, shares = world.share()
        self._parts_here = micro_batches // shares
        self._first_part = share * self._parts_here
        self._device, self._l2, self._precision = device, l2, precision
        self.server = ParameterServer()
        part = world.part()
        free = require_room(model.tables, host_device_mix, device, part)
        self.host_budget = HostBudget(free, {})
        uses = -(-most_uses // shares)
        if host_device_mix:
            needs = estimate_host_memory(model, cache, part, device, depth=depth, uses=uses, saves=saves)
            self.host_budget = make_host_budget(needs)
        if host_device_mix and is_accelerator(device):
            require_copies(model.tables, uses, depth + 2, free, cached=cache is not None)
        self.tables: dict[str, HostTable | DeviceTable] = {}
        for name, spec in model.tables.items():
            shape = (spec.rows, spec.dim, spec.optimizer)
            self.tables[name] = (
                self.server.add(HostTable(*shape, name=name, seed=seed, init=spec.init, part=part, dtype=spec.dtype))
                if host_device_mix
                else DeviceTable(*shape, device, name=name, seed=seed, init=spec.init, dtype=spec.dtype)
            )
        features = {name: self._feature(feature) for name, feature in model.features.items()}
        self.runtime = Runtime(
            features, device=device, cache=cache, depth=depth, ranks=ranks, log=log, timeline=timeline,
            dense_exchange=dense_exchange, hooks=hooks)  # fmt: skip
        self.timeline = self.runtime.pipeline.timeline
        self.model, self._staged = model, None
        self._reading: dict[str, Any] = {"ids": model.ids, "send": _sent, "background": True}  # uses no random numbers
        if layout is not None:
            assert ranks is not None
            assert sample is not None
            autocast = torch.bfloat16 if precision == "bf16" else None
            extra = self._extra if l2 != "none" else None
            ops = [Primitive(name, _call, scope="network", log=log) for name in ("DenseForward", "DenseBackward")]
            self._staged = Staged(model, layout, ranks, self._device, autocast, sample, extra, self.timeline, ops)
            self._averages = Averages([], None)
            self._parameters = self._staged.parameters or [torch.nn.Parameter(torch.zeros(0, device=device))]
        else:
            broadcast_parameters(model, world)
            self._parameters = list(model.to(self.runtime.device).parameters())
            # without micro-batches, the layers move their averages themselves
            self._averages = Averages([model] if micro_batches > 1 else [], world.channel())
        self.adam = torch.optim.Adam(self._parameters, lr=model.lr if lr is None else lr, eps=DENSE_EPS, fused=True)
        self._start_adam()
        self._parts_begun = 0  # of this rank, in all steps
        self._forward = Primitive("DenseForward", _objective, scope="network", log=log)  # a method would be a cycle
        self._backward = Primitive("DenseBackward", Tensor.backward, scope="network", log=log)
        self._adam_step = Primitive("Adam", self.adam.step, scope="network", log=log)
        if l2 == "table":
            table = self.tables[DEEP]
            self._table_l2 = Primitive("TableL2", table.partial_squares, scope=DEEP, log=log)
            self._table_l2.add_prim_attr("primitive_target", table.primitive_target)

    def _feature(self, feature: Feature) -> Feature:
        """Replace a feature's table names by the tables; embeddings have the dense layers' precision."""
        names = (feature.tables,) if feature.is_single else tuple(feature.tables)
        tables = tuple(self.tables[name] for name in names)
        dtypes = tuple("bfloat16" if self._precision == "bf16" and table.dim > 1 else "float32" for table in tables)
        if feature.is_single:
            return replace(feature, tables=tables[0], dtype=dtypes[0])
        return replace(feature, tables=tables, dtype=dtypes)

    def _start_adam(self) -> None:
        """Create the optimizer's state by a skipped step, so that a non-finite first step changes nothing."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.adam.found_inf = torch.ones((), device=self._device)  # type: ignore[attr-defined]
        self.adam.step()
        self.adam.zero_grad()

    @property
    def caches(self) -> list[Any]:
        """The caches of the table groups."""
        return self.runtime.caches

    def exchanged_bytes(self) -> dict[str, int]:
        """Return the bytes sent to other ranks in training, by `Runtime` and between stages."""
        between = {} if self._staged is None else {"parts": self._staged.sent_bytes}
        return {**self.runtime.exchanged_bytes(), **between}

    @property
    def cut(self) -> str | None:
        """The stages and slices as text; None if every rank has all layers."""
        return None if self._staged is None else self._staged.describe()

    @property
    def steps(self) -> int:
        """Number of steps with finished updates."""
        return self.runtime.pipeline.steps

    def train(self, batches: Iterable[Batch]) -> Generator[Result, None, None]:
        """Take a step per batch and yield its losses before the update; closing the iterator finishes queued steps.

        Raises:
            NonFiniteLossError: A loss or gradient is not finite. This step and later ones update nothing.
        """
        self.model.train()
        many = self._micro_batches > 1
        parts = self._parts(batches)
        if self._staged is not None:
            yield from self._train_stages(self._staged, parts)
            return
        micro_batches = self._parts_here if many else None
        loop = self.runtime.train(parts, **self._reading, micro_batches=micro_batches, reduce_early=many)
        with loop:
            for (batch, dense, label), rows in loop:
                outcome = self._step(rows, batch, dense, label)
                result = [Result(batch.step_rows, outcome)] if outcome is not None else []
                del batch, dense, label, rows, outcome  # the loop reads ahead once these are released
                if result:
                    yield result.pop()

    def _train_stages(self, staged: Staged, parts: Iterable[Batch]) -> Generator[Result, None, None]:
        """Train as `train` does, with stages."""
        loop = self.runtime.train(parts, **self._reading, micro_batches=self._parts_here, by_step=True)
        with loop:
            for step in loop:
                outcome, rows = self._step_stages(staged, step)
                yield Result(rows, outcome)
                del step, outcome

    def _step_stages(self, staged: Staged, step: Step) -> tuple[Outcome, int]:
        """Queue a step of stages; return its losses and its number of samples."""
        self.adam.zero_grad()

        def given(number: int) -> tuple[Tensor, Rows]:
            (_, dense, _), rows = step.micro_batch(number)
            self._draw_anew(number)
            return dense, rows

        def loss(number: int, logits: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
            (batch, _, label), _ = step.micro_batch(number)
            wide = wide_loss(logits, label)
            objective = wide * (self._weight(batch) or 1.0)
            objective = objective if extra is None else objective + extra
            return objective, torch.stack([wide.detach(), objective.detach()])

        losses = staged.step(step, given, loss)
        self._parts_begun += self._parts_here
        assert losses is not None
        [batch, *_], rows = step.micro_batch(len(step.sizes) - 1)
        return self._finish(rows, batch, losses, None), batch.step_rows

    def _extra(self, rows: Rows) -> Tensor:
        """Return the L2 term of a micro-batch."""
        unique, counts = rows.unique(DEEP)
        return deep_l2(unique, counts)

    def _parts(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this rank's micro-batches of each batch."""
        for batch in batches:
            if self._micro_batches == 1:
                yield batch
                continue
            mine = cut(batch.step_rows, self._micro_batches)[self._first_part : self._first_part + self._parts_here]
            begin = mine[0][0]
            yield from batch.split([0, *(stop - begin for _, stop in mine)])

    def _step(self, rows: Rows, batch: Batch, dense: Tensor, label: Tensor) -> Outcome | None:
        """Queue a micro-batch: losses, gradients and, after the last one of a step (else None), Adam."""
        if self._l2 == "table":
            self.runtime.write_back()  # the table is read as a whole
        self.adam.zero_grad()
        values = squares = None
        if len(batch):
            self._draw_anew(self._parts_begun % self._parts_here)
            watching = self._averages.watching(self._parts_begun % self._parts_here)
            with self.timeline.span("forward", rows.number), watching:
                wide, objective, deep = self._forward(self, rows, dense, label, self._weight(batch))
            squares = self._table_l2() if self._l2 == "table" else None
            with self.timeline.span("backward", rows.number):
                self._backward(objective)
            values = torch.stack([wide, deep])
        losses = rows.reduce(self._parameters, values)
        self._parts_begun += 1
        if not rows.is_due:
            return None
        self._averages.move()
        assert losses is not None  # the last micro-batch has a sample
        return self._finish(rows, batch, losses, squares)

    def _finish(self, rows: Rows, batch: Batch, losses: Tensor, squares: Any) -> Outcome:
        """Queue the check for non-finite gradients, and Adam."""
        looked_at, results = [losses], [losses]
        if isinstance(squares, Tensor):  # on the device, maybe not computed yet
            looked_at.append(squares.sum().float())
            results.append(squares)
        elif squares is not None:
            looked_at.append(torch.full((), total(squares), device=self._device))
        sizes = [stop - start for start, stop in cut(batch.step_rows, self._micro_batches)]
        read = partial(read_losses, squares, [size / batch.step_rows for size in sizes], self._l2 != "none", rows.step)
        outcome = rows.guard(self.adam, looked_at, results, read)
        with self.timeline.span("optimizer", rows.number):
            self._adam_step()
        return outcome

    def _weight(self, batch: Batch) -> float | None:
        """Return the weight of a micro-batch's loss; None for an undivided batch."""
        if self._micro_batches == 1:
            return None
        return len(batch) / batch.step_rows if self._gradients == "mean" else 1.0

    def _draw_anew(self, part: int) -> None:
        """Seed the generators with the micro-batch's number, for layers such as dropout."""
        if self._micro_batches > 1:
            step = self._parts_begun // self._parts_here
            number = step * self._micro_batches + self._first_part + part
            seed_generators(self._device, key64(self._seed, "micro-batch", number) >> 1)

    def objective(
        self, rows: Rows, dense: Tensor, label: Tensor, weight: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the wide loss, the deep loss to differentiate, and its value; `weight` scales the wide loss in it."""
        wide = wide_loss(self._logits(dense, rows), label)
        objective = wide if weight is None else wide * weight
        if self._l2 != "none":
            unique, counts = rows.unique(DEEP)
            objective = objective + deep_l2(unique, counts if self._l2 == "batch" else None)
        return wide.detach(), objective, objective.detach()

    def _logits(self, dense: Tensor, rows: Rows) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            logits: Tensor = self.model(dense, rows)
        return logits

    def evaluate(
        self, batches: Iterable[Batch], progress: Callable[[], object] = lambda: None, folder: Path | None = None
    ) -> Evaluation | None:
        """Return AUC and log loss over batches; None if there are none. The model's training mode is kept.

        Args:
            progress: Called after each batch.
            folder: Receives scores that do not fit in memory, as for `Scores`.
        """
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), Scores(folder) as scores:
                together = None if self.ranks is None else Together(self.ranks, scores)
                to = scores if together is None else together
                for number, (logits, batch) in enumerate(self._scored(batches), 1):
                    if logits is not None:
                        to.add(logits, batch.label)
                    if number % self._parts_here == 0:
                        if together is not None:
                            together.end_batch(batch.step_rows)
                        progress()
                found = to.figures()
        finally:
            self.model.train(training)
        if not found.rows:
            return None
        if found.not_finite:
            raise UserError(f"{found.not_finite} of {found.rows} predictions are not finite; the model has diverged")
        return Evaluation(found.auc, found.logloss, found.rows)

    def _scored(self, batches: Iterable[Batch]) -> Iterator[tuple[npt.NDArray[Any] | None, Batch]]:
        """Yield each local micro-batch with its logits; None if it has no samples or another rank has the logits."""
        parts = self._parts(batches)
        if self._staged is None:
            with closing(self.runtime.predict(parts, **self._reading)) as loop:
                for (batch, dense, _), rows in loop:
                    outcome = None
                    if len(batch):
                        outcome = rows.to_host([self._logits(dense, rows)], lambda results: results[0])
                    yield None if outcome is None else outcome.get(), batch
            return
        loop = self.runtime.predict(parts, **self._reading, micro_batches=self._parts_here)
        with closing(loop):
            for step in loop:
                found = dict(self._staged.predict(step, partial(_given, step)))
                for number in range(len(step.sizes)):
                    (batch, _, _), _ = step.micro_batch(number)
                    scores = found.get(number)
                    yield None if scores is None else scores.float().cpu().numpy(), batch

    def state_sha256(self) -> str:
        """Return the digest of the tables and the dense state."""
        self.runtime.write_back()
        return state_sha256(self.tables.values(), self.dense_state(), self.ranks)

    def dense_state(self) -> DenseState:
        """Return the dense state; with stages, rank 0 returns all of it."""
        return get_dense_state(self.model, self.adam) if self._staged is None else self._staged.state(self.adam)

    def save(
        self, to: CheckpointManager, step: int, more: Any, files: Mapping[str, Path], *, state_sha256: str | None = None
    ) -> AsyncWriter:
        """Start saving a checkpoint of everything after the last step; a loop may be between two steps.

        Args:
            more: Values to store with it.
            files: Files to store with it, by their names there.
        """
        self.runtime.write_back()
        tensors: dict[str, Tensor] = {}
        whole = self.dense_state()
        dense = {"model": whole.model, "optimizer": whole.optimizer}
        state = {"dense": to_tree(dense, tensors), "random": to_tree(self._random_states(), tensors, "random")}
        state["more"] = to_tree(more, tensors, "more")
        content = Content(state, tensors, dict(files), names_in_checkpoint(whole))
        return to.save(self.tables.values(), step, content, state_sha256=state_sha256)

    def _random_states(self) -> dict[str, Tensor]:
        """Return the states of torch's generators, for layers such as dropout."""
        if self._micro_batches > 1:
            return {}  # each micro-batch is seeded
        states = {"cpu": torch.get_rng_state()}
        if _has_generator(self._device):
            states[self._device.type] = torch.get_device_module(self._device).get_rng_state(self._device)
        return states

    def load(self, chain: Chain, *, check: bool = False) -> Any:
        """Load a checkpoint and return its `more`; `check` verifies the row checksums, as in `load_tables`.

        Raises:
            UserError: The checkpoint is of another model; nothing was changed.
        """
        require_tables(chain, self.tables)
        values = values_of(chain)
        self.load_dense(chain, values["dense"])
        load_tables(chain, self.tables, check=check)
        self.runtime.pipeline.steps = chain[-1].manifest.step
        self._parts_begun = chain[-1].manifest.step * self._parts_here
        _set_random_states(values["random"], self._device)
        return values["more"]

    def load_dense(self, chain: Chain, dense: Any) -> None:
        """Load a checkpoint's dense weights and Adam state; UserError if they are of another model."""
        try:
            if self._staged is not None:
                self._staged.load(dense["model"], self.adam, dense["optimizer"])
            else:
                self.model.load_state_dict(dense["model"])
                self.adam.load_state_dict(dense["optimizer"])
        except (RuntimeError, UserError) as error:
            raise UserError(f"{chain[-1].path} is of another model: {' '.join(str(error).split())[:300]}") from None


def _has_generator(device: torch.device) -> bool:
    return is_accelerator(device) and hasattr(torch.get_device_module(device), "set_rng_state")


def _set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if _has_generator(device) and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _objective(trainer: Trainer, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return trainer.objective(*arguments)


def _call(call: Callable[..., Any], *values: Any, **named: Any) -> Any:
    return call(*values, **named)


def _given(step: Step, number: int) -> tuple[Tensor, Rows]:
    (_, dense, _), rows = step.micro_batch(number)
    return dense, rows


def _sent(batch: Batch) -> tuple[Batch, Tensor, Tensor]:
    """Return a batch, and its dense columns and labels as tensors to send to the device."""
    return batch, torch.from_numpy(batch.dense), torch.from_numpy(batch.label)
