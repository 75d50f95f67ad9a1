"""Checks and deduplication of a batch's ids, for all table groups at once.

A group is a set of tables that the same features look up. Its ids are the ids of these features, concatenated. The
concatenated array is never built: kernels read the features' arrays by address. One kernel call handles many small
groups, since a call from Python takes longer than processing their ids.
"""

import threading
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.kernels.arrays import AnyIds, Positions, Values, scratch
from hostdev.kernels.hash_table import find_key
from hostdev.kernels.jit import address_of, array_at, kernel
from hostdev.kernels.lookup import first_outside
from hostdev.kernels.pool import parallel_for, ranges, run_tasks
from hostdev.kernels.unique import Dedupe, add_direct, id_range, unique

_LARGE = 1 << 16  # ids; larger groups are deduplicated in parts
_GRAIN = 1 << 14  # ids; fewer are not worth a task
_CHECKED, _FEW = 1 << 16, 4  # ids, features; with more of either, one call checks all ids
_PLACES = 1 << 18  # smaller ids are indices into an array that fits the L2 cache; larger ones are hashed
_MOST = 2**31 - 1  # the most ids of a feature in a batch
_WIDTHS = {np.dtype(np.int32): 4, np.dtype(np.int64): 8}
_own = threading.local()


class _Features(NamedTuple):
    """Addresses of the features' ids, for kernels; the caller must keep the arrays alive."""

    addresses: npt.NDArray[np.int64]  # [F]
    widths: npt.NDArray[np.int64]  # [F], bytes of an id
    ends: npt.NDArray[np.int64]  # [F + 1], where each feature's ids begin among all ids


def _describe_features(features: Sequence[AnyIds]) -> _Features:
    for ids in features:
        if ids.dtype not in _WIDTHS:
            raise TypeError(f"ids must be int32 or int64, not {ids.dtype}")
        if ids.ndim != 1 or not ids.flags.c_contiguous:
            raise ValueError(f"ids must be C-contiguous and have one dimension; these have the shape {ids.shape}")
    addresses = [address_of(ids) for ids in features]
    widths = [_WIDTHS[ids.dtype] for ids in features]
    ends = list(accumulate(map(len, features), initial=0))
    return _Features(*(np.array(values, np.int64) for values in (addresses, widths, ends)))


