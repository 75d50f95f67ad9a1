"""A model with its tables: what trains it, evaluates it and digests it. A user of `hostdev.Runtime` like any other."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.checkpoint.checkpoints import Checkpoints
from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.loading import load_tables, require_tables, values_of
from hostdev.checkpoint.saving import Content, Saving
from hostdev.checkpoint.tree import to_tree
from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, copied_bytes, gib, pinned_size, require_table, row_bytes
from hostdev.core.primitive import OpLog, Primitive
from hostdev.core.timeline import Timeline
from hostdev.data.batch import Batch
from hostdev.device.backend import free_bytes, is_accelerator
from hostdev.device.table import DeviceTable
from hostdev.host.server import ParameterServer
from hostdev.host.table import HostTable
from hostdev.kernels.norm import total
from hostdev.models.model import Model
from hostdev.models.wide_deep.loss import L2_COEFFICIENT, deep_l2, wide_loss
from hostdev.pipeline.outcome import Outcome
from hostdev.runtime.digest import names_in_checkpoint, state_sha256
from hostdev.runtime.loop import NonFiniteError
from hostdev.runtime.rows import Rows
from hostdev.runtime.runtime import Runtime
from hostdev.runtime.spec import CacheSpec, Feature, TableSpec
from hostdev.train import metrics

DENSE_EPS = 1e-8
DEEP = "deep"  # the table that --l2 is about


class Losses(NamedTuple):
    """A step's losses."""

    wide: float
    deep: float


class Evaluation(NamedTuple):
    """How good the model is on a split."""

    auc: float
    logloss: float
    rows: int


class NonFiniteLossError(NonFiniteError):
    """A loss or a gradient is not a number or infinite; the message says which, and that no row was updated."""


class Result:
    """A batch's step, whose losses may be on their way from the device still."""

    def __init__(self, batch: Batch, outcome: Outcome) -> None:
        self.batch = batch
        self._outcome = outcome

    @property
    def value(self) -> Losses:
        """The losses, waited for; raises NonFiniteLossError."""
        losses: Losses = self._outcome.get()
        return losses


