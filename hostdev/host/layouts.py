"""Layouts of rows in memory: all float32, or with weights or state in fewer bits. See `host.storage` for the shapes.

A column of a table is a view, or an object that computes float32 values when it is read: it widens the stored values,
or applies the steps that the rows have missed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.rounding import rounding_key
from hostdev.host.storage import COPIED_BYTES, ReadColumn, RowFormat, RowIds, Storage, taken
from hostdev.kernels import eight_bits, rounding
from hostdev.kernels.arrays import AnyIds, Positions, Rows, aligned_empty, interleave, reserved
from hostdev.kernels.bfloat16 import require_exact, round_into
from hostdev.kernels.bits import copy_to_columns
from hostdev.kernels.eight_bits import decode_rows
from hostdev.kernels.init import fill_constant
from hostdev.kernels.lookup import lookup_tasks, store_tasks
from hostdev.kernels.plane_formats import BFLOAT16, FLOAT32, UNSIGNED_8, plane_bytes
from hostdev.kernels.pool import Task, run_tasks
from hostdev.kernels.rounding import SplitRows
from hostdev.kernels.shards import get_inverse

_READ_ONLY = (
    "this is a read-only view of a table, which would not notice a write to it; change the table's values within "
    "`with table.writing() as w:`, for example w.weights[...] = values"
)
_FILLED = 1 << 20  # rows of a rank's part that are filled at a time
_FILLED_BYTES = 1 << 26  # bytes of float32 weights that are filled and rounded at a time


class ReadOnlyRows(np.ndarray[Any, np.dtype[np.float32]]):
    """A read-only view of a table; assignments and in-place arithmetic raise a ValueError that says how to write.

    Results of arithmetic are ordinary arrays.
    """

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
        return _plain(self).__reduce__()  # a pickle can then be loaded without this class

    def _require_writeable(self) -> None:
        if not self.flags.writeable:
            raise ValueError(_READ_ONLY)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, ReadOnlyRows) else value


def _widen(bits: npt.NDArray[np.uint16]) -> Rows:
    """Return bfloat16 values as float32."""
    found = bits.astype(np.uint32)
    found <<= np.uint32(16)
    widened: Rows = found.view(np.float32)
    return widened


Read = Callable[[npt.NDArray[Any]], tuple[Rows, Rows]]


def current_columns(storage: Storage, read: Read) -> dict[str, Any]:
    """Return weights and optimizer state by name, after the last step; indexing by slices or row ids yields float32.

    Args:
        storage: The rows.
        read: Called with ids [N]; returns up-to-date copies of these rows: weights and S state columns, float32
            [N, 1 + S, D], and per-row state, float32 [N, any].
    """
    rows, planes, dim = storage.shape
    step = max(1, COPIED_BYTES // (4 * planes * dim))

    def get(number: int, width: int, chosen: Any) -> Rows:
        ids = np.arange(rows)[chosen] if isinstance(chosen, slice) else np.asarray(chosen)
        out = np.empty((len(ids), width), np.float32)
        for start in range(0, len(ids), step):
            block, row_slots = read(ids[start : start + step])
            at = number - planes
            out[start : start + step] = block[:, number] if at < 0 else row_slots[:, at : at + 1]
        return out

    widths = [dim if number < planes else 1 for number in range(len(storage.names))]
    return {
        name: ReadColumn(rows, width, partial(get, number, width))
        for number, (name, width) in enumerate(zip(storage.names, widths, strict=True))
    }


def _allocate(index: RowIds, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Return uninitialized memory for values of all rows; for a table by key, the memory is only reserved."""
    found: npt.NDArray[Any] = aligned_empty(shape, dtype) if index.keys is None else reserved(shape, dtype)
    return interleave(found)


def _fill_row_slots(format_: RowFormat, row_slots: Rows) -> None:
    """Write the initial per-row state."""
    if len(values := format_.row_slots):
        fill_constant(row_slots[:, :, None], values[0], values[1:])


