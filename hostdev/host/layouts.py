"""Layouts of rows in memory: all float32, or with weights or state in fewer bits. See `host.storage` for the shapes.

Columns of a table are views, or are widened, or brought up to date, as they are read.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.initializers import Initializer
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.rounding import plane_formats, rounding_key
from hostdev.host.storage import Shape, Storage, taken
from hostdev.kernels import eight_bits, rounding
from hostdev.kernels.arrays import AnyIds, Positions, Rows, identity
from hostdev.kernels.bfloat16 import require_exact, round_into, round_rows
from hostdev.kernels.bits import copy_to_columns
from hostdev.kernels.eight_bits import Codes, decode_rows
from hostdev.kernels.init import fill_constant
from hostdev.kernels.lookup import lookup_tasks, store_tasks
from hostdev.kernels.plane_formats import BFLOAT16, FLOAT32, UNSIGNED_8, plane_bytes
from hostdev.kernels.pool import Task
from hostdev.kernels.rounding import SplitRows
from hostdev.kernels.shards import get_inverse

_READ_ONLY = (
    "this is a read-only view of a table, which does not see writes to it; change the table's values within "
    "`with table.writing() as w:`, for example w.weights[...] = values"
)
_FILLED = 1 << 20  # rows of a rank's part that are filled at a time
_FILLED_BYTES = 1 << 26  # bytes of float32 weights that are filled and rounded at a time


class ReadOnlyRows(np.ndarray[Any, np.dtype[np.float32]]):
    """A read-only view of a table; writing to it raises ValueError that says how to write. Results are plain arrays."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self._require_writeable()
        super().__setitem__(key, value)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        for one in (*kwargs.get("out", ()), *(inputs[:1] if method == "at" else ())):
            if isinstance(one, ReadOnlyRows):
                one._require_writeable()
        given = [_plain(one) for one in inputs]
        if "out" in kwargs:
            kwargs["out"] = tuple(map(_plain, kwargs["out"]))
        return getattr(ufunc, method)(*given, **kwargs)

    def __reduce__(self) -> Any:
        return _plain(self).__reduce__()  # readable without this class

    def _require_writeable(self) -> None:
        if not self.flags.writeable:
            raise ValueError(_READ_ONLY)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, ReadOnlyRows) else value


class Bfloat16View:
    """A bfloat16 column, [V, D]; indexing by slices or row ids yields float32."""

    def __init__(self, bits: npt.NDArray[np.uint16]) -> None:
        self._bits = bits
        self.shape = bits.shape

    def __len__(self) -> int:
        return len(self._bits)

    def __getitem__(self, rows: Any) -> Rows:
        found = self._bits[rows].astype(np.uint32)
        found <<= np.uint32(16)
        widened: Rows = found.view(np.float32)
        return widened


class EightBitView:
    """An 8-bit slot (`kernels.eight_bits`), uint8 [V, P]; indexing by slices or row ids yields float32 [any, D]."""

    def __init__(self, planes: Codes, dim: int, unsigned: bool) -> None:
        self._planes, self._unsigned = planes, unsigned
        self.shape = len(planes), dim

    def __len__(self) -> int:
        return len(self._planes)

    def __getitem__(self, rows: Any) -> Rows:
        return decode_rows(self._planes[rows], self.shape[1], self._unsigned)


Read = Callable[[npt.NDArray[Any]], tuple[Rows, Rows]]

_PART_BYTES = 1 << 26  # bytes of rows read at a time


