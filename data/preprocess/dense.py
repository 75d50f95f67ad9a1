"""Scaling of numeric columns to float32 with statistics of the training rows."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.kernels.arrays import Numbers

MODES = ("max", "log", "standard")
LARGEST = 3e38  # about the largest float32
BLOCK = 4096  # rows summed at once


class Scaling(Protocol):
    """Scales numeric columns: call `observe` with training rows, then `transform` with any rows. NaN becomes 0."""

    def observe(self, numbers: Numbers) -> None:
        """Update the statistics with the values of some training rows, float64 [n, columns]."""

    def transform(self, numbers: Numbers) -> npt.NDArray[np.float32]:
        """Return scaled numbers, float32 [n, columns]; computed in float64 and rounded once.

        Raises UserError if a scaled number exceeds the range of float32.
        """

    def statistics(self) -> dict[str, Any]:
        """Return the statistics that the manifest stores."""


def make_scaling(mode: str, names: tuple[str, ...], *, signed: bool) -> Scaling:
    """Return a new scaling of this mode; if `signed`, negative numbers are scaled symmetrically to positive ones."""
    return Standard(names) if mode == "standard" else ByMaximum(mode, names, signed=signed)


def fixed_scaling(mode: str, names: tuple[str, ...], statistics: Mapping[str, Any], *, signed: bool) -> Scaling:
    """Return the scaling that a manifest's statistics describe."""
    if mode != "standard":
        made = ByMaximum(mode, names, signed=signed)
        made.maximum = np.array(statistics["dense_max"], np.float64)
        return made
    return _Fixed(names, *(np.array(statistics[name], np.float64) for name in ("dense_mean", "dense_deviation")))


class _Fixed:
    """Standardization with a fixed mean and deviation."""

    def __init__(self, names: tuple[str, ...], mean: Numbers, deviation: Numbers) -> None:
        self._names, self._mean, self._deviation = names, mean, deviation

    def observe(self, numbers: Numbers) -> None:
        """Do nothing, as the scaling is fixed."""

    def transform(self, numbers: Numbers) -> npt.NDArray[np.float32]:
        """Return the scaled numbers, float32 [n, columns]."""
        divisor = np.where(self._deviation > 0, self._deviation, 1.0)
        return _rounded((numbers - self._mean) / divisor, self._names)

    def statistics(self) -> dict[str, Any]:
        """Return the means and the standard deviations for the manifest."""
        return {"dense_mean": self._mean.tolist(), "dense_deviation": self._deviation.tolist()}


class ByMaximum:
    """Scaling by the maximum: x / maximum in mode `max`, log1p(max(x, 0)) / log1p(maximum) in mode `log`.

    A column is divided only if its maximum is above 0. For signed numbers, the maximum is max |x| and the logarithm is
    sign(x) log1p(|x|).
    """

    def __init__(self, mode: str, names: tuple[str, ...], *, signed: bool) -> None:
        self._mode, self._names, self._signed = mode, names, signed
        self.maximum = np.zeros(len(names))

    def observe(self, numbers: Numbers) -> None:
        """Update the statistics with the numbers of training rows, float64 [n, columns]."""
        if len(numbers):
            known = np.where(np.isnan(numbers), 0.0, numbers)
            self.maximum = np.maximum(self.maximum, (np.abs(known) if self._signed else known).max(axis=0))

    @np.errstate(over="ignore")
    def transform(self, numbers: Numbers) -> npt.NDArray[np.float32]:
        """Return the scaled numbers, float32 [n, columns]."""
        divisor = np.where(self.maximum > 0, self.maximum, 1.0)
        if self._mode == "log":
            divisor = np.where(self.maximum > 0, np.log1p(divisor), 1.0)
            if self._signed:
                numbers = np.copysign(np.log1p(np.abs(numbers)), numbers)
            else:
                numbers = np.log1p(np.maximum(numbers, 0.0))
        return _rounded(numbers / divisor, self._names)

    def statistics(self) -> dict[str, Any]:
        """Return the maxima for the manifest."""
        return {"dense_max": self.maximum.tolist()}


