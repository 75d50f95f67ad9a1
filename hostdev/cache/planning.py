"""The kernels of `planner`: what is known of rows and coming batches, what a row is worth, who enters and leaves.

V rows, C slots, U unique ids of a batch. All that is known of a row lies in half a cache line:

    rows    int32 [V, 8]: the last announced batch that uses the row; a bit for each of the 32 batches up to that one,
            bit k for the one k before it; the row's slot or -1; its uses in all batches announced so far, for lookahead
            the batches that use it, for static 1 if it is to be cached
    values  float32 [V, 8], a view of `rows`: at 4 how often batches have used it, the last ones most, as of the last
            that did; at 5 how likely a batch uses it by its count; in `rows`, at 6, 1 for the C likeliest by that

A row is worth a key of 12 bits, so that ranks come from a histogram. That of lookahead is the index of `prices`, by the
batches that are known and by how likely one beyond them uses the row, and then that likelihood; others have 64 steps
an octave of a number.
"""

from typing import Any, NamedTuple

import numpy as np

from hostdev.cache.prices import ENTER, RATES, STAY
from hostdev.kernels.jit import inline, kernel, prefetch_to_read

LOOKAHEAD, LRU, LFU, STATIC = range(4)  # as in `options.POLICIES`

KEYS = 1 << 12
FINE_BITS = 4  # of a key, below the index
_DROPPED_BITS = 17  # of float32's 23 bits behind the point; 6 are kept
_LOWEST = (127 - 32) << 6  # the key of 2 ** -32
LAST, BEFORE, SLOT, COUNT, RECENT, CHANCE, MEMBER, ID = range(8)  # of a row
WORDS = 8  # of a row
SURE = 1e6  # uses; what is believed as much is not doubted
DECAYS = 512  # batches, after which a use is forgotten
_AHEAD = 64  # rows; asked for to be read, a line comes to the second cache, of which more may be on their way
_BLOCK = 256  # rows, which stay in the nearest caches
_MOST_USES = 2**30


class Now(NamedTuple):
    """What all rows of a batch that is planned are valued by."""

    number: int  # of the batch that is planned
    latest: int  # of the last that is announced
    kind: int
    bits: int  # of the index table: batches that it tells apart
    believed: np.float32  # uses seen of late that weigh as much as what the counts say
    per_batch: np.float32  # 1 / the batches that count for what was used of late, decayed alike
    per_announced: np.float32  # 1 / batches so far, where they are all that tells how likely a row is; else 0
    least: np.float32  # a chance that is sure to enter
    gate: int  # the key above which others do


@inline
def _key_of(value: Any) -> Any:
    """Return the key of a float32 of at least 0; 0 for 0."""
    steps: Any = np.int64(np.float32(value).view(np.uint32)) >> _DROPPED_BITS
    return np.uint16(min(max(steps - _LOWEST, 0), KEYS - 1))


@inline
def _coming(rows: Any, row: Any, now: Any) -> Any:
    """Return the announced batches that use the row, as the index table has them: the nearest is the highest bit."""
    later: Any = min(max(np.int64(rows[row, LAST]) - np.int64(now.number), 0), 32)
    used = np.uint64(np.uint32(rows[row, BEFORE])) & ((np.uint64(1) << np.uint64(later)) - np.uint64(1))
    return (used << np.uint64(32)) >> np.uint64(later + 32 - now.bits)


@inline
def _mean(counted: Any, of_late: Any, believed: Any, per_batch: Any) -> Any:
    """Return the mean of two chances, the first of which weighs as much as `believed` uses seen of late."""
    weight = believed / (believed + max(counted, of_late) / per_batch)
    return of_late + (counted - of_late) * weight


@inline
def _chance(rows: Any, values: Any, row: Any, now: Any, decays: Any) -> Any:
    """Return how likely a batch uses the row that nobody knows yet."""
    ago = np.uint64(min(now.latest - rows[row, LAST], DECAYS - 1))
    counted = values[row, CHANCE] + np.float32(rows[row, COUNT]) * now.per_announced
    of_late = values[row, RECENT] * decays[ago] * now.per_batch
    return min(_mean(counted, of_late, now.believed, now.per_batch), np.float32(1))


