"""Averages of a table's weights over the steps, for evaluation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from hostdev.core.checks import checked_ids
from hostdev.core.memory import require_memory
from hostdev.core.table_dtypes import BF16
from hostdev.device.table import DeviceTable
from hostdev.host.table import HostTable
from hostdev.kernels.arrays import AnyIds, Rows

_PART = 1 << 16  # rows to process at a time

averaged_tables: WeakSet[HostTable | DeviceTable] = WeakSet()  # tables of which the program has made an EMA


class EMA:
    """The exponential moving average of a table's weights over the steps.

    ::

        average = hostdev.EMA(users, decay=0.999)
        for batch, rows in runtime.train(loader, ids=ids):
            ...
            optimizer.step()
            average.update(batch.user)  # the step's ids; without them, `update` compares all rows
        with average.applied():
            for batch, rows in runtime.predict(test_loader, ids=ids):
                ...

    After a step with the weights w: average <- decay * average + (1 - decay) * w. The average starts as a copy of the
    weights. The averages of unchanged rows are computed only when they are read, with the same result. An EMA takes
    rows x (8 x dim + 8) bytes of host memory. `update` reads the table; in a loop, the current batch's step is
    therefore applied to the table at once.

    Args:
        table: A HostTable or a DeviceTable.
        decay: The weight of the previous average, in [0, 1).

    Raises:
        UserError: There is not enough host memory.
        ValueError: `decay` is out of range, or each step of the table's optimizer changes all rows.
    """

    def __init__(self, table: HostTable | DeviceTable, decay: float) -> None:
        if not isinstance(table, HostTable | DeviceTable):
            raise TypeError(f"EMA takes a hostdev.HostTable or a DeviceTable, not a {type(table).__name__}")
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(f"table {table.name!r}: decay must be in [0, 1), not {decay!r}")
        if table.capabilities.late:
            raise ValueError(
                f"table {table.name!r}: EMA tracks only the rows that a step writes, but each step of "
                f"{table.optimizer!r} changes all rows; use an optimizer without weight_decay, or LazyAdam in place "
                "of Adam"
            )
        require_memory(table.rows * (8 * table.dim + 8), f"table {table.name!r}: the average of its rows")
        self.table, self.decay = table, float(decay)
        self.steps = 0  # number of updates
        self._rows: Rows = np.empty((table.rows, table.dim), np.float32)  # the weights at each row's last update
        for part, values in self._parts(self._read(None)):
            self._rows[part] = values
        self._average = self._rows.copy()  # the averages at each row's last update
        self._last = np.zeros(table.rows, np.int64)  # the number of each row's last update
        averaged_tables.add(table)

    def update(self, ids: npt.ArrayLike | torch.Tensor | None = None) -> None:
        """Add the table's current weights to the average, once after each step.

        Args:
            ids: The ids of all rows that the step may have changed: integers of any shape, each in [0, rows),
                duplicates allowed. None: find these rows by comparing all rows.

        Raises:
            UserError: An id is out of range; the average is unchanged. For other wrong ids see `HostTable.lookup`.
            ValueError: `ids` are given, but this rank has only some of the table's rows.
        """
        if ids is None:
            read = self._read(None)
            changed = [
                np.flatnonzero((values.view(np.int32) != self._rows[part].view(np.int32)).any(1)) + part.start
                for part, values in self._parts(read)
            ]
            rows = np.concatenate(changed)
        else:
            if getattr(self.table, "part", None) is not None:
                raise ValueError(
                    f"table {self.table.name!r}: this rank has only some of the table's rows, but a batch also uses "
                    "rows of other ranks; call update() without ids, which finds the changed rows of this rank"
                )
            array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
            rows = np.unique(checked_ids(array.reshape(-1), self.table.rows, self.table.name))
            read = self._read(rows)
        self.steps += 1
        for start in range(0, len(rows), _PART):
            part = rows[start : start + _PART]
            values = self._values(read, part if ids is None else slice(start, start + len(part)))
            before = self._at(part, self.steps - 1)
            self._average[part] = before + (1 - self.decay) * (values - before)
            self._rows[part], self._last[part] = values, self.steps

    def lookup(self, ids: npt.ArrayLike) -> Rows:
        """Return the averages of rows, float32 [N, D]; ids as in `HostTable.lookup`."""
        return self._at(checked_ids(ids, self.table.rows, self.table.name), self.steps).astype(np.float32)

    @property
    def weights(self) -> Rows:
        """A copy of the averages of all rows, float32 [rows, dim]."""
        out = np.empty_like(self._rows)
        for start in range(0, len(out), _PART):
            part = np.arange(start, min(len(out), start + _PART))
            out[part] = self._at(part, self.steps)
        return out

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the table's weights by the averages in a `with` block; its end restores the weights bit for bit.

        The optimizer state does not change. In a bfloat16 table, the averages are rounded to nearest. A checkpoint
        that is saved within the block contains the averages. Writes to the weights within the block are lost.

        Raises:
            ValueError: The table cannot be written now, for example in a loop at depth > 0 with several ranks.
        """
        average = self.weights
        if self.table.dtype == BF16:
            average = torch.from_numpy(average).bfloat16().float().numpy()
        with self.table.writing() as w:
            before = w.weights.clone() if isinstance(w.weights, torch.Tensor) else w.weights.copy()
            w.weights = torch.from_numpy(average) if isinstance(w.weights, torch.Tensor) else average
        try:
            yield
        finally:
            with self.table.writing() as w:
                w.weights = before

    def state_dict(self) -> dict[str, Any]:  # Any: numbers and tensors, as in torch
        """Return the state for `load_state_dict`, or as `extra` of `Runtime.save`; tensors share the EMA's memory."""
        names = ("rows", "average", "last")
        arrays = (self._rows, self._average, self._last)
        tensors = {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}
        return {"decay": self.decay, "steps": self.steps, **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as `state_dict` returns it
        """Load a result of `state_dict`; raise ValueError if it is for a table of another shape."""
        shape = list(state["rows"].shape)
        if shape != list(self._rows.shape):
            raise ValueError(
                f"table {self.table.name!r} has the shape {list(self._rows.shape)}, but the state to load has {shape}"
            )
        self.decay, self.steps = float(state["decay"]), int(state["steps"])
        for array, name in ((self._rows, "rows"), (self._average, "average"), (self._last, "last")):
            array[...] = state[name].cpu().numpy()

    def _at(self, rows: AnyIds, step: int) -> npt.NDArray[np.float64]:
        """Return the averages of rows [N] after `step` updates, float64 [N, D]; their last update must not be later."""
        there = self._rows[rows].astype(np.float64)
        gone = np.power(self.decay, (step - self._last[rows]).astype(np.float64))[:, None]
        return there + gone * (self._average[rows].astype(np.float64) - there)

    def _read(self, rows: AnyIds | None) -> Any:
        """Return the weights of rows [N], or of all rows."""
        if rows is None:
            return self.table.columns()["weights"]
        if isinstance(self.table, DeviceTable):
            return self.table.lookup(torch.from_numpy(rows).to(self.table.device))
        return self.table.lookup(rows)

    def _parts(self, read: Any) -> Iterator[tuple[slice, Rows]]:
        for start in range(0, self.table.rows, _PART):
            part = slice(start, min(self.table.rows, start + _PART))
            yield part, self._values(read, part)

    @staticmethod
    def _values(read: Any, rows: Any) -> Rows:
        if isinstance(read, torch.Tensor):
            at = torch.from_numpy(rows).to(read.device) if isinstance(rows, np.ndarray) else rows
            return np.ascontiguousarray(read[at].cpu().numpy())
        return np.ascontiguousarray(read[rows])
