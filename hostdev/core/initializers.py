"""Initial weights of a table: pure functions of (seed, table name, row, column).

S: number of optimizer state columns of D values per row.
"""

import ast
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.arrays import LongIds, Rows
from hostdev.kernels.counter import key64
from hostdev.kernels.init import fill_constant, fill_normal, fill_uniform
from hostdev.kernels.norm import largest


@dataclass(frozen=True)
class Normal:
    """Independent, normally distributed weights with mean 0 and standard deviation `std`."""

    std: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.std <= _LARGEST:
            raise ValueError(f"std must be positive and at most {_LARGEST:g}, not {self.std}")
        object.__setattr__(self, "std", float(self.std))  # `from_text` cannot parse the repr of a NumPy number

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: LongIds | None = None
    ) -> None:
        """Fill a block, float32 [V, 1 + S, D], with the initial weights and slots of V rows.

        `slots` holds one value per slot, float32 [S]. The rows are `ids`, int64 [V], or by default first_row,
        first_row + 1, ...
        """
        fill_normal(block, key64(seed, name), self.std, slots, first_row=first_row, ids=ids)


@dataclass(frozen=True)
class Constant:
    """The same value for every weight."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _require_finite("value", self.value)
        object.__setattr__(self, "value", float(self.value))

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: LongIds | None = None
    ) -> None:
        """Fill a block with the constant and the initial slots; the arguments are those of `Normal.fill`."""
        fill_constant(block, self.value, slots)


@dataclass(frozen=True)
class Uniform:
    """Independent weights: each is one of 2^24 evenly spaced values from low to below high, rounded to float32 once."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _require_finite("low", self.low)
        _require_finite("high", self.high)
        if not self.low < self.high:
            raise ValueError(f"low must be below high, not {self.low} and {self.high}")
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: LongIds | None = None
    ) -> None:
        """Fill a block with uniform weights and the initial slots; the arguments are those of `Normal.fill`."""
        fill_uniform(block, key64(seed, name, "uniform"), self.low, self.high, slots, first_row=first_row, ids=ids)


class Given:
    """Weights given as a float32 array [rows, dim], or as data that numpy can convert to one.

    Do not modify the array later. Pass the whole array on every rank, even if a rank holds only a part of the table.
    """

    def __init__(self, values: npt.ArrayLike) -> None:
        self._values = np.ascontiguousarray(values, np.float32)
        if self._values.ndim != 2:
            raise ValueError(f"initial values must be an array [rows, dim], not of shape {list(self._values.shape)}")
        if not largest(self._values) < np.inf:
            row = int(np.flatnonzero(~np.isfinite(self._values).all(1))[0])
            raise ValueError(f"initial values must be finite; row {row} contains NaN or infinity")

    def __repr__(self) -> str:
        """Return text with a checksum of the values, by which ranks can check that their values are equal."""
        rows, dim = self._values.shape
        return f"Given({rows} x {dim}, CRC-32 {zlib.crc32(self._values.data):08x})"

    def require(self, rows: int, dim: int, table: str) -> None:
        """Raise ValueError unless the array has the table's shape, [rows, dim]."""
        if self._values.shape != (rows, dim):
            raise ValueError(
                f"table {table!r} has {rows} rows of {dim} columns, but its initial values have the shape "
                f"{list(self._values.shape)}"
            )

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: LongIds | None = None
    ) -> None:
        """Fill a block with the given weights and the initial slots; the arguments are those of `Normal.fill`.

        `seed` and `name` have no effect.
        """
        if ids is None:
            block[:, 0] = self._values[first_row : first_row + len(block)]
        else:
            block[:, 0] = self._values[ids]
        block[:, 1:] = slots[:, None]


class GivenRows:
    """Given weights for some rows; another initializer fills the rest.

    Args:
        others: Initializer of the remaining rows.
        load: Returns the ids of rows with given weights, int64 [K], ascending and distinct, and the weights, float32
            [K, D]. The first `fill` or `repr` calls it, so that creating a table does not need the weights.
    """

    def __init__(self, others: "Initializer", load: Callable[[], tuple[LongIds, npt.NDArray[np.float32]]]) -> None:
        self._others, self._load = others, load

    @cached_property
    def _rows(self) -> tuple[LongIds, npt.NDArray[np.float32]]:
        return self._load()

    def __repr__(self) -> str:
        """Return text with a checksum, by which ranks can check that their values are equal."""
        ids, values = self._rows
        checksum = zlib.crc32(values.data, zlib.crc32(ids.data))
        return f"GivenRows({self._others!r}, {len(ids)} rows, CRC-32 {checksum:08x})"

    def fill(
        self, block: Rows, seed: int, name: str, slots: Rows, *, first_row: int = 0, ids: LongIds | None = None
    ) -> None:
        """Fill a block with the weights of its rows and the initial slots; the arguments are those of `Normal.fill`."""
        self._others.fill(block, seed, name, slots, first_row=first_row, ids=ids)
        given, values = self._rows
        if ids is None:
            start, stop = np.searchsorted(given, [first_row, first_row + len(block)])
            block[given[start:stop] - first_row, 0] = values[start:stop]
        elif len(given):
            place = np.minimum(np.searchsorted(given, ids), len(given) - 1)
            here = np.flatnonzero(given[place] == ids)
            block[here, 0] = values[place[here]]


Initializer = Normal | Constant | Uniform | Given | GivenRows

_BY_NAME: dict[str, Any] = {"Normal": Normal, "Constant": Constant, "Uniform": Uniform}


def from_text(text: str) -> Initializer:
    """Return the Normal, Constant or Uniform that has this text as its repr; raise ValueError for other text."""
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
        given = {str(argument.arg): ast.literal_eval(argument.value) for argument in call.keywords}
        found: Initializer = _BY_NAME[call.func.id](**given)
    except (AssertionError, SyntaxError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{text[:80]!r} is no initializer") from error
    return found


_LARGEST = 1e37  # the largest standard deviation; ten times this is finite in float32


def initializer(init: Any, rows: int, dim: int, table: str) -> Initializer:
    """Return the initializer of a table [rows, dim] for a user's `init`, which is an initializer or an array."""
    if isinstance(init, Normal | Constant | Uniform | GivenRows):
        return init
    if hasattr(init, "detach"):  # a torch tensor
        init = init.detach().cpu().numpy()
    try:
        given = init if isinstance(init, Given) else Given(init)
    except (TypeError, ValueError) as error:
        if np.ndim(init) == 2 and np.asarray(init).dtype.kind in "fiu":
            raise ValueError(f"table {table!r}: {error}") from None
        raise TypeError(
            f"table {table!r}: init must be hostdev.Normal(std), Uniform(low, high), Constant(value) or an array "
            f"[rows, dim] of numbers, not {type(init).__name__}"
        ) from None
    given.require(rows, dim, table)
    return given


def _require_finite(name: str, value: float) -> None:
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(value)):
            raise ValueError(f"{name} must be finite in float32, not {value}")


def initial_array(shape: tuple[int, ...], init: Initializer, seed: int, name: str) -> Rows:
    """Return initial values, float32 [*shape]; they equal row 0 of a table with this name and prod(shape) columns."""
    block = np.empty((1, 1, max(1, int(np.prod(shape)))), np.float32)
    init.fill(block, seed, name, np.empty(0, np.float32))
    return block.reshape(shape)
