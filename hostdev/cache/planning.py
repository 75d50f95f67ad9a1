"""The kernels of `planner`: what is known of rows and coming batches, what a row is worth, who enters and leaves.

V rows, C slots, U unique ids of a batch. The fields of a row or a slot lie in one cache line:

    rows    int32 [V, width / 4]: two words for `masks`; its slot or -1; its uses so far; the others for `coming`
    masks   uint64 [V, width / 8], a view of `rows`: first, a bit for each announced batch that uses the row, number
            modulo 64
    coming  uint8 [V, width], a view of `rows`: from byte 16 on a ring of R batches, how often each uses the row, as a
            number of 8 bits: exact below 16, above in steps of 1/8 to 1/16
    slots   int32 [C, 4]: the next announced batch that uses its row, or NEVER; how often; the row's uses until the
            last batch that used it; that batch

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

LOOKAHEAD, LRU, LFU, STATIC = range(4)  # as in `options.POLICIES`

KEYS = 1 << 12
STEPS_PER_OCTAVE = 64
NEVER = 2**31 - 1  # the batch of a next use that is not known
_DROPPED_BITS = 17  # of float32's 23 bits behind the point; 6 are kept
_LOWEST = (127 - 32) << 6  # the key of 2 ** -32
SLOT, COUNT = 2, 3  # of a row
NEXT, USES, TOTAL, LAST = range(4)  # of a slot
RING = 16  # the byte of a row where its ring begins
_AHEAD, _SOON = 32, 12  # ids: for a row, and for what it leads to
_MOST_USES = 2**30


@inline
def _key_of(value: Any) -> Any:
    """Return the key of a float32 of at least 0; 0 for 0."""
    steps: Any = np.int64(np.float32(value).view(np.uint32)) >> _DROPPED_BITS
    return np.uint16(min(max(steps - _LOWEST, 0), KEYS - 1))


@inline
def _density(next_batch: Any, uses: Any, now: Any) -> Any:
    return np.float32(uses) / np.float32(next_batch - now)


@inline
def _newcomer_key(kind: Any, next_batch: Any, uses: Any, count: Any, past: Any, now: Any, rate: Any, far: Any) -> Any:
    """Return the key of a row that batch `now` uses and that is not cached; 0: let it pass.

    next_batch  the next batch that is known to use it, or NEVER
    uses        how often that one does
    count       its uses in all batches known so far (static: more than 0 if it is to be cached)
    past        those that are not in this batch
    rate        1 / number of batches known so far
    far         1 / batches until a use that is not known, at least
    """
    if kind == LRU:
        return _key_of(1.0)
    if kind in (LFU, STATIC):
        return _key_of(count)
    if next_batch != NEVER:
        return _key_of(_density(next_batch, uses, now))
    if past <= 0:
        return np.uint16(1)  # nothing speaks for it: into a slot that is free it may go
    return _key_of(min(np.float32(count) * rate, far))


@inline
def _resident_key(kind: Any, next_batch: Any, uses: Any, count: Any, last: Any, now: Any, rate: Any, far: Any) -> Any:
    """Return the key of a cached row; it goes if a newcomer's is larger, by the margin.

    last  the last batch that used it; the others as in `_newcomer_key`
    """
    if kind == LRU:
        return _key_of(np.float32(1) / np.float32(now - last + 1))
    if kind == LFU:
        return _key_of(count)
    if kind == STATIC:
        return np.uint16(KEYS - 1)
    if next_batch != NEVER:
        return _key_of(_density(next_batch, uses, now))
    return _key_of(min(np.float32(count) * rate, far))


@inline
def _next_batch(mask: Any, number: Any) -> Any:
    """Return the first batch after `number` whose bit is set."""
    if mask == 0:
        return np.int32(NEVER)
    by = np.uint64(number + 1) & np.uint64(63)
    turned = (mask >> by) | (mask << ((np.uint64(64) - by) & np.uint64(63)))
    lowest = np.float64(turned & (~turned + np.uint64(1)))  # a power of two, whose exponent is its place
    return np.int32(number + 1 + (lowest.view(np.int64) >> 52) - 1023)


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
def announce(
    start: Any, stop: Any, ids: Any, uses: Any, number: Any, ring: Any, kind: Any,
    rows: Any, masks: Any, coming: Any, slots: Any,
) -> None:  # fmt: skip
    """Take in ids[start:stop] of batch `number`; `ring` is the length of that, a power of two."""
    bit, end = np.uint64(1) << (np.uint64(number) & np.uint64(63)), np.uint64(stop)
    place = np.uint64(RING) + (np.uint64(number) & np.uint64(ring - 1))
    for p in range(np.uint64(start), end):
        if p + np.uint64(_AHEAD) < end:
            prefetch_to_write(rows, ids[p + np.uint64(_AHEAD)], 1)
        if p + np.uint64(_SOON) < end:
            prefetch_to_write(slots, max(rows[np.uint64(ids[p + np.uint64(_SOON)]), SLOT], 0), 1)
        row = np.uint64(ids[p])
        mask, s, code = masks[row, 0], rows[row, SLOT], _encode(uses[p])
        if mask == 0 and s >= 0:
            slot = slots[np.uint64(s)]
            slot[NEXT], slot[USES] = number, _decode(code)
        masks[row, 0] = mask | bit
        coming[row, place] = code
        if kind != STATIC:
            rows[row, COUNT] = min(rows[row, COUNT], _MOST_USES) + uses[p]


@kernel
def classify(
    start: Any, stop: Any, ids: Any, uses: Any, number: Any, ring: Any, kind: Any, rate: Any, far: Any,
    rows: Any, masks: Any, coming: Any, slots: Any,
    slot_of: Any, keys: Any, histograms: Any, totals: Any, piece: Any,
) -> None:  # fmt: skip
    """Find the slots of ids[start:stop] of batch `number`, and the keys of those that have none.

    slot_of     int32 [U], written: the slot, or -1
    keys        uint16 [U], written: 0 for an id that has a slot
    histograms  int32 [pieces, KEYS], histograms[piece] added to: how many ids without a slot have each key
    totals      int64 [pieces, 2], written: unique ids with a slot, their uses
    """
    bit, histogram, end = np.uint64(1) << (np.uint64(number) & np.uint64(63)), histograms[piece], np.uint64(stop)
    hits = used = np.int64(0)
    for p in range(np.uint64(start), end):
        if p + np.uint64(_AHEAD) < end:
            prefetch_to_write(rows, ids[p + np.uint64(_AHEAD)], 1)
        if p + np.uint64(_SOON) < end:
            prefetch_to_write(slots, max(rows[np.uint64(ids[p + np.uint64(_SOON)]), SLOT], 0), 1)
        row = np.uint64(ids[p])
        mask = masks[row, 0] & ~bit
        masks[row, 0] = mask
        s, count, following = rows[row, SLOT], rows[row, COUNT], _next_batch(mask, number)
        uses_then = _decode(coming[row, np.uint64(RING) + (np.uint64(following) & np.uint64(ring - 1))])
        slot_of[p] = s
        if s >= 0:
            slot = slots[np.uint64(s)]
            slot[NEXT], slot[USES], slot[TOTAL], slot[LAST] = following, uses_then, count, number
            hits += 1
            used += uses[p]
            keys[p] = 0
        else:
            key = _newcomer_key(kind, following, uses_then, count, count - uses[p], number, rate, far)
            keys[p] = key
            histogram[np.uint64(key)] += 1
    totals[piece, 0], totals[piece, 1] = hits, used


@kernel
def score(
    start: Any, stop: Any, number: Any, kind: Any, rate: Any, far: Any,
    slots: Any, first: Any, keys: Any, histograms: Any, piece: Any,
) -> None:  # fmt: skip
    """Write the keys of slots[start:stop] to keys uint16 from `start` - `first` on, and count them."""
    histogram = histograms[piece]
    for s in range(np.uint64(start), np.uint64(stop)):
        slot = slots[s]
        key = _resident_key(kind, slot[NEXT], slot[USES], slot[TOTAL], slot[LAST], number, rate, far)
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
def pick(threshold: Any, ties: Any, keys: Any, turned: Any, out: Any) -> None:
    """Write the positions of keys above the threshold and of the first `ties` at it, ascending, to out [one more].

    turned  KEYS - 1 for small keys to count as large ones, else 0
    """
    count, left = np.uint64(0), np.int64(ties)
    for p in range(np.uint64(0), np.uint64(len(keys))):
        key = keys[p] ^ turned
        out[count] = p
        tie = (key == threshold) & (left > 0)
        left -= np.int64(tie)
        count += np.uint64((key > threshold) | tie)


@kernel
def evict(start: Any, stop: Any, evicted: Any, rows: Any) -> None:
    """Take their slots from the rows evicted[start:stop]."""
    for i in range(np.uint64(start), np.uint64(stop)):
        if i + np.uint64(_AHEAD) < np.uint64(stop):
            prefetch_to_write(rows, evicted[i + np.uint64(_AHEAD)], 16)
        rows[np.uint64(evicted[i]), SLOT] = -1


@kernel
def install(
    start: Any, stop: Any, number: Any, ring: Any, ids: Any, admitted: Any, into: Any,
    rows: Any, masks: Any, coming: Any, slots: Any, slot_ids: Any,
) -> None:  # fmt: skip
    """Give the slots into[start:stop] to the ids at the positions `admitted`."""
    for i in range(np.uint64(start), np.uint64(stop)):
        if i + np.uint64(_AHEAD) < np.uint64(stop):
            prefetch_to_write(rows, ids[np.uint64(admitted[i + np.uint64(_AHEAD)])], 1)
            prefetch_to_write(slots, into[i + np.uint64(_AHEAD)], 16)
        p, s = np.uint64(admitted[i]), np.uint64(into[i])
        row, slot = np.uint64(ids[p]), slots[s]
        rows[row, SLOT] = into[i]
        following = _next_batch(masks[row, 0], number)
        slot[NEXT] = following
        slot[USES] = _decode(coming[row, np.uint64(RING) + (np.uint64(following) & np.uint64(ring - 1))])
        slot[TOTAL], slot[LAST] = rows[row, COUNT], number
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