class Float32(Storage):
    """Storage of each row's weights and optimizer state side by side: block float32 [V, 1 + S, D]."""

    def __init__(self, format_: RowFormat, rows: int, index: RowIds) -> None:
        self.format, self._index = format_, index
        self.block: Rows = _allocate(index, (rows, 1 + len(format_.slots), format_.dim))
        self.row_slots = _allocate(index, (rows, len(format_.row_slots)))

    def fill(self) -> None:
        """See `Storage`."""
        how, rows = self.format, len(self.block)
        if not self._index.is_part:
            how.init.fill(self.block, how.seed, how.name, how.slots)
        else:
            for first in range(0, rows, _FILLED):
                ids = self._index.between(first, min(rows, first + _FILLED))
                how.init.fill(self.block[first : first + _FILLED], how.seed, how.name, how.slots, ids=ids)
        _fill_row_slots(how, self.row_slots)

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

    def plane(self, number: int) -> Any:
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
    """Storage of weights [V, D] and state in separate arrays, each in its format; see `kernels.plane_formats`.

    Weights are float32, or bfloat16 as uint16. The state is float32 or bfloat16, [V, S, D], or 8 bits, uint8 [V, S, P],
    where P is `plane_bytes(D)`. New values are rounded as in `kernels.bfloat16`, with random numbers that depend on a
    row's id in the whole table.

    Args:
        format_: How rows are stored.
        rows: V.
        index: The rows' ids or keys.
    """

    def __init__(self, format_: RowFormat, rows: int, index: RowIds) -> None:
        assert format_.planes is not None
        self.format, self._index, formats, dim = format_, index, format_.planes, format_.dim
        self._unsigned = np.array([kind == UNSIGNED_8 for kind in formats[1:]], np.uint8)
        self._where = (index.first, get_inverse(index.total), index.total) if index.is_part else (0, 0, index.total)
        self._keys = np.zeros(0, np.int64) if index.keys is None else index.keys
        S = len(format_.slots)
        self.stored = _allocate_planes(index, (rows, dim), formats[0])
        self.slots = _allocate_planes(index, (rows, S, dim), formats[-1] if S else FLOAT32)
        self.row_slots = _allocate(index, (rows, len(format_.row_slots)))

    def fill(self) -> None:
        """See `Storage`."""
        how, (rows, dim) = self.format, self.stored.shape
        step = max(1, _FILLED_BYTES // (4 * dim))
        weights, none = np.empty((min(step, rows), 1, dim), np.float32), np.empty(0, np.float32)
        for first in range(0, rows, step):
            part = weights[: min(step, rows - first)]
            where: dict[str, Any] = {"first_row": first}
            if self._index.is_part:
                where = {"ids": self._index.between(first, first + len(part))}
            how.init.fill(part, how.seed, how.name, none, **where)
            stored = self.stored[first : first + len(part)]
            if stored.dtype == np.float32:
                stored[:] = part[:, 0]
            else:
                round_into(part, stored, rounding_key(how.seed, how.name, 0), **where)
        if self.slots.dtype == np.uint8:
            eight_bits.fill(self.slots, how.slots, dim, self._unsigned)
        elif len(how.slots):
            is_float32, bits = self.slots.dtype == np.float32, how.slots.view(np.uint32)
            values: Any = how.slots if is_float32 else (bits >> np.uint32(16)).astype(np.uint16)  # without rounding
            fill_constant(self.slots, values[0], values[1:])
        _fill_row_slots(how, self.row_slots)

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

    def plane(self, number: int) -> Any:
        """See `Storage`."""
        held = self.slots[:, number - 1] if number else self.stored
        if held.dtype == np.float32:
            return held
        rows, dim = self.stored.shape
        if held.dtype == np.uint16:
            return ReadColumn(rows, dim, lambda chosen: _widen(held[chosen]))
        is_unsigned = bool(self._unsigned[number - 1])
        return ReadColumn(rows, dim, lambda chosen: decode_rows(held[chosen], dim, is_unsigned))

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
        assert self.format.planes is not None
        require_exact(values, self.format.name, plane, self.format.planes[plane])

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


def _allocate_planes(index: RowIds, shape: tuple[int, ...], kind: int) -> npt.NDArray[Any]:
    """Return memory for planes in the format `kind`, one of `kernels.plane_formats`; `shape` is [..., D]."""
    dtype: Any = {FLOAT32: np.float32, BFLOAT16: np.uint16}.get(kind, np.uint8)
    if dtype == np.uint8:
        shape = (*shape[:-1], plane_bytes(shape[-1]))
    return _allocate(index, shape, dtype)


def _flat(block: Rows) -> Rows:
    return block.reshape(len(block), block.shape[1] * block.shape[2])


def make_layout(format_: RowFormat, rows: int, index: RowIds) -> Float32 | Split:
    """Return unfilled storage in memory for a table's rows; `index` has their ids or keys."""
    return (Float32 if format_.planes is None else Split)(format_, rows, index)


def fill_rows(storage: Float32 | Split, rows: Positions, ids: AnyIds) -> None:
    """Write the initial values of ids or keys [N] to rows [N] of a storage."""
    for part, block, row_slots in storage.format.initial(ids):
        run_tasks(storage.write_tasks(rows[part], block, row_slots, None))
