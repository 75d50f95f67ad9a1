"""Scaling of numbers, and lists of different lengths."""

import numpy as np
import pytest

from hostdev import UserError
from hostdev.data import ragged
from hostdev.data.preprocess.scaling import make_scaling

NAN = np.nan
NUMBERS = np.array([[0, -8, 5, NAN], [2, 4, 5, NAN], [NAN, 1, NAN, NAN]], np.float64)


def scaled(mode, *, signed, numbers=NUMBERS, of=NUMBERS):
    scaling = make_scaling(mode, ("a", "b", "c", "d"), signed=signed)
    scaling.observe(of)
    return scaling.transform(numbers)


@pytest.mark.parametrize("signed", [True, False])
def test_by_the_maximum(signed):
    most = 8 if signed else 4
    expected = [[0, -8 / most, 1, 0], [1, 4 / most, 1, 0], [0, 1 / most, 0, 0]]
    np.testing.assert_array_equal(scaled("max", signed=signed), np.array(expected, np.float32))


@pytest.mark.parametrize("signed", [True, False])
def test_by_logarithms(signed):
    log = np.log1p
    below = -log(8) / log(8) if signed else 0
    most = 8 if signed else 4
    expected = [[0, below, 1, 0], [1, log(4) / log(most), 1, 0], [0, log(1) / log(most), 0, 0]]
    np.testing.assert_array_equal(scaled("log", signed=signed), np.array(expected, np.float32))


def test_by_the_deviation():
    found = scaled("standard", signed=True)
    deviation = np.sqrt(np.mean(np.square([-7, 5, 2])))
    np.testing.assert_allclose(found[:, 0], [-1, 1, 0])
    np.testing.assert_allclose(found[:, 1], np.array([-7, 5, 2]) / deviation, rtol=1e-6)
    assert (found[:, 2:] == 0).all()  # one value only, and none
    beyond = np.array([[0, 0, 9, 7]], np.float64)
    assert scaled("standard", signed=True, numbers=beyond)[0, 2:].tolist() == [4, 7]


def test_a_mean_that_float64_rounds_is_no_deviation():
    constant = np.full((1000, 4), 0.1)
    assert (scaled("standard", signed=True, numbers=constant, of=constant) == 0).all()


@pytest.mark.parametrize("sizes", [[10_000], [1] * 50 + [9950], [4095, 1, 4096, 1808], [0, 3, 0, 9997], [5000, 5000]])
def test_deviations_do_not_depend_on_how_many_rows_come_at_once(sizes):
    rng = np.random.default_rng(1)
    numbers = rng.normal(1e9, 1, (10_000, 3))
    numbers[rng.random(numbers.shape) < 0.1] = NAN
    scaling = make_scaling("standard", ("a", "b", "c"), signed=True)
    for part in np.split(numbers, np.cumsum(sizes)[:-1]):
        scaling.observe(part)
    whole = make_scaling("standard", ("a", "b", "c"), signed=True)
    whole.observe(numbers)
    assert scaling.statistics() == whole.statistics()
    found = whole.statistics()
    np.testing.assert_allclose(found["dense_mean"], np.nanmean(numbers, axis=0), rtol=1e-14)
    np.testing.assert_allclose(found["dense_deviation"], np.nanstd(numbers, axis=0), rtol=1e-6)


def test_no_training_rows_or_columns():
    for mode in ("max", "log", "standard"):
        assert scaled(mode, signed=True, of=NUMBERS[:0])[0, 2] == np.float32(np.log1p(5) if mode == "log" else 5)
        scaling = make_scaling(mode, (), signed=True)
        scaling.observe(np.empty((5, 0)))
        assert scaling.transform(np.empty((3, 0))).shape == (3, 0)


def test_what_float32_cannot_hold():
    beyond = np.array([[1, 1, 1e39, 1]])
    with pytest.raises(UserError, match="column 'c': a number is 1e\\+39 when scaled, which float32 cannot hold"):
        scaled("max", signed=True, numbers=beyond, of=np.ones((1, 4)))
    assert np.isfinite(scaled("log", signed=True, numbers=beyond, of=np.ones((1, 4)))).all()


def test_lists():
    lists = [[3, 1], [], [4, 1, 5], [], [9]]
    values = np.array([value for one in lists for value in one])
    offsets = ragged.offsets_of(np.array([len(one) for one in lists]))
    assert offsets.tolist() == [0, 2, 2, 5, 5, 6]
    for rows in ([], [2], [1, 3], [4, 0, 0, 2], [0, 1, 2, 3, 4]):
        found, lengths = ragged.take(values, offsets, np.array(rows, np.int64))
        assert lengths.dtype == np.int32
        assert lengths.tolist() == [len(lists[row]) for row in rows]
        assert found.tolist() == [value for row in rows for value in lists[row]]
