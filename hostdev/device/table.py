"""An embedding table and its optimizer state in device memory: the counterpart of the host table.

S and R: number of optimizer state columns with D values per row, and with one value per row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.checks import check_rows, checked_ids, require_finite, require_size
from hostdev.core.history import History, make_history
from hostdev.core.initializers import Given, Initializer, Normal, initializer
from hostdev.core.memory import require_table
from hostdev.core.optimizers import SparseOptimizer, require_optimizer
from hostdev.core.rounding import initial_slots, plane_formats, rounding_key
from hostdev.core.table_dtypes import BF16, FP32, require_slots_dtype, require_table_dtype
from hostdev.core.tables import Capabilities, ColumnCopies, Owned, initial_seed
from hostdev.device.backend import free_bytes, require
from hostdev.device.ops import get_ops
from hostdev.device.ops.catch_up import Clocks, bring, pack, unpack
from hostdev.kernels.arrays import Rows, identity
from hostdev.kernels.bfloat16 import require_exact, round_rows, round_to_nearest
from hostdev.kernels.norm import PART, partial_squares, total
from hostdev.kernels.plane_formats import BFLOAT16

_ERASED = 1 << 16  # rows erased at a time
_FILL_BYTES = 1 << 26  # bytes of rows filled at a time
_FOLD_BYTES = 1 << 28  # bytes of squares summed at a time


class DeviceWriting(ColumnCopies):
    """The copies that `DeviceTable.writing` yields.

    Args:
        table: The table's name, for errors.
        columns: Views of the table's weights and optimizer state by name.
        ids: int64 [N] on the device, all different; None for all rows.
        current: Called with `ids`; returns these rows' columns as of the last step. None if `columns` are up to date.
    """

    def __init__(
        self,
        table: str,
        columns: Mapping[str, Tensor],
        ids: Tensor | None,
        current: Callable[[Tensor | None], Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(table, columns)
        self._columns, self._ids = columns, ids
        self._current = None if current is None else current(ids)

    def _copied(self, name: str) -> Tensor:
        if self._current is not None:
            return self._current[name].clone(memory_format=torch.contiguous_format)
        column = self._columns[name]
        there = column if self._ids is None else column.index_select(0, self._ids)
        return there.clone(memory_format=torch.contiguous_format)

    def require_finite(self) -> None:
        """If a value of the copies is not finite, raise a ValueError that names the first row with such a value."""
        for values in self._held.values():
            wrong = ~values.isfinite()
            if wrong.any():
                row = int(wrong.any(1).nonzero()[0])
                value = float(values[row][wrong[row]][0])
                number = row if self._ids is None else int(self._ids[row])
                raise ValueError(
                    f"table {self.table!r}: {value} cannot be written to row {number}: values must be finite; "
                    "nothing was written"
                )

    def require_exact(self, planes: Sequence[str], check: Callable[[int, npt.NDArray[np.float32]], None]) -> None:
        """Call `check` with the number and the new values of each plane that was copied."""
        for plane, name in enumerate(planes):
            if name in self._held:
                check(plane, self._held[name].cpu().numpy())

    def write(self) -> None:
        """Write the copies to the table; if its steps also change unused rows, write only the changed rows."""
        if self._current is not None:
            self._write_changed(self._current)
            return
        for name, values in self._held.items():
            if self._ids is None:
                self._columns[name].copy_(values)
            else:
                self._columns[name].index_copy_(0, self._ids, values)

    def _write_changed(self, current: Mapping[str, Tensor]) -> None:
        changed = [
            (values.view(torch.int32) != current[name].contiguous().view(torch.int32)).any(1)
            for name, values in self._held.items()
        ]
        if not changed:
            return
        rows = torch.stack(changed).any(0).nonzero()[:, 0]
        at = rows if self._ids is None else self._ids[rows]
        for name, column in self._columns.items():
            column.index_copy_(0, at, self._held.get(name, current[name])[rows])


class DeviceTable(Owned):
    """Weights float32 [rows, dim] and optimizer state on `device`, as in a `HostTable` with the same arguments.

    Ids must be in range and unique; the caller checks and deduplicates them on the host. With dtype="bfloat16",
    slots="bfloat16" or slots="8bit", the values equal those of such a host table, but each takes 4 bytes here.

    The body of an open `Runtime.train` loop may read and write the table like a host table. `weights`, `slots` and
    `block` are views that torch cannot make read-only: use `writing` or `write_rows` to write.

    Args:
        device: The device that holds the table, as for `Runtime`: "auto", "cpu", "cuda", ..., or a torch.device. The
            other arguments are those of `HostTable`.
    """

    primitive_target = "DEVICE"

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: SparseOptimizer,
        device: torch.device | str = "auto",
        *,
        name: str,
        seed: int | None = None,
        init: Initializer | npt.ArrayLike = Normal(0.01),
        dtype: str = FP32,
        slots: str = FP32,
    ) -> None:
        require_size(rows, dim, name)
        require_optimizer(optimizer, name)
        device = require(device)
        self.dtype, self.slots_dtype = require_table_dtype(dtype, name), require_slots_dtype(slots, name, dim)
        free = free_bytes(device)
        if free is not None:
            require_table(name, rows, dim, optimizer, free, "device")
        self.name, self.seed = name, initial_seed(seed)
        self.optimizer = optimizer
        self._block = torch.empty((rows, 1 + len(optimizer.slots), dim), dtype=torch.float32, device=device)
        self._init = initializer(init, rows, dim, name)
        self.writes = int(isinstance(self._init, Given))  # an array of initial weights counts as a write
        self._fill(self._init, self.seed)
        row_slots = torch.tensor(list(optimizer.row_slots.values()), dtype=torch.float32, device=device)
        self._row_slots = row_slots.repeat(rows, 1)
        self.history, late = make_history(optimizer), optimizer.catch_up is not None
        formats = plane_formats(self.dtype, self.slots_dtype, optimizer)
        self.capabilities = Capabilities(late=late, formats=formats)
        self.total_rows, self.capacity, self.fetched_width = rows, rows, dim
        self._ops, self._clocks = get_ops(self._block.device), Clocks()

    def _fill(self, init: Initializer, seed: int) -> None:
        slots = initial_slots(self.optimizer, self.slots_dtype)
        if self._block.device.type == "cpu" and self.dtype == FP32:
            init.fill(self._block.numpy(), seed, self.name, slots)
            return
        rows, width, dim = self._block.shape
        step = min(rows, max(1, _FILL_BYTES // (width * dim * 4)))
        staging = np.empty((step, width, dim), np.float32)
        for first in range(0, rows, step):
            part = staging[: min(step, rows - first)]
            init.fill(part, seed, self.name, slots, first_row=first)
            if self.dtype == BF16:
                ids = np.arange(first, first + len(part))
                round_rows(part, identity(len(part)), ids, rounding_key(seed, self.name, 0), (BFLOAT16,))
            self._block[first : first + len(part)] = torch.from_numpy(part)

    def __getstate__(self) -> Mapping[str, Any]:
        """See `Owned`."""
        return {name: value for name, value in super().__getstate__().items() if name not in ("_ops", "_clocks")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._ops, self._clocks = get_ops(self._block.device), Clocks()

    @property
    def rows(self) -> int:
        """Number of rows, V."""
        return self._block.shape[0]

    @property
    def row_space(self) -> int:
        """The number of rows, as `HostTable.row_space`."""
        return self.rows

    @property
    def used_rows(self) -> int:
        """The number of rows, as `HostTable.used_rows`."""
        return self.rows

    @property
    def dim(self) -> int:
        """Number of columns, D."""
        return self._block.shape[2]

    @property
    def device(self) -> torch.device:
        """The device that holds the table."""
        return self._block.device

    @property
    def block(self) -> Tensor:
        """The memory of all rows, float32 [V, 1 + S, D]: weights, then state columns of D values.

        If the optimizer changes all rows in each step, a row has the values of its last write here, not those after the
        last step.
        """
        self._before_read()
        return self._block

    @property
    def row_slots(self) -> Tensor:
        """The memory of the per-row state, float32 [V, R]."""
        self._before_read()
        return self._row_slots

    @property
    def weights(self) -> Tensor:
        """The weights, float32 [V, D]: a view, or a copy if each step changes all rows."""
        self._before_read()
        return self._current()["weights"]

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """The optimizer state by name, float32 [V, D], or [V, 1] for per-row state; views or copies as `weights`."""
        self._before_read()
        return MappingProxyType({name: values for name, values in self._current().items() if name != "weights"})

    def columns(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by name, as `HostTable.columns` does."""
        self._before_read()
        return self._columns()

    def _columns(self) -> dict[str, Tensor]:
        return self._named(self._block, self._row_slots)

    def _current(self, ids: Tensor | None = None) -> dict[str, Tensor]:
        """Return weights and optimizer state by name, of all rows or of `ids`, as they are after the last step."""
        return self._named(*self._current_memory(ids))

    def _current_memory(self, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return block and row_slots, of all rows or of `ids`, as they are after the last step."""
        block, row_slots = self._block, self._row_slots
        if (clock := self.clock()) is not None:
            block, row_slots = (
                held.clone() if ids is None else held.index_select(0, ids) for held in (block, row_slots)
            )
            bring(block, row_slots, clock, self._clocks)
        elif ids is not None:
            block, row_slots = (held.index_select(0, ids) for held in (block, row_slots))
        return block, row_slots

    def _storable(self, ids: Tensor | None = None) -> dict[str, Tensor]:
        """Return the columns of `_current`, rounded to the nearest values that the host table can store."""
        found = self._current(ids)
        if (formats := self.capabilities.formats) is not None:
            names = list(found)[: len(formats)]
            block = np.stack([found[name].cpu().numpy() for name in names], 1)
            round_to_nearest(block, formats)
            found |= {name: torch.from_numpy(block[:, i]).to(self.device) for i, name in enumerate(names)}
        return found

    def _named(self, block: Tensor, row_slots: Tensor) -> dict[str, Tensor]:
        planes = {name: block[:, i] for i, name in enumerate(("weights", *self.optimizer.slots))}
        return planes | {name: row_slots[:, i : i + 1] for i, name in enumerate(self.optimizer.row_slots)}

    def where(self, ids: Any) -> tuple[Tensor, Any]:  # Any: anything that torch can index rows with
        """Return the memory of rows and optimizer state, float32 [V, 1 + S, D], and the positions of `ids` in it."""
        return self._block, ids

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """`block` and `row_slots` for internal use by the training loop, without checks."""
        return self._block, self._row_slots

    def lookup(self, ids: Tensor) -> Tensor:
        """Return a copy of the weights of rows, float32 [U, D]; `ids` are int32 or int64 [U]."""
        self._before_read()
        return self.lookup_now(ids)

    def lookup_now(self, ids: Tensor) -> Tensor:
        """Return the weights as `lookup` does, for internal use by the training loop, without checks."""
        if (clock := self.clock()) is not None:
            packed = pack(self._block.index_select(0, ids), self._row_slots.index_select(0, ids), clock.moments)
            return unpack(packed, self.dim, clock, self._clocks)
        rows: Tensor = self._ops.lookup(self._block, ids)
        return rows

    def update(self, ids: Tensor, grads: Tensor, skip: Tensor | None = None) -> None:
        """Take one optimizer step on unique rows.

        Args:
            ids: The rows to update, int32 or int64 [U].
            grads: Summed gradients, float32 [U, D].
            skip: float32 []; if it is not 0, nothing changes; None means 0.

        Raises:
            ValueError: A gradient is not finite, or exceeds `optimizer.largest_gradient`; nothing is written then.
        """
        most = float(grads.abs().max()) if grads.numel() else 0.0  # NaN if a gradient is NaN
        if not most <= self.optimizer.largest_gradient:
            raise ValueError(
                f"table {self.name!r}: the largest gradient is {most}; the table's optimizer needs finite gradients of "
                f"at most {self.optimizer.largest_gradient:.3g}; no row was updated"
            )
        self._before_write()
        self.update_now(ids, grads, skip)
        self._after_write(ids)

    def update_now(self, ids: Tensor, grads: Tensor, skip: Tensor | None = None) -> None:
        """Update as `update` does, for internal use by the training loop, which has checked the gradients."""
        step = self.begin_step()
        if step.clip is not None:
            grads = self._ops.clip_rows(grads, step.clip)
        given = self.optimizer.primitive, self._block, self._row_slots, ids, grads, step.scalars, skip
        self._ops.update(*given, clock=step.clock, clocks=self._clocks)
        if step.rounding is not None:  # rounding does not change skipped rows
            self._ops.round_rows(self._block, ids, ids, *step.rounding)

    def adopt(self, history: History, *, whole: bool) -> None:
        """Replace the table's step history with a checkpoint's, as `HostTable.adopt` does."""
        self._before_write()
        if not whole:
            for start in range(0, self.rows, _ERASED):
                ids = torch.arange(start, min(self.rows, start + _ERASED), device=self.device)
                for name, values in self._storable(ids).items():
                    self._columns()[name].index_copy_(0, ids, values)
            self._row_slots[:, -1] = float(history.steps)
        self.history = history
        self._after_write(None)

    def _require_exact(self, plane: int, values: Rows) -> None:
        """Raise ValueError unless values [N, D] of a plane can be stored without rounding; plane 0 is the weights."""
        if (formats := self.capabilities.formats) is not None:
            require_exact(values, self.name, plane, formats[plane])

    @contextmanager
    def writing(self, ids: Tensor | npt.ArrayLike | None = None) -> Iterator[DeviceWriting]:
        """Yield copies of weights and state, as `HostTable.writing` does; their changes are written when `with` ends.

        Args:
            ids: Integers [N], an array or a tensor, each in [0, V), all different; None for all rows.
        """
        chosen = None
        if ids is not None:
            array = checked_ids(ids.cpu().numpy() if isinstance(ids, Tensor) else ids, self.rows, self.name)
            if len(np.unique(array)) < len(array):
                raise ValueError(f"table {self.name!r}: the ids of writing() must be all different")
            chosen = torch.from_numpy(array).to(self.device, torch.int64)
        self._before_write()
        late = self._storable if self.capabilities.late else None
        one = DeviceWriting(self.name, self._columns(), chosen, late)
        self._is_writing = True
        try:
            with torch.no_grad():
                yield one
                one.require_finite()
                one.require_exact(("weights", *self.optimizer.slots), self._require_exact)
                one.write()
        finally:
            one.end()
            self._is_writing = False
        self._after_write(chosen)

    def erase(self, ids: Tensor | npt.ArrayLike) -> None:
        """Reset weights and optimizer state of rows to their initial values, as `HostTable.erase` does."""
        array = checked_ids(ids.cpu().numpy() if isinstance(ids, Tensor) else ids, self.rows, self.name)
        array = np.unique(array).astype(np.int64)
        _, planes, D = self._block.shape
        slots = initial_slots(self.optimizer, self.slots_dtype)
        for start in range(0, len(array), _ERASED):
            part = array[start : start + _ERASED]
            block = np.empty((len(part), planes, D), np.float32)
            self._init.fill(block, self.seed, self.name, slots, ids=part)
            if self.dtype == BF16:
                round_rows(block, identity(len(part)), part, rounding_key(self.seed, self.name, 0), (BFLOAT16,))
            row_slots = np.empty((len(part), self._row_slots.shape[1]), np.float32)
            row_slots[:] = list(self.optimizer.row_slots.values())
            self.history.stamp(row_slots)
            self.write_rows(part, block, row_slots)

    def write_rows(self, ids: npt.ArrayLike, block: Rows, row_slots: Rows) -> None:
        """Overwrite rows and their optimizer state from host memory.

        Args:
            ids: Integers [N], each in [0, V), all different (not checked).
            block: float32 [N, 1 + S, D]: weights, then state columns of D values.
            row_slots: float32 [N, R]: per-row state.

        Raises:
            UserError, TypeError: An id is outside the table, or an array has a wrong dtype.
            ValueError: A shape is wrong, or a value is not finite or not representable; nothing is written then.
        """
        ids = checked_ids(ids, self.rows, self.name)
        _, planes, D = self._block.shape
        check_rows("block", block, (len(ids), planes, D), self.name)
        check_rows("row_slots", row_slots, (len(ids), self._row_slots.shape[1]), self.name)
        for plane in range(planes):
            self._require_exact(plane, block[:, plane])
        require_finite(self.name, ids, block, row_slots)
        self.history.require_steps(self.name, ids, row_slots)
        self._before_write()
        at = torch.from_numpy(ids).to(self.device, torch.int64)
        self._block.index_copy_(0, at, torch.from_numpy(block).to(self.device))
        self._row_slots.index_copy_(0, at, torch.from_numpy(row_slots).to(self.device))
        self._after_write(ids)

    def partial_squares(self) -> Tensor:
        """Split the rows into P parts, and return each part's sum of squared weights by column: float64 [P, D].

        `kernels.norm` defines the parts and the order; the result equals the host table's bit for bit.
        """
        self._before_read()
        block, _ = self._current_memory()
        if self.device.type == "cpu":
            return torch.from_numpy(partial_squares(block.numpy()))
        return partial_squares_with_torch(block[:, 0])

    def sum_of_squares(self) -> float:
        """Return the sum of squares of all weights, in float64, in the order of `kernels.norm`."""
        return total(self.partial_squares().cpu().numpy())


def partial_squares_with_torch(weights: Tensor) -> Tensor:
    """Compute `kernels.norm.partial_squares` of weights float32 [V, D] with torch's elementwise operations."""
    rows, dim = weights.shape
    out = torch.empty((-(-rows // PART), dim), dtype=torch.float64, device=weights.device)
    step = max(1, _FOLD_BYTES // (PART * dim * 8))
    for first in range(0, len(out), step):
        x = weights[first * PART : (first + step) * PART].double().square_()
        if len(x) % PART:
            x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % PART))
        x = x.view(-1, PART, dim)
        while x.shape[1] > 1:
            low, high = x.chunk(2, 1)
            x = low + high
        out[first : first + step] = x[:, 0]
    return out
