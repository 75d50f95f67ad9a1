"""Types of arrays, of rows within an array, and of an optimizer's scalars."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32 | np.int64]
Scalars: TypeAlias = tuple[np.float32 | float, ...]


class Strided(NamedTuple):
    """Rows at equal distances in a C-contiguous array: row i is values[first + i * step].

    Kernels take the three attributes, because numba does not vectorize loops over arrays with other strides.
    """

    values: npt.NDArray[Any]
    first: int = 0
    step: int = 1
