"""Series that are shortened to a bounded number of points, without the loss of their extremes."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_POINTS = 400

Values = npt.NDArray[np.float64]


class Series(NamedTuple):
    """Consecutive values in groups: each group's middle position, mean, least and greatest value, float64 [groups]."""

    at: Values
    mean: Values
    low: Values
    high: Values
    group: int  # most values in a group


def shorten(values: Values, most: int = MOST_POINTS) -> Series:
    """Return the finite values, at positions 1, 2, ..., in at most `most` groups of equally many positions.

    Args:
        values: float64 [n].
    """
    group = max(1, -(-len(values) // most))
    positions = np.flatnonzero(np.isfinite(values))
    kept, groups = values[positions], positions // group
    starts = np.flatnonzero(np.concatenate([np.ones(len(groups[:1]), np.bool_), groups[1:] != groups[:-1]]))
    if not len(starts):
        none = np.empty(0)
        return Series(none, none, none, none, group)
    counts = np.diff([*starts, len(kept)])
    at = np.add.reduceat(positions + 1.0, starts) / counts
    mean = np.add.reduceat(kept, starts) / counts
    return Series(at, mean, np.minimum.reduceat(kept, starts), np.maximum.reduceat(kept, starts), group)
