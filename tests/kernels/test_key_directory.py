"""The directory of keys against a dict: any keys, in any order, while parts grow and entries are erased."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.kernels.counter import mix64
from hostdev.kernels.key_directory import _SIZE, EMPTY, FULL, GROWTH, PARTS, Arena, KeyDirectory, as_entries, parts_of
from hostdev.kernels.pool import host_threads, set_host_threads
from tests.naive import unmix64

KEYS = st.integers(-(2**63), 2**63 - 1)


def check(directory, expected, keys):
    """Compare with a dict, for these keys and all that the directory has."""
    every = np.array([*keys, *expected], np.int64)
    np.testing.assert_array_equal(directory.find(every), [expected.get(key, EMPTY) for key in every.tolist()])
    assert len(directory) == len(expected)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.lists(KEYS | st.integers(-3, 40), max_size=60)), max_size=12),
    stride=st.sampled_from([1, 2**8, 2**40, 2**56, -1]),
)
def test_like_a_dict(steps, stride):
    directory, expected, row = KeyDirectory(), {}, 0
    for inserts, drawn in steps:
        keys = list(dict.fromkeys(((key * stride + 2**63) % 2**64) - 2**63 for key in drawn))
        if inserts:
            new = [key for key in keys if key not in expected]
            rows = np.arange(row, row + len(new), dtype=np.int32)
            directory.insert(np.array(new, np.int64), rows)
            expected |= dict(zip(new, rows.tolist(), strict=True))
            row += len(new)
        else:
            found = directory.erase(np.array(keys, np.int64))
            assert found.tolist() == [expected.pop(key, EMPTY) for key in keys]
        check(directory, expected, keys)


@pytest.mark.parametrize("expected", [0, 100_000])
def test_many_keys(expected):
    """Growth keeps each part between FULL / GROWTH and FULL of its slots, and the rows of all keys."""
    rng = np.random.default_rng(1)
    keys = rng.permutation(np.arange(300_000)) * np.int64(1_000_003) - 5
    rows = rng.permutation(np.arange(300_000, dtype=np.int32))
    directory = KeyDirectory(expected)
    for start in range(0, len(keys), 7_001):
        assert (directory.find(keys[start : start + 7_001]) == EMPTY).all()
        directory.insert(keys[start : start + 7_001], rows[start : start + 7_001])
    np.testing.assert_array_equal(directory.find(keys), rows)
    counts = np.bincount(parts_of(keys), minlength=PARTS)
    share = counts / directory.parts[:, _SIZE]
    assert share.max() <= FULL and share.min() >= 0.97 * FULL / GROWTH
    assert directory.nbytes / len(keys) < 32
    gone = rng.permutation(len(keys))[:100_000]
    np.testing.assert_array_equal(directory.erase(keys[gone]), rows[gone])
    rows[gone] = EMPTY
    np.testing.assert_array_equal(directory.find(keys), rows)
    assert len(directory) == 200_000
    directory.insert(keys[gone], np.arange(100_000, dtype=np.int32))  # an erased key may come back
    rows[gone] = np.arange(100_000)
    np.testing.assert_array_equal(directory.find(keys), rows)


def test_keys_that_all_begin_at_one_slot():
    """Keys that do not fit at a part's end get more spare slots; the part itself does not grow without bounds."""
    hashes = np.uint64(0x07000000FFFFFFFF) | np.arange(300, dtype=np.uint64) << np.uint64(32)
    keys = unmix64(hashes).view(np.int64)
    assert (parts_of(keys) == 7).all()
    directory, rows = KeyDirectory(), np.arange(300, dtype=np.int32)
    for start in range(0, 300, 20):
        directory.insert(keys[start : start + 20], rows[start : start + 20])
    np.testing.assert_array_equal(directory.find(keys), rows)
    assert directory.nbytes < 1 << 20
    np.testing.assert_array_equal(directory.erase(keys[::2]), rows[::2])
    np.testing.assert_array_equal(directory.find(keys), np.where(rows % 2, rows, EMPTY))


def test_parts_that_are_full_at_once_do_not_grow_at_once():
    rng, directory = np.random.default_rng(6), KeyDirectory()
    directory.insert(rng.integers(0, 2**63, 300_000), np.arange(300_000, dtype=np.int32))
    sizes = np.sort(directory.parts[:, _SIZE])
    assert sizes[-1] > 1.2 * sizes[0]
    assert (sizes[1:] / sizes[:-1]).max() < 1.05


def test_searches_stay_short_for_keys_in_the_order_of_their_hashes():
    """Checkpoints, `keys` and `weights` of a table have this order; a part of them may fill a part of the directory."""
    keys = np.random.default_rng(3).integers(0, 2**63, 200_000)
    keys = keys[np.argsort(mix64(keys.view(np.uint64)))]
    directory, longest = KeyDirectory(), 0
    for start in range(0, len(keys), 500):
        directory.insert(keys[start : start + 500], np.arange(start, start + 500, dtype=np.int32))
        for part in np.unique(parts_of(keys[start : start + 500])).tolist():
            empty = np.flatnonzero(as_entries(directory._blocks[part])[:, 1] == EMPTY)
            longest = max(longest, int(np.diff(empty, prepend=-1).max()))
    assert longest < 100  # entries in a row


def test_every_part_is_the_hashs_highest_byte():
    keys = np.array([0, 1, -1, 2**62, -(2**63)], np.int64)
    np.testing.assert_array_equal(parts_of(keys), mix64(keys.view(np.uint64)) >> np.uint64(56))


def test_parts_do_not_grow_at_once():
    """Of keys that come a few at a time, no more than a few parts' worth is moved in one call."""
    directory, grown = KeyDirectory(200_000), []
    for start in range(0, 400_000, 2_000):
        before = directory.parts[:, _SIZE].copy()
        directory.insert(np.arange(start, start + 2_000), np.arange(start, start + 2_000, dtype=np.int32))
        grown.append(int((directory.parts[:, _SIZE] != before).sum()))
    assert max(grown) < PARTS / 10 and sum(grown) > 2 * PARTS


@pytest.mark.parametrize("threads", [1, 3])
def test_find_with_threads(threads):
    before = host_threads()
    set_host_threads(threads)
    try:
        keys = mix64(np.arange(100_000)).view(np.int64)
        directory = KeyDirectory(len(keys))
        directory.insert(keys[:50_000], np.arange(50_000, dtype=np.int32))
        found = directory.find(keys)
        np.testing.assert_array_equal(found, np.where(np.arange(100_000) < 50_000, np.arange(100_000), EMPTY))
    finally:
        set_host_threads(before)


def test_no_memory_leaves_the_directory_as_it_was(monkeypatch):
    directory, keys = KeyDirectory(), np.arange(20_000)
    directory.insert(keys[:5_000], np.arange(5_000, dtype=np.int32))
    real, left = Arena.take, [5]

    def short(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(Arena, "take", short)
    with pytest.raises(MemoryError):
        directory.insert(keys[5_000:], np.arange(5_000, 20_000, dtype=np.int32))
    assert len(directory) == 5_000
    np.testing.assert_array_equal(directory.find(keys), np.where(keys < 5_000, keys, EMPTY))
    monkeypatch.undo()
    directory.insert(keys[5_000:], np.arange(5_000, 20_000, dtype=np.int32))
    np.testing.assert_array_equal(directory.find(keys), keys)
