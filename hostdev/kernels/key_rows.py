"""Numbers the rows of a batch's keys, where keys without a row share the out-of-vocabulary row of their feature."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel

Rows = npt.NDArray[np.int32]


@kernel
def _number(rows, inverse, ends, unknown, slots, numbers, found):
    """Renumber `inverse` in order of first occurrence; write the rows in this order, and return how many they are.

    Args:
        rows: int32 [U], the row of each unique key, or a negative number.
        inverse: int32 [N], the position of each key among the unique keys; overwritten.
        ends: int64 [F + 1], where each feature's keys begin.
        unknown: int32 [F], the out-of-vocabulary row of each feature.
        slots: int64 [F], the place of each feature's out-of-vocabulary row in `numbers`, from U on.
        numbers: int32 [U + F], all -1.
        found: int32 [U + F], written: the rows.
    """
    count = np.uint64(0)
    for f in range(np.uint64(0), np.uint64(len(unknown))):
        for i in range(np.uint64(ends[f]), np.uint64(ends[f + np.uint64(1)])):
            key = np.uint64(inverse[i])
            row = rows[key]
            place = key if row >= 0 else np.uint64(slots[f])
            number = numbers[place]
            if number < 0:
                number = numbers[place] = count
                found[count] = row if row >= 0 else unknown[f]
                count += np.uint64(1)
            inverse[i] = number
    return np.int64(count)


def number_rows(rows: Rows, inverse: Rows, features: Sequence[npt.NDArray[Any]], unknown: Sequence[int]) -> Rows:
    """Return the distinct rows of a batch in order of first occurrence; renumber `inverse` accordingly, in place.

    Args:
        rows: int32 [U], the row of each unique key; a negative number for a key without a row.
        inverse: int32 [N], the position of each of the batch's keys among the unique keys; afterwards, that of its row.
        features: The keys of each feature, together N; only their lengths are used.
        unknown: The out-of-vocabulary row of each feature.
    """
    if not len(rows) or rows.min() >= 0:
        return rows
    ends = np.array(list(accumulate(map(len, features), initial=0)), np.int64)
    places = {row: len(rows) + number for number, row in enumerate(dict.fromkeys(unknown))}
    numbers = np.full(len(rows) + len(unknown), -1, np.int32)
    found = np.empty(len(numbers), np.int32)
    slots = np.array([places[row] for row in unknown], np.int64)
    count = _number(rows, inverse, ends, np.array(unknown, np.int32), slots, numbers, found)
    return found[:count].copy()
