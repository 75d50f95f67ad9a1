"""Views of a host table's columns that are stored in fewer than 32 bits; reading a view yields float32."""

from typing import Any

import numpy as np
import numpy.typing as npt

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
