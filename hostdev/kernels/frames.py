"""Which rows of a table are in memory, each in a frame, and which are on disk.

Shapes: V rows, M frames, N rows of a call.

`where` [V], int32 or int64, has for each row 0 if it has its initial values and is not stored, `position + 1` if it is
on disk, or `-1 - frame` if it is in memory. Each frame has:

- `row_of` int64 [M]: its row, or -1 if the frame is free.
- `pins` int32 [M]: how many batches need the row in memory.
- `saved` int64 [M]: the value of `where` once the row leaves memory unchanged; CHANGED if it must be written first.
- `state` uint8 [M]: the flags LEAVING, RECENT, ARRIVING and CHOSEN.
"""

import numpy as np

from hostdev.kernels.jit import kernel, prefetch_to_read

FREE = -1
CHANGED = -1
# Flags of a frame. Its row may leave memory; was used recently; is being read or initialized; is about to leave.
LEAVING, RECENT, ARRIVING, CHOSEN = 1, 2, 4, 8
_AHEAD = 16


@kernel
def count_missing(rows, where, pins):
    """Return how many of the rows [N] are not in memory, and how many unpinned frames `pin` would pin for the rows."""
    missing, fresh, n = np.int64(0), np.int64(0), np.uint64(len(rows))
    for i in range(n):
        if i + np.uint64(_AHEAD) < n:
            prefetch_to_read(where, rows[i + np.uint64(_AHEAD)], 1)
        place = np.int64(where[np.uint64(rows[i])])
        if place >= 0:
            missing += 1
            fresh += 1
        else:
            fresh += np.int64(pins[np.uint64(-1 - place)] == 0)
    return missing, fresh


