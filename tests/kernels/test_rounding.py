"""Stochastic rounding to bfloat16: the reference's bits on the host and in torch's operations, and its distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core.rounding import rounding_key
from hostdev.device.ops import torch_operations
from hostdev.kernels import bfloat16
from hostdev.kernels.plane_formats import BFLOAT16, FLOAT32
from hostdev.kernels.pool import set_host_threads
from tests import naive
from tests.combinations import pairs_first

FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 3.4028235e38, -3.4028235e38, 1.00390625])
KEYS = st.integers(0, 2**64 - 1)


def is_bfloat16(values):
    return not (values.view(np.uint32) & np.uint32(0xFFFF)).any()


def rounded(values, row_ids, key, at=None, plane=0, kind=BFLOAT16):
    """Return rows [n, D] rounded by the host's kernel as a plane of a block at some of its rows; the others stay."""
    at = np.arange(len(values)) if at is None else at
    block = np.full((max(at, default=0) + 2, 3, values.shape[1]), np.float32(1.2345678))
    block[at, plane] = values
    before = block.copy()
    bfloat16.round_rows(block, at, row_ids, key, (FLOAT32,) * plane + (kind,))
    found = block[at, plane].copy()
    block[at, plane] = values
    assert block.tobytes() == before.tobytes()
    return found


def by_torch(values, row_ids, key, at=None, plane=0, kind=BFLOAT16):
    block = torch.zeros(max(at, default=len(values) - 1) + 2 if at is not None else len(values), 3, values.shape[1])
    places = None if at is None else torch.from_numpy(at)
    block[places if at is not None else slice(None), plane] = torch.from_numpy(values)
    torch_operations.round_rows(block, places, torch.from_numpy(row_ids), key, (FLOAT32,) * plane + (kind,))
    assert not block[:, [other for other in range(3) if other != plane]].any()
    return (block[:, plane] if at is None else block[places, plane]).numpy()


@pairs_first("dim, dtype, threads", [1, 3, 16, 80, 129], [np.int32, np.int64], [1, 2, 5])
def test_the_twins_bits(dim, dtype, threads):
    set_host_threads(threads)
    rng = np.random.default_rng(dim)
    for n in (0, 1, 700):
        values = (rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-40, 38, (n, dim))).astype(np.float32)
        row_ids = rng.integers(0, 2**31 - 1 if dtype == np.int32 else 2**40, n).astype(dtype)
        at = rng.permutation(2 * n)[:n].astype(dtype)
        key = int(rng.integers(0, 2**64, dtype=np.uint64))
        expected = naive.round_to_bfloat16(values, row_ids, key)
        assert is_bfloat16(expected)
        for found in (
            rounded(values, row_ids, key),
            rounded(values, row_ids, key, at),
            by_torch(values, row_ids, key),
            by_torch(values, row_ids, key, at),
        ):
            assert found.tobytes() == expected.tobytes()
        out = np.empty((n, dim), np.uint16)
        bfloat16.round_into(values[:, None], out, key, ids=row_ids.astype(np.int64))
        np.testing.assert_array_equal(out.astype(np.uint32) << 16, expected.view(np.uint32))


@pytest.mark.parametrize("dim", [1, 3, 16, 33])
def test_each_plane_has_draws_of_its_own(dim):
    rng = np.random.default_rng(dim)
    block = rng.standard_normal((300, 3, dim), dtype=np.float32)
    ids = rng.permutation(10_000)[:300]
    for first, stop in [(0, 1), (1, 3), (0, 3)]:
        expected = block.copy()
        for plane in range(first, stop):
            expected[:, plane] = naive.round_to_bfloat16(block[:, plane], ids, 77, plane)
        by_host, on_device = block.copy(), torch.from_numpy(block.copy())
        formats = (FLOAT32,) * first + (BFLOAT16,) * (stop - first)
        bfloat16.round_rows(by_host, np.arange(300), ids, 77, formats)
        torch_operations.round_rows(on_device, None, torch.from_numpy(ids), 77, formats)
        assert by_host.tobytes() == on_device.numpy().tobytes() == expected.tobytes()
    halves = np.full((300, 3, dim), np.float32(1 + 2**-8))  # half of the way to the next bfloat16 number
    bfloat16.round_rows(halves, np.arange(300), ids, 77, (BFLOAT16,) * 3)
    ups = (halves > 1) * 2.0 - 1
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        assert abs(np.mean(ups[:, a] * ups[:, b])) < 5 / np.sqrt(300 * dim)


