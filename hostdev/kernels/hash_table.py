"""Linear probing in hash tables whose slots have positions of keys, while the keys lie in an array of their own.

A table has 2 ** (64 - shift) slots, int32, of which at least one is empty. A slot has the position of a key, or a
negative number if it has none. Such a table takes a quarter of the memory of one whose slots have the keys, too.
"""

import numpy as np

from hostdev.kernels.jit import inline, kernel


@inline
def find_slot(key, shift):
    """Return the slot at which the search for a key begins, in a hash table of 2 ** (64 - shift) slots."""
    # Fibonacci hashing (Knuth, TAOCP vol. 3, section 6.4): the high bits of a product are well spread.
    return (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(shift)


@inline
def find_key(key, slots, shift, keys):
    """Return the slot at which the search for a key ends, and the key's position in `keys`, negative if missing."""
    mask, one = np.uint64(len(slots) - 1), np.uint64(1)
    slot = find_slot(key, shift)
    position = slots[slot]
    while position >= 0 and keys[np.uint64(position)] != key:
        slot = (slot + one) & mask
        position = slots[slot]
    return slot, position


@inline
def find_free(key, slots, shift):
    """Return the first empty slot at or after the slot where the search for a key begins."""
    mask, one = np.uint64(len(slots) - 1), np.uint64(1)
    slot = find_slot(key, shift)
    while slots[slot] >= 0:
        slot = (slot + one) & mask
    return slot


@kernel
def fill(slots, shift, keys, count):
    """Write the positions of the first `count` keys, which are distinct, to slots that are all empty."""
    for position in range(np.uint64(count)):
        slots[find_free(keys[position], slots, shift)] = position
