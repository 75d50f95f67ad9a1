import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.kernels.strings import TextMap, hash_texts, scan_quotes
from tests import naive


def packed(texts, dtype=np.int32):
    """Return offsets and bytes of texts, with other bytes before the first."""
    offsets = np.cumsum([3, *map(len, texts)]).astype(dtype)
    return offsets, np.frombuffer(b"abc" + b"".join(texts), np.uint8)


def unpacked(offsets, data):
    return [data[a:b].tobytes() for a, b in pairwise(offsets)]


TEXTS = st.lists(st.one_of(st.binary(max_size=3), st.binary(max_size=40)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, max_size=4), st.sampled_from([np.int32, np.int64]))
def test_positions_are_in_order_of_first_occurrence(parts, dtype):
    seen = TextMap()
    found = [seen.add(*packed(part, dtype)) for part in parts]
    texts = [text for part in parts for text in part]
    order = list(dict.fromkeys(texts))
    assert [order[p] for positions in found for p in positions] == texts
    assert len(seen) == len(order)
    assert unpacked(*seen.take(np.arange(len(order)))) == order


def test_many_and_long_texts(monkeypatch):
    seen = TextMap()
    texts = [str(i % 70_000).encode() for i in range(100_000)] + [b"x" * 100_000]
    positions = seen.add(*packed(texts))
    assert len(seen) == 70_001
    np.testing.assert_array_equal(positions[:-1], np.arange(100_000) % 70_000)
    assert unpacked(*seen.take(np.array([69_999, 70_000, 0]))) == [b"69999", b"x" * 100_000, b"0"]
    np.testing.assert_array_equal(seen.add(*packed(texts[::-1])), positions[::-1])


def test_taking_texts_needs_memory_for_a_copy_of_them_only():
    seen = TextMap()
    seen.add(*packed([str(i).encode() * 1000 for i in range(100, 1000)]))
    some = np.arange(899, -1, -3)
    assert seen.lengths(some).tolist() == [3000] * 300
    seen.take(some[:1])  # compiled
    tracemalloc.start()
    taken = seen.take(some)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert unpacked(*taken) == [str(i).encode() * 1000 for i in range(999, 99, -3)]
    assert peak < 300 * 3000 + 50_000


def test_texts_with_the_same_hash_are_different(monkeypatch):
    """By the hash alone they would be equal."""
    monkeypatch.setattr("hostdev.kernels.strings.hash_texts", lambda offsets, _: np.zeros(len(offsets) - 1, np.uint64))
    seen = TextMap()
    texts = [b"", b"a", b"b", b"ab", b"a", b"aa", b""]
    np.testing.assert_array_equal(seen.add(*packed(texts)), [0, 1, 2, 3, 1, 4, 0])
    many = [str(i).encode() for i in range(1500)]
    seen.add(*packed(many))
    np.testing.assert_array_equal(seen.add(*packed(many)), 5 + np.arange(1500))


@given(TEXTS)
def test_hashes(texts):
    assert hash_texts(*packed(texts)).tolist() == [naive.fnv1a(text) for text in texts]


def test_a_hash_that_is_published():
    assert hash_texts(*packed([b"", b"a", b"foobar"])).tolist() == [
        0xCBF29CE484222325,
        0xAF63DC4C8601EC8C,
        0x85944171F73967E8,
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", None),
        ('"', 1),
        ('"a"', None),
        ('a"', None),
        ('a,"', 1),
        ('a\n"b\n"\n', None),
        ('a\nb,"c\n\nd', 2),
        ('"a""', 1),
        ('"a"""', None),
        ('"a" b"\n"', 2),
        ('"a"\r\n"', 2),
    ],
)
def test_quotes_that_are_left_open(text, line):
    assert naive.open_quotes(text) == line
    assert open_quotes(text, len(text) + 1) == line


@given(st.text('a",\n\r'), st.integers(1, 5))
def test_quotes_in_pieces(text, size):
    assert open_quotes(text, size) == naive.open_quotes(text)


def open_quotes(text, size):
    state = 0, 0, 0
    data = np.frombuffer(text.encode(), np.uint8)
    for start in range(0, len(data), size):
        *state, end = scan_quotes(data[start : start + size], ord(","), *state)
        assert end == 0 or data[start + end - 1] == ord("\n")
    return state[2] if state[0] == 2 else None
