"""Memory for the kernels."""

import numpy as np
import pytest

from hostdev.kernels.arrays import reserved


def test_reserved_memory_is_zero_and_may_be_larger_than_the_machines():
    large = reserved((1 << 37, 2), np.uint32)  # 1 TiB of address space
    large[-1] = 7
    assert large[-1].tolist() == [7, 7] and large[0].tolist() == [0, 0] and large.flags.c_contiguous
    assert reserved((0, 3), np.int64).shape == (0, 3)
    with pytest.raises(MemoryError, match="cannot reserve"):
        reserved((1 << 62,), np.float32)
