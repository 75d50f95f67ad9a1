"""The kernels of `planner`: what is known of rows and coming batches, what a row is worth, who enters and leaves.

V rows, C slots, U unique ids of a batch. All that is known of a row lies in one cache line:

    rows    int32 [V, width / 4]: the last announced batch that uses the row; a bit for each of the 32 batches up to
            that one, bit k for the one k before it; the row's slot or -1; its uses in all batches announced so far;
            the others for `coming`
    coming  uint8 [V, width], a view of `rows`: from byte 16 on a ring of R batches, how often each uses the row, as a
            code of 8 bits: exact below 16, above in steps of 1/8 to 1/16

A row is worth a key of 12 bits, 64 steps an octave, so that ranks come from a histogram. The lookahead key is the
density of a row's next use: its uses in the next batch that has it, over the number of batches until then. To keep a
row from one use to the next takes a slot for that long and spares that many misses, so by the linear program of offline
caching an interval is worth keeping if its density is above the price of a slot. Belady's rule, the nearest next use
first, is the same with every batch counting one use.

Sources: Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal 5 (1966);
Berger, Beckmann & Harchol-Balter, "Practical Bounds on Optimal Caching with Variable Object Sizes", SIGMETRICS 2018
(intervals as flow); Albers, Arora & Khanna, "Page Replacement for General Caching Problems", SODA 1999 (the program).
"""

from typing import Any

import numpy as np

from hostdev.kernels.jit import inline, kernel, prefetch_to_read

LOOKAHEAD, LRU, LFU, STATIC = range(4)  # as in `options.POLICIES`

KEYS = 1 << 12
STEPS_PER_OCTAVE = 64
_DROPPED_BITS = 17  # of float32's 23 bits behind the point; 6 are kept
_LOWEST = (127 - 32) << 6  # the key of 2 ** -32
LAST, BEFORE, SLOT, COUNT = range(4)  # of a row
RING = 16  # the byte of a row where its ring begins
_AHEAD = 64  # rows; asked for to be read, a line comes to the second cache, of which more may be on their way
_BLOCK = 256  # rows, which stay in the nearest caches
_MOST_USES = 2**30


@inline
def _key_of(value: Any) -> Any:
    """Return the key of a float32 of at least 0; 0 for 0."""
    steps: Any = np.int64(np.float32(value).view(np.uint32)) >> _DROPPED_BITS
    return np.uint16(min(max(steps - _LOWEST, 0), KEYS - 1))


@inline
def _encode(uses: Any) -> Any:
    """Uses in 8 bits: below 16 as they are, above as a float32's exponent and first 3 bits."""
    steps: Any = np.int64(np.float32(uses).view(np.uint32)) >> 20
    return np.uint8(uses if uses < 16 else steps - 1032)


@inline
def _decode(code: Any) -> Any:
    step: Any = max(np.int64(code) - 16, 0)
    return np.int32(code if code < 16 else (8 + (step & 7)) << ((step >> 3) + 1))


@kernel
def densities(keys: Any) -> None:
    """Write the key of each next use, uint16 [1 + most batches ahead, 256]: so many ahead, with uses of that code."""
    keys[0] = 0
    for ahead in range(1, len(keys)):
        for code in range(256):
            keys[ahead, code] = _key_of(np.float32(_decode(code)) / np.float32(ahead))


@inline
def _next_use(rows: Any, row: Any, number: Any) -> Any:
    """Return how many batches after `number` the next announced one comes that uses the row; 0: none does."""
    later: Any = np.int64(rows[row, LAST]) - np.int64(number)  # batches
    used = np.int64(np.uint32(rows[row, BEFORE])) & ((np.int64(1) << np.int64(max(later, 0))) - 1)
    highest = (np.float64(used).view(np.int64) >> 52) - 1023  # the exponent of a number is the place of its first bit
    return later - highest if used else np.int64(0)


@inline
def _density(ahead: Any, number: Any, ring: Any, coming: Any, row: Any, prices: Any) -> Any:
    """Return the key of the row's next use, `ahead` batches after `number`; 0 for none."""
    place = np.uint64(RING) + (np.uint64(number + ahead) & np.uint64(ring - 1))
    return prices[np.uint64(ahead), np.uint64(coming[row, place])]


