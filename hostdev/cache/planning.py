"""The kernels of `planner`: row data, announced batches, row values, admissions and evictions.

V rows, C slots, U unique ids of a batch. A row's data takes half a cache line:

    rows    int32 [V, 8]: word 0 is the last announced batch that uses the row; 1 has a bit for each of the 32 batches
            up to that one, bit k for the batch k before it; 2 is the row's slot or -1; 3 its uses in all announced
            batches (lookahead: the batches that use it; static: 1 if it is to be cached); 6 is 1 for the C likeliest
            rows by count; 7 is, in a directory, the row's id
            nearest: 1 is the row's position among the ids of that batch, and 6 the number of the first batch after the
            planned one that uses it; a number not above the planned one's means that none is announced (`next_uses`)
    values  float32 [V, 8], a view of `rows`: word 4 is the row's decayed number of uses as of the last one; 5 the
            probability that a batch uses it, by its count

A row's value is a 12-bit key, so that a histogram gives ranks. The key of lookahead is a Whittle index (`prices`),
looked up by the known batches and the probability of a use beyond them, followed by bits of that probability. The keys
of other policies encode a number with 64 steps per octave.
"""

from typing import Any, NamedTuple

import numpy as np

from hostdev.cache.prices import ENTER, RATES, STAY
from hostdev.kernels.jit import inline, kernel, prefetch_to_read

LOOKAHEAD, LRU, LFU, STATIC, NEAREST = range(5)  # in the order of `options.POLICIES`, then NEAREST

KEYS = 1 << 12
FINE_BITS = 4  # low bits of a lookahead key: bits of the probability, below the Whittle index
_DROPPED_BITS = 17  # low bits of float32's 23 mantissa bits; 6 are kept
_LOWEST = (127 - 32) << 6  # 2 ** -32 has the key 0
LAST, BEFORE, SLOT, COUNT, RECENT, CHANCE, MEMBER, ID = range(8)  # words of a row
NEXT = MEMBER  # the name of this word with the policy "nearest"
WORDS = 8  # number of words of a row
SURE = 1e6  # a weight in recent uses, at which counts are fully trusted
DECAYS = 512  # batches after which a use is forgotten
_AHEAD = 64  # prefetch distance in rows; read prefetches go to the L2 cache, which allows more in flight
_BLOCK = 256  # rows that are valued together; their arrays fit the L1 cache
_MOST_USES = 2**30


class PlanContext(NamedTuple):
    """The context in which the rows of a planned batch are valued."""

    number: int  # the planned batch's number
    latest: int  # the last announced batch's number
    kind: int  # the policy's number
    bits: int  # number of announced batches that the index table distinguishes
    believed: np.float32  # weight of the counts, in recent uses
    per_batch: np.float32  # 1 / the decayed number of batches
    per_announced: np.float32  # 1 / the number of announced batches, if there are no counts; else 0
    least: np.float32  # rows of at least this probability may enter if their index is above 0
    gate: int  # other rows may enter if their key is above this one


@inline
def _key_of(value):
    """Return the key of a float32 number >= 0; the key of 0 is 0."""
    steps: Any = np.int64(np.float32(value).view(np.uint32)) >> _DROPPED_BITS
    return np.uint16(min(max(steps - _LOWEST, 0), KEYS - 1))


@inline
def _coming(rows, row, now):
    """Return a row's position in the index table.

    The position has a bit for each announced batch, set if the batch uses the row. The nearest batch's bit is highest.
    """
    later: Any = min(max(np.int64(rows[row, LAST]) - np.int64(now.number), 0), 32)
    used = np.uint64(np.uint32(rows[row, BEFORE])) & ((np.uint64(1) << np.uint64(later)) - np.uint64(1))
    return (used << np.uint64(32)) >> np.uint64(later + 32 - now.bits)


@inline
def _mean(counted, of_late, believed, per_batch):
    """Return the weighted mean of two probabilities, where `counted` has the weight of `believed` recent uses."""
    weight = believed / (believed + max(counted, of_late) / per_batch)
    return of_late + (counted - of_late) * weight


@inline
def _chance(rows, values, row, now, decays):
    """Return the probability that a future, unannounced batch uses the row."""
    ago = np.uint64(min(now.latest - rows[row, LAST], DECAYS - 1))
    counted = values[row, CHANCE] + np.float32(rows[row, COUNT]) * now.per_announced
    of_late = values[row, RECENT] * decays[ago] * now.per_batch
    return min(_mean(counted, of_late, now.believed, now.per_batch), np.float32(1))


@inline
def _nearness(rows, values, row, now, decays):
    """Return 1 / the number of batches until the row's next use: its announced one, or else the expected one."""
    until: Any = np.int64(rows[row, NEXT]) - np.int64(now.number)
    if until > 0:
        return np.float32(1) / np.float32(until)
    chance = max(_chance(rows, values, row, now, decays), np.float32(1e-9))
    return np.float32(1) / (np.float32(now.latest - now.number + 1) + np.float32(1) / chance)


@kernel
def _value(some, count, now, rows, values, decays, table, chances, of_late, places, keys):
    """Write the probabilities and the keys of the first `count` rows of a block.

    A key is the row's Whittle index from `table`, uint8 [RATES << bits], followed by the 4 bits of the probability
    below those that select its class. There are separate loops for reading rows in random order, for computing
    (vectorized), and for reading the table, which is larger than the L1 cache.
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
def _block():
    """Allocate a block's arrays, which `_value` reads and writes."""
    return (
        np.empty(_BLOCK, np.int64),
        np.empty(_BLOCK, np.float32),
        np.empty(_BLOCK, np.float32),
        np.empty(_BLOCK, np.uint32),
        np.empty(_BLOCK, np.uint16),
    )


