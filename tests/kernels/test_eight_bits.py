"""Slots in 8 bits: the reference's bits on the host and in torch's operations; what a slot stores, it stores again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core.rounding import rounding_key
from hostdev.kernels import bfloat16, eight_bits, rounding
from hostdev.kernels.plane_formats import BFLOAT16, FLOAT32, SIGNED_8, UNSIGNED_8, plane_bytes
from hostdev.kernels.pool import run_tasks, set_host_threads
from tests import naive
from tests.combinations import pairs_first
from tests.kernels.test_rounding import KEYS, by_torch, rounded

EDGES = [0.0, -0.0, 1e-45, -1e-40, 2.0**-90, -(2.0**-90), 2.0**-91, 3.4028235e38, -3.4028235e38, 1.0, -1.0, 1e-7, 0.1]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(EDGES)


def rows_of(rng, n, dim, unsigned):
    """Rows of slots, from almost equal values to values far apart; zeros among them."""
    apart = rng.choice([0.0, 1.0, 6.0], (n, 1))
    values = rng.standard_normal((n, dim)) * np.exp(apart * rng.standard_normal((n, dim)))
    values *= 2.0 ** rng.integers(-95, 100, (n, 1)) * (rng.random((n, dim)) < 0.9)
    return np.abs(values).astype(np.float32) if unsigned else values.astype(np.float32)


@pytest.mark.parametrize("unsigned", [False, True])
def test_the_map_is_dettmers_with_lower_ends(unsigned):
    codes = eight_bits.MAPS[int(unsigned)]
    expected = naive.eight_bit_map(unsigned)
    np.testing.assert_array_equal(codes[: len(expected)], expected.astype(np.float32))
    assert len(expected) == (256 if unsigned else 129)
    np.testing.assert_array_equal(codes[len(expected) :], -codes[1 : 257 - len(expected)][::-1])
    assert (np.diff(expected) > 0).all()


@pairs_first("kind, dim, threads", [SIGNED_8, UNSIGNED_8], [1, 2, 3, 16, 80, 129, 600], [1, 2, 5])
def test_the_twins_bits(kind, dim, threads):
    set_host_threads(threads)
    rng = np.random.default_rng(dim)
    for n, dtype in ((0, np.int64), (1, np.int32), (400, np.int64)):
        values = rows_of(rng, n, dim, kind == UNSIGNED_8)
        ids, at = rng.integers(0, 2**31 - 1, n).astype(dtype), rng.permutation(2 * n)[:n].astype(dtype)
        key = int(rng.integers(0, 2**64, dtype=np.uint64))
        expected = naive.round_to_eight_bits(values, ids, key, 1, kind == UNSIGNED_8)
        for found in (
            rounded(values, ids, key, plane=1, kind=kind),
            rounded(values, ids, key, at, plane=1, kind=kind),
            by_torch(values, ids, key, plane=1, kind=kind),
            by_torch(values, ids, key, at, plane=1, kind=kind),
        ):
            assert found.tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=300)
@given(st.lists(FLOATS, min_size=1, max_size=20), KEYS, st.integers(0, 2**62), st.booleans())
def test_any_row(values, key, row_id, unsigned):
    """The largest value stays, others become a neighbour; what is stored is stored again; all twins agree."""
    row, ids = np.array([np.abs(values) if unsigned else values], np.float32), np.array([row_id])
    kind = UNSIGNED_8 if unsigned else SIGNED_8
    found = rounded(row, ids, key, kind=kind)
    assert found.tobytes() == by_torch(row, ids, key, kind=kind).tobytes()
    assert found.tobytes() == naive.round_to_eight_bits(row, ids, key, 0, unsigned).tobytes()
    for again in (rounded(found, ids, key ^ 1, kind=kind), eight_bits.to_nearest(found, unsigned=unsigned)):
        assert again.tobytes() == found.tobytes()
    [[scale]] = naive.eight_bit_scales(row)
    if scale == 0:
        assert not found.any()
        return
    assert scale in found
    codes = np.unique(eight_bits.MAPS[int(unsigned)]).astype(np.float64)
    for x, r in zip(row[0].astype(np.float64) / scale, found[0].astype(np.float64) / scale, strict=True):
        below, above = codes[codes <= x + 1e-6 * abs(x)], codes[codes >= x - 1e-6 * abs(x)]
        neighbours = [below.max(initial=codes[0]), above.min(initial=1.0)]
        assert min(abs(r - code) for code in neighbours) <= 1e-6 * abs(r)
        if unsigned and not 2.0**-114 < x < 2.0**-100:  # between these, it depends on the draw
            assert (r > 0) == (x >= 2.0**-100)


@pytest.mark.parametrize("unsigned", [False, True])
def test_every_code_is_kept_at_any_scale(unsigned):
    rng = np.random.default_rng(0)
    scales = (
        2.0 ** rng.uniform(-90, 127, (3000, 1)) * rng.choice([1.0] if unsigned else [1.0, -1.0], (3000, 1))
    ).astype(np.float32)
    rows = eight_bits.MAPS[int(unsigned)] * scales + np.float32(0)
    kind, ids = UNSIGNED_8 if unsigned else SIGNED_8, np.arange(3000)
    for step in range(3):
        assert rounded(rows, ids, rounding_key(0, "t", step), kind=kind).tobytes() == rows.tobytes()


@pytest.mark.parametrize("unsigned", [False, True])
def test_nearest_is_that_of_a_binary_search(unsigned):
    rng = np.random.default_rng(1)
    values = rows_of(rng, 2000, 80, unsigned)
    scales = naive.eight_bit_scales(values).astype(np.float64)
    values, scales = values[scales[:, 0] != 0], scales[scales[:, 0] != 0]
    codes, x = np.unique(eight_bits.MAPS[int(unsigned)]).astype(np.float64), values / scales
    at = np.searchsorted(codes, x).clip(1, len(codes) - 1)
    lower, upper = codes[at - 1], codes[at]
    share = (x - lower) / (upper - lower)
    found = eight_bits.to_nearest(values, unsigned=unsigned) / scales
    is_clear = (np.abs(share - 0.5) > 1e-3) & (np.abs(x) > (1e-7 if unsigned else 0)) & (x > codes[0])
    assert is_clear.mean() > 0.7
    np.testing.assert_allclose(found[is_clear], np.where(share > 0.5, upper, lower)[is_clear], rtol=1e-6)


@pytest.mark.parametrize("kind", [SIGNED_8, UNSIGNED_8])
@pytest.mark.parametrize("share", [3e-7, 2.5e-6, 9.99e-4, 0.0999, 0.1003, 0.31234, 0.99, 0.999])
def test_the_mean_is_the_value(kind, share):
    """Also next to the decades' ends, where the distance of codes changes."""
    row = np.full((500, 101), np.float32(3 * share))
    row[:, 0] = 3
    draws = [rounded(row, np.arange(500), rounding_key(0, "t", step), kind=kind)[:, 1:] for step in range(4)]
    codes = np.unique(np.abs(eight_bits.MAPS[int(kind == UNSIGNED_8)])).astype(np.float64) * 3
    gap = np.min(codes[codes >= 3 * share]) - np.max(codes[codes < 3 * share])
    assert len(np.unique(draws)) == 2
    assert abs(np.mean(draws, dtype=np.float64) - 3 * share) < 4.5 * 0.5 * gap / np.sqrt(np.size(draws)) + gap / 4096


