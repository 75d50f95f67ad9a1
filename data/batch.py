"""One step's rows, as the reader hands them on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows. The ids are those of the schema's joint space.

    label  float32 [B], 0 or 1
    dense  float32 [B, dense columns], scaled
    ids    int32 or int64 [B, columns of kind "id"]
    bags   by column of kind "bag": the ids of all rows end to end, as `ids` [N], and how many each row has, int32 [B]
    """

    label: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[Any]
    bags: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]

    def __len__(self) -> int:
        """Return B."""
        return len(self.label)
