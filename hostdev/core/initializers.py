"""How a table's weights start; each a pure function of (seed, table name, row, column)."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.counter import key64
from hostdev.kernels.finite import largest
from hostdev.kernels.init import fill_constant, fill_normal
from hostdev.kernels.uniform import fill_uniform

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers with mean 0 and standard deviation `std`."""

    std: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.std <= _LARGEST:
            raise ValueError(f"std must be positive and at most {_LARGEST:g}, not {self.std}")

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

    def __post_init__(self) -> None:
        _require_finite("value", self.value)

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: Ids | None = None
    ) -> None:
        """Fill a block float32 [V, 1 + S, D] with the weight and the slots' constants float32 [S]."""
        fill_constant(block, self.value, slots)


@dataclass(frozen=True)
class Uniform:
    """Independent numbers, uniform from low to high, in 2^24 steps, each rounded to float32 once."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _require_finite("low", self.low)
        _require_finite("high", self.high)
        if not self.low < self.high:
            raise ValueError(f"low must be below high, not {self.low} and {self.high}")

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: Ids | None = None
    ) -> None:
        """As `Normal.fill`."""
        fill_uniform(block, key64(seed, name, "uniform"), self.low, self.high, slots, first_row=first_row, ids=ids)


class Given:
    """The rows of an array float32 [rows, dim], or of what numpy makes one of; it is kept, and must not be changed.

    With a part of a table, too, the array has all rows.
    """

    def __init__(self, values: npt.ArrayLike) -> None:
        self._values = np.ascontiguousarray(values, np.float32)
        if self._values.ndim != 2:
            raise ValueError(f"initial values are an array [rows, dim], not {list(self._values.shape)}")
        if not largest(self._values) < np.inf:
            row = int(np.flatnonzero(~np.isfinite(self._values).all(1))[0])
            raise ValueError(f"initial values must be finite, and those of row {row} are not")

    def __repr__(self) -> str:
        """Return what processes that share a table compare: the values' checksum, and not where they lie."""
        rows, dim = self._values.shape
        return f"Given({rows} x {dim}, CRC-32 {zlib.crc32(self._values.data):08x})"

    def require(self, rows: int, dim: int, table: str) -> None:
        """ValueError unless the array has this shape."""
        if self._values.shape != (rows, dim):
            raise ValueError(
                f"table {table!r} has {rows} rows of {dim} columns, and the array of its initial values the shape "
                f"{list(self._values.shape)}"
            )

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: Ids | None = None
    ) -> None:
        """As `Normal.fill`; seed and name do not matter."""
        if ids is None:
            block[:, 0] = self._values[first_row : first_row + len(block)]
        else:
            block[:, 0] = self._values[ids]
        block[:, 1:] = slots[:, None]


Initializer = Normal | Constant | Uniform | Given

_LARGEST = 1e37  # a standard deviation: a normal number of ten of them is finite in float32


def initializer(init: Any, rows: int, dim: int, table: str) -> Initializer:
    """Return the initializer of a table [rows, dim] from what its user gave: one, or an array."""
    if isinstance(init, Normal | Constant | Uniform):
        return init
    if hasattr(init, "detach"):  # torch's
        init = init.detach().cpu().numpy()
    try:
        given = init if isinstance(init, Given) else Given(init)
    except (TypeError, ValueError) as error:
        if np.ndim(init) == 2 and np.asarray(init).dtype.kind in "fiu":
            raise ValueError(f"table {table!r}: {error}") from None
        raise TypeError(
            f"table {table!r}: init is hostdev.Normal(std), Uniform(low, high), Constant(value) or an array [rows, "
            f"dim] of numbers, not {type(init).__name__}"
        ) from None
    given.require(rows, dim, table)
    return given


def _require_finite(name: str, value: float) -> None:
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(value)):
            raise ValueError(f"{name} must be finite in float32, not {value}")


def initial_array(shape: tuple[int, ...], init: Initializer, seed: int, name: str) -> Rows:
    """Return one array of initial values, as if it were the first row of the table `name`; float32 [*shape]."""
    block = np.empty((1, 1, max(1, int(np.prod(shape)))), np.float32)
    init.fill(block, seed, name, np.empty(0, np.float32))
    return block.reshape(shape)