@kernel
def announce(start, stop, ids, uses, now, rows, values, decays):
    """Record that batch `now.latest` uses the rows ids[start:stop]; `uses`: how often, int32 [U], or None."""
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
        elif now.kind != STATIC and uses is not None:
            rows[row, COUNT] = min(np.int64(rows[row, COUNT]) + uses[p], _MOST_USES)


@kernel
def judge(watched, now, rows, values, decays, weights, scores):
    """Add to scores[k] the log-likelihood of batch `now.latest` if counts have the weight weights[k].

    This is the Poisson likelihood of the batch's uses of the rows `watched`. The batch has already been announced, but
    `now` has the rates from before its announcement.
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
    start, stop, ids, uses, now, rows, values, decays, indices, hits, hit_slots, missed, keys, histograms, totals, piece
):
    """Find the slots of ids[start:stop] of batch `now.number`, and the keys of ids without a slot.

    Args:
        uses: int32 [U], how often the batch uses each id, or None to count no uses.
        indices: uint8 [2, RATES << bits], from `prices`.
        hits: Output from `start` on, int32 [U]: positions of ids with a slot, ascending.
        hit_slots: Output from `start` on, int32 [U]: their slots.
        missed: Output from `start` on, int32 [U]: positions of ids without a slot, ascending.
        keys: Output from `start` on, uint16 [U]: their keys; 0 for a bypass.
        histograms: int32 [pieces, KEYS]; the counts of these keys are added to histograms[piece].
        totals: Output, int64 [pieces, 3]: the numbers of ids with a slot, of their uses, and of all uses.
    """
    histogram, end, block, entering = histograms[piece], np.uint64(stop), np.uint64(_BLOCK), indices[ENTER]
    some, chances, of_late, places, block_keys = _block()
    h = m = valued = np.uint64(start)
    hit_uses = all_uses = np.int64(0)
    for begin in range(np.uint64(start), end, block):
        for p in range(begin, min(begin + block, end)):
            if p + np.uint64(_AHEAD) < end:
                prefetch_to_read(rows, ids[p + np.uint64(_AHEAD)], 1)
            slot = rows[np.uint64(ids[p]), SLOT]
            used = np.int64(0) if uses is None else np.int64(uses[p])
            hits[h], hit_slots[h], missed[m] = p, slot, p  # the next id overwrites the entry that does not apply
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
                key = _key_of(1.0) if now.kind == LRU else _key_of(rows[row, COUNT])  # static: keys above 0 enter
                if now.kind == NEAREST:
                    key = _key_of(_nearness(rows, values, row, now, decays))
            keys[valued + i] = key
            histogram[np.uint64(key)] += 1
        valued = m
    totals[piece, 0], totals[piece, 1], totals[piece, 2] = np.int64(h) - start, hit_uses, all_uses


@kernel
def score(start, stop, slot_ids, now, rows, values, decays, indices, keys, histograms, piece):
    """Write the keys of the rows in slots [start, stop) to keys[start:stop], uint16; count them in histograms[piece].

    A row may be evicted if a newcomer's key exceeds the row's key by more than a margin (see `exchanges`).
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
            elif now.kind == NEAREST:
                key = _key_of(_nearness(rows, values, row, now, decays))
            else:
                key = _key_of(rows[row, COUNT])
            keys[begin + i] = key
            histogram[np.uint64(key)] += 1


@kernel
def likely(some, now, rows, values, decays, out):
    """Write to `out` the probability that a future, unannounced batch uses each row in `some`."""
    for i in range(len(some)):
        out[i] = _chance(rows, values, np.uint64(some[i]), now, decays)


@kernel
def exchanges(newcomers, residents, margin):
    """Return the number of swaps: the k-th best newcomer replaces the k-th worst resident if its key is high enough.

    Args:
        newcomers: Counts by key, int64 [KEYS]; rows of key 0 do not enter.
        residents: Counts by key, int64 [KEYS].
        margin: A newcomer's key must exceed the resident's by more than this.
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
def worst(threshold, ties, keys, out):
    """Write the positions of keys below the threshold, and of the first `ties` keys equal to it, to `out`.

    `out` must be one element longer than needed.
    """
    count, left = np.uint64(0), np.int64(ties)
    for p in range(np.uint64(0), np.uint64(len(keys))):
        out[count] = p
        tie = (keys[p] == threshold) & (left > 0)
        left -= np.int64(tie)
        count += np.uint64((keys[p] < threshold) | tie)


@kernel
def divide(threshold, ties, missed, keys, starts, ends, admitted, passed):
    """Divide the ids without a slot: admit those with a key above the threshold, and the first `ties` equal to it.

    Args:
        missed: The ids' positions.
        keys: Their keys.
        starts: int64 [pieces], starts of the valid ranges of `missed` and `keys`.
        ends: int64 [pieces], ends of the valid ranges.
        admitted: Output, one element longer than needed: the admitted positions.
        passed: Output, one element longer than needed: the other positions.
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
def exchange(start, stop, ids, admitted, into, evicted, rows, slot_ids):
    """Give the slots `into[start:stop]` to the ids at positions `admitted[start:stop]`, and record the rows that leave.

    Args:
        evicted: Output [E]: the rows that held the last E slots of `into`.
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
def take(start, stop, indices, values, below, out, counts, piece):
    """Set out[i] = values[indices[i]]; count values less than `below` in counts[piece]."""
    count = np.int64(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        value = values[np.uint64(indices[i])]
        out[i] = value
        count += np.int64(value < below)
    counts[piece] = count