class CurrentColumn:
    """A table's weights, or one column of its state, after the last step; indexing by slices or row ids yields float32.

    Args:
        shape: V, 1 + S, D: of all rows.
        read: Called with ids [N]; returns up-to-date copies of these rows: weights and S state columns, float32
            [N, 1 + S, D], and per-row state, float32 [N, any].
        number: 0 for the weights, 1 .. S for the state columns of D values, then one number for each per-row state.
    """

    def __init__(self, shape: tuple[int, int, int], read: Read, number: int) -> None:
        rows, self._planes, dim = shape
        self._step = max(1, _PART_BYTES // (4 * self._planes * dim))
        self._read, self._number = read, number
        self.shape = rows, dim if number < self._planes else 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Rows:
        ids = np.arange(len(self))[rows] if isinstance(rows, slice) else np.asarray(rows)
        out = np.empty((len(ids), self.shape[1]), np.float32)
        at = self._number - self._planes
        for start in range(0, len(ids), self._step):
            block, row_slots = self._read(ids[start : start + self._step])
            out[start : start + self._step] = block[:, self._number] if at < 0 else row_slots[:, at : at + 1]
        return out


def current_columns(storage: Storage, optimizer: SparseOptimizer, read: Read) -> dict[str, Any]:
    """Return weights and optimizer state by name, after the last step; `read` is as for `CurrentColumn`."""
    names = "weights", *optimizer.slots, *optimizer.row_slots
    return {name: CurrentColumn(storage.shape, read, number) for number, name in enumerate(names)}


def stored_columns(storage: Storage, optimizer: SparseOptimizer) -> dict[str, Any]:
    """Return stored weights and optimizer state by name: arrays, or columns that are widened as they are read."""
    names, row_slots = ("weights", *optimizer.slots), storage.row_slots
    found = {name: storage.column(number) for number, name in enumerate(names)}
    return found | {name: row_slots[:, number : number + 1] for number, name in enumerate(optimizer.row_slots)}


class Float32(Storage):
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
    def _stored(self) -> tuple[Any, ...]:
        return self.block, self.row_slots

    @property
    def _weights(self) -> Rows:
        return self.block

    def _rows_at(self, key: int) -> Rows:
        return self.block

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Storage`."""
        V, planes, D = self.block.shape
        return V, planes, D

    def column(self, number: int) -> Any:
        """See `Storage`."""
        return self.block[:, number]

    def read_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        tasks = lookup_tasks(_flat(self.block)[:, None], ids, _flat(block), positions)
        return tasks + super().read_tasks(ids, block, row_slots, positions)

    def write_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        tasks = store_tasks(_flat(self.block), ids, _flat(block), positions)
        return tasks + super().write_tasks(ids, block, row_slots, positions)

    def copy_to_columns(self, start: int, stop: int, first: int, ids: AnyIds | None, columns: Rows) -> None:
        """See `Storage`."""
        copy_to_columns(start, stop, first, ids, self.block, columns)

    def taken(self, ids: AnyIds) -> Rows:
        """See `Storage`."""
        return taken(self.block, ids)


class Split(Storage):
    """Storage of weights [V, D] and state in separate arrays, each in its format; see `kernels.bfloat16`.

    Weights are float32, or bfloat16 as uint16. The state is float32 or bfloat16, [V, S, D], or 8 bits, uint8 [V, S, P].
    `kernels.bfloat16` rounds new values; its random numbers depend on a row's id in the whole table.

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
    def _stored(self) -> tuple[Any, ...]:
        return self.stored, self.slots, self.row_slots

    @property
    def _weights(self) -> Any:
        return self.stored[:, None]

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Storage`."""
        V, D = self.stored.shape
        return V, 1 + self.slots.shape[1], D

    def column(self, number: int) -> Any:
        """See `Storage`."""
        held = self.slots[:, number - 1] if number else self.stored
        if held.dtype == np.float32:
            return held
        if held.dtype == np.uint16:
            return Bfloat16View(held)
        return EightBitView(held, self.stored.shape[1], bool(self._unsigned[number - 1]))

    def read_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        tasks = rounding.read_tasks(*self._arrays, ids, block, positions)
        return tasks + super().read_tasks(ids, block, row_slots, positions)

    def write_tasks(self, ids: AnyIds, block: Rows, row_slots: Rows, positions: Positions | None) -> list[Task]:
        """See `Storage`."""
        tasks = rounding.write_tasks(*self._arrays, ids, block, positions)
        return tasks + super().write_tasks(ids, block, row_slots, positions)

    def require_exact(self, plane: int, values: Rows) -> None:
        """See `Storage`."""
        require_exact(values, self._name, plane, self._formats[plane])

    def _rows_at(self, key: int) -> SplitRows:
        return SplitRows.of(*self._arrays, key, self._where, self._keys)

    @property
    def _arrays(self) -> tuple[Any, Any, Any]:
        return self.stored, self.slots, self._unsigned

    def copy_to_columns(self, start: int, stop: int, first: int, ids: AnyIds | None, columns: Rows) -> None:
        """See `Storage`."""
        copy_to_columns(start, stop, first, ids, self._weights, columns[:1])
        if self.slots.dtype == np.uint8:
            eight_bits.decode_to_columns(start, stop, first, ids, self.slots, self._unsigned, columns[1:])
        else:
            copy_to_columns(start, stop, first, ids, self.slots, columns[1:])

    def taken(self, ids: AnyIds) -> Rows:
        """See `Storage`."""
        out = np.empty((len(ids), *self.shape[1:]), np.float32)
        rounding.read_here(*self._arrays, ids, out)
        return out


def _allocate(of: Shape, shape: tuple[int, ...], kind: int) -> npt.NDArray[Any]:
    """Return memory for planes in the format `kind`, one of `kernels.bfloat16`; `shape` is [..., D]."""
    dtype: Any = {FLOAT32: np.float32, BFLOAT16: np.uint16}.get(kind, np.uint8)
    if dtype == np.uint8:
        shape = (*shape[:-1], plane_bytes(shape[-1]))
    return of.allocate(shape, dtype)


def _to_bfloat16(values: Rows) -> npt.NDArray[np.uint16]:
    """Return the bits of float32 values that bfloat16 can represent."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _flat(block: Rows) -> Rows:
    return block.reshape(len(block), block.shape[1] * block.shape[2])


def make_layout(name: str, shape: Shape, dtype: str, slots_dtype: str) -> Float32 | Split:
    """Return unfilled storage in memory for a table's rows; `shape` must have been made for the same slots_dtype."""
    formats = plane_formats(dtype, slots_dtype, shape.optimizer)
    return Float32(name, shape) if formats is None else Split(name, shape, formats)
