"""The `core.tables.Owner`s of a runtime: what must happen before the program reads or writes one of its tables."""

import os
import threading
import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet, ref

import torch

from hostdev.core.reading_ahead import is_reading_ahead
from hostdev.runtime.features import Table


class Access:
    """Checks the use of a table of an open loop, whose finished steps it first applies; it keeps no runtime alive.

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
    """Warns at the next use of tables whose rows lost gradients, because a loop left them without a step.

    It is unknown whether `break` or an exception ended the body: a program may drop the gradients on purpose, may
    forget the step, or may save what it has after an error. So this is a warning, and it waits for the next use.

    Args:
        tables: The runtime's tables.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = WeakSet(tables)  # weak, since they hold this object
        self._step = 0  # the number of the step in its loop, from 1; 0 if nothing was left

    def note(self, step: int) -> None:
        """Record that a loop was left with gradients of the rows of this step."""
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
