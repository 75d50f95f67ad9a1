"""Views of a host table's columns that are stored in fewer than 32 bits; reading a view yields float32."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.eight_bits import Codes, decode_rows

Rows = npt.NDArray[np.float32]


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