@kernel
def _value(
    some: Any,
    count: Any,
    now: Any,
    rows: Any,
    values: Any,
    decays: Any,
    table: Any,
    chances: Any,
    of_late: Any,
    places: Any,
    keys: Any,
) -> None:
    """Write chances and keys of the first `count` rows of a block: indices, of a table [RATES << bits], and 4 bits.

    In loops of their own: what is read from anywhere, what is calculated, which the compiler does for several rows at
    once, what is read from the table, which is larger than the nearest caches.
    """
    believed, per_batch, per_announced, bits = now.believed, now.per_batch, now.per_announced, np.uint32(now.bits)
    last: Any = np.int64(now.latest)
    n = np.uint64(count)
    for i in range(np.uint64(0), n):
        row = np.uint64(some[i])
        ago = np.uint64(min(last - np.int64(rows[row, LAST]), DECAYS - 1))
        chances[i] = values[row, CHANCE] + np.float32(rows[row, COUNT]) * per_announced
        of_late[i] = values[row, RECENT] * decays[ago] * per_batch
        places[i] = np.uint32(_coming(rows, row, now))
    for i in range(np.uint64(0), n):
        chances[i] = min(_mean(chances[i], of_late[i], believed, per_batch), np.float32(1))
    steps = chances.view(np.int32)
    for i in range(np.uint64(0), n):
        rate: Any = min(max(np.int32(127 << 1) - (steps[i] >> np.int32(22)), np.int32(0)), np.int32(RATES - 1))
        places[i] |= np.uint32(rate) << bits
        keys[i] = np.uint16((steps[i] >> np.int32(22 - FINE_BITS)) & np.int32((1 << FINE_BITS) - 1))
    for i in range(np.uint64(0), n):
        prefetch_to_read(table, places[i], 1)
    for i in range(np.uint64(0), n):
        keys[i] |= np.uint16(table[np.uint64(places[i])]) << np.uint16(FINE_BITS)


@inline
def _block() -> Any:
    """Return room for what `_value` reads and writes."""
    return (
        np.empty(_BLOCK, np.int64),
        np.empty(_BLOCK, np.float32),
        np.empty(_BLOCK, np.float32),
        np.empty(_BLOCK, np.uint32),
        np.empty(_BLOCK, np.uint16),
    )


@kernel
def announce(start: Any, stop: Any, ids: Any, uses: Any, now: Any, rows: Any, values: Any, decays: Any) -> None:
    """Take in ids[start:stop] of batch `now.latest`."""
    end, number = np.uint64(stop), np.int64(now.latest)
    for p in range(np.uint64(start), end):
        if p + np.uint64(_AHEAD) < end:
            prefetch_to_read(rows, ids[p + np.uint64(_AHEAD)], 1)
        row = np.uint64(ids[p])
        gone: Any = number - np.int64(rows[row, LAST])
        before = np.uint64(np.uint32(rows[row, BEFORE])) << np.uint64(min(gone, 63))
        rows[row, LAST], rows[row, BEFORE] = number, np.uint32(before | np.uint64(1))
        if now.kind == LOOKAHEAD:
            values[row, RECENT] = values[row, RECENT] * decays[np.uint64(min(gone, DECAYS - 1))] + np.float32(1)
            rows[row, COUNT] += 1
        elif now.kind != STATIC:
            rows[row, COUNT] = min(np.int64(rows[row, COUNT]) + uses[p], _MOST_USES)


@kernel
def judge(watched: Any, now: Any, rows: Any, values: Any, decays: Any, weights: Any, scores: Any) -> None:
    """Add to `scores` [K] how likely batch `now.latest` was, if counts weigh weights[k] uses.

    The logarithm, of Poisson's law, over rows `watched`, once that batch is announced; rates in `now` are of before.
    """
    decay = decays[1]
    for i in range(len(watched)):
        row = np.uint64(watched[i])
        used = np.int64(rows[row, LAST] == now.latest)
        ago = np.uint64(min(now.latest - rows[row, LAST], DECAYS - 1))
        counted = values[row, CHANCE] + np.float32(rows[row, COUNT] - used) * now.per_announced
        of_late = (values[row, RECENT] * decays[ago] - np.float32(used)) / decay * now.per_batch
        for k in range(len(weights)):
            chance = min(max(_mean(counted, of_late, weights[k], now.per_batch), np.float32(1e-4)), np.float32(1))
            scores[k] += (np.log(chance) if used else np.float32(0)) - chance


