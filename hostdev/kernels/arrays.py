"""Types of arrays and of an optimizer's scalars."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32 | np.int64]
Scalars: TypeAlias = tuple[np.float32 | float, ...]
