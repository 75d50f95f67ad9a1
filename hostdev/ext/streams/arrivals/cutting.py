"""Batches of equal size from one file after the other: the rest of a file waits, and begins the next file's batches."""

from collections.abc import Iterator

from hostdev.data.batch import Batch
from hostdev.data.rows import Range, Rows, gathered
from hostdev.ext.streams.arrivals.converting import Converted


class BatchCutter:
    """Cuts files into batches of `size` rows. One thread at a time may use it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranges: list[Range] = []
        self.waiting = 0  # rows that are not in a batch yet

    def steps(self, rows: int) -> int:
        """Return the number of batches that `cut` makes of a file with this many rows."""
        return (self.waiting + rows) // self._size

    def cut(self, file: Converted, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of the rows that wait and of a file's rows from row `first` on; the rest waits."""
        for before, piece in file.read(first):
            rows, start = Rows([piece], None), max(0, first - before)
            while start < len(rows):
                taken = min(self._size - self.waiting, len(rows) - start)
                self._ranges.append((rows, start, start + taken))
                start += taken
                self.waiting += taken
                if self.waiting == self._size:
                    yield self.rest()

    def rest(self) -> Batch:
        """Return the rows that wait, at least one, as a batch; none wait afterwards."""
        ranges, self._ranges, self.waiting = self._ranges, [], 0
        return gathered(ranges, None)


def batches_of(file: Converted, size: int) -> Iterator[Batch]:
    """Yield a file's rows in batches; the last may be smaller."""
    cutter = BatchCutter(size)
    yield from cutter.cut(file)
    if cutter.waiting:
        yield cutter.rest()