@kernel
def _check(start, stop, addresses, widths, ends, limits, grain, wrong):
    """Write to wrong[start // grain] whether any of the ids [start, stop) is outside its table.

    An id is inside if it is in [0, limit), where `limits` has the limit of each feature.
    """
    f = np.searchsorted(ends, start, side="right") - 1
    outside = False
    while f < len(addresses) and ends[f] < stop:
        begin, end = max(start, ends[f]), min(stop, ends[f + 1])
        address = addresses[f] + (begin - ends[f]) * widths[f]
        if widths[f] == 4:
            low4, high4 = id_range(array_at(address, end - begin, np.int32))
            outside |= low4 < 0 or high4 >= limits[f]
        else:
            low8, high8 = id_range(array_at(address, end - begin, np.int64))
            outside |= low8 < 0 or high8 >= limits[f]
        f += 1
    wrong[start // grain] = outside


def check_groups(groups: Sequence[tuple[Sequence[AnyIds], int]]) -> tuple[int, int, int] | None:
    """Return (group, feature, position) of the first id that is outside its table, or None if there is none.

    Args:
        groups: For each group, its features' ids, each int32 or int64 [N_f], C-contiguous, and the number of rows of
            its tables.
    """
    features = [ids for group, _ in groups for ids in group]
    described = _describe_features(features)
    n = int(described.ends[-1])
    if len(features) > _FEW or n > _CHECKED:  # else a call per feature is faster
        limits = np.array([rows for group, rows in groups for _ in group], np.int64)
        wrong = np.zeros(n // _CHECKED + 1, np.bool_)
        parallel_for(_check, n, *described, limits, _CHECKED, wrong, grain=_CHECKED)
        if not wrong.any():
            return None
    found = ((g, f, first_outside(ids, rows)) for g, (group, rows) in enumerate(groups) for f, ids in enumerate(group))
    return next((where for where in found if where[2] >= 0), None)


@kernel
def _add_hashed(ids, slots, shift, keys, count, positions):
    """Add ids as `IdMap.add` does, but store only positions in `slots`, which is faster if `keys` fits the cache."""
    for i in range(np.uint64(0), np.uint64(len(ids))):
        slot, position = find_key(ids[i], slots, shift, keys)
        if position < 0:
            slots[slot] = position = count
            keys[np.uint64(count)] = ids[i]
            count += 1
        positions[i] = position
    return count


@kernel
def _unique_small(start, stop, which, firsts, addresses, ends, keys, inverse, counts, places, slots):
    """Deduplicate the ids of each of the groups which[start:stop].

    Args:
        firsts: [G + 1], the number of each group's first feature.
        addresses: [F], the address of each feature's ids.
        ends: [F + 1], where each feature's ids begin among all ids.
        keys: [N + G], written: the unique ids of group g begin at index b + g, where b is the index of the group's
            first id among all ids.
        inverse: int32 [N], written: the position of each id in its group's unique ids.
        counts: [G], written: the number of unique ids of each group.
        places: int32, one item per possible id, for groups with small ids; all items are -1 before and after the call.
        slots: int32, the hash table for other groups; its size is a power of two, at least twice the number of ids of
            the largest group.
    """
    one = np.uint64(1)
    for w in range(np.uint64(start), np.uint64(stop)):
        group = np.uint64(which[w])
        features = range(np.uint64(firsts[group]), np.uint64(firsts[group + one]))
        begin, end = ends[np.uint64(firsts[group])], ends[np.uint64(firsts[group + one])]
        own = keys[np.uint64(begin) + group : np.uint64(end) + group + one]
        low = high = keys.dtype.type(0)
        for f in features:
            low_of, high_of = id_range(array_at(addresses[f], ends[f + one] - ends[f], keys.dtype))
            low, high = min(low, low_of), max(high, high_of)
        direct, count = low >= 0 and high < len(places), np.int64(0)
        bits = np.uint64(1)
        if not direct:
            while one << bits < np.uint64(2 * (end - begin)):
                bits += one
            slots[: one << bits] = -1
        for f in features:
            ids, positions = (
                array_at(addresses[f], ends[f + one] - ends[f], keys.dtype),
                inverse[ends[f] : ends[f + one]],
            )
            if direct:
                count = add_direct(ids, places, own, count, positions)
            else:
                count = _add_hashed(ids, slots[: one << bits], np.uint64(64) - bits, own, count, positions)
        if direct:
            for k in range(np.uint64(0), np.uint64(count)):
                places[np.uint64(own[k])] = -1
        counts[group] = count


def _run_small(start: int, stop: int, which: npt.NDArray[np.int64], most: int, *arguments: Any) -> None:
    if not hasattr(_own, "places"):
        _own.places = np.full(_PLACES, -1, np.int32)
    slots = scratch("slots of ids", (1 << (2 * most).bit_length(),), np.int32)
    _unique_small(start, stop, which, *arguments, _own.places, slots)


def unique_groups(groups: Sequence[Sequence[AnyIds]]) -> list[tuple[AnyIds, Positions]]:
    """Deduplicate the ids of each group as `unique` does, for all groups at once.

    Args:
        groups: For each group, the ids of its features, of which there must be at least one: int32 or int64 [N_f],
            C-contiguous, with the same dtype for all features of a group.

    Returns:
        For each group, its unique ids [U] in order of first occurrence, and the position of each id among the unique
        ids, int32 [N]. The positions of all groups are slices of one array.
    """
    G, features = len(groups), [ids for group in groups for ids in group]
    described = _describe_features(features)
    if G == len(features) == 1:
        return [unique(features[0])]
    addresses, _, ends = described
    firsts = np.array(list(accumulate(map(len, groups), initial=0)), np.int64)
    begins = ends[firsts].tolist()
    inverse = np.empty(begins[-1], np.int32)
    small: dict[np.dtype[Any], list[int]] = {}
    large: dict[int, Dedupe] = {}
    for g, (group, (begin, end)) in enumerate(zip(groups, pairwise(begins), strict=True)):
        if not group or any(ids.dtype != group[0].dtype for ids in group):
            raise ValueError(f"group {g} must have at least one feature, and all its ids must have the same dtype")
        if end - begin < _LARGE:
            small.setdefault(group[0].dtype, []).append(g)
        else:
            large[g] = Dedupe(group, inverse[begin:end], len(large))
    tasks = [task for work in large.values() for task in work.tasks()]  # the longest tasks begin first
    counts, keys = np.zeros(G, np.int64), {}
    for dtype, which in small.items():
        keys[dtype] = scratch(f"unique ids {dtype.char}", (begins[-1] + G,), dtype)  # dtype.name would take 10 us
        sizes = [begins[g + 1] - begins[g] for g in which]
        arguments = (np.array(which), max(sizes), firsts, addresses, ends, keys[dtype], inverse, counts)
        tasks += [(_run_small, start, stop, arguments) for start, stop in _shares(sizes)]
    run_tasks(tasks)
    run_tasks([(_merge, i, i + 1, (list(large.values()),)) for i in range(len(large))])
    run_tasks([task for work in large.values() for task in work.renumber_tasks()])
    out = []
    for g, (group, (begin, end), count) in enumerate(zip(groups, pairwise(begins), counts.tolist(), strict=True)):
        ids = large[g].ids if g in large else keys[group[0].dtype][begin + g : begin + g + count]
        out.append((ids.copy(), inverse[begin:end]))
    return out


def _shares(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Split the groups into ranges with about the same number of ids each; return each range's (start, stop)."""
    ends = list(accumulate(sizes))
    edges = [0, *(bisect_left(ends, stop) + 1 for _, stop in ranges(ends[-1], _GRAIN)), len(sizes)]
    return [(start, stop) for start, stop in pairwise(edges) if start < stop]


def _merge(start: int, stop: int, works: Sequence[Dedupe]) -> None:
    for work in works[start:stop]:
        work.merge()


@kernel
def _offsets(lengths, offsets):
    """Write where each bag begins; return the index of the first negative length (or -1) and the sum of the lengths.

    The sum is capped just above the largest allowed sum, so that it cannot overflow.
    """
    total: Any = np.int64(0)
    negative: Any = np.int64(-1)
    for b in range(len(lengths)):
        offsets[b] = total
        if lengths[b] < 0 and negative < 0:
            negative = b
        total = min(total + min(np.int64(lengths[b]), _MOST + 1), _MOST + 1)
    offsets[len(lengths)] = total
    return negative, total


def offsets_of(lengths: npt.NDArray[Any]) -> Positions:
    """Return where each bag begins and the last bag ends, int32 [B + 1], from the bags' lengths, int32 or int64 [B].

    Raises:
        UserError: A length is negative, or the lengths add up to more than 2**31 - 1.
    """
    offsets = np.empty(len(lengths) + 1, np.int32)
    negative, total = _offsets(lengths, offsets)
    if negative >= 0:
        raise UserError(f"the length of bag {negative} is {lengths[negative]}; it must be 0 or more")
    if total > _MOST:
        raise UserError(
            f"the bag lengths add up to more than {_MOST}, the largest number of ids of one feature in a batch; use "
            "smaller batches"
        )
    return offsets


@kernel
def _count_kept(start, stop, values, offsets, padding, kept):
    for b in range(np.uint64(start), np.uint64(stop)):
        count = np.int32(0)
        for i in range(np.uint64(offsets[b]), np.uint64(offsets[b + np.uint64(1)])):
            count += np.int32(values[i] != padding)
        kept[b] = count


@kernel
def _copy_kept(start, stop, values, weights, offsets, padding, begins, kept_values, kept_weights):
    to = np.uint64(begins[start])
    for i in range(np.uint64(offsets[start]), np.uint64(offsets[stop])):
        if values[i] != padding:
            kept_values[to] = values[i]
            if weights is not None:
                kept_weights[to] = weights[i]
            to += np.uint64(1)


def drop_padding(
    values: AnyIds, lengths: Positions, padding: int, weights: Values | None
) -> tuple[AnyIds, Positions, Values | None]:
    """Return values, lengths and weights without the padding id; if it does not occur, return the same arrays.

    Args:
        values: int32 or int64 [N], the concatenated ids of all bags.
        lengths: int32 [B], the number of ids of each bag.
        padding: The id to drop.
        weights: float32 [N], the weight of each id, or None.

    Raises:
        UserError: A length is negative, or the lengths add up to more than 2**31 - 1.
        ValueError: The lengths do not add up to N, or the number of weights is not N.
    """
    offsets = offsets_of(lengths)
    N, B = len(values), len(lengths)
    if offsets[-1] != N or (weights is not None and len(weights) != N):
        raise ValueError(
            f"the lengths sum to {offsets[-1]}; the number of values ({N}), and of weights, if any, must equal this sum"
        )
    limits = np.iinfo(values.dtype)
    if not limits.min <= padding <= limits.max:
        return values, lengths, weights
    grain = max(1, _GRAIN * B // max(1, N))
    padding = values.dtype.type(padding)
    kept = np.empty(B, np.int32)
    parallel_for(_count_kept, B, values, offsets, padding, kept, grain=grain)
    begins = offsets_of(kept)
    if begins[-1] == N:
        return values, lengths, weights
    kept_values = np.empty(begins[-1], values.dtype)
    kept_weights = None if weights is None else np.empty(begins[-1], np.float32)
    arguments = (values, weights, offsets, padding, begins, kept_values, kept_weights)
    parallel_for(_copy_kept, B, *arguments, grain=grain)
    return kept_values, kept, kept_weights