class Trainer:
    """A model with its tables.

    model            which tables it wants, and logits from dense columns and rows; it goes to the device
    host_device_mix  place the tables, and the ops on them, on the host
    device           of the dense layers
    l2               "none", "batch" or "table": of the table named "deep"
    precision        "fp32", or "bf16" for the dense layers' arithmetic over float32 weights
    seed             of the tables' initial values
    lr               of the dense side's Adam; None for the model's own
    log              where every op's durations go
    most_uses        ids in a batch, at most: so that the memory of the copies is found to be too large before it is
    cache            of the tables' rows, as `Runtime` takes it
    overlap          depth, timeline, staleness, ... of `Runtime`
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
        timeline: Timeline | None = None,
        **overlap: Any,
    ) -> None:
        if l2 != "none" and DEEP not in model.tables:
            raise UserError(f"--l2 {l2} is of Wide & Deep's deep table, which this model does not have; leave it out")
        if cache is not None and l2 == "table":
            raise UserError("--l2 table reads the whole table in every step, which a cache of its rows would have to "
                            "write back each time; use --l2 batch, or no --cache-rows")  # fmt: skip
        log = log or OpLog()
        self._device, self._l2, self._precision = device, l2, precision
        self.server = ParameterServer()
        free = _require_tables(model.tables, host_device_mix, device)
        if host_device_mix and is_accelerator(device):
            _require_staging(model.tables, most_uses, depth + 2, free, cached=cache is not None)
        self.tables: dict[str, HostTable | DeviceTable] = {}
        for name, spec in model.tables.items():
            shape = (spec.rows, spec.dim, spec.optimizer)
            self.tables[name] = (
                self.server.add(HostTable(*shape, name=name, seed=seed, init=spec.init))
                if host_device_mix
                else DeviceTable(*shape, device, name=name, seed=seed, init=spec.init)
            )
        features = {name: self._feature(feature) for name, feature in model.features.items()}
        self.runtime = Runtime(
            features, device=device, cache=cache, depth=depth, log=log, timeline=timeline, **overlap
        )  # fmt: skip
        self.timeline = self.runtime.pipeline.timeline
        self.model = model.to(self.runtime.device)
        self.adam = torch.optim.Adam(model.parameters(), lr=model.lr if lr is None else lr, eps=DENSE_EPS, fused=True)
        self._start_adam()
        self._forward = Primitive("DenseForward", _objective, scope="network", log=log)  # no cycle: tables go with it
        self._backward = Primitive("DenseBackward", Tensor.backward, scope="network", log=log)
        self._adam_step = Primitive("Adam", self.adam.step, scope="network", log=log)
        if l2 == "table":
            table = self.tables[DEEP]
            self._table_l2 = Primitive("TableL2", table.partial_squares, scope=DEEP, log=log)
            self._table_l2.add_prim_attr("primitive_target", table.primitive_target)

    def _feature(self, feature: Feature) -> Feature:
        """Return a model's feature with its tables for their names; vectors in the dense layers' precision."""
        names = (feature.tables,) if feature.is_single else tuple(feature.tables)
        tables = tuple(self.tables[name] for name in names)
        dtypes = tuple("bfloat16" if self._precision == "bf16" and table.dim > 1 else "float32" for table in tables)
        return replace(feature, tables=tables[0] if feature.is_single else tables,
                       dtype=dtypes[0] if feature.is_single else dtypes)  # fmt: skip

    def _start_adam(self) -> None:
        """Make the optimizer's state, by a step that is skipped: a first step that is not finite changes nothing."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.adam.found_inf = torch.ones((), device=self._device)  # type: ignore[attr-defined]
        self.adam.step()
        self.adam.zero_grad()

    @property
    def caches(self) -> list[Any]:
        """The caches of the tables' groups."""
        return self.runtime.caches

    @property
    def steps(self) -> int:
        """Steps whose updates are finished."""
        return self.runtime.pipeline.steps

    def train(self, batches: Iterable[Batch]) -> Generator[Result, None, None]:
        """Take a step per batch, and yield each one's losses from before its update.

        Closing the iterator finishes what has been stepped. Raises NonFiniteLossError where a loss or a gradient is not
        finite; that step and later ones update nothing.
        """
        self.model.train()
        with self.runtime.train(batches, ids=self.model.ids, send=_sent) as loop:
            for (batch, dense, label), rows in loop:
                outcome = self._step(rows, dense, label)
                result = [Result(batch, outcome)]
                del batch, dense, label, rows, outcome  # the loop reads on when nobody has them
                yield result.pop()

    def _step(self, rows: Rows, dense: Tensor, label: Tensor) -> Outcome:
        """Queue a step: losses, gradients of rows and parameters, Adam on the dense side."""
        if self._l2 == "table":
            self.runtime.write_back()  # the table is read as a whole
        with self.timeline.span("forward", rows.number):
            wide, objective, deep = self._forward(self, rows, dense, label)
        squares = self._table_l2() if self._l2 == "table" else None
        self.adam.zero_grad()
        with self.timeline.span("backward", rows.number):
            self._backward(objective)
        losses = torch.stack([wide, deep])
        looked_at, results = [losses], [losses]
        if isinstance(squares, Tensor):  # on the device, so not here yet
            looked_at.append(squares.sum().float())
            results.append(squares)
        elif squares is not None:
            looked_at.append(torch.full((), total(squares), device=self._device))
        outcome = rows.guard(self.adam, looked_at, results, partial(_read_losses, squares, rows.step))
        with self.timeline.span("optimizer", rows.number):
            self._adam_step()
        return outcome

    def objective(self, rows: Rows, dense: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the wide loss, what to differentiate (the deep loss, whose gradient is both losses'), its value."""
        wide = wide_loss(self._logits(dense, rows), label)
        if self._l2 == "none":
            return wide.detach(), wide, wide.detach()
        unique, counts = rows.unique(DEEP)
        objective = wide + deep_l2(unique, counts if self._l2 == "batch" else None)
        return wide.detach(), objective, objective.detach()

    def _logits(self, dense: Tensor, rows: Mapping[str, Any]) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            logits: Tensor = self.model(dense, rows)
        return logits

    def evaluate(self, batches: Iterable[Batch], progress: Callable[[], object] = lambda: None) -> Evaluation | None:
        """Return AUC and log loss over batches, None if there are none; the model stays as it is, in training or not.

        progress  called after each batch
        """
        logits, labels = [], []
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), closing(self.runtime.predict(batches, ids=self.model.ids, send=_sent)) as loop:
                for (batch, dense, _), rows in loop:
                    outcome = rows.to_host([self._logits(dense, rows)], lambda results: results[0])
                    logits.append(outcome.get())
                    labels.append(batch.label)
                    progress()
        finally:
            self.model.train(training)
        if not labels:
            return None
        scores, truth = np.concatenate(logits), np.concatenate(labels)
        wrong = len(scores) - np.count_nonzero(np.isfinite(scores))
        if wrong:
            raise UserError(f"the predictions of {wrong} of {len(scores)} rows are not finite; the model has diverged")
        return Evaluation(metrics.auc(scores, truth), metrics.log_loss(scores, truth), len(scores))

    def state_sha256(self) -> str:
        """Return the digest of the tables and of the dense side."""
        self.runtime.write_back()
        return state_sha256(self.tables.values(), self.model, self.adam)

    def save(
        self, to: Checkpoints, step: int, more: Any, files: Mapping[str, Path], *, state_sha256: str | None = None
    ) -> Saving:
        """Begin to save a checkpoint of everything, as of the last step; between two steps of a loop, too.

        more   values to be kept with it
        files  to be kept with it, by their names there
        """
        self.runtime.write_back()
        tensors: dict[str, Tensor] = {}
        dense = {"model": self.model.state_dict(), "optimizer": self.adam.state_dict()}
        state = {"dense": to_tree(dense, tensors), "random": to_tree(_random_states(self._device), tensors, "random"),
                 "more": to_tree(more, tensors, "more")}  # fmt: skip
        content = Content(state, tensors, dict(files), names_in_checkpoint(self.model, self.adam))
        return to.save(self.tables.values(), step, content, state_sha256=state_sha256)

    def load(self, chain: Chain) -> Any:
        """Load a checkpoint that is whole; return its `more`. UserError, before anything changes, for another model."""
        require_tables(chain, self.tables)
        values = values_of(chain)
        try:
            self.model.load_state_dict(values["dense"]["model"])
        except RuntimeError as error:
            raise UserError(f"{chain[-1].path} is of another model: {' '.join(str(error).split())}") from None
        self.adam.load_state_dict(values["dense"]["optimizer"])
        load_tables(chain, self.tables)
        self.runtime.pipeline.steps = chain[-1].manifest.step
        _set_random_states(values["random"], self._device)
        return values["more"]


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators, which layers such as dropout draw from."""
    states = {"cpu": torch.get_rng_state()}
    if _has_generator(device):
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _has_generator(device: torch.device) -> bool:
    return is_accelerator(device) and hasattr(torch.get_device_module(device), "set_rng_state")


def _set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if _has_generator(device) and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _objective(trainer: Trainer, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return trainer.objective(*arguments)


def _sent(batch: Batch) -> tuple[Batch, Tensor, Tensor]:
    """What the loop needs of a batch: itself, its dense columns and labels on the device."""
    return batch, torch.from_numpy(batch.dense), torch.from_numpy(batch.label)


def _read_losses(squares: Any, step: int, results: list[npt.NDArray[Any]]) -> Losses:
    """Make losses of a step's results; `squares` are the table's, where its L2 is added."""
    losses, *more, skipped = results
    wide, deep = losses.tolist()
    if squares is not None:
        deep = wide + L2_COEFFICIENT / 2 * total(more[0] if more else squares)
    if skipped[0] or not np.isfinite([wide, deep]).all():
        what = f"wide_loss {wide}, deep_loss {deep}"
        which = "the loss" if not np.isfinite([wide, deep]).all() else "a gradient"
        raise NonFiniteLossError(f"{which} is not finite ({what}); no row was updated", step)
    return Losses(wide, deep)


def _require_tables(tables: Mapping[str, TableSpec], host_device_mix: bool, device: torch.device) -> int:
    """Raise UserError unless all tables together fit, before the first is allocated; return what is free beside."""
    where = "host" if host_device_mix else "device"
    free = available_bytes() if host_device_mix else free_bytes(device)
    if free is None:
        return 0
    for name, spec in sorted(tables.items()):
        free -= require_table(name, spec.rows, spec.dim, spec.optimizer, free, where)
    return free


def _require_staging(tables: Mapping[str, TableSpec], uses: int, batches: int, free: int, *, cached: bool) -> None:
    """Raise UserError unless the pinned memory of the copies fits beside the tables, where no id comes twice."""
    row, whole = row_bytes((spec.dim, spec.optimizer) for spec in tables.values())
    most = min(max(spec.rows for spec in tables.values()), uses)
    each = copied_bytes(most, 2 * most if cached else 0, uses, row, whole)
    needed = batches * pinned_size(each)
    if needed > free:
        raise UserError(
            f"the copies of {batches} batches need up to {gib(needed)} of pinned host memory, but beside the tables "
            f"{gib(free)} are free; use a smaller --batch-size or --pipeline-depth"
        )
