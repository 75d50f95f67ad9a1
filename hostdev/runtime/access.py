"""Checks that the program may read or write a table that a loop uses, and first applies the loop's finished steps."""

import os
import threading
from typing import Any
from weakref import ref

import torch

from hostdev.core.reading_ahead import is_reading_ahead


class Access:
    """The `core.tables.Owner` of a runtime's tables; it does not keep the runtime alive.

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
        loop = None if runtime is None else runtime.loops.training
        if loop is not None:
            loop.wrote(table, ids)

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
