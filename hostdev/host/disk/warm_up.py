"""Compile the kernels of tables on disk, or load them from numba's cache, before the first step is timed."""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.host.disk.readers import Planes
from hostdev.host.disk.sizes import FRAME_BYTES
from hostdev.host.disk.tier import Tier
from hostdev.kernels.disk_records import Format

_ROWS, _WIDTH, _FRAMES = 4096, 1024, 512  # two chunks of rows, of which some must leave the memory


def warm_up_disk(id_dtype: npt.DTypeLike) -> None:
    """Call each kernel once with row numbers of this dtype, on a small table in a temporary folder.

    If there is no space for it, kernels compile when they are needed.
    """
    with contextlib.suppress(UserError, OSError), tempfile.TemporaryDirectory(prefix="hostdev-warm-up-") as folder:
        _use(Path(folder), id_dtype)


def _use(folder: Path, id_dtype: npt.DTypeLike) -> None:
    format_ = Format.of(_WIDTH, 0)
    nbytes = 4 * format_.chunk_bytes + _FRAMES * (_WIDTH + FRAME_BYTES)

    def allocate(count: int, keys: npt.NDArray[np.int64]) -> Planes:
        del keys
        return Planes.of([np.zeros((count, _WIDTH), np.uint8)])

    functions = allocate, lambda rows: rows, lambda frames, keys: None
    tier = Tier("warm-up", folder, _ROWS, nbytes, _WIDTH, *functions, segment_bytes=0)
    planes = allocate(_FRAMES, np.zeros(0, np.int64))
    for turn in range(3):
        for start in range(0, _ROWS, _FRAMES // 4):
            rows = np.arange(start, start + _FRAMES // 4).astype(id_dtype)
            with tier.held(rows, change=turn != 1):
                tier.find(rows)
            tier.let_go(rows[::2])
            tier.keep(rows[:1])
    tier.copy(np.arange(0, _ROWS, 16).astype(id_dtype), planes, lambda frames, keys: None)
    tier.forget(rows)
    tier.close()
