"""The largest absolute value of an array, which finds gradients and rows that are not finite."""

import numpy as np
import pytest

from hostdev.kernels.norm import largest
from hostdev.kernels.pool import set_host_threads
from tests import naive


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 3), (3000, 80), (50_000, 3, 2)])
def test_matches_the_naive_twin(shape, threads):
    set_host_threads(threads)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape, dtype=np.float32)
    assert largest(values) == naive.largest(values)
    for value in (np.nan, -np.nan, np.inf, -np.inf, -3.4e38, 1e-45):
        if values.size:
            spoiled = values.copy() if abs(value) > 1 or value != value else np.zeros_like(values)
            spoiled.reshape(-1)[rng.integers(values.size)] = value
            assert largest(spoiled) == naive.largest(spoiled)
