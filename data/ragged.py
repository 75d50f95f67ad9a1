"""Ragged arrays: n lists as N concatenated values and offsets [n + 1]."""

from typing import Any

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


def offsets_of(lengths: npt.NDArray[Any]) -> Offsets:
    """Return the offsets, int64 [n + 1], of concatenated lists with these lengths [n]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def places_of(starts: npt.NDArray[np.int64], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the positions, list by list, of all values of the lists with these starts [n] and lengths [n]."""
    offsets = offsets_of(lengths)
    return np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])


def take(
    values: npt.NDArray[Any], offsets: Offsets, rows: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Return the lists at indices `rows`: their concatenated values, and their lengths, int32 [len(rows)]."""
    starts = offsets[rows]
    lengths = (offsets[rows + 1] - starts).astype(np.int32)
    return values[places_of(starts, lengths)], lengths
