"""Pooling of rows into bags and summation of gradients per row, for several features that share the rows.

A bag is a list of ids, and each of its ids is an occurrence of a row. In the forward pass, the rows of a bag's
occurrences are summed. In the backward pass, each occurrence of a row adds the gradient of its bag to the row's
gradient, one feature after another. No array with a row per occurrence is built. Each arithmetic operation is rounded
once.

Shapes: N occurrences of a feature in B bags, U unique rows, D columns.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Positions, Rows, Strided, scratch
from hostdev.kernels.bfloat16 import as_stored, to_float32
from hostdev.kernels.jit import kernel, prefetch_to_read, prefetch_to_write
from hostdev.kernels.pool import Task, get_grain, host_threads, parallel_for, run_tasks, tasks_over
from hostdev.kernels.segment import prepare_sums, row_ranges, sort_uses, streams, sum_part, sum_scalar_part, sum_sorted

_ROWS_AHEAD, _SUMS_AHEAD = 16, 12  # prefetch distances in occurrences


class FeatureOccurrences(NamedTuple):
    """The occurrences of one feature.

    Attributes:
        inverse: int32 [N], the index of each occurrence's row among the unique rows.
        offsets: int32 [B + 1]: bag b has the occurrences [offsets[b], offsets[b + 1]); None if the feature has no bags.
        weights: float32 [N], the weight of each occurrence, or None if all weights are 1.
        mean: Whether each bag's sum is divided by the number of its occurrences.
    """

    inverse: Positions
    offsets: Positions | None = None
    weights: npt.NDArray[np.float32] | None = None
    mean: bool = False


@kernel
def _pool(start, stop, rows, inverse, offsets, weights, mean, out, first, step):
    D, one = rows.shape[1], np.uint64(1)
    sums = np.empty(D, np.float32)
    last = np.uint64(offsets[stop])
    for b in range(np.uint64(start), np.uint64(stop)):
        begin, end = np.uint64(offsets[b]), np.uint64(offsets[b + one])
        if begin == end:
            sums[:] = np.float32(0)
        for i in range(begin, end):
            if i + np.uint64(_ROWS_AHEAD) < last:
                prefetch_to_read(rows, inverse[i + np.uint64(_ROWS_AHEAD)], D * 4)
            row = rows[np.uint64(inverse[i])]
            weight = np.float32(1) if weights is None else weights[i]
            if i == begin:
                for j in range(D):
                    sums[j] = row[j] * weight
            else:
                for j in range(D):
                    sums[j] += row[j] * weight
        to = out[np.uint64(first) + b * np.uint64(step)]
        if mean and begin < end:
            n = np.float32(end - begin)
            for j in range(D):
                sums[j] /= n
        for j in range(D):
            to[j] = as_stored(to, sums[j])


@kernel
def _pool_scalars(start, stop, rows, inverse, offsets, weights, mean, out, first, step):
    """Do the same as `_pool`, for D = 1."""
    one, column = np.uint64(1), np.uint64(0)
    last = np.uint64(offsets[stop])
    for b in range(np.uint64(start), np.uint64(stop)):
        begin, end = np.uint64(offsets[b]), np.uint64(offsets[b + one])
        total = np.float32(-0.0) if begin < end else np.float32(0)
        for i in range(begin, end):
            if i + np.uint64(_ROWS_AHEAD) < last:
                prefetch_to_read(rows, inverse[i + np.uint64(_ROWS_AHEAD)], 4)
            value = rows[np.uint64(inverse[i]), column]
            total += value if weights is None else np.float32(value * weights[i])
        if mean and begin < end:
            total /= np.float32(end - begin)
        to = out[np.uint64(first) + b * np.uint64(step)]
        to[column] = as_stored(to, total)


def pool_tasks(rows: Rows, feature: FeatureOccurrences, out: Strided) -> list[Task]:
    """Return the work of `pool` as tasks, so that one `run_tasks` can run it together with other tasks.

    `out` has one row per bag.
    """
    inverse, offsets, weights, mean = feature
    assert offsets is not None
    B = len(offsets) - 1
    pool_bags = _pool_scalars if rows.shape[1] == 1 else _pool
    grain = get_grain(rows.strides[0] * max(1, len(inverse) // max(1, B)))
    return tasks_over(pool_bags, B, rows, inverse, offsets, weights, mean, *out, grain=grain)


def pool(rows: Rows, feature: FeatureOccurrences, out: npt.NDArray[Any]) -> None:
    """Write, for each bag, the sum (or mean) of its rows times weights, added in order of occurrence.

    An empty bag yields 0.

    Args:
        rows: float32 [U, D].
        feature: The feature, which must have bags.
        out: float32 [B, D], or bfloat16 as uint16 [B, D], written; bfloat16 is rounded once, after the additions.
    """
    run_tasks(pool_tasks(rows, feature, Strided(out)))


@kernel
def _add_bags(start, stop, seen, grads, first, step, inverse, offsets, weights, mean, out):
    """Add the gradients of the bags [start, stop) to the sums of their rows.

    `segment.sum_part` describes `seen` and the returned value. The gradient of each bag is read only once.
    """
    first, step = np.uint64(first), np.uint64(step)
    D, seen, one = grads.shape[1], np.uint64(seen), np.uint64(1)
    grad = np.empty(D, np.float32)
    last = np.uint64(offsets[stop])
    for b in range(np.uint64(start), np.uint64(stop)):
        begin, end, stored = np.uint64(offsets[b]), np.uint64(offsets[b + one]), grads[first + b * step]
        for j in range(D):
            grad[j] = to_float32(stored[j])
        if mean and begin < end:
            n = np.float32(end - begin)
            for j in range(D):
                grad[j] /= n
        for i in range(begin, end):
            if i + np.uint64(_SUMS_AHEAD) < last:
                prefetch_to_write(out, inverse[i + np.uint64(_SUMS_AHEAD)], D * 4)
            row = np.uint64(inverse[i])
            total = out[row]
            weight = np.float32(1) if weights is None else weights[i]
            if row == seen:
                seen += one
                for j in range(D):
                    total[j] = grad[j] * weight
            else:
                for j in range(D):
                    total[j] += grad[j] * weight
    return seen


@kernel
def _add_scalar_bags(start, stop, seen, grads, first, step, inverse, offsets, weights, mean, out):
    """Do the same as `_add_bags`, for D = 1."""
    seen, one, column = np.uint64(seen), np.uint64(1), np.uint64(0)
    first, step = np.uint64(first), np.uint64(step)
    for b in range(np.uint64(start), np.uint64(stop)):
        begin, end, grad = (
            np.uint64(offsets[b]),
            np.uint64(offsets[b + one]),
            to_float32(grads[first + b * step, column]),
        )
        if mean and begin < end:
            grad /= np.float32(end - begin)
        for i in range(begin, end):
            row = np.uint64(inverse[i])
            term = np.float32(grad if weights is None else grad * weights[i])
            if row == seen:
                seen += one
                out[row, column] = term
            else:
                out[row, column] += term
    return seen


@kernel
def _divide(start, stop, grads, first, step, offsets, out):
    first, step = np.uint64(first), np.uint64(step)
    for b in range(np.uint64(start), np.uint64(stop)):
        grad, to, n = grads[first + b * step], out[b], np.float32(max(1, offsets[b + np.uint64(1)] - offsets[b]))
        for j in range(len(to)):
            to[j] = to_float32(grad[j]) / n


@kernel
def _fill_bags(start, stop, offsets, bags):
    for b in range(np.uint64(start), np.uint64(stop)):
        bags[np.uint64(offsets[b]) : np.uint64(offsets[b + np.uint64(1)])] = b


class _Sorted(NamedTuple):
    order: Positions  # [N], the occurrences sorted by row
    ends: npt.NDArray[np.int64]  # [U + 1]; row u has order[ends[u] : ends[u + 1]]
    bags: Positions | None  # [N], the bag of each occurrence


class Uses:
    """The occurrences of U rows in several features.

    The occurrences are sorted at most once, even if gradients are summed for several tables that use the same ids.

    Args:
        features: The features that share the rows.
        rows: U, the number of rows.
        in_order: Whether each row occurs, and the rows are numbered in order of first occurrence, one feature after
            another.
    """

    def __init__(self, features: Sequence[FeatureOccurrences], rows: int, *, in_order: bool = True) -> None:
        self.features, self.rows, self.in_order = features, rows, in_order

    def sum(self, grads: Sequence[Strided], out: Rows) -> None:
        """Write the sum of each row's gradients; they are added one feature after another, in order of occurrence.

        Args:
            grads: For each feature, the gradients of its B bags, or of its N occurrences if it has no bags. Each
                gradient is a row of an array [any, D], float32, or bfloat16 as uint16.
            out: float32 [U, D], written: the sums; -0 for a row that does not occur.
        """
        if streams() or not len(out):
            self.stream(grads, out)
            return
        found = self._sorted
        arguments = []
        for number, (feature, grad, by_row) in enumerate(zip(self.features, grads, found, strict=True)):
            if feature.mean and feature.offsets is not None:
                bags = len(feature.offsets) - 1
                divided = scratch(f"gradients of means {number}", (bags, out.shape[1]))
                grain = get_grain(divided.strides[0])
                parallel_for(_divide, bags, *grad, feature.offsets, divided, grain=grain)
                grad = Strided(divided)
            arguments.append((*grad, by_row.order, by_row.ends, by_row.bags, feature.weights, number == 0, out))

        def sum_rows(start: int, stop: int) -> None:
            for some in arguments:
                sum_sorted(start, stop, *some)

        ends = found[0].ends if len(found) == 1 else np.sum([by_row.ends for by_row in found], 0)
        run_tasks([(sum_rows, start, stop, ()) for start, stop in row_ranges(ends)])

    def stream(self, grads: Sequence[Strided], out: Rows) -> None:
        """Do the same as `sum`, using only this thread."""
        seen = prepare_sums(out, self.in_order)
        for feature, grad in zip(self.features, grads, strict=True):
            seen = _stream(feature, grad, seen, out)

    @cached_property
    def _sorted(self) -> list[_Sorted]:
        found: list[_Sorted] = []
        for inverse, offsets, _, _ in self.features:
            order, ends = np.empty(len(inverse), np.int32), np.empty(self.rows + 2, np.int64)
            found.append(_Sorted(order, ends, None if offsets is None else np.empty(len(inverse), np.int32)))
        run_tasks([(self._sort, f, f + 1, (found,)) for f in range(len(found))])
        return [by_row._replace(ends=by_row.ends[:-1]) for by_row in found]

    def _sort(self, start: int, stop: int, found: list[_Sorted]) -> None:
        for feature, by_row in zip(self.features[start:stop], found[start:stop], strict=True):
            sort_uses(feature.inverse, by_row.ends, by_row.order)
            if feature.offsets is not None:
                _fill_bags(0, len(feature.offsets) - 1, feature.offsets, by_row.bags)


def sum_many(calls: Sequence[tuple[Uses, Sequence[Strided], Rows]]) -> None:
    """Call `uses.sum(grads, out)` for each item (uses, grads, out) of `calls`.

    If there are at least as many calls as threads, each call uses only one thread.
    """
    if len(calls) < max(2, host_threads()):
        for uses, grads, out in calls:
            uses.sum(grads, out)
        return

    def stream(start: int, stop: int) -> None:
        for uses, grads, out in calls[start:stop]:
            uses.stream(grads, out)

    run_tasks([(stream, number, number + 1, ()) for number in range(len(calls))])


def _stream(feature: FeatureOccurrences, grads: Strided, seen: Any, out: Rows) -> Any:
    """Add the gradients of a feature's occurrences to the sums in `out`.

    `segment.sum_part` describes `seen` and the returned value.
    """
    inverse, offsets, weights, mean = feature
    if offsets is not None:
        add_bags = _add_scalar_bags if out.shape[1] == 1 else _add_bags
        return add_bags(0, len(offsets) - 1, seen, *grads, inverse, offsets, weights, mean, out)
    part = sum_scalar_part if out.shape[1] == 1 else sum_part
    return part(0, len(inverse), seen, *grads, inverse, weights, out)


def sum_uses(
    features: Sequence[FeatureOccurrences], grads: Sequence[npt.NDArray[Any]], out: Rows, *, in_order: bool = True
) -> None:
    """Sum gradients as `Uses.sum` does, for a single table; `grads` has one array of gradients per feature."""
    Uses(features, len(out), in_order=in_order).sum([Strided(grad) for grad in grads], out)
