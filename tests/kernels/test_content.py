"""Fingerprints of memory, against their twin; any one change is found."""

import numpy as np
import pytest

from hostdev.kernels.content import fingerprint
from tests import naive


@pytest.mark.parametrize("n", [0, 1, 3, 4, 7, 4096, 10_001])
@pytest.mark.parametrize("start", [0, 1])
def test_against_the_twin(n, start):
    data = np.random.default_rng(n).integers(0, 256, n + start, dtype=np.uint8)[start:]
    assert fingerprint(data) == naive.fingerprint(data)


def test_every_change_of_one_byte_is_found():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 999, dtype=np.uint8)
    before = fingerprint(data)
    for at in range(len(data)):
        data[at] ^= 1 << int(rng.integers(0, 8))
        assert fingerprint(data) != before
        before = fingerprint(data)


def test_words_that_change_places_are_found():
    data = np.arange(64, dtype=np.uint32)
    assert fingerprint(data.view(np.uint8)) != fingerprint(data[::-1].copy().view(np.uint8))
