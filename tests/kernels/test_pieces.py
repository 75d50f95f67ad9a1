"""Rows and lists gathered from arrays in pieces, against references, on any number of threads."""

import numpy as np
import pytest

from hostdev.kernels.columns import get_addresses, length_tasks, list_tasks, places_of, take_tasks
from hostdev.kernels.pool import run_tasks, set_host_threads
from tests import naive

SIZES = {"one": [900], "several": [1, 0, 300, 599, 0], "many": [3] * 300}


def first_of(sizes):
    return np.cumsum([0, *sizes[:-1]])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dim", [1, 3, 80, 128])
@pytest.mark.parametrize("n", [0, 1, 5000])
@pytest.mark.parametrize("sizes", SIZES)
def test_rows(sizes, n, dim, threads):
    set_host_threads(threads)
    rng = np.random.default_rng(n + dim)
    for dtype in (np.float32, np.int32, np.int64):
        pieces = [rng.integers(-(2**30), 2**30, (size, dim)).astype(dtype) for size in SIZES[sizes]]
        rows = rng.integers(0, 900, n)
        out = np.full((n, dim), -1, dtype)
        run_tasks(take_tasks(places_of(rows, first_of(SIZES[sizes])), get_addresses(pieces), out))
        np.testing.assert_array_equal(out, np.concatenate(pieces)[rows])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("longest", [0, 1, 9])
@pytest.mark.parametrize("n", [0, 1, 9000])
@pytest.mark.parametrize("sizes", SIZES)
def test_lists(sizes, n, longest, threads):
    set_host_threads(threads)
    rng = np.random.default_rng(n + longest)
    lengths = [rng.integers(0, longest + 1, size) for size in SIZES[sizes]]
    offsets = [np.concatenate([[0], np.cumsum(some)]) for some in lengths]
    for dtype in (np.int32, np.int64):
        values = [rng.integers(0, 2**30, some.sum()).astype(dtype) for some in lengths]
        rows = rng.integers(0, 900, n)
        places, found = places_of(rows, first_of(SIZES[sizes])), np.full(n, -1, np.int32)
        run_tasks(length_tasks(places, get_addresses(offsets), found))
        begins = np.concatenate([[0], np.cumsum(found)])
        out = np.full(begins[-1], -1, dtype)
        run_tasks(list_tasks(places, get_addresses(offsets), get_addresses(values), begins, out))
        expected, expected_lengths = naive.take_lists(values, offsets, rows)
        np.testing.assert_array_equal(found, expected_lengths)
        np.testing.assert_array_equal(out, expected.astype(dtype))