def test_two_largest_values_give_the_positive_one_as_scale():
    plane = np.array([[-2.0, 1.0, 2.0, -2.0]], np.float32)
    found = eight_bits.to_nearest(plane, unsigned=False)
    np.testing.assert_allclose(found, [[-2 * 0.9859375, 0.9875, 2.0, -2 * 0.9859375]], rtol=1e-6)
    assert found[0, 2] == 2


def test_each_format_in_one_call():
    rng = np.random.default_rng(3)
    block = rng.standard_normal((50, 4, 9), dtype=np.float32)
    block[:, 3] = np.abs(block[:, 3])
    ids, expected = rng.permutation(1000)[:50], block.copy()
    expected[:, 1] = naive.round_to_bfloat16(block[:, 1], ids, 5, 1)
    expected[:, 2] = naive.round_to_eight_bits(block[:, 2], ids, 5, 2, False)
    expected[:, 3] = naive.round_to_eight_bits(block[:, 3], ids, 5, 3, True)
    bfloat16.round_rows(block, np.arange(50), ids, 5, (FLOAT32, BFLOAT16, SIGNED_8, UNSIGNED_8))
    assert block.tobytes() == expected.tobytes()


@pytest.mark.parametrize("unsigned", [False, True])
def test_what_8_bits_cannot_represent_is_refused(unsigned):
    values = np.array([[1.0, 0.5001, 0.0]], np.float32)
    kind = UNSIGNED_8 if unsigned else SIGNED_8
    with pytest.raises(
        ValueError, match=rf"table 't' stores slots in 8 bits.*to_nearest\(values, unsigned={unsigned}\)"
    ):
        bfloat16.require_exact(values, "t", 1, kind)
    for part in (eight_bits.to_nearest(values, unsigned=unsigned), values[:0], values[:, ::2]):
        bfloat16.require_exact(part, "t", 1, kind)
    with pytest.raises(ValueError, match="8 bits"):
        bfloat16.require_exact(np.array([[1.0, -0.0]], np.float32), "t", 1, kind)


@pytest.mark.parametrize("dim", [2, 3, 80])
def test_stored_slots_are_read_in_each_way(dim):
    rng = np.random.default_rng(dim)
    unsigned = np.array([0, 1], np.uint8)
    slots = np.zeros((40, 2, plane_bytes(dim)), np.uint8)
    values = np.stack([eight_bits.to_nearest(rows_of(rng, 40, dim, flag), unsigned=flag) for flag in (False, True)], 1)
    block = np.concatenate([rng.standard_normal((40, 1, dim), dtype=np.float32), values], 1)
    weights = np.empty((40, dim), np.float32)
    run_tasks(rounding.write_tasks(weights, slots, unsigned, np.arange(40), block))
    found = np.empty((40, 3, dim), np.float32)
    rounding.read_here(weights, slots, unsigned, np.arange(40), found)
    assert found.tobytes() == block.tobytes()
    columns, ids = np.empty((2, 5, dim), np.float32), np.array([3, 9, 1, 0, 39])
    eight_bits.decode_to_columns(0, 5, 0, ids, slots, unsigned, columns)
    assert columns.tobytes() == values[ids].transpose(1, 0, 2).tobytes()
    eight_bits.decode_to_columns(0, 5, 20, None, slots, unsigned, columns)
    assert columns.tobytes() == values[20:25].transpose(1, 0, 2).tobytes()
    for slot, flag in enumerate((False, True)):
        assert eight_bits.decode_rows(slots[:, slot], dim, flag).tobytes() == values[:, slot].tobytes()
    eight_bits.fill(slots, np.array([-1.5, 0.25], np.float32), dim, unsigned)
    rounding.read_here(weights, slots, unsigned, np.arange(40), found)
    assert (found[:, 1] == -1.5).all()
    assert (found[:, 2] == 0.25).all()
