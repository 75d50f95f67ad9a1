"""The digest of a state, beside its definition written out with hashlib alone."""

from functools import partial
from hashlib import sha256

import numpy as np
import pytest

from hostdev.core.digest import (
    DigestColumn,
    RangeDigests,
    StateDigest,
    range_digests,
    ranges_in_order,
    ranges_of,
    rows_per_range,
)

V, D = 70_000, 8  # two ranges of 32,768 rows, and a third


def by_hand(columns, dense):
    found = sha256(b"hostdev state 2\n")
    found.update(b"table t step 7\n")
    for name in ("weights", "m", "z"):
        values = columns[name]
        found.update(f"t/{name} float32 [{V}, {values.shape[1]}]\n".encode())
        for start in (0, 32_768, 65_536):
            found.update(sha256(values[start : start + 32_768].tobytes()).digest())
    found.update(b"layer.weight float32 [3, 5]\n")
    found.update(dense.tobytes())
    return found.hexdigest()


def made():
    rng = np.random.default_rng(0)
    block = rng.random((V, 2, D), np.float32)
    columns = {"weights": block[:, 0], "z": block[:, 1], "m": rng.random((V, 1), np.float32)}
    return columns, rng.random((3, 5), np.float32)


def digest_of(columns, dense, *, threads=None, ranges=ranges_of, known=None):
    digest = StateDigest(threads)
    length = rows_per_range(D)
    found = [DigestColumn(name, rows.shape, partial(ranges, rows, length)) for name, rows in columns.items()]
    digest.table("t", 7, found, known)
    digest.array("layer.weight", "float32", dense.shape, [dense[:1], dense[1:]])
    return digest.hexdigest()


@pytest.mark.parametrize(("dim", "rows"), [(1, 262_144), (16, 16_384), (80, 2048), (262_144, 1), (10**6, 1)])
def test_ranges_have_a_power_of_two_of_rows(dim, rows):
    assert rows_per_range(dim) == rows


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
def test_the_definition(threads):
    columns, dense = made()
    assert digest_of(columns, dense, threads=threads) == by_hand(columns, dense)
    columns["z"][65_537, 3] += 1
    assert digest_of(columns, dense, threads=threads) == by_hand(columns, dense)


@pytest.mark.parametrize("chunk", [100, 32_767, 32_768, 50_000, V])
def test_chunks_of_any_length(chunk):
    columns, dense = made()

    def in_order(rows, length, numbers):
        return ranges_in_order(lambda: (rows[i : i + chunk] for i in range(0, V, chunk)), length, numbers)

    assert digest_of(columns, dense, ranges=in_order) == by_hand(columns, dense)


def test_known_ranges_are_not_read():
    columns, dense = made()
    by_column = {name: range_digests(rows, rows_per_range(D)) for name, rows in columns.items()}
    known = RangeDigests(by_column, np.array([True, False, True]))
    columns["m"][40_000] = -1
    asked = []

    def noted(rows, length, numbers):
        asked.append(list(numbers))
        return ranges_of(rows, length, numbers)

    assert digest_of(columns, dense, ranges=noted, known=known) == by_hand(columns, dense)
    assert asked == [[1]] * 3
    expected = by_hand(columns, dense)
    columns["m"][0] = -1  # not known to have changed: the digest trusts its caller
    assert digest_of(columns, dense, known=known) == expected


def test_an_error_of_a_thread_is_raised():
    def broken(rows, length, numbers):
        for number in numbers:
            yield partial((lambda n: 1 // n), 1 - number)

    columns, dense = made()
    with pytest.raises(ZeroDivisionError):
        digest_of(columns, dense, threads=2, ranges=broken)
