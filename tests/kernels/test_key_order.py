import numpy as np
import pytest

from hostdev.kernels.bits import bits_of
from hostdev.kernels.counter import mix64
from hostdev.kernels.key_order import sorted_rows


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 100_000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rows_are_sorted_by_the_hashes_of_their_keys(rows, share):
    rng = np.random.default_rng(rows)
    keys = rng.integers(-(2**63), 2**63, rows)
    wanted = rng.random(rows) < share
    found = sorted_rows(keys, bits_of(wanted))
    expected = np.flatnonzero(wanted)
    expected = expected[np.argsort(mix64(keys[expected].view(np.uint64)))]
    np.testing.assert_array_equal(found, expected)