class Standard:
    """Standardization: (x - mean) / standard deviation, or x - mean for a constant column.

    The moments of fixed-size blocks of training rows are merged in order (Chan, Golub & LeVeque, 1979). They thus
    depend only on the rows, and not on how many of them each call of `observe` gets.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._rest: list[Numbers] = []  # rows not summed yet, fewer than a block
        self._waiting = 0
        self._count, self._mean, self._squares = (np.zeros(len(names)) for _ in range(3))
        self._low, self._high = np.full(len(names), np.inf), np.full(len(names), -np.inf)

    def observe(self, numbers: Numbers) -> None:
        """Update the statistics with the numbers of training rows, float64 [n, columns]."""
        self._rest.append(numbers)
        self._waiting += len(numbers)
        if self._waiting < BLOCK:
            return
        rows = np.concatenate(self._rest)
        whole = len(rows) - len(rows) % BLOCK
        for start in range(0, whole, BLOCK):
            self._add(rows[start : start + BLOCK])
        self._rest, self._waiting = [rows[whole:]], len(rows) - whole

    def _add(self, rows: Numbers) -> None:
        self.merge(*moments(rows))

    @np.errstate(over="ignore", invalid="ignore")
    def merge(self, low: Numbers, high: Numbers, count: Numbers, mean: Numbers, squares: Numbers) -> None:
        """Add the `moments` of the next block of rows, in place of `observe`."""
        self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        total = self._count + count
        step, share = mean - self._mean, count / np.maximum(total, 1)
        self._mean = self._mean + step * share
        self._squares = self._squares + squares + step**2 * self._count * share
        self._count = total

    def _finish(self) -> None:
        if self._waiting:
            self._add(np.concatenate(self._rest))
            self._rest, self._waiting = [], 0

    @property
    def mean(self) -> Numbers:
        """Mean of each column over the training rows; 0 if all values are missing."""
        self._finish()
        return self._mean

    @property
    def deviation(self) -> Numbers:
        """Population standard deviation of each column over the training rows; 0 for a constant column."""
        self._finish()
        deviation = np.where(self._high > self._low, np.sqrt(self._squares / np.maximum(self._count, 1)), 0.0)
        if not np.isfinite(deviation).all():
            name = self._names[np.flatnonzero(~np.isfinite(deviation))[0]]
            raise UserError(f"column {name!r} has numbers too large for --dense standard; use --dense log")
        return deviation

    def transform(self, numbers: Numbers) -> npt.NDArray[np.float32]:
        """Return the scaled numbers, float32 [n, columns]."""
        deviation = self.deviation
        return _rounded((numbers - self._subtracted) / np.where(deviation > 0, deviation, 1.0), self._names)

    @property
    def _subtracted(self) -> Numbers:
        """The number to subtract: the mean, or the value of a constant column, whose computed mean may be rounded."""
        return np.where(self.deviation > 0, self.mean, np.where(self._count > 0, self._low, 0.0))

    def statistics(self) -> dict[str, Any]:
        """Return the numbers that are subtracted, and the standard deviations, for the manifest."""
        return {"dense_mean": self._subtracted.tolist(), "dense_deviation": self.deviation.tolist()}


@np.errstate(over="ignore", invalid="ignore")
def moments(rows: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Return low, high, count, mean and sum of squared deviations of the known numbers in each column of a block."""
    known = ~np.isnan(rows)
    low = np.where(known, rows, np.inf).min(axis=0)
    high = np.where(known, rows, -np.inf).max(axis=0)
    count = known.sum(axis=0)
    mean = np.where(known, rows, 0.0).sum(axis=0) / np.maximum(count, 1)
    squares = np.square(np.where(known, rows - mean, 0.0)).sum(axis=0)
    return low, high, count, mean, squares


def largest(mode: str, statistics: Mapping[str, Any], columns: int) -> Numbers:
    """Return the largest valid number of each column, float64 [columns].

    A larger number could exceed the range of float32, unscaled or scaled. With scaling `max`, numbers up to the
    training maximum are always valid; with `log`, all numbers are.
    """
    if mode == "log":
        return np.full(columns, np.finfo(np.float64).max)
    known = np.array(statistics["dense_max" if mode == "max" else "dense_deviation"], np.float64)
    most: Numbers = LARGEST * np.minimum(np.where(known > 0, known, 1.0), 1.0)
    return np.maximum(most, known) if mode == "max" else most


def _rounded(scaled: Numbers, names: tuple[str, ...]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        rounded = np.where(np.isnan(scaled), 0.0, scaled).astype(np.float32)
    wrong = np.argwhere(~np.isfinite(rounded))
    if len(wrong):
        row, column = wrong[0]
        raise UserError(
            f"column {names[column]!r}: a number is {scaled[row, column]:.3g} when scaled, which float32 "
            "cannot hold; leave such rows out, or use --dense log"
        )
    return rounded