@kernel
def pin(
    rows, change, where, row_of, pins, saved, state, free, free_count, live, per_segment, frames, missing, positions
):
    """Pin rows; those that are not in memory get free frames, of which there must be enough.

    Args:
        rows: int32 or int64 [N], distinct.
        change: Whether the rows may change, so that their records on disk are dropped.
        where: See the module.
        row_of: See the module.
        pins: See the module.
        saved: See the module.
        state: See the module.
        free: int32 [M], the free frames.
        free_count: Number of free frames, the last of which are taken.
        live: int64 [segments], the live records of each segment; reduced by those that are dropped.
        per_segment: Records per segment.
        frames: int32 [N], output: the rows' frames.
        missing: int32 [N + 1], output: the indices in `rows` of the rows that were not in memory.
        positions: int64 [N + 1], output: the positions of these rows on disk; -1 for initial values.

    Returns:
        How many rows were not in memory, and how many frames were not pinned before.
    """
    m = fresh = np.uint64(0)
    left, n = np.int64(free_count), np.uint64(len(rows))
    for i in range(n):
        if i + np.uint64(_AHEAD) < n:
            prefetch_to_read(where, rows[i + np.uint64(_AHEAD)], 1)
        row = np.uint64(rows[i])
        place = np.int64(where[row])
        if place < 0:
            frame = np.uint64(-1 - place)
            fresh += np.uint64(pins[frame] == 0)
            pins[frame] += 1
            state[frame] |= RECENT
            if change:
                if saved[frame] > 0:
                    live[np.uint64(saved[frame] - 1) // np.uint64(per_segment)] -= 1
                saved[frame] = CHANGED
        else:
            left -= 1
            frame = np.uint64(free[np.uint64(left)])
            row_of[frame], pins[frame], state[frame] = np.int64(row), 1, RECENT | ARRIVING
            saved[frame] = place
            where[row] = -1 - np.int64(frame)
            missing[m], positions[m] = i, place - 1
            m, fresh = m + np.uint64(1), fresh + np.uint64(1)
            if change:
                if place > 0:
                    live[np.uint64(place - 1) // np.uint64(per_segment)] -= 1
                saved[frame] = CHANGED
        frames[i] = frame
    return np.int64(m), np.int64(fresh)


@kernel
def unpin(frames, pins):
    """Undo a `pin` of these frames; return how many are not pinned any more."""
    found = np.int64(0)
    for i in range(np.uint64(len(frames))):
        frame = np.uint64(frames[i])
        pins[frame] -= 1
        found += np.int64(pins[frame] == 0)
    return found


@kernel
def mark_leaving(rows, where, state, out):
    """Mark the frames of rows [N] as LEAVING; write newly marked ones to `out`, int32 [N + 1]; return their number."""
    found = np.uint64(0)
    for i in range(np.uint64(len(rows))):
        place = np.int64(where[np.uint64(rows[i])])
        if place < 0:
            frame = np.uint64(-1 - place)
            out[found] = frame
            found += np.uint64((state[frame] & LEAVING) == 0)
            state[frame] |= LEAVING
    return np.int64(found)


@kernel
def mark_staying(rows, where, state):
    """Undo `mark_leaving` for rows [N]."""
    for i in range(np.uint64(len(rows))):
        place = np.int64(where[np.uint64(rows[i])])
        if place < 0:
            state[np.uint64(-1 - place)] &= np.uint8(255 - LEAVING)


@kernel
def choose_leaving(frames, pins, state, wanted, chosen, kept):
    """Choose up to `wanted` of the frames [N] that are LEAVING and not pinned; keep the others that are LEAVING.

    Args:
        frames: int32 [N].
        pins: See the module.
        state: See the module.
        wanted: The most frames to choose.
        chosen: int32 [N + 1], output: the chosen frames.
        kept: int32 [N + 1], output: frames that are still LEAVING, in their order.

    Returns:
        The numbers of chosen and of kept frames.
    """
    c = k = np.uint64(0)
    for i in range(np.uint64(len(frames))):
        frame = np.uint64(frames[i])
        if state[frame] & LEAVING == 0:
            continue
        if pins[frame] == 0 and c < np.uint64(wanted):
            state[frame] = CHOSEN
            chosen[c] = frame
            c += np.uint64(1)
        else:
            kept[k] = frame
            k += np.uint64(1)
    return np.int64(c), np.int64(k)


@kernel
def choose_by_clock(hand, row_of, pins, state, wanted, chosen):
    """Choose up to `wanted` frames that are not pinned: first those not used since the clock's hand last passed them.

    Args:
        hand: The frame at which to begin.
        row_of: See the module.
        pins: See the module.
        state: See the module.
        wanted: The most frames to choose.
        chosen: int32 [wanted + 1], output.

    Returns:
        The number of chosen frames, and the new hand.
    """
    M, c, at = np.int64(len(row_of)), np.uint64(0), np.int64(hand)
    for _ in range(2 * M):
        if c == np.uint64(wanted):
            break
        frame = np.uint64(at)
        at = at + 1 if at + 1 < M else np.int64(0)
        if row_of[frame] < 0 or pins[frame] > 0 or state[frame] & CHOSEN:
            continue
        if state[frame] & RECENT:
            state[frame] &= np.uint8(255 - RECENT)
            continue
        state[frame] = CHOSEN
        chosen[c] = frame
        c += np.uint64(1)
    return np.int64(c), at


@kernel
def release(frames, where, row_of, saved, state, free, free_count, changed):
    """Free those of the frames [N] whose rows have not changed: their values are on disk, or are the initial ones.

    Args:
        frames: int32 [N].
        where: See the module.
        row_of: See the module.
        saved: See the module.
        state: See the module.
        free: int32 [M], the free frames.
        free_count: Number of free frames.
        changed: int32 [N + 1], output: the frames of changed rows, which stay.

    Returns:
        The number of free frames, and of frames of changed rows.
    """
    left, c = np.uint64(free_count), np.uint64(0)
    for i in range(np.uint64(len(frames))):
        frame = np.uint64(frames[i])
        if saved[frame] == CHANGED:
            changed[c] = frame
            c += np.uint64(1)
            continue
        where[np.uint64(row_of[frame])] = saved[frame]
        row_of[frame], state[frame], free[left] = FREE, 0, frame
        left += np.uint64(1)
    return np.int64(left), np.int64(c)


@kernel
def release_to(frames, first, where, row_of, state, free, free_count):
    """Free frames [N] whose rows were written to the positions from `first` on; return the number of free frames."""
    left = np.uint64(free_count)
    for i in range(np.uint64(len(frames))):
        frame = np.uint64(frames[i])
        where[np.uint64(row_of[frame])] = np.int64(first) + np.int64(i) + 1
        row_of[frame], state[frame], free[left] = FREE, 0, frame
        left += np.uint64(1)
    return np.int64(left)


@kernel
def forget(rows, where, row_of, pins, saved, state, free, free_count, live, per_segment):
    """Reset rows [N], except those that are pinned, to their initial values; return the number of free frames."""
    left = np.uint64(free_count)
    for i in range(np.uint64(len(rows))):
        row = np.uint64(rows[i])
        place = np.int64(where[row])
        if place < 0:
            frame = np.uint64(-1 - place)
            if pins[frame] > 0:
                continue
            place = saved[frame]
            row_of[frame], state[frame], free[left] = FREE, 0, frame
            left += np.uint64(1)
        if place > 0:
            live[np.uint64(place - 1) // np.uint64(per_segment)] -= 1
        where[row] = 0
    return np.int64(left)


@kernel
def find(start, stop, rows, where, frames):
    """Write the frames of rows[start:stop] to frames[start:stop], int32; -1 for a row that is not in memory."""
    end = np.uint64(stop)
    for i in range(np.uint64(start), end):
        if i + np.uint64(_AHEAD) < end:
            prefetch_to_read(where, rows[i + np.uint64(_AHEAD)], 1)
        place = np.int64(where[np.uint64(rows[i])])
        frames[i] = -1 - place if place < 0 else np.int64(-1)  # not the position, which may need 64 bits


@kernel
def move_to(rows, first, where):
    """Record that the records of rows [N] were copied to the positions from `first` on."""
    for i in range(np.uint64(len(rows))):
        where[np.uint64(rows[i])] = np.int64(first) + np.int64(i) + 1


@kernel
def locate(rows, where, saved, positions, changed):
    """Write to positions, int64 [N], what `where` would be if the rows [N] left memory; CHANGED for changed rows.

    Write the indices in `rows` of changed rows to `changed`, int32 [N + 1], and return how many there are.
    """
    c = np.uint64(0)
    for i in range(np.uint64(len(rows))):
        place = np.int64(where[np.uint64(rows[i])])
        if place < 0:
            place = saved[np.uint64(-1 - place)]
        positions[i], changed[c] = place, i
        c += np.uint64(place == CHANGED)
    return np.int64(c)


@kernel
def record_saved(frames, first, pins, saved, live, per_segment):
    """Record that the rows in frames [N], which stay there, were written to the disk, to positions from `first` on.

    Rows that are not pinned count as unchanged from then on. Pinned rows may still change, so their records are dead.
    """
    for i in range(np.uint64(len(frames))):
        frame, position = np.uint64(frames[i]), np.int64(first) + np.int64(i)
        if pins[frame] == 0:
            saved[frame] = position + 1
        else:
            live[np.uint64(position) // np.uint64(per_segment)] -= 1


@kernel
def find_records(start, stop, where, saved, first, out):
    """For each row in [start, stop) with one of the N records from `first` on, write the row to out[record's number].

    Args:
        start: The first row.
        stop: The end of the rows.
        where: See the module.
        saved: See the module.
        first: The position of the first record.
        out: int64 [N], output.
    """
    for row in range(np.uint64(start), np.uint64(stop)):
        place = np.int64(where[row])
        if place < 0:
            place = saved[np.uint64(-1 - place)]
        number = np.uint64(place - 1 - np.int64(first))
        if place > 0 and number < np.uint64(len(out)):
            out[number] = row