@settings(deadline=None, max_examples=300)
@given(st.lists(FLOATS, min_size=1, max_size=20), KEYS, st.integers(0, 2**62))
def test_any_value(values, key, row_id):
    """The result is a neighbour; exact values stay, NaN is quiet; host, torch and the reference agree."""
    row, ids = np.array([values], np.float32), np.array([row_id])
    found = rounded(row, ids, key)
    assert found.tobytes() == by_torch(row, ids, key).tobytes() == naive.round_to_bfloat16(row, ids, key).tobytes()
    down = (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    up = (down.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    for x, r, a, b in zip(row[0], found[0], down[0], up[0], strict=True):
        if np.isnan(x):
            assert r.view(np.uint32) == 0x7FC00000
        else:
            assert r.tobytes() in (a.tobytes(), b.tobytes())
            assert x != a or r.tobytes() == a.tobytes()
    assert rounded(found, ids, key + 1 if key < 9 else key - 1).tobytes() == found.tobytes()


@pytest.mark.parametrize("value", [1.0 + 2**-9, -0.01234567, 3e-39, 1e30])
def test_the_mean_is_the_value(value):
    """Averages over columns, rows and steps: each has its own draws."""
    x = np.float32(value)
    step = abs(float(rounding_step(x)))
    for shape, steps in (((50_000, 1), 1), ((1, 50_000), 1), ((5, 10), 1000)):
        draws = [
            rounded(np.full(shape, x), np.arange(shape[0]), rounding_key(0, "t", number)) for number in range(steps)
        ]
        mean = np.mean(np.array(draws), dtype=np.float64)
        assert abs(mean - float(x)) < 4.5 * 0.5 * step / np.sqrt(50_000)  # 4.5 of a coin's standard errors


def rounding_step(x):
    down = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return (down.view(np.uint32) + np.uint32(0x10000)).view(np.float32) - down


def test_neighbouring_numbers_are_not_alike():
    """The lowest of the 16 bits are as random as the highest, over rows, columns and steps; no two are correlated."""
    zeros = np.full((256, 64), np.float32(1)).view(np.uint32)
    draws = []
    for bit in (0, 7, 15):
        values = (zeros | np.uint32(1 << bit)).view(np.float32)  # goes up where r >= 2^16 - 2^bit
        ups = [rounded(values, np.arange(256), rounding_key(1, "t", step)) > 1 for step in range(40)]
        assert abs(np.mean(ups) - 2.0 ** (bit - 16)) < 5 * np.sqrt(2.0 ** (bit - 16) / np.size(ups))
        draws.append(np.array(ups))
    coin = draws[-1] * 2.0 - 1  # step, row, column
    for other in (np.roll(coin, 1, 0), np.roll(coin, 1, 1), np.roll(coin, 1, 2), np.roll(coin, 2, 2)):
        assert abs(np.mean(coin * other)) < 5 / np.sqrt(coin.size)


def test_what_bfloat16_cannot_represent_is_refused():
    values = np.ones((3, 4), np.float32)
    for part in (values, values[:0], values[:, ::2]):
        bfloat16.require_exact(part, "t", 0, BFLOAT16)
    values[2, 3] = np.float32(1.2345678)
    for plane, what in [(0, "weights"), (2, "slots")]:
        with pytest.raises(ValueError, match=rf"table 't' stores {what}.* bfloat16.*bfloat16\(\)\.float\(\)"):
            bfloat16.require_exact(values, "t", plane, BFLOAT16)
        bfloat16.require_exact(values, "t", plane, FLOAT32)
