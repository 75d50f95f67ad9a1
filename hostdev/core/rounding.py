"""Keys of the random numbers for rounding weights to bfloat16."""

import numpy as np

from hostdev.kernels.counter import key64, mix64


def rounding_key(seed: int, table: str, step: int) -> int:
    """Return the key for rounding a table's weights at its step 1, 2, 3, ...; step 0 is for the initial values."""
    return key64(seed, "bfloat16", table) ^ int(mix64(np.array([step]))[0])
