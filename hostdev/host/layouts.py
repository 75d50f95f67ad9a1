"""Layouts of rows in memory: all float32, or with weights or state in fewer bits. See `host.storage` for the shapes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.initializers import Initializer
from hostdev.core.rounding import plane_formats, rounding_key
from hostdev.core.table_dtypes import TableStep
from hostdev.host.storage import Ids, InMemory, Positions, Rows, Shape, taken
from hostdev.host.views import Bfloat16View, EightBitView
from hostdev.kernels import catch_up, eight_bits, rounding
from hostdev.kernels.apply import apply_occurrences, apply_tasks
from hostdev.kernels.bits import copy_to_columns
from hostdev.kernels.buffers import identity
from hostdev.kernels.clock import Clock
from hostdev.kernels.init import fill_constant
from hostdev.kernels.lookup import lookup_tasks, store_tasks
from hostdev.kernels.norm import partial_squares
from hostdev.kernels.plane_formats import BFLOAT16, FLOAT32, UNSIGNED_8, plane_bytes
from hostdev.kernels.pool import Task
from hostdev.kernels.rounding import SplitRows
from hostdev.kernels.shards import get_inverse
from hostdev.kernels.stochastic_rounding import require_exact, round_into, round_rows

_FILLED = 1 << 20  # rows of a rank's part that are filled at a time
_FILLED_BYTES = 1 << 26  # bytes of float32 weights that are filled and rounded at a time


class Float32(InMemory):
    """Storage of each row's weights and optimizer state side by side: block float32 [V, 1 + S, D]."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._name, self._optimizer = name, shape.optimizer
        self.block: Rows = shape.allocate((shape.rows, 1 + len(shape.slots), shape.dim))
        self.row_slots = shape.row_slots()

    def fill(self, shape: Shape, seed: int, init: Initializer) -> None:
        """See `Storage`."""
        if not shape.is_part:
            init.fill(self.block, seed, self._name, shape.slots)
        else:
            for first in range(0, shape.rows, _FILLED):
                stop = first + _FILLED
                init.fill(self.block[first:stop], seed, self._name, shape.slots, ids=shape.ids(first, stop))
        shape.fill_row_slots(self.row_slots)

    def initial(self, shape: Shape, seed: int, init: Initializer, ids: npt.NDArray[np.int64], block: Rows) -> None:
        """See `Storage`."""
        init.fill(block, seed, self._name, shape.slots, ids=ids)

    @property
    def planes(self) -> list[Any]:
        """All that is stored of the rows, each [V, any]."""
        return [values for values in (self.block, self.row_slots) if values[:1].nbytes]

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Storage`."""
        V, planes, D = self.block.shape
        return V, planes, D

    @property
    def nbytes(self) -> int:
        """See `Storage`."""
        return self.block.nbytes + self.row_slots.nbytes

    def column(self, number: int) -> Any:
        """See `Storage`."""
        return self.block[:, number]

    def lookup_tasks(self, ids: Ids, out: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        return lookup_tasks(self.block, ids, out, positions)

    def pack_tasks(self, ids: Ids, out: Rows, positions: Positions | None, planes: int) -> list[Task]:
        """See `Storage`."""
        return catch_up.pack_tasks(self.block, self.row_slots, ids, out, positions, planes)

    def current_tasks(self, ids: Ids, clock: Clock, out: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        return catch_up.look_up_tasks(self.block, self.row_slots, ids, clock, out, positions)

    def read_tasks(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        tasks = lookup_tasks(_flat(self.block)[:, None], ids, _flat(block), positions)
        return tasks + _read_row_slots(self.row_slots, ids, row_slots, positions)

    def write_tasks(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        tasks = store_tasks(_flat(self.block), ids, _flat(block), positions)
        return tasks + _write_row_slots(self.row_slots, ids, row_slots, positions)

    def require_exact(self, plane: int, values: Rows) -> None:
        """Accept all values."""

    def update_tasks(self, ids: Ids, grads: Rows, step: TableStep, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        primitive = self._optimizer.primitive
        return apply_tasks(
            primitive, self.block, self.row_slots, ids, grads, step.scalars, positions, step.clip, step.clock
        )

    def apply(self, ids: Ids, grads: Rows, step: TableStep) -> None:
        """See `Storage`."""
        table = self._optimizer.primitive, self.block, self.row_slots
        apply_occurrences(*table, ids, grads, step.scalars, step.clip, step.clock)

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """See `Storage`."""
        return partial_squares(self.block)

    def copy_to_columns(self, start: int, stop: int, first: int, ids: Ids | None, columns: Rows) -> None:
        """See `Storage`."""
        copy_to_columns(start, stop, first, ids, self.block, columns)

    def taken(self, ids: Ids) -> Rows:
        """See `Storage`."""
        return taken(self.block, ids)


class Split(InMemory):
    """Storage of weights [V, D] and state in separate arrays, each in its format; see `kernels.plane_formats`.

    Weights are float32, or bfloat16 as uint16. The state is float32 or bfloat16, [V, S, D], or 8 bits, uint8 [V, S, P].
    `kernels.stochastic_rounding` rounds new values; its random numbers depend on a row's id in the whole table.

    Args:
        name: The table's name.
        shape: The dimensions.
        formats: The format of each plane: the weights, then the state columns.
    """

    def __init__(self, name: str, shape: Shape, formats: tuple[int, ...]) -> None:
        self._name, self._optimizer, rows, dim = name, shape.optimizer, shape.rows, shape.dim
        self._formats = formats
        self._unsigned = np.array([kind == UNSIGNED_8 for kind in formats[1:]], np.uint8)
        self._where = (shape.first, get_inverse(shape.total), shape.total) if shape.is_part else (0, 0, shape.total)
        self._keys = np.zeros(0, np.int64) if shape.keys is None else shape.keys
        self.stored = _allocate(shape, (rows, dim), formats[0])
        self.slots = _allocate(shape, (rows, len(shape.slots), dim), formats[-1] if shape.slots.size else FLOAT32)
        self.row_slots = shape.row_slots()

    def fill(self, shape: Shape, seed: int, init: Initializer) -> None:
        """See `Storage`."""
        name, (rows, dim) = self._name, self.stored.shape
        step = max(1, _FILLED_BYTES // (4 * dim))
        weights, none = np.empty((min(step, rows), 1, dim), np.float32), np.empty(0, np.float32)
        for first in range(0, rows, step):
            part = weights[: min(step, rows - first)]
            where: dict[str, Any] = {"first_row": first}
            if shape.is_part:
                where = {"ids": shape.ids(first, first + len(part))}
            init.fill(part, seed, name, none, **where)
            stored = self.stored[first : first + len(part)]
            if stored.dtype == np.float32:
                stored[:] = part[:, 0]
            else:
                round_into(part, stored, rounding_key(seed, name, 0), **where)
        if self.slots.dtype == np.uint8:
            eight_bits.fill(self.slots, shape.slots, dim, self._unsigned)
        elif len(shape.slots):
            values: Any = shape.slots if self.slots.dtype == np.float32 else _to_bfloat16(shape.slots)
            fill_constant(self.slots, values[0], values[1:])
        shape.fill_row_slots(self.row_slots)

    def initial(self, shape: Shape, seed: int, init: Initializer, ids: npt.NDArray[np.int64], block: Rows) -> None:
        """See `Storage`."""
        init.fill(block, seed, self._name, shape.slots, ids=ids)
        if self._formats[0] == BFLOAT16:
            round_rows(block, identity(len(ids)), ids, rounding_key(seed, self._name, 0), (BFLOAT16,))

    @property
    def planes(self) -> list[Any]:
        """All that is stored of the rows, each [V, any]."""
        return [values for values in (self.stored, self.slots, self.row_slots) if values[:1].nbytes]

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Storage`."""
        V, D = self.stored.shape
        return V, 1 + self.slots.shape[1], D

    @property
    def nbytes(self) -> int:
        """See `Storage`."""
        return self.stored.nbytes + self.slots.nbytes + self.row_slots.nbytes

    def column(self, number: int) -> Any:
        """See `Storage`."""
        held = self.slots[:, number - 1] if number else self.stored
        if held.dtype == np.float32:
            return held
        if held.dtype == np.uint16:
            return Bfloat16View(held)
        return EightBitView(held, self.stored.shape[1], bool(self._unsigned[number - 1]))

    def lookup_tasks(self, ids: Ids, out: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        return lookup_tasks(self.stored[:, None], ids, out, positions)

    def pack_tasks(self, ids: Ids, out: Rows, positions: Positions | None, planes: int) -> list[Task]:
        """See `Storage`."""
        return catch_up.pack_tasks(self._rows_at(0), self.row_slots, ids, out, positions, planes)

    def current_tasks(self, ids: Ids, clock: Clock, out: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        return catch_up.look_up_tasks(self._rows_at(0), self.row_slots, ids, clock, out, positions)

    def read_tasks(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        tasks = rounding.read_tasks(*self._arrays, ids, block, positions)
        return tasks + _read_row_slots(self.row_slots, ids, row_slots, positions)

    def write_tasks(self, ids: Ids, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        tasks = rounding.write_tasks(*self._arrays, ids, block, positions)
        return tasks + _write_row_slots(self.row_slots, ids, row_slots, positions)

    def require_exact(self, plane: int, values: Rows) -> None:
        """See `Storage`."""
        require_exact(values, self._name, plane, self._formats[plane])

    def update_tasks(self, ids: Ids, grads: Rows, step: TableStep, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        assert step.rounding is not None
        primitive, rows = self._optimizer.primitive, self._rows_at(step.rounding.key)
        return apply_tasks(primitive, rows, self.row_slots, ids, grads, step.scalars, positions, step.clip, step.clock)

    def apply(self, ids: Ids, grads: Rows, step: TableStep) -> None:
        """See `Storage`."""
        assert step.rounding is not None
        table = self._optimizer.primitive, self._rows_at(step.rounding.key), self.row_slots
        apply_occurrences(*table, ids, grads, step.scalars, step.clip, step.clock)

    def _rows_at(self, key: int) -> SplitRows:
        return SplitRows.of(*self._arrays, key, self._where, self._keys)

    @property
    def _arrays(self) -> tuple[Any, Any, Any]:
        return self.stored, self.slots, self._unsigned

    def partial_squares(self) -> npt.NDArray[np.float64]:
        """See `Storage`."""
        return partial_squares(self.stored[:, None])

    def copy_to_columns(self, start: int, stop: int, first: int, ids: Ids | None, columns: Rows) -> None:
        """See `Storage`."""
        copy_to_columns(start, stop, first, ids, self.stored[:, None], columns[:1])
        if self.slots.dtype == np.uint8:
            eight_bits.decode_to_columns(start, stop, first, ids, self.slots, self._unsigned, columns[1:])
        else:
            copy_to_columns(start, stop, first, ids, self.slots, columns[1:])

    def taken(self, ids: Ids) -> Rows:
        """See `Storage`."""
        out = np.empty((len(ids), *self.shape[1:]), np.float32)
        rounding.read_here(*self._arrays, ids, out)
        return out


def _allocate(of: Shape, shape: tuple[int, ...], kind: int) -> npt.NDArray[Any]:
    """Return memory for planes in the format `kind`, one of `kernels.plane_formats`; `shape` is [..., D]."""
    dtype: Any = {FLOAT32: np.float32, BFLOAT16: np.uint16}.get(kind, np.uint8)
    if dtype == np.uint8:
        shape = (*shape[:-1], plane_bytes(shape[-1]))
    return of.allocate(shape, dtype)


def _to_bfloat16(values: Rows) -> npt.NDArray[np.uint16]:
    """Return the bits of float32 values that bfloat16 can represent."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _flat(block: Rows) -> Rows:
    return block.reshape(len(block), block.shape[1] * block.shape[2])


def _read_row_slots(held: Rows, ids: Ids, out: Rows, positions: Positions | None) -> list[Task]:
    return lookup_tasks(held[:, None], ids, out, positions) if held.shape[1] else []


def _write_row_slots(held: Rows, ids: Ids, values: Rows, positions: Positions | None) -> list[Task]:
    return store_tasks(held, ids, values, positions) if held.shape[1] else []


def make_layout(name: str, shape: Shape, dtype: str, slots_dtype: str) -> Float32 | Split:
    """Return unfilled storage in memory for a table's rows; `shape` must have been made for the same slots_dtype."""
    formats = plane_formats(dtype, slots_dtype, shape.optimizer)
    return Float32(name, shape) if formats is None else Split(name, shape, formats)
