"""Durations of any number of calls in bounded memory: exact for up to 65,536 calls, then partly in a histogram."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

EXACT = 1 << 16  # durations, 8 bytes each
_BITS = 7  # log2 of the number of buckets per power of two
_BUCKETS = (63 - _BITS + 1) << _BITS


class Durations:
    """Durations of calls in nanoseconds: up to 65,536 are kept exactly, older ones in a histogram of 57 KiB.

    Count and sum are exact. Percentiles are exact for up to 65,536 calls, and within 0.4% for more. Not thread-safe.
    """

    def __init__(self) -> None:
        self.latest = array("q")  # not yet in the histogram
        self._earlier: npt.NDArray[np.int64] | None = None
        self._count = self._total = 0  # of the durations in the histogram

    def add(self, nanoseconds: int) -> None:
        """Add a call's duration."""
        if len(self.latest) == EXACT:
            values = np.array(self.latest, np.int64)
            self._earlier = _histogram(values) if self._earlier is None else self._earlier + _histogram(values)
            self._count, self._total = self._count + len(values), self._total + int(values.sum())
            self.latest = array("q")
        self.latest.append(nanoseconds)

    @property
    def total(self) -> int:
        """The sum of all durations."""
        return self._total + sum(self.latest)

    def copy(self) -> "Durations":
        """Return an independent copy."""
        made = Durations()
        made.latest = self.latest[:]
        made._earlier, made._count, made._total = self._earlier, self._count, self._total
        return made

    def __len__(self) -> int:
        return self._count + len(self.latest)


def statistics(each: Sequence[Durations]) -> dict[str, Any]:
    """Return the count, total, mean, median and 99th percentile of all durations, in microseconds."""
    latest = [np.array(one.latest, np.int64) for one in each]
    earlier = [one._earlier for one in each if one._earlier is not None]
    us = np.concatenate(latest) / 1e3
    count, total = sum(map(len, each)), float(us.sum())
    if earlier:
        total = sum(one.total for one in each) / 1e3
        p50, p99 = _percentiles(np.sum([*earlier, *map(_histogram, latest)], axis=0), [50, 99])
    else:
        p50, p99 = np.percentile(us, [50, 99]).tolist()
    return {
        "count": count,
        "total_us": round(total, 1),
        "mean_us": round(total / count, 1),
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
    }


def _histogram(nanoseconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count values by their highest eight bits; each value below 256 has its own bucket."""
    values = np.maximum(nanoseconds, 0)
    shift = np.maximum(np.frexp(values.astype(np.float64))[1] - (_BITS + 1), 0)
    buckets = (shift << _BITS) + (values >> shift)
    return np.bincount(np.minimum(buckets, _BUCKETS - 1), minlength=_BUCKETS)


def _percentiles(histogram: npt.NDArray[np.int64], of: list[int]) -> list[float]:
    """Return the percentiles `of` in microseconds, as np.percentile does, with the buckets' midpoints as values."""
    until = np.cumsum(histogram)
    found = []
    for each in of:
        rank = (int(until[-1]) - 1) * each / 100
        low, high = (_middle(int(np.searchsorted(until, at, "right"))) for at in (int(rank), -int(-rank // 1)))
        found.append((low + (high - low) * (rank % 1)) / 1e3)
    return found


def _middle(bucket: int) -> float:
    shift = max(0, (bucket >> _BITS) - 1)
    return float((bucket - (shift << _BITS)) << shift) + ((1 << shift) - 1) / 2