@inline
def _frequency(count: Any, rate: Any, far: Any) -> Any:
    """Return the key of a row whose next use is not known.

    count  its uses so far
    rate   1 / number of batches known so far
    far    1 / batches until a use that is not known, at least
    """
    value = np.float32(min(np.float32(max(count, 1)) * rate, far))
    steps: Any = np.int64(value.view(np.uint32)) >> _DROPPED_BITS
    return np.uint16(steps - _LOWEST)  # of 2 ** -31 to 1: no need to look for the ends


@kernel
def announce(
    start: Any, stop: Any, ids: Any, uses: Any, number: Any, ring: Any, kind: Any, rows: Any, coming: Any,
) -> None:  # fmt: skip
    """Take in ids[start:stop] of batch `number`; `ring` is the length of that, a power of two."""
    end, place = np.uint64(stop), np.uint64(RING) + (np.uint64(number) & np.uint64(ring - 1))
    for p in range(np.uint64(start), end):
        if p + np.uint64(_AHEAD) < end:
            prefetch_to_read(rows, ids[p + np.uint64(_AHEAD)], 1)
        row = np.uint64(ids[p])
        gone: Any = min(np.int64(number) - np.int64(rows[row, LAST]), 63)
        before = np.uint64(np.uint32(rows[row, BEFORE])) << np.uint64(gone)
        rows[row, LAST], rows[row, BEFORE] = number, np.uint32(before | np.uint64(1))
        coming[row, place] = _encode(uses[p])
        if kind != STATIC:
            rows[row, COUNT] = min(np.int64(rows[row, COUNT]) + uses[p], _MOST_USES)


@kernel
def classify(
    start: Any, stop: Any, ids: Any, uses: Any, number: Any, ring: Any, kind: Any, rate: Any, far: Any,
    rows: Any, coming: Any, prices: Any,
    hits: Any, hit_slots: Any, missed: Any, keys: Any, histograms: Any, totals: Any, piece: Any,
) -> None:  # fmt: skip
    """Find the slots of ids[start:stop] of batch `number`, and what those are worth that have none.

    rate, far        as `_frequency` takes them
    prices           uint16 [any, 256], by `densities`
    hits, hit_slots  int32 [U], written from `start` on: the positions of ids with a slot, and these; ascending
    missed, keys     int32 and uint16 [U], the same for those without one, and their keys; 0 for one that is to pass by
    histograms       int32 [pieces, KEYS], histograms[piece] added to: how many ids without a slot have each key
    totals           int64 [pieces, 3], written: ids with a slot, their uses, all uses
    """
    histogram, end, block = histograms[piece], np.uint64(stop), np.uint64(_BLOCK)
    choice = np.ones(4, np.uint16)  # 0: nothing speaks for the row, which may go where a slot is free
    h = m = valued = np.uint64(start)
    hit_uses = all_uses = np.int64(0)
    for begin in range(np.uint64(start), end, block):
        for p in range(begin, min(begin + block, end)):
            if p + np.uint64(_AHEAD) < end:
                prefetch_to_read(rows, ids[p + np.uint64(_AHEAD)], 1)
            slot, used = rows[np.uint64(ids[p]), SLOT], np.int64(uses[p])
            hits[h], hit_slots[h], missed[m] = p, slot, p  # what is not so is overwritten by the next
            hit = slot >= 0
            h, m = h + np.uint64(hit), m + np.uint64(not hit)
            hit_uses, all_uses = hit_uses + used * np.int64(hit), all_uses + used
        for i in range(valued, m):
            at = np.uint64(missed[i])
            row = np.uint64(ids[at])
            count = rows[row, COUNT]
            if kind == LOOKAHEAD:
                ahead = _next_use(rows, row, number)
                choice[1], choice[2] = _frequency(count, rate, far), _density(ahead, number, ring, coming, row, prices)
                choice[3] = choice[2]
                key = choice[np.uint64(ahead > 0) << np.uint64(1) | np.uint64(count > uses[at])]
            else:
                key = _key_of(1.0) if kind == LRU else _key_of(count)  # static: more than 0 if it is to be cached
            keys[i] = key
            histogram[np.uint64(key)] += 1
        valued = m
    totals[piece, 0], totals[piece, 1], totals[piece, 2] = np.int64(h) - start, hit_uses, all_uses


