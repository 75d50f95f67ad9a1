"""The number of rows of a table on disk that fit in an amount of memory."""

from typing import NamedTuple

import numpy as np

from hostdev.kernels.disk_records import Format

FRAME_BYTES = 32  # memory of a frame beside its row
_BUFFERS_OF = 16  # buffers for writing take at most one part in 16 of the memory
LEAST_BUFFERS = 4
_SPARE_BATCHES = 4  # rows of so many batches are in memory although the plan does not keep them
_RESERVED_OF = 8  # one frame in 8 is for reads and writes outside of the pipeline


class MemorySize(NamedTuple):
    """What determines how many rows fit: V rows, their bytes in memory, and the format of their records."""

    rows: int
    row_bytes: int
    format: Format

    @property
    def frame_bytes(self) -> int:
        """Memory of a row in memory."""
        return self.row_bytes + FRAME_BYTES

    @property
    def least_bytes(self) -> int:
        """Memory that suffices for the buffers and for some rows."""
        return LEAST_BUFFERS * self.format.chunk_bytes + 1024 * self.frame_bytes

    def count_buffers(self, nbytes: int) -> int:
        """Return how many chunks are in buffers."""
        return max(nbytes // _BUFFERS_OF // self.format.chunk_bytes, LEAST_BUFFERS)

    def count_frames(self, nbytes: int) -> int:
        """Return how many rows fit in `nbytes` of memory; less than 1 if the buffers do not."""
        buffers = self.count_buffers(nbytes) * self.format.chunk_bytes
        return min(self.rows, (nbytes - buffers) // self.frame_bytes)

    def get_bytes(self, batch: int) -> int:
        """Return memory in which the pipeline has room for `batch` of the rows at once, as in any larger memory."""
        frames = min(self.rows, -(-batch * _RESERVED_OF // (_RESERVED_OF - 1))) * self.frame_bytes
        in_buffers = -(-frames // (_BUFFERS_OF - 1))
        return frames + max(in_buffers, LEAST_BUFFERS * self.format.chunk_bytes)


def count_most(frames: int, rows: int) -> int:
    """Return how many of `frames` the pipeline may use; all of them if all rows of the table have one."""
    return frames if frames == rows else frames - frames // _RESERVED_OF


def count_kept(frames: int, rows: int, batch: int) -> int:
    """Return how many rows the planner of a tier with so many frames keeps, if a batch has `batch` rows."""
    return frames if frames == rows else max(frames // 2, frames - _SPARE_BATCHES * batch)


def get_location_bytes(rows: int) -> int:
    """Return the bytes of memory for each of a table's rows, to know where it is."""
    return 4 if 3 * rows < np.iinfo(np.int32).max else 8  # with dead records, positions may be twice the rows
