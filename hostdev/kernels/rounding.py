"""Loads and stores of rows with bfloat16 weights, or with bfloat16 or 8-bit slots, in optimizers' kernels.

The kernels round new values as `bfloat16` describes.

Shapes: V table rows of dimension D, S optimizer slots of D values, P bytes per 8-bit slot. Plane 0 of a row has its
weights, and plane 1 + s has its slot s.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from hostdev.kernels.arrays import AnyIds, Keys, Positions, Rows
from hostdev.kernels.bfloat16 import as_exact, draw, rounded_bits, steps_of, to_float32
from hostdev.kernels.counter import hashed
from hostdev.kernels.eight_bits import NEAREST, Codes, Flags, decode_plane, store_plane
from hostdev.kernels.jit import bare, bare_bits, inline_code, kernel, prefetch_to_read, prefetch_update
from hostdev.kernels.loops import run_alone
from hostdev.kernels.pool import Task, get_grain, tasks_over
from hostdev.kernels.shards import id_at

Bfloat16 = npt.NDArray[np.uint16]
Stored = Rows | Bfloat16
StoredSlots = Stored | Codes

_AHEAD = 8  # prefetch distance in rows


class SplitRows(NamedTuple):
    """Rows whose weights or slots are not float32; optimizers' kernels accept them in place of a float32 block.

    Attributes:
        weights: float32 or bfloat16 [V, D].
        slots: float32 or bfloat16 [V, S, D], or 8 bits, uint8 [V, S, P].
        unsigned: uint8 [S], for each slot, 1 if it is stored in 8 bits and is never negative, else 0.
        steps: The counter of each pair of columns in each plane, from `steps_of`.
        key: The key of the table's step, 64 bits.
        first: The position (see `shards`) of the first row, if these are the rows of one rank; else 0.
        inverse: The multiplier that turns positions into ids, from `shards.get_inverse`; 0 if row numbers are ids.
        total: The number of rows of the whole table.
        keys: int64 [V], the key of each row of a table by key, which takes the place of its id; [0] for other tables.
    """

    weights: Stored
    slots: StoredSlots
    unsigned: Flags
    steps: npt.NDArray[np.uint32]
    key: np.uint64
    first: np.uint64
    inverse: np.uint64
    total: np.uint64
    keys: Keys

    @classmethod
    def of(
        cls, weights: Stored, slots: StoredSlots, unsigned: Flags, key: int, where: tuple[int, int, int], keys: Keys
    ) -> "SplitRows":
        """Return a table's rows for the step with this key; `where` is (first, inverse, total)."""
        first, inverse, total = map(np.uint64, where)
        steps = steps_of(weights.shape[1], 1 + slots.shape[1])
        return cls(weights, slots, unsigned, steps, np.uint64(key), first, inverse, total, keys)

    @property
    def row_bytes(self) -> int:
        """The number of bytes per row."""
        return int(self.weights.strides[0] + self.slots[:1].nbytes)


def bare_rows(block: Any) -> Any:
    """Return a block, or the arrays of `SplitRows`, without reference counting (see `jit.bare`); for use in kernels."""
    raise NotImplementedError("only compiled kernels can call this function")


def make_scratch(block: Any) -> Any:
    """Return the scratch memory with which `load_weights`, `load_slot` and `store_row` handle one row at a time."""
    raise NotImplementedError("only compiled kernels can call this function")


def load_weights(block: Any, row: Any, scratch: Any) -> Any:
    """Return a row's weights, float32 [D], for modification: a view, or a copy, which `store_row` later writes back."""
    raise NotImplementedError("only compiled kernels can call this function")


def load_slot(block: Any, row: Any, number: Any, scratch: Any) -> Any:
    """Return an optimizer slot of a row, float32 [D], for modification: a view or a copy, as in `load_weights`."""
    raise NotImplementedError("only compiled kernels can call this function")


def store_row(block: Any, row: Any, scratch: Any) -> None:
    """Write back a row: round the copies that `load_weights` and `load_slot` returned, if any, and store them."""
    raise NotImplementedError("only compiled kernels can call this function")


def prefetch_row(block: Any, ids: Any, i: Any, stop: Any) -> None:
    """At iteration i of a loop that updates row ids[i], prefetch the row of iteration i + 8, if i + 8 < stop."""
    raise NotImplementedError("only compiled kernels can call this function")


def _widen(stored: Any, unsigned: Any, out: Any) -> Any:
    """Copy a stored plane to out, float32 [D], and return `out`.

    `unsigned` says, for an 8-bit slot, whether it is never negative.
    """
    raise NotImplementedError("only compiled kernels can call this function")


