"""The kernels of `planner`: what is known of rows and coming batches, what a row is worth, who enters and leaves.

V rows, C slots, U unique ids of a batch, W batches ahead. The fields of a row or a slot lie in one cache line:

    rows   int32 [V, 4]: its slot or -1; the last announced batch that has it, and the position there; its uses so far
    slots  int32 [C, 4]: the next announced batch that uses its row, or NEVER; how often; the row's uses so far; the
           last batch that used it
    ahead  int32 [(W + 1) * most, 2], a ring of announced batches: of each unique id the next one that has it, how often

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

from hostdev.kernels.jit import inline, kernel, prefetch_to_write

POLICIES = ("lookahead", "lru", "lfu", "static")
LOOKAHEAD, LRU, LFU, STATIC, OPTIMAL = range(5)  # OPTIMAL: lookahead over the whole run, for comparison

KEYS = 1 << 12
STEPS_PER_OCTAVE = 64
NEVER = 2**31 - 1  # the batch of a next use that is not known
_DROPPED_BITS = 17  # of float32's 23 bits behind the point; 6 are kept
_LOWEST = (127 - 32) << 6  # the key of 2 ** -32
SLOT, BATCH, POSITION, COUNT = range(4)  # of a row
NEXT, USES, TOTAL, LAST = range(4)  # of a slot
_AHEAD, _SOON = 32, 12  # ids: for a row, and for what it leads to
_MOST_USES = 2**30


@inline
def key_of(value: Any) -> Any:
    """Return the key of a float32 of at least 0; 0 for 0."""
    steps: Any = np.int64(np.float32(value).view(np.uint32)) >> _DROPPED_BITS
    return np.uint16(min(max(steps - _LOWEST, 0), KEYS - 1))


@inline
def _density(next_batch: Any, next_uses: Any, now: Any) -> Any:
    return np.float32(next_uses) / np.float32(next_batch - now)


@inline
def newcomer_key(
    kind: Any, next_batch: Any, next_uses: Any, count: Any, past: Any, now: Any, rate: Any, far: Any
) -> Any:
    """Return the key of a row that is used now and is not cached; 0: let it pass.

    next_batch  the next batch that is known to use it, or NEVER
    next_uses   how often that one does
    count       its uses in all batches known so far (static: more than 0 if it is to be cached)
    past        those before the batch of now
    now         the number of the batch
    rate        1 / number of batches known so far
    far         1 / batches until a use that is not known, at least
    """
    if kind == LRU:
        return key_of(1.0)
    if kind == LFU or kind == STATIC:
        return key_of(count)
    if next_batch != NEVER:
        return key_of(_density(next_batch, next_uses, now))
    if kind == OPTIMAL:
        return np.uint16(0)
    if past <= 0:
        return np.uint16(1)  # nothing speaks for it: into a slot that is free it may go
    return key_of(min(np.float32(count) * rate, far))


@inline
def resident_key(
    kind: Any, next_batch: Any, next_uses: Any, count: Any, last: Any, now: Any, rate: Any, far: Any
) -> Any:
    """Return the key of a cached row; it goes if a newcomer's is larger, by the margin.

    last  the last batch that used it; the others as in `newcomer_key`
    """
    if kind == LRU:
        return key_of(np.float32(1) / np.float32(now - last + 1))
    if kind == LFU:
        return key_of(count)
    if kind == STATIC:
        return np.uint16(KEYS - 1)
    if next_batch != NEVER:
        return key_of(_density(next_batch, next_uses, now))
    if kind == OPTIMAL:
        return np.uint16(0)
    return key_of(min(np.float32(count) * rate, far))


@kernel
def tally(start: Any, stop: Any, inverse: Any, parts: Any, counts: Any) -> None:
    """Count the uses of each unique id in inverse[edges] for the parts [start, stop) of `counts` int32 [parts, U]."""
    for part in range(np.uint64(start), np.uint64(stop)):
        row = counts[part]
        row[:] = 0
        first, last = len(inverse) * part // parts, len(inverse) * (part + np.uint64(1)) // parts
        for i in range(np.uint64(first), np.uint64(last)):
            row[np.uint64(inverse[i])] += np.int32(1)


@kernel
def announce(
    start: Any, stop: Any, ids: Any, uses: Any, number: Any, oldest: Any, kind: Any,
    rows: Any, slots: Any, ahead: Any, base_of: Any,
) -> None:  # fmt: skip
    """Take in ids[start:stop] of batch `number`.

    oldest   the first batch that is announced and not planned
    base_of  int64 [any], where in `ahead` that batch begins, the one after it, ... up to this one
    """
    mine, end = np.uint64(base_of[number - oldest]), np.uint64(stop)
    for p in range(np.uint64(start), end):
        if p + np.uint64(_AHEAD) < end:
            prefetch_to_write(rows, ids[p + np.uint64(_AHEAD)], 16)
        if p + np.uint64(_SOON) < end:
            coming = rows[np.uint64(ids[p + np.uint64(_SOON)])]
            if coming[BATCH] >= oldest:
                prefetch_to_write(ahead, base_of[np.uint64(coming[BATCH] - oldest)] + coming[POSITION], 8)
            elif coming[SLOT] >= 0:
                prefetch_to_write(slots, coming[SLOT], 16)
        row = rows[np.uint64(ids[p])]
        if row[BATCH] >= oldest:
            earlier = ahead[np.uint64(base_of[np.uint64(row[BATCH] - oldest)] + row[POSITION])]
            earlier[0], earlier[1] = number, uses[p]
        elif row[SLOT] >= 0:
            slot = slots[np.uint64(row[SLOT])]
            slot[NEXT], slot[USES] = number, uses[p]
        row[BATCH], row[POSITION] = number, p
        if kind != STATIC and row[COUNT] < _MOST_USES:
            row[COUNT] += uses[p]
        here = ahead[mine + p]
        here[0], here[1] = NEVER, 0


@kernel
def classify(
    start: Any, stop: Any, ids: Any, uses: Any, number: Any, kind: Any, rate: Any, far: Any,
    rows: Any, slots: Any, mine: Any, slot_of: Any, keys: Any, histograms: Any, totals: Any, piece: Any,
) -> None:  # fmt: skip
    """Find the slots of ids[start:stop] of batch `number`, and the keys of those that have none.

    mine        int32 [U, 2], the batch's part of `ahead`
    slot_of     int32 [U], written: the slot, or -1
    keys        uint16 [U], written: 0 for an id that has a slot
    histograms  int32 [pieces, KEYS], histograms[piece] added to: how many ids without a slot have each key
    totals      int64 [pieces, 2], written: unique ids with a slot, their uses
    """
    histogram, end = histograms[piece], np.uint64(stop)
    hits = used = np.int64(0)
    for p in range(np.uint64(start), end):
        if p + np.uint64(_AHEAD) < end:
            prefetch_to_write(rows, ids[p + np.uint64(_AHEAD)], 16)
        if p + np.uint64(_SOON) < end:
            prefetch_to_write(slots, max(rows[np.uint64(ids[p + np.uint64(_SOON)]), SLOT], 0), 16)
        row = rows[np.uint64(ids[p])]
        slot_of[p] = row[SLOT]
        if row[SLOT] >= 0:
            slot = slots[np.uint64(row[SLOT])]
            slot[NEXT], slot[USES], slot[TOTAL], slot[LAST] = mine[p, 0], mine[p, 1], row[COUNT], number
            hits += 1
            used += uses[p]
            keys[p] = 0
        else:
            past = row[COUNT] - uses[p]
            key = newcomer_key(kind, mine[p, 0], mine[p, 1], row[COUNT], past, number, rate, far)
            keys[p] = key
            histogram[np.uint64(key)] += 1
    totals[piece, 0], totals[piece, 1] = hits, used


@kernel
def score(
    start: Any, stop: Any, number: Any, kind: Any, rate: Any, far: Any,
    slots: Any, keys: Any, histograms: Any, piece: Any,
) -> None:  # fmt: skip
    """Write the keys uint16 [C] of slots[start:stop] and count them."""
    histogram = histograms[piece]
    for s in range(np.uint64(start), np.uint64(stop)):
        slot = slots[s]
        key = resident_key(kind, slot[NEXT], slot[USES], slot[TOTAL], slot[LAST], number, rate, far)
        keys[s] = key
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
def best(keys: Any, threshold: Any, ties: Any, out: Any) -> None:
    """Write the positions of keys above the threshold and of the first `ties` at it, ascending, to out [one more]."""
    count, left = np.uint64(0), np.int64(ties)
    for p in range(np.uint64(0), np.uint64(len(keys))):
        out[count] = p
        tie = (keys[p] == threshold) & (left > 0)
        left -= np.int64(tie)
        count += np.uint64((keys[p] > threshold) | tie)


@kernel
def worst(keys: Any, threshold: Any, ties: Any, out: Any) -> None:
    """Write the positions of keys below the threshold and of the first `ties` at it, ascending, to out [one more]."""
    count, left = np.uint64(0), np.int64(ties)
    for p in range(np.uint64(0), np.uint64(len(keys))):
        out[count] = p
        tie = (keys[p] == threshold) & (left > 0)
        left -= np.int64(tie)
        count += np.uint64((keys[p] < threshold) | tie)


@kernel
def evict(start: Any, stop: Any, evicted: Any, rows: Any) -> None:
    """Take their slots from the rows evicted[start:stop]."""
    for i in range(np.uint64(start), np.uint64(stop)):
        if i + np.uint64(_AHEAD) < np.uint64(stop):
            prefetch_to_write(rows, evicted[i + np.uint64(_AHEAD)], 16)
        rows[np.uint64(evicted[i]), SLOT] = -1


@kernel
def install(
    start: Any, stop: Any, number: Any, ids: Any, admitted: Any, into: Any,
    rows: Any, slots: Any, slot_ids: Any, mine: Any,
) -> None:  # fmt: skip
    """Give the slots into[start:stop] to the ids at the positions `admitted`."""
    for i in range(np.uint64(start), np.uint64(stop)):
        if i + np.uint64(_AHEAD) < np.uint64(stop):
            prefetch_to_write(rows, ids[np.uint64(admitted[i + np.uint64(_AHEAD)])], 16)
            prefetch_to_write(slots, into[i + np.uint64(_AHEAD)], 16)
        p, s = np.uint64(admitted[i]), np.uint64(into[i])
        row, slot = rows[np.uint64(ids[p])], slots[s]
        row[SLOT] = into[i]
        slot[NEXT], slot[USES], slot[TOTAL], slot[LAST] = mine[p, 0], mine[p, 1], row[COUNT], number
        slot_ids[s] = ids[p]


@kernel
def split(slot_of: Any, admitted: Any, hits: Any, hit_slots: Any, passed: Any) -> None:
    """Write the positions of ids with a slot, and these, and the positions of those without, but for `admitted`.

    hits, hit_slots, passed  one longer than what is written; ascending
    """
    for i in range(np.uint64(0), np.uint64(len(admitted))):
        slot_of[np.uint64(admitted[i])] = -2
    h = m = np.uint64(0)
    for p in range(np.uint64(0), np.uint64(len(slot_of))):
        slot = slot_of[p]
        hits[h], hit_slots[h], passed[m] = p, slot, p
        h += np.uint64(slot >= 0)
        m += np.uint64(slot == -1)
