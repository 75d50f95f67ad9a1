"""How a table's weights start; each a pure function of (seed, table name, row, column)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hostdev.kernels.counter import key64
from hostdev.kernels.init import fill_constant, fill_normal

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers with mean 0 and standard deviation `std`."""

    std: float = 0.01

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ValueError(f"std must be positive, not {self.std}")

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: Ids | None = None
    ) -> None:
        """Fill a block float32 [V, 1 + S, D] with weights and the slots' constants float32 [S].

        Its rows are those of `ids`, int64 [V], or first_row and so on.
        """
        fill_normal(block, key64(seed, name), self.std, slots, first_row=first_row, ids=ids)


@dataclass(frozen=True)
class Constant:
    """The same weight everywhere."""

    value: float = 0.0

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: Ids | None = None
    ) -> None:
        """Fill a block float32 [V, 1 + S, D] with the weight and the slots' constants float32 [S]."""
        fill_constant(block, self.value, slots)


Initializer = Normal | Constant


def initial_array(shape: tuple[int, ...], init: Initializer, seed: int, name: str) -> Rows:
    """Return one array of initial values, as if it were the first row of the table `name`; float32 [*shape]."""
    block = np.empty((1, 1, max(1, int(np.prod(shape)))), np.float32)
    init.fill(block, seed, name, np.empty(0, np.float32))
    return block.reshape(shape)
