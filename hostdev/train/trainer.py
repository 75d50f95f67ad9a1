"""A model with its tables: what trains it, evaluates it and digests it. A user of `hostdev.Runtime` like any other."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from hostdev.checkpoint.checkpoints import Checkpoints
from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.loading import load_tables, require_tables, values_of
from hostdev.checkpoint.saving import Content, Saving
from hostdev.checkpoint.tree import to_tree
from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, copied_bytes, gib, pinned_size, require_table, row_bytes
from hostdev.core.micro_batches import cut
from hostdev.core.primitive import OpLog, Primitive
from hostdev.core.timeline import Timeline
from hostdev.data.batch import Batch
from hostdev.device.backend import free_bytes, is_accelerator
from hostdev.device.table import DeviceTable
from hostdev.host.server import ParameterServer
from hostdev.host.table import HostTable
from hostdev.kernels.counter import key64
from hostdev.kernels.norm import total
from hostdev.kernels.shards import range_of
from hostdev.models.model import Model
from hostdev.models.wide_deep.loss import L2_COEFFICIENT, deep_l2, wide_loss
from hostdev.parallel.ranks import Ranks
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

    def __init__(self, rows: int, outcome: Outcome) -> None:
        self.rows = rows
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
    micro_batches    into which a batch is cut: what they come to is added in an order that depends on nothing else
    gradients        "mean": a micro-batch counts by its rows; "sum": each one's mean counts whole
    ranks            processes that share out the micro-batches and the tables' rows; None: this one is alone
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
        micro_batches: int = 1,
        gradients: str = "mean",
        ranks: Ranks | None = None,
        **overlap: Any,
    ) -> None:
        if l2 != "none" and DEEP not in model.tables:
            raise UserError(f"--l2 {l2} is of Wide & Deep's deep table, which this model does not have; leave it out")
        if cache is not None and l2 == "table":
            raise UserError("--l2 table reads the whole table in every step, which a cache of its rows would have to "
                            "write back each time; use --l2 batch, or no --cache-rows")  # fmt: skip
        if l2 == "table" and micro_batches > 1:
            raise UserError("--l2 table does not go with --micro-batches: it would be added with each of them; use "
                            "--l2 batch")  # fmt: skip
        if ranks is not None:
            _require_no_averages(model)
        log = log or OpLog()
        self._micro_batches, self._gradients, self._seed = micro_batches, gradients, seed
        self.ranks = ranks
        rank, size = (0, 1) if ranks is None else ranks.part()
        self._parts_here = micro_batches // size
        self._first_part = rank * self._parts_here
        self._device, self._l2, self._precision = device, l2, precision
        self.server = ParameterServer()
        part = ranks.part() if ranks is not None else None
        free = _require_tables(model.tables, host_device_mix, device, part)
        if host_device_mix and is_accelerator(device):
            uses = -(-most_uses // (1 if ranks is None else ranks.size))
            _require_staging(model.tables, uses, depth + 2, free, cached=cache is not None)
        self.tables: dict[str, HostTable | DeviceTable] = {}
        for name, spec in model.tables.items():
            shape = (spec.rows, spec.dim, spec.optimizer)
            self.tables[name] = (
                self.server.add(HostTable(*shape, name=name, seed=seed, init=spec.init, part=part))
                if host_device_mix
                else DeviceTable(*shape, device, name=name, seed=seed, init=spec.init)
            )
        features = {name: self._feature(feature) for name, feature in model.features.items()}
        self.runtime = Runtime(
            features, device=device, cache=cache, depth=depth, ranks=ranks, log=log, timeline=timeline, **overlap
        )  # fmt: skip
        self.timeline = self.runtime.pipeline.timeline
        self.model = model.to(self.runtime.device)
        self.adam = torch.optim.Adam(model.parameters(), lr=model.lr if lr is None else lr, eps=DENSE_EPS, fused=True)
        if ranks is not None:
            _broadcast(model, ranks)
        self._start_adam()
        self._parameters = list(model.parameters())
        self._parts_begun = 0  # micro-batches here of all steps
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
        many = self._micro_batches > 1
        parts = self._parts(batches)
        loop = self.runtime.train(
            parts, ids=self.model.ids, send=_sent, micro_batches=self._parts_here if many else None, reduce_early=many
        )
        with loop:
            for (batch, dense, label), rows in loop:
                outcome = self._step(rows, batch, dense, label)
                result = [Result(batch.step_rows, outcome)] if outcome is not None else []
                del batch, dense, label, rows, outcome  # the loop reads on when nobody has them
                if result:
                    yield result.pop()

    def _parts(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches of each batch, or of this rank's part of it."""
        for batch in batches:
            if self._micro_batches == 1:
                yield batch
                continue
            mine = cut(batch.step_rows, self._micro_batches)[self._first_part : self._first_part + self._parts_here]
            begin = mine[0][0]
            yield from batch.split([0, *(stop - begin for _, stop in mine)])

    def _step(self, rows: Rows, batch: Batch, dense: Tensor, label: Tensor) -> Outcome | None:
        """Queue a step: losses, gradients, Adam on the dense side; None while more micro-batches are to come."""
        if self._l2 == "table":
            self.runtime.write_back()  # the table is read as a whole
        self.adam.zero_grad()
        values = squares = None
        if len(batch):
            self._draw_anew()
            with self.timeline.span("forward", rows.number):
                wide, objective, deep = self._forward(self, rows, dense, label, self._weight(batch))
            squares = self._table_l2() if self._l2 == "table" else None
            with self.timeline.span("backward", rows.number):
                self._backward(objective)
            values = torch.stack([wide, deep])
        losses = rows.reduce(self._parameters, values)
        self._parts_begun += 1
        if not rows.is_due:
            return None
        assert losses is not None  # the last micro-batch has a row
        looked_at, results = [losses], [losses]
        if isinstance(squares, Tensor):  # on the device, so not here yet
            looked_at.append(squares.sum().float())
            results.append(squares)
        elif squares is not None:
            looked_at.append(torch.full((), total(squares), device=self._device))
        sizes = [stop - start for start, stop in cut(batch.step_rows, self._micro_batches)]
        read = partial(_read_losses, squares, [size / batch.step_rows for size in sizes], self._l2 != "none", rows.step)
        outcome = rows.guard(self.adam, looked_at, results, read)
        with self.timeline.span("optimizer", rows.number):
            self._adam_step()
        return outcome

    def _weight(self, batch: Batch) -> float | None:
        """Return what a micro-batch's loss is multiplied by; None: the batch is whole."""
        if self._micro_batches == 1:
            return None
        return len(batch) / batch.step_rows if self._gradients == "mean" else 1.0

    def _draw_anew(self) -> None:
        """Let what a micro-batch draws, as dropout does, be a function of its number."""
        if self._micro_batches > 1:
            step, part = divmod(self._parts_begun, self._parts_here)
            number = step * self._micro_batches + self._first_part + part
            torch.manual_seed(key64(self._seed, "micro-batch", number) >> 1)

    def objective(
        self, rows: Rows, dense: Tensor, label: Tensor, weight: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the wide loss, what to differentiate (the deep loss, whose gradient is both losses'), its value.

        weight  of the wide loss in what is differentiated: of a micro-batch; None for a whole batch
        """
        wide = wide_loss(self._logits(dense, rows), label)
        objective = wide if weight is None else wide * weight
        if self._l2 != "none":
            unique, counts = rows.unique(DEEP)
            objective = objective + deep_l2(unique, counts if self._l2 == "batch" else None)
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
        sizes: list[int] = []  # of the batches
        training = self.model.training
        self.model.eval()
        loop = self.runtime.predict(self._parts(batches), ids=self.model.ids, send=_sent)
        try:
            with torch.no_grad(), closing(loop):
                for number, ((batch, dense, _), rows) in enumerate(loop, 1):
                    if len(batch):
                        outcome = rows.to_host([self._logits(dense, rows)], lambda results: results[0])
                        logits.append(outcome.get())
                        labels.append(batch.label)
                    if number % self._parts_here == 0:
                        sizes.append(sum(len(each) for each in labels) - sum(sizes))
                        progress()
        finally:
            self.model.train(training)
        scores, truth = (np.concatenate(each) if each else np.empty(0, np.float32) for each in (logits, labels))
        if self.ranks is not None:
            scores, truth = _of_all(self.ranks, sizes, scores, truth)
        if not len(truth):
            return None
        wrong = len(scores) - np.count_nonzero(np.isfinite(scores))
        if wrong:
            raise UserError(f"the predictions of {wrong} of {len(scores)} rows are not finite; the model has diverged")
        return Evaluation(metrics.auc(scores, truth), metrics.log_loss(scores, truth), len(scores))

    def state_sha256(self) -> str:
        """Return the digest of the tables and of the dense side."""
        self.runtime.write_back()
        return state_sha256(self.tables.values(), self.model, self.adam, self.ranks)

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
        state = {"dense": to_tree(dense, tensors), "random": to_tree(self._random_states(), tensors, "random"),
                 "more": to_tree(more, tensors, "more")}  # fmt: skip
        content = Content(state, tensors, dict(files), names_in_checkpoint(self.model, self.adam))
        return to.save(self.tables.values(), step, content, state_sha256=state_sha256)

    def _random_states(self) -> dict[str, Tensor]:
        """Return the states of torch's generators, which layers such as dropout draw from."""
        if self._micro_batches > 1:
            return {}  # each micro-batch begins anew
        states = {"cpu": torch.get_rng_state()}
        if _has_generator(self._device):
            states[self._device.type] = torch.get_device_module(self._device).get_rng_state(self._device)
        return states

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
        self._parts_begun = chain[-1].manifest.step * self._parts_here
        _set_random_states(values["random"], self._device)
        return values["more"]


def _require_no_averages(model: Model) -> None:
    """Raise UserError for layers whose averages over batches would differ from rank to rank."""
    for name, layer in model.named_modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            raise UserError(
                f"layer {name!r} ({type(layer).__name__}) keeps averages of what it has seen, which would differ "
                "between processes; use LayerNorm, or track_running_stats=False"
            )


def _broadcast(model: Model, ranks: Ranks) -> None:
    """Let all ranks begin with the parameters and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        there = tensor.detach().cpu().contiguous()
        ranks.control.broadcast(there)
        tensor.data.copy_(there)


def _of_all(ranks: Ranks, sizes: list[int], *arrays: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Return the values of all ranks in the order of the rows: batch by batch, each by rank.

    sizes  of this rank's parts of the batches, end to end in each array
    """
    edges = [np.cumsum(each)[:-1] for each in ranks.control.gather(np.array(sizes, np.int64))]
    found = []
    for array in arrays:
        parts = [np.split(each, edge) for each, edge in zip(ranks.control.gather(array), edges, strict=True)]
        found.append(np.concatenate([part[batch] for batch in range(len(sizes)) for part in parts] or [array]))
    return found


def _has_generator(device: torch.device) -> bool:
    return is_accelerator(device) and hasattr(torch.get_device_module(device), "set_rng_state")


def _set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if _has_generator(device) and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _objective(trainer: Trainer, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return trainer.objective(*arguments)


def _sent(batch: Batch) -> tuple[Batch, Tensor, Tensor]:
    """What the loop needs of a batch: itself, its dense columns and labels on the device."""
    return batch, torch.from_numpy(batch.dense), torch.from_numpy(batch.label)


def _read_losses(
    squares: Any, shares: list[float], has_l2: bool, step: int, results: list[npt.NDArray[Any]]
) -> Losses:  # fmt: skip
    """Make losses of a step's results.

    squares  the table's, where its L2 is added
    shares   of the micro-batches in the batch's rows
    has_l2   the deep losses, which are weighted already, have a term of their own
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


def _require_tables(
    tables: Mapping[str, TableSpec], host_device_mix: bool, device: torch.device, part: tuple[int, int] | None
) -> int:
    """Raise UserError unless all tables, or this rank's part of them, fit together, before the first is allocated.

    Returns what is free beside.
    """
    where = "host" if host_device_mix else "device"
    free = available_bytes() if host_device_mix else free_bytes(device)
    if free is None:
        return 0
    for name, spec in sorted(tables.items()):
        start, stop = (0, spec.rows) if part is None else range_of(spec.rows, *part)
        free -= require_table(name, stop - start, spec.dim, spec.optimizer, free, where)
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
