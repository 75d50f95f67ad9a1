"""The memory of frames: reserved for more of them than the budget has, and taken when they are used."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.memory import free_addresses
from hostdev.host.disk.readers import Planes
from hostdev.host.disk.sizes import MemorySize
from hostdev.kernels import frames
from hostdev.kernels.buffers import reserved

_ADDRESSES_OF = 4  # under `ulimit -v`, frames beyond the budget reserve at most a quarter of the addresses left


class FrameArrays(NamedTuple):
    """What is known of frames, each [M], see `kernels.frames`; `keys` are their rows' keys, `planes` their rows."""

    keys: npt.NDArray[np.int64]
    row_of: npt.NDArray[np.int64]
    pins: npt.NDArray[np.int32]
    saved: npt.NDArray[np.int64]
    state: npt.NDArray[np.uint8]
    free: npt.NDArray[np.int32]
    planes: Planes


def reserve_frames(
    count: int, size: MemorySize, allocate: Callable[[int, npt.NDArray[np.int64]], Planes]
) -> FrameArrays:
    """Reserve at least `count` frames, all of which are free, and as many as the table has rows if addresses allow it.

    Raises MemoryError if the system refuses the addresses for `count` frames.
    """
    left = free_addresses()
    most = size.rows if left is None else min(size.rows, count + left // _ADDRESSES_OF // size.frame_bytes)
    try:
        return _reserve(most, count, allocate)
    except MemoryError:
        return _reserve(count, count, allocate)


def _reserve(most: int, count: int, allocate: Callable[[int, npt.NDArray[np.int64]], Planes]) -> FrameArrays:
    dtypes = np.int64, np.int64, np.int32, np.int64, np.uint8, np.int32
    keys, row_of, pins, saved, state, free = (reserved((most,), dtype) for dtype in dtypes)
    row_of[:count] = frames.FREE
    found: Any = keys, row_of, pins, saved, state, free, allocate(most, keys)
    return FrameArrays(*found)
