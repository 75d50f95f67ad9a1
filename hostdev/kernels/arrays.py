"""Types for arrays, for equally spaced rows, and for the scalars of optimizers. N: elements; D: columns."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Ids: TypeAlias = npt.NDArray[np.int32 | np.int64]  # [N]
AnyIds: TypeAlias = npt.NDArray[Any]  # [N], int32 or int64, where the type does not say which
LongIds: TypeAlias = npt.NDArray[np.int64]  # [N]
Keys: TypeAlias = npt.NDArray[np.int64]  # [N]
RowNumbers: TypeAlias = npt.NDArray[np.int32]  # [N]
Positions: TypeAlias = npt.NDArray[np.int32]  # [N], indices of another array
Counts: TypeAlias = npt.NDArray[np.int64]  # [N]
Lengths: TypeAlias = npt.NDArray[np.int32]  # [N], numbers of values of each row
Rows: TypeAlias = npt.NDArray[np.float32]  # [N, D]
Values: TypeAlias = npt.NDArray[np.float32]  # [N], or [N, values of each]
Numbers: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Scalars: TypeAlias = tuple[np.float32 | float, ...]


class Strided(NamedTuple):
    """Equally spaced rows of a C-contiguous array: row i is values[first + i * step].

    Kernels take the three attributes as arguments, because numba does not vectorize loops over strided arrays.
    """

    values: npt.NDArray[Any]
    first: int = 0
    step: int = 1
