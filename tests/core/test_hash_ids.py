"""Ids of texts: XXH64, the same for every way to pass the texts."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import hostdev
from tests.naive import xxh64


def signed(number):
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize(
    ("text", "expected"),  # of the reference implementation
    [
        ("", 0xEF46DB3751D8E999),
        ("a", 0xD24EC4F1A98C6E5B),
        ("abc", 0x44BC2CF5AD770999),
        ("Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_golden_values(text, expected):
    assert hostdev.hash_ids([text]).tolist() == [signed(expected)]
    assert xxh64(text.encode()) == expected


def test_every_length():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, length, dtype=np.uint8).tobytes() for length in [*range(100), 1_000, 4_099]]
    assert hostdev.hash_ids(texts).tolist() == [signed(xxh64(text)) for text in texts]


def test_every_way_to_pass_texts():
    texts = ["anna", "", "Jörg", "anna", "x" * 70, "日本"]
    expected = [signed(xxh64(text.encode())) for text in texts]
    ways = [
        texts,
        tuple(texts),
        np.array(texts),
        np.array(texts, object),
        [text.encode() for text in texts],
        pd.Series(texts),
        pd.Series(texts, dtype="category"),
        pa.array(texts),
        pa.array(texts).dictionary_encode(),
        pa.array(["no", *texts]).slice(1),
        pa.chunked_array([texts[:2], [], texts[2:]]),
        pa.array(texts, pa.string_view()),
        pa.array(texts, pa.large_string()),
    ]
    for way in ways:
        found = hostdev.hash_ids(way)
        assert found.dtype == np.int64 and found.tolist() == expected, type(way)
    assert hostdev.hash_ids(np.array(texts).reshape(3, 2)).tolist() == np.reshape(expected, (3, 2)).tolist()
    assert hostdev.hash_ids([["a\0", "a"], ["b", "c"]]).tolist() == [
        [signed(xxh64(text.encode())) for text in row] for row in (["a\0", "a"], ["b", "c"])
    ]
    assert len(hostdev.hash_ids(["a"] * 50_000 + ["x" * 200_000])) == 50_001  # takes no memory of 50,001 long texts
    for empty in ([], np.array([], "U3"), pa.array([], pa.string()), pd.Series([], dtype=str)):
        assert hostdev.hash_ids(empty).tolist() == []


def test_a_broken_arrow_array():
    offsets, data = pa.py_buffer(np.array([0, 3, 1], np.int32)), pa.py_buffer(b"abc")
    with pytest.raises(ValueError, match="the values are not a valid Arrow array"):
        hostdev.hash_ids(pa.Array.from_buffers(pa.string(), 2, [None, offsets, data]))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([1, 2], TypeError, "texts, not values of type int64; integers are ids themselves, and need no hash"),
        ([0.5], TypeError, "texts, not values of type double"),
        (["a", 1], TypeError, "these values are of several types or none"),
        (["a", None], ValueError, "the value at index 1 is missing"),
        ([None], ValueError, "the value at index 0 is missing"),
        (pd.Series(["a", "b", np.nan]), ValueError, "the value at index 2 is missing"),
        ([["a", float("nan")]], ValueError, "the value at index 1 is missing"),
        ([["a", 1]], TypeError, "these values are of several types or none"),
        ([["a"], ["b", "c"]], ValueError, "these lists have different lengths"),
    ],
)
def test_other_values(values, error, message):
    with pytest.raises(error, match=message):
        hostdev.hash_ids(values)