@overload(_widen, inline="always")
def _overload_widen(stored: Any, unsigned: Any, out: Any) -> Any:
    def widen(stored: Any, unsigned: Any, out: Any) -> Any:
        for j in range(np.uint64(len(out))):
            out[j] = to_float32(stored[j])
        return out

    def of_codes(stored: Any, unsigned: Any, out: Any) -> Any:
        return decode_plane(stored, unsigned, out)

    return of_codes if stored.dtype == types.uint8 else widen


@overload(bare_rows, inline="always")
def _overload_bare_rows(block: Any) -> Any:
    def of_block(block: Any) -> Any:
        return bare(block)

    def of_rows(block: Any) -> Any:
        weights, slots, unsigned, steps, key, first, inverse, total, keys = block
        return SplitRows(
            bare(weights), bare(slots), bare(unsigned), bare(steps), key, first, inverse, total, bare(keys)
        )

    return of_block if isinstance(block, types.Array) else of_rows


@overload(make_scratch, inline="always")
def _make_scratch(block: Any) -> Any:
    def none(block: Any) -> Any:
        return None

    def of_a_row(block: Any) -> Any:
        planes, pairs = block.steps.shape
        own, words = np.empty((planes, block.weights.shape[1]), np.float32), np.empty(pairs, np.uint32)
        return bare(own), bare(words), own, words  # the last two keep the memory alive

    return none if isinstance(block, types.Array) else of_a_row


@overload(load_weights, inline="always")
def _load_weights(block: Any, row: Any, scratch: Any) -> Any:
    def there(block: Any, row: Any, scratch: Any) -> Any:
        return block[row, 0]

    def apart(block: Any, row: Any, scratch: Any) -> Any:
        return block.weights[row]

    def widen(block: Any, row: Any, scratch: Any) -> Any:
        return _widen(block.weights[row], False, scratch[0][0])

    if isinstance(block, types.Array):
        return there
    return widen if _is_rounded(block, "weights") else apart


@overload(load_slot, inline="always")
def _load_slot(block: Any, row: Any, number: Any, scratch: Any) -> Any:
    def in_block(block: Any, row: Any, number: Any, scratch: Any) -> Any:
        return block[row, 1 + number]

    def in_slots(block: Any, row: Any, number: Any, scratch: Any) -> Any:
        return block.slots[row, number]

    def widen(block: Any, row: Any, number: Any, scratch: Any) -> Any:
        return _widen(block.slots[row, number], block.unsigned[number], scratch[0][1 + number])

    if isinstance(block, types.Array):
        return in_block
    return widen if _is_rounded(block, "slots") else in_slots


def _is_rounded(rows: Any, field: str) -> bool:
    """Return whether the numba type of a field of `SplitRows` is not float32."""
    return not isinstance(rows[rows.fields.index(field)].dtype, types.Float)


@inline_code
def _hash_row(block, row):
    """Return the hash of the step's key and the row's id in the whole table, or the row's key in a table by key."""
    if len(block.keys):
        return hashed(block.key, block.keys[row])
    position = row + block.first
    row_id = id_at(position, block.inverse, block.total) if block.inverse else position
    return hashed(block.key, row_id)


def _round_plane(word: Any, steps: Any, values: Any, unsigned: Any, words: Any, stored: Any) -> None:
    """Round values, float32 [D], into a stored plane, bfloat16 [D] or uint8 [P]."""
    raise NotImplementedError("only compiled kernels can call this function")


@overload(_round_plane, inline="always")
def _overload_round_plane(word: Any, steps: Any, values: Any, unsigned: Any, words: Any, stored: Any) -> Any:
    def to_bfloat16(word: Any, steps: Any, values: Any, unsigned: Any, words: Any, stored: Any) -> None:
        draw(word, steps, words)
        bits, random = bare_bits(values, np.uint32), bare_bits(words, np.uint16)
        for j in range(len(values)):
            stored[j] = rounded_bits(bits[j], random[j])

    def to_codes(word: Any, steps: Any, values: Any, unsigned: Any, words: Any, stored: Any) -> None:
        draw(word, steps, words)
        store_plane(values, unsigned, bare_bits(words, np.uint16), stored)

    return to_codes if stored.dtype == types.uint8 else to_bfloat16


@inline_code
def _round_slots(word, block, row, planes, words):
    """Round the slots of a row; planes is float32 [1 + S, D]."""
    for slot in range(np.uint64(block.slots.shape[1])):
        plane = slot + np.uint64(1)
        _round_plane(word, block.steps[plane], planes[plane], block.unsigned[slot], words, block.slots[row, slot])


