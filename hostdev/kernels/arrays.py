"""Types for arrays of ids, for equally spaced rows, and for the scalars of optimizers."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32 | np.int64]
Scalars: TypeAlias = tuple[np.float32 | float, ...]


class Strided(NamedTuple):
    """Equally spaced rows of a C-contiguous array: row i is values[first + i * step].

    Kernels take the three attributes as arguments, because numba does not vectorize loops over strided arrays.
    """

    values: npt.NDArray[Any]
    first: int = 0
    step: int = 1
