"""A runtime's open loops, the record of which loop trains which table, and checks of the program's access to tables.

While a loop is open, tables call `Access`, a `core.tables.Owner`, before the program reads or writes them.
"""

import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor

from hostdev.core.errors import HostdevError
from hostdev.pipeline.pipeline import Pipeline
from hostdev.runtime.dense_layers import DenseLayers
from hostdev.runtime.features import GroupSpec, Table
from hostdev.runtime.loaders import PredictLoader, RowsLoader, close_loaders
from hostdev.runtime.logged import RuntimeLog
from hostdev.runtime.loop import AnyPredictLoop, AnyTrainLoop, trained, trained_by
from hostdev.runtime.random_streams import Place
from hostdev.runtime.reading import Iterators, is_reading_ahead
from hostdev.runtime.table_optimizer import TableOptimizer, TableSettings


class Access:
    """Applies an open loop's finished steps to a table before the program reads or writes it, or raises ValueError.

    The object does not keep its runtime alive.

    Args:
        runtime: A `Runtime`, untyped because its module imports this one.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = ref(runtime)
        self._process = os.getpid()
        self._is_busy = False  # whether a write-back is running, in the loop's thread

    def before_read(self, table: Any) -> None:
        """See `core.tables.Owner`."""
        runtime = self._runtime()
        loop = None if runtime is None else runtime.loops.training
        if runtime is None or loop is None:
            return
        self._require_body(table, loop.thread)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            runtime.write_back()
        finally:
            self._is_busy = False

    def before_write(self, table: Any) -> None:
        """See `core.tables.Owner`."""
        self.before_read(table)
        runtime = self._runtime()
        loop = None if runtime is None else runtime.loops.training
        if runtime is not None and runtime.pipeline.depth and loop is not None:
            runtime.world.require_own_rows(table.name)

    def before_rekey(self, table: Any) -> None:
        """See `core.tables.Owner`."""
        runtime = self._runtime()
        if runtime is None:
            return
        if runtime.loops.is_predicting():
            raise ValueError(
                f"table {table.name!r}: a loop over `predict` is open; end it, or call its close(), before you change "
                "the table's keys"
            )
        if (loop := runtime.loops.training) is not None:
            runtime.world.agree("rekey", f"a change of the keys of table {table.name!r}")
            loop.suspend(table)

    def after_write(self, table: Any, ids: Any) -> None:
        """See `core.tables.Owner`."""
        runtime = self._runtime()
        if runtime is not None and table.primitive_target == "CPU":
            with torch.inference_mode(False), torch.no_grad():
                runtime.pipeline.reload(table, ids)

    def _require_body(self, table: Any, thread: int) -> None:
        """Raise ValueError unless the caller is in the loop's body: in its process and thread, not reading ahead."""
        if is_reading_ahead():
            raise ValueError(
                f"table {table.name!r}: the loader, `ids` or `send` used this table, but they run ahead of the loop's "
                "body, before the updates of earlier batches; use the table in the loop's body, or do not read ahead: "
                "depth=0, no cache and no accumulation"
            )
        if os.getpid() != self._process:
            raise ValueError(
                f"table {table.name!r}: this is a forked process, such as a DataLoader worker, and has only a copy of "
                "the table; read and write tables in the body of the loop"
            )
        if threading.get_ident() != thread:
            raise ValueError(
                f"table {table.name!r} is being trained by a loop in another thread; read and write it in the body "
                "of that loop or after the loop, but not in the loader, `ids` or `send`"
            )