@overload(store_row, inline="always")
def _store_row(block: Any, row: Any, scratch: Any) -> Any:
    def nothing(block: Any, row: Any, scratch: Any) -> None:
        pass

    def weights(block: Any, row: Any, scratch: Any) -> None:
        own, words = scratch[0], scratch[1]
        _round_plane(_hash_row(block, row), block.steps[0], own[0], False, words, block.weights[row])

    def slots(block: Any, row: Any, scratch: Any) -> None:
        own, words = scratch[0], scratch[1]
        _round_slots(_hash_row(block, row), block, row, own, words)

    def both(block: Any, row: Any, scratch: Any) -> None:
        own, words = scratch[0], scratch[1]
        word = _hash_row(block, row)
        _round_plane(word, block.steps[0], own[0], False, words, block.weights[row])
        _round_slots(word, block, row, own, words)

    if isinstance(block, types.Array):
        return nothing
    if not _is_rounded(block, "slots"):
        return weights
    return both if _is_rounded(block, "weights") else slots


@overload(prefetch_row, inline="always")
def _prefetch_row(block: Any, ids: Any, i: Any, stop: Any) -> Any:
    def of_block(block: Any, ids: Any, i: Any, stop: Any) -> None:
        prefetch_update(block, ids, i, stop)

    def of_both(block: Any, ids: Any, i: Any, stop: Any) -> None:
        ahead = i + np.uint64(_AHEAD)
        if ahead < np.uint64(stop):
            prefetch_to_read(block.weights, ids[ahead], block.weights.strides[0])
            prefetch_to_read(
                block.slots, ids[ahead], block.slots.shape[1] * block.slots.shape[2] * block.slots.itemsize
            )

    return of_block if isinstance(block, types.Array) else of_both


def _store(values: Any, unsigned: Any, random: Any, out: Any) -> None:
    """Store values, float32 [D], in a plane that can represent them; random is uint16 [D or more], for 8-bit slots."""
    raise NotImplementedError("only compiled kernels can call this function")


@overload(_store, inline="always")
def _overload_store(values: Any, unsigned: Any, random: Any, out: Any) -> Any:
    def exact(values: Any, unsigned: Any, random: Any, out: Any) -> None:
        for j in range(np.uint64(len(out))):
            out[j] = as_exact(out, values[j])

    def as_codes(values: Any, unsigned: Any, random: Any, out: Any) -> None:
        store_plane(values, unsigned, random, out)

    return as_codes if out.dtype == types.uint8 else exact


@kernel
def _read(start, stop, ids, positions, weights, slots, unsigned, out):
    weights, slots, out = bare(weights), bare(slots), bare(out)
    planes = np.uint64(slots.shape[1])
    for i in range(np.uint64(start), np.uint64(stop)):
        ahead = i + np.uint64(_AHEAD)
        if ahead < np.uint64(stop):
            prefetch_to_read(weights, ids[ahead], weights.strides[0])
            prefetch_to_read(slots, ids[ahead], slots.shape[1] * slots.shape[2] * slots.itemsize)
        row, at = np.uint64(ids[i]), np.uint64(i if positions is None else positions[i])
        _widen(weights[row], False, out[at, 0])
        for s in range(planes):
            _widen(slots[row, s], unsigned[s], out[at, s + np.uint64(1)])


@kernel
def _write(start, stop, ids, positions, weights, slots, unsigned, values):
    weights, slots, values = bare(weights), bare(slots), bare(values)
    planes, nearest = np.uint64(slots.shape[1]), np.full(values.shape[2], NEAREST, np.uint16)
    for i in range(np.uint64(start), np.uint64(stop)):
        row, at = np.uint64(ids[i]), np.uint64(i if positions is None else positions[i])
        _store(values[at, 0], False, nearest, weights[row])
        for s in range(planes):
            _store(values[at, s + np.uint64(1)], unsigned[s], nearest, slots[row, s])


def read_tasks(
    weights: Stored, slots: StoredSlots, unsigned: Flags, ids: AnyIds, out: Rows, positions: Positions | None = None
) -> list[Task]:
    """Return tasks that copy rows, with weights and slots, to `out`.

    Args:
        weights, slots, unsigned: As in `SplitRows`.
        ids: int32 or int64 [N].
        out: float32 [N, 1 + S, D], written; with `positions`, [any, 1 + S, D].
        positions: int32 [N]: the row ids[i] is copied to out[positions[i]]; None to copy it to out[i].
    """
    return tasks_over(_read, len(ids), ids, positions, weights, slots, unsigned, out, grain=get_grain(out.strides[0]))


def read_here(weights: Stored, slots: StoredSlots, unsigned: Flags, ids: AnyIds, out: Rows) -> None:
    """Copy rows as the tasks of `read_tasks` do, using only this thread."""
    run_alone(_read, len(ids), ids, None, weights, slots, unsigned, out)


def write_tasks(
    weights: Stored, slots: StoredSlots, unsigned: Flags, ids: AnyIds, values: Rows, positions: Positions | None = None
) -> list[Task]:
    """Return tasks that overwrite the rows `ids` with `values`; arguments have the shapes that `read_tasks` describes.

    The formats of weights and slots must be able to represent the values exactly.
    """
    args = ids, positions, weights, slots, unsigned, values
    return tasks_over(_write, len(ids), *args, grain=get_grain(values.strides[0]))