@kernel
def score(
    start: Any, stop: Any, slot_ids: Any, number: Any, ring: Any, kind: Any, rate: Any, far: Any,
    rows: Any, coming: Any, prices: Any, first: Any, keys: Any, histograms: Any, piece: Any,
) -> None:  # fmt: skip
    """Write the keys of the rows in slots [start, stop) to keys uint16 from `start` - `first` on, and count them.

    A row goes if a newcomer's key is larger, by the margin.
    """
    histogram, end, choice = histograms[piece], np.uint64(stop), np.empty(2, np.uint16)
    for s in range(np.uint64(start), end):
        if s + np.uint64(_AHEAD) < end:
            prefetch_to_read(rows, slot_ids[s + np.uint64(_AHEAD)], 1)
        row = np.uint64(slot_ids[s])
        if kind == LOOKAHEAD:
            ahead = _next_use(rows, row, number)
            choice[0] = _frequency(rows[row, COUNT], rate, far)
            choice[1] = _density(ahead, number, ring, coming, row, prices)
            key = choice[np.uint64(ahead > 0)]
        elif kind == LRU:
            key = _key_of(np.float32(1) / np.float32(number - rows[row, LAST] + 1))
        else:
            key = _key_of(rows[row, COUNT])
        keys[s - np.uint64(first)] = key
        histogram[np.uint64(key)] += 1


@kernel
def exchanges(newcomers: Any, residents: Any, margin: Any) -> Any:
    """Return how many newcomers take a resident's place: the k-th best one is worth more than the k-th worst resident.

    newcomers  int64 [KEYS], how many have each key; those of key 0 do not enter
    residents  int64 [KEYS]
    margin     steps by which a newcomer must be better
    """
    better, worse = np.int64(KEYS - 1), np.int64(0)
    left, room, count = newcomers[better], residents[worse], np.int64(0)
    while True:
        while left == 0 and better > 1:
            better -= 1
            left = newcomers[better]
        while room == 0 and worse < KEYS - 1:
            worse += 1
            room = residents[worse]
        if left == 0 or room == 0 or better <= worse + margin:
            return count
        pairs = min(left, room)
        left, room, count = left - pairs, room - pairs, count + pairs


@kernel
def worst(threshold: Any, ties: Any, keys: Any, out: Any) -> None:
    """Write the positions of keys below the threshold and of the first `ties` at it, ascending, to out [one more]."""
    count, left = np.uint64(0), np.int64(ties)
    for p in range(np.uint64(0), np.uint64(len(keys))):
        out[count] = p
        tie = (keys[p] == threshold) & (left > 0)
        left -= np.int64(tie)
        count += np.uint64((keys[p] < threshold) | tie)


@kernel
def divide(
    threshold: Any, ties: Any, missed: Any, keys: Any, starts: Any, ends: Any, admitted: Any, passed: Any
) -> None:
    """Write the positions `missed` whose key is above the threshold, with the first `ties` at it, and the others.

    starts, ends      int64 [pieces], of the parts of `missed` and `keys` that count
    admitted, passed  one longer than what is written
    """
    a, m, left = np.uint64(0), np.uint64(0), np.int64(ties)
    for piece in range(len(starts)):
        for i in range(np.uint64(starts[piece]), np.uint64(ends[piece])):
            tie = (keys[i] == threshold) & (left > 0)
            left -= np.int64(tie)
            better = (keys[i] > threshold) | tie
            admitted[a], passed[m] = missed[i], missed[i]
            a, m = a + np.uint64(better), m + np.uint64(not better)


@kernel
def exchange(start: Any, stop: Any, ids: Any, admitted: Any, into: Any, evicted: Any, rows: Any, slot_ids: Any) -> None:
    """Give the slots into[start:stop] to the ids at the positions `admitted`.

    evicted  [E], written: the rows that lose the last E of these slots
    """
    end, free = np.uint64(stop), np.uint64(len(into) - len(evicted))
    for i in range(np.uint64(start), end):
        if i + np.uint64(_AHEAD) < end:
            prefetch_to_read(rows, ids[np.uint64(admitted[i + np.uint64(_AHEAD)])], 1)
            prefetch_to_read(rows, slot_ids[np.uint64(into[i + np.uint64(_AHEAD)])], 1)
        new, slot = ids[np.uint64(admitted[i])], np.uint64(into[i])
        if i >= free:
            old = slot_ids[slot]
            evicted[i - free] = old
            rows[np.uint64(old), SLOT] = -1
        rows[np.uint64(new), SLOT] = into[i]
        slot_ids[slot] = new


@kernel
def take(start: Any, stop: Any, indices: Any, values: Any, out: Any) -> None:
    """out[i] = values[indices[i]]."""
    for i in range(np.uint64(start), np.uint64(stop)):
        out[i] = values[np.uint64(indices[i])]
