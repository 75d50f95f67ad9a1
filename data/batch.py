"""One step's rows, as the reader hands them on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of F = 39 fields: the 13 dense columns, then the 26 categorical ones."""

    label: npt.NDArray[np.float32]  # [B], 0 or 1
    ids: npt.NDArray[Any]  # int32 or int64 [B, 39]
    weights: npt.NDArray[np.float32]  # [B, 39]: the scaled value of a dense column, 1 for a categorical one

    def __len__(self) -> int:
        """Return B."""
        return len(self.label)
