"""Columns of a host table: views, and columns that are widened, or brought up to date, as they are read."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.optimizers import SparseOptimizer
from hostdev.host.storage import Storage
from hostdev.kernels.arrays import Rows
from hostdev.kernels.eight_bits import Codes, decode_rows

_READ_ONLY = (
    "this is a read-only view of a table, which does not see writes to it; change the table's values within "
    "`with table.writing() as w:`, for example w.weights[...] = values"
)


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