@kernel
def classify(
    start: Any,
    stop: Any,
    ids: Any,
    uses: Any,
    now: Any,
    rows: Any,
    values: Any,
    decays: Any,
    indices: Any,
    hits: Any,
    hit_slots: Any,
    missed: Any,
    keys: Any,
    histograms: Any,
    totals: Any,
    piece: Any,
) -> None:
    """Find the slots of ids[start:stop] of batch `now.number`, and what those are worth that have none.

    indices          uint8 [2, RATES << bits], by `prices`
    hits, hit_slots  int32 [U], written from `start` on: the positions of ids with a slot, and these; ascending
    missed, keys     int32 and uint16 [U], the same for those without one, and their keys; 0 for one that is to pass by
    histograms       int32 [pieces, KEYS], histograms[piece] added to: how many ids without a slot have each key
    totals           int64 [pieces, 3], written: ids with a slot, their uses, all uses
    """
    histogram, end, block, entering = histograms[piece], np.uint64(stop), np.uint64(_BLOCK), indices[ENTER]
    some, chances, of_late, places, block_keys = _block()
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
        found = m - valued
        for i in range(np.uint64(0), found):
            some[i] = ids[np.uint64(missed[valued + i])]
        if now.kind == LOOKAHEAD:
            _value(some, found, now, rows, values, decays, entering, chances, of_late, places, block_keys)
        for i in range(np.uint64(0), found):
            row = np.uint64(some[i])
            if now.kind == LOOKAHEAD:
                index = np.int64(block_keys[i])
                sure = (rows[row, MEMBER] > 0) | ((now.believed < SURE) & (chances[i] >= now.least))
                willing = (sure & (index >= 1 << FINE_BITS)) | (index > now.gate)
                key = np.uint16(index * np.int64(willing))
            else:
                key = _key_of(1.0) if now.kind == LRU else _key_of(rows[row, COUNT])  # static: above 0 to be cached
            keys[valued + i] = key
            histogram[np.uint64(key)] += 1
        valued = m
    totals[piece, 0], totals[piece, 1], totals[piece, 2] = np.int64(h) - start, hit_uses, all_uses


@kernel
def score(
    start: Any,
    stop: Any,
    slot_ids: Any,
    now: Any,
    rows: Any,
    values: Any,
    decays: Any,
    indices: Any,
    keys: Any,
    histograms: Any,
    piece: Any,
) -> None:
    """Write the keys of the rows in slots [start, stop) to keys uint16 from `start` on, and count them.

    A row goes if a newcomer's key is larger, by the margin.
    """
    histogram, end, block, staying = histograms[piece], np.uint64(stop), np.uint64(_BLOCK), indices[STAY]
    some, chances, of_late, places, block_keys = _block()
    for begin in range(np.uint64(start), end, block):
        found = min(begin + block, end) - begin
        for i in range(np.uint64(0), found):
            if begin + i + np.uint64(_AHEAD) < end:
                prefetch_to_read(rows, slot_ids[begin + i + np.uint64(_AHEAD)], 1)
            some[i] = slot_ids[begin + i]
        if now.kind == LOOKAHEAD:
            _value(some, found, now, rows, values, decays, staying, chances, of_late, places, block_keys)
        for i in range(np.uint64(0), found):
            row = np.uint64(some[i])
            if now.kind == LOOKAHEAD:
                key = block_keys[i]
            elif now.kind == LRU:
                key = _key_of(np.float32(1) / np.float32(now.number - rows[row, LAST] + 1))
            else:
                key = _key_of(rows[row, COUNT])
            keys[begin + i] = key
            histogram[np.uint64(key)] += 1


@kernel
def likely(some: Any, now: Any, rows: Any, values: Any, decays: Any, out: Any) -> None:
    """Write how likely a batch uses these rows that nobody knows yet."""
    for i in range(len(some)):
        out[i] = _chance(rows, values, np.uint64(some[i]), now, decays)


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
