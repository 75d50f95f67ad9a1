"""Distribution of keys over ranks: each rank owns whole parts of the keys' hashes, in order.

There are 256 parts, by the highest bits of the hash. Their number is fixed, so that nothing depends on that of ranks:
the keys of all ranks, one rank after the other, are in the order of the hashes.
"""

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import Keys
from hostdev.kernels.key_directory import PARTS, parts_of


def first_part(rank: int, ranks: int) -> int:
    """Return the first part that a rank owns; `rank` may be `ranks`, for the end of the last rank's parts."""
    return -(-PARTS * rank // ranks)


def owners_of(keys: Keys, ranks: int) -> npt.NDArray[np.int32]:
    """Return the ranks that own keys [N], int32 [N]."""
    found: npt.NDArray[np.int32] = (parts_of(keys).astype(np.int32) * ranks) // PARTS
    return found
