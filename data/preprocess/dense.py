"""The integer columns as weights in float32: scaled by the training rows' column maximum."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hostdev.data.manifest import DENSE
from hostdev.data.preprocess.raw import RawRows


@dataclass
class DenseScaling:
    """`max`: value / maximum. `log`: log1p(max(value, 0)) / log1p(maximum). A missing value is 0.

    A column whose maximum is not positive is not divided.
    """

    mode: str
    maximum: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(DENSE, np.int64))

    def observe(self, rows: RawRows) -> None:
        """Take in training rows."""
        if len(rows):
            values = np.where(rows.missing, 0, rows.integers)
            self.maximum = np.maximum(self.maximum, values.max(axis=0))

    def transform(self, rows: RawRows) -> npt.NDArray[np.float32]:
        """Return the weights, float32 [n, 13]; computed in float64 and rounded once."""
        values = rows.integers.astype(np.float64)
        divisor = np.where(self.maximum > 0, self.maximum, 1).astype(np.float64)
        if self.mode == "log":
            values = np.log1p(np.maximum(values, 0.0))
            divisor = np.where(self.maximum > 0, np.log1p(divisor), 1.0)
        return np.where(rows.missing, 0.0, values / divisor).astype(np.float32)