class LeftGradients:
    """Warns at the next use of the tables if a loop ended after `backward` but before the optimizer's step.

    It is unknown whether `break` or an exception ended the body: a program may drop the gradients on purpose, may
    forget the step, or may save what it has after an error. So this is a warning, and it waits for the next use.

    Args:
        tables: The runtime's tables.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = WeakSet(tables)  # weak, since the tables refer to this object
        self._step = 0  # the step whose gradients were left, counted from 1 in its loop; 0 if there is none

    def note(self, step: int) -> None:
        """Record that a loop was left in this step, whose rows have gradients."""
        self.forget()
        self._step = step
        for table in self._tables:
            table.add_owner(self)

    def forget(self) -> None:
        """Forget the gradients that were left."""
        if self._step:
            self._step = 0
            for table in self._tables:
                table.remove_owner(self)

    def report(self) -> None:
        """Warn once of gradients that were left without a step."""
        step = self._step
        self.forget()
        if step:
            warnings.warn(
                f"the last batch's gradients were left without a step: a loop over runtime.train() ended in its step "
                f"{step}, between backward() and the optimizer's step, and the gradients of the rows are dropped. Call "
                "optimizer.step(), or runtime.optimizer.step() without a dense optimizer, before you leave the loop; "
                "or runtime.optimizer.zero_grad() to drop them without this warning",
                stacklevel=5,
            )

    def before_read(self, table: Any) -> None:
        """See `core.tables.Owner`."""
        self.report()

    before_write = before_rekey = before_read

    def after_write(self, table: Any, ids: Any) -> None:
        """See `core.tables.Owner`."""


class AbandonedLoopError(RuntimeError):
    """An error in a loop that the program had already left; `__cause__` is the original error."""


class Loops:
    """A runtime's open loops, and the state that they leave for later loops.

    Args:
        groups: The groups of tables.
        pipeline: Looks up and updates the rows.
        settings: The tables' settings.
        access: The `Owner` of the tables while a loop is open; it is called at each read and write.
        loaders: The loaders of frameworks' trainers, whose loops may be open.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pipeline: Pipeline,
        settings: TableSettings,
        access: Access,
        loaders: WeakSet[RowsLoader[Any]],
    ) -> None:
        self._tables: Mapping[str, Table] = {table.name: table for group in groups for table in group.tables}
        self._pipeline, self._settings, self._access, self._loaders = pipeline, settings, access, loaders
        self.left = LeftGradients(self._tables.values())
        self.dense = DenseLayers(self._tables, pipeline, settings)
        self.iterators = Iterators()
        self.cursor: Any = None  # see `Runtime.cursor`
        self.predicting = 0  # number of open loops over `predict`
        self._predict_loops: WeakSet[AnyPredictLoop] = WeakSet()  # all open loops over `predict`; ended ones may remain
        self._open: ReferenceType[AnyTrainLoop] | None = None  # weak, so that a loop ends when the program drops it
        self._late: BaseException | None = None  # the error of a deleted loop, until it is raised
        self._logs: list[RuntimeLog] = []
        self.warned_of: set[str] = set()  # names of classes that a warning gave as the reason for not reading ahead

    @property
    def training(self) -> AnyTrainLoop | None:
        """The open loop over `train`, or None."""
        return self._open() if self._open is not None else None

    @property
    def place(self) -> Place | None:
        """The open training loop's position; without one, that of the last training loop over an iterator."""
        loop = self.training
        return self.iterators.place if loop is None else loop.place

    def make_optimizer(self) -> TableOptimizer:
        """Return the tables' torch optimizer, which is created at the first call."""
        if self._settings.optimizer is None:
            self._settings.optimizer = TableOptimizer(
                list(self._tables.values()), lambda: self.training is not None, self._find_rows, self.drop_gradients
            )
        return self._settings.optimizer

    def _find_rows(self, table: Table) -> Tensor | None:
        """Return the rows of a table in the body's batch as a parameter; None if there are none."""
        loop = self.training
        return None if loop is None else loop.watcher.row_parameter(table)

    def drop_gradients(self) -> None:
        """Drop the gradients of the body's batch, and those that a loop left without a step."""
        self.left.forget()
        if (loop := self.training) is not None:
            loop.drop_gradients()

    def failed_late(self, error: BaseException) -> None:
        """Keep the error of a deleted loop, which no caller could catch, for `raise_late`."""
        try:
            self._late = copy(error)  # without its traceback, whose frames hold the loop
        except Exception:  # copying a user's exception may fail
            self._late = RuntimeError(f"{type(error).__name__}: {error}")

    def raise_late(self) -> None:
        """Warn of gradients that a loop left without a step; raise the error of a loop that failed after being left."""
        self.left.report()
        error, self._late = self._late, None
        if isinstance(error, HostdevError):
            raise error
        if error is not None:
            raise AbandonedLoopError(
                f"a loop over these tables failed after the program had left it: {type(error).__name__}: {error}"
            ) from error

    def begin_training(self, loop: AnyTrainLoop) -> None:
        """Register a loop over `train`; raise ValueError while another loop over these tables is open."""
        self._close_left()
        self.raise_late()
        if self.training is not None:
            raise ValueError("a loop over `train` is open; end it, or call its close(), before the next one")
        self._require_untrained()
        close_loaders(self._loaders, PredictLoader)
        if self.is_predicting():
            raise ValueError("a loop over `predict` is open; end it, or call its close(), before training")
        self._open = ref(loop)
        self.dense.begin_loop(self._open)
        for log in self._logs:
            log.begin(self._pipeline.steps)
        for table in self._tables.values():
            trained[table] = self._open
            table.add_owner(self._access)

    def add_log(self, log: RuntimeLog) -> None:
        """Add a log, to which the figures of later steps are written."""
        log.begin(self._pipeline.steps)
        self._logs.append(log)

    def count_step(self, runtime: Any, samples: int) -> None:
        """Count a step of the tables, for the logs and for the record of the dense layers."""
        self.dense.note_step()
        for log in list(self._logs):
            if not log.step(runtime, samples):
                self._logs.remove(log)

    def end_training(self) -> None:
        """Unregister the loop over `train`."""
        self._open = None
        self.dense.end_loop()
        for table in self._tables.values():
            trained.pop(table, None)
        self._disown()

    def replan(self) -> None:
        """Make the open loop over `train`, if there is one, replan; see `TrainLoop.replan`."""
        if (training := self.training) is not None:
            training.replan()

    def begin_prediction(self, loop: AnyPredictLoop) -> None:
        """Register a loop over `predict`; raise ValueError while a loop of another runtime trains these tables."""
        self.catch_up()
        self.dense.require_same()
        if self.training is None and not self.predicting:
            for table in self._tables.values():
                table.add_owner(self._access)
        self.predicting += 1
        self._predict_loops.add(loop)

    def end_prediction(self) -> None:
        """Unregister a loop over `predict`."""
        self.predicting -= 1
        self._disown()

    def is_predicting(self) -> bool:
        """Close loops that are finished or were left; return whether a loop over `predict` is still open."""
        if self.predicting:
            self._close_left(but=self.training)
        return self.predicting > 0

    def catch_up(self) -> None:
        """Apply all steps so far to the tables; raise ValueError while a loop of another runtime trains them."""
        self._close_left(but=self.training)
        self.raise_late()
        self._require_untrained()
        if (training := self.training) is not None:
            training.submit()

    def require_closed(self, purpose: str) -> None:
        """Raise ValueError while a loop is open; raise the error of an earlier loop that failed."""
        self._close_left()
        if self.training is not None or self.predicting:
            raise ValueError(f"a loop over these tables is open; end it, or call its close(), before {purpose}")
        self.raise_late()

    def close(self) -> None:
        """End all open loops, and forget the iterators that they have read."""
        for loop in [self.training, *self._predict_loops]:
            if loop is not None:
                loop.close()
        self.iterators.clear()

    def _close_left(self, *, but: AnyTrainLoop | None = None) -> None:
        """Close each loop, except `but`, that is finished, or that a variable holds although its `for` has ended."""
        training = [trained_by(table) for table in self._tables.values()]
        for loop in [*training, *self._predict_loops]:
            if loop is not None and loop is not but:
                if loop.is_finished:
                    loop.close()
                elif loop.is_left:
                    loop.replace()

    def _require_untrained(self) -> None:
        busy = [table.name for table in self._tables.values() if trained_by(table) is not None]
        if busy and self.training is None:
            raise ValueError(
                f"table {busy[0]!r} is being trained by a loop of another runtime; end it, or call its close(), first"
            )

    def _disown(self) -> None:
        if self.training is None and not self.predicting:
            for table in self._tables.values():
                table.remove_owner(self._access)
