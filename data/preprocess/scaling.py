"""Scaling and clipping of numeric columns to float32, with statistics of the training rows and settings per column."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.json_files import parse
from hostdev.data.manifest import CLIP, STATISTICS_OF
from hostdev.data.preprocess.options import MODES
from hostdev.kernels.arrays import Numbers

LARGEST = 3e38  # about the largest float32
BLOCK = 4096  # rows summed at once
_DIGIT = 16  # bits of a key that each selection pass resolves


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
    """Return the scaling of this mode that a manifest's statistics fix; all columns have the same mode."""
    if mode != "standard":
        return ByMaximum(mode, names, signed=signed, maximum=np.array(statistics["dense_max"], np.float64))
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

    def __init__(self, mode: str, names: tuple[str, ...], *, signed: bool, maximum: Numbers | None = None) -> None:
        self._mode, self._names, self._signed, self._learns = mode, names, signed, maximum is None
        self.maximum = np.zeros(len(names)) if maximum is None else maximum

    def observe(self, numbers: Numbers) -> None:
        """Update the maximum, unless it is given, with the numbers of training rows, float64 [n, columns]."""
        if self._learns and len(numbers):
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
            self.merge(*moments(rows[start : start + BLOCK]))
        self._rest, self._waiting = [rows[whole:]], len(rows) - whole

    @np.errstate(over="ignore", invalid="ignore")
    def merge(self, low: Numbers, high: Numbers, count: Numbers, mean: Numbers, squares: Numbers) -> None:
        """Add the `moments` of the next block of rows, computed by `observe` or by another task."""
        self._low, self._high = np.minimum(self._low, low), np.maximum(self._high, high)
        total = self._count + count
        step, share = mean - self._mean, count / np.maximum(total, 1)
        self._mean = self._mean + step * share
        self._squares = self._squares + squares + step**2 * self._count * share
        self._count = total

    def finish(self) -> None:
        """Add the rows that are left, fewer than a block, to the statistics."""
        if self._waiting:
            self.merge(*moments(np.concatenate(self._rest)))
            self._rest, self._waiting = [], 0

    @property
    def mean(self) -> Numbers:
        """Mean of each column over the training rows; 0 if all values are missing."""
        self.finish()
        return self._mean

    @property
    def deviation(self) -> Numbers:
        """Population standard deviation of each column over the training rows; 0 for a constant column."""
        self.finish()
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


class BlockMoments(Standard):
    """Collects the `moments` of blocks of training rows in `found`, instead of merging them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self.found: list[tuple[Numbers, ...]] = []

    def merge(self, *block: Numbers) -> None:
        """Add the moments of the next block."""
        self.found.append(block)


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


@dataclass(frozen=True, kw_only=True)
class ColumnScaling:
    """Scaling settings of a numeric column.

    Attributes:
        mode: One of `MODES`, or None for the mode of --dense.
        clip: Two quantiles of the training rows' numbers, to which numbers are clipped, or None for no clipping.
    """

    mode: str | None = None
    clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise UserError(f"scaling must be one of {', '.join(MODES)}, not {self.mode!r}")
        if self.clip is not None and not 0 <= self.clip[0] < self.clip[1] <= 1:
            raise UserError(f"clip must be two quantiles, 0 <= low < high <= 1, not {list(self.clip)}")

    def as_json(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        return {"mode": self.mode, "clip": None if self.clip is None else list(self.clip)}


def own(options: Mapping[str, Any]) -> dict[str, ColumnScaling]:
    """Return the per-column scaling settings in a manifest's options.

    Raises UserError for invalid settings.
    """
    try:
        return parse(dict[str, ColumnScaling], options.get("scaling") or {})
    except ValueError:
        raise UserError(
            "the data set's manifest.json has invalid scaling settings; preprocess the data again"
        ) from None


class ByColumn:
    """Scaling of columns that have different modes or are clipped.

    Args:
        names: Names of the columns.
        parts: Pairs of column indices and the scaling of these columns; also an attribute.
        clips: By name, the two quantiles of each clipped column; `find_limits` learns its limits; also an attribute.
        limits: By name, limits of clipped columns that are already known.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        parts: Sequence[tuple[npt.NDArray[np.int64], Scaling]],
        clips: Mapping[str, tuple[float, float]],
        limits: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._names, self.parts, self.clips = names, parts, clips
        self._low, self._high = np.full(len(names), -np.inf), np.full(len(names), np.inf)
        for name, (low, high) in (limits or {}).items():
            self._low[names.index(name)], self._high[names.index(name)] = low, high

    def find_limits(self, numbers: Callable[[], Iterator[Numbers]]) -> None:
        """Learn the clipping limits from training rows.

        `numbers` yields the rows' numbers, float64 [n, columns]; it is called several times.
        """
        for name, quantiles in self.clips.items():
            column = self._names.index(name)
            found = select(lambda column=column: (some[:, column] for some in numbers()), quantiles)  # type: ignore[misc]
            if found is not None:
                self._low[column], self._high[column] = found

    def observe(self, numbers: Numbers) -> None:
        """Update the statistics with the numbers of training rows, float64 [n, columns]."""
        clipped = np.clip(numbers, self._low, self._high)
        for columns, scaling in self.parts:
            scaling.observe(np.ascontiguousarray(clipped[:, columns]))

    def transform(self, numbers: Numbers) -> npt.NDArray[np.float32]:
        """Return the scaled numbers, float32 [n, columns]."""
        clipped, scaled = np.clip(numbers, self._low, self._high), np.empty(numbers.shape, np.float32)
        for columns, scaling in self.parts:
            scaled[:, columns] = scaling.transform(np.ascontiguousarray(clipped[:, columns]))
        return scaled

    def statistics(self) -> dict[str, Any]:
        """Return the clipping limits, and the statistics of all columns (0 where a column's scaling has none)."""
        found = {name: np.zeros(len(self._names)) for names in STATISTICS_OF.values() for name in names}
        for columns, scaling in self.parts:
            for name, values in scaling.statistics().items():
                found[name][columns] = values
        limits = {
            name: [self._low[i], self._high[i]] for i, name in enumerate(self._names) if np.isfinite(self._high[i])
        }
        return {**{name: values.tolist() for name, values in found.items()}, CLIP: limits}


def make(mode: str, names: tuple[str, ...], own: Mapping[str, ColumnScaling], *, signed: bool) -> Scaling:
    """Return the scaling of columns; the per-column settings in `own` override `mode`."""
    if not own:
        return make_scaling(mode, names, signed=signed)
    parts = [(columns, make_scaling(of, some, signed=signed)) for of, columns, some in _by_mode(mode, names, own)]
    return ByColumn(names, parts, {name: one.clip for name, one in own.items() if one.clip is not None})


def fixed(
    mode: str, names: tuple[str, ...], own: Mapping[str, ColumnScaling], statistics: Mapping[str, Any], *, signed: bool
) -> Scaling:
    """Return the scaling that a manifest's statistics fix; the per-column settings in `own` override `mode`."""
    if not own:
        return fixed_scaling(mode, names, statistics, signed=signed)
    parts = []
    for of, columns, some in _by_mode(mode, names, own):
        of_columns = _statistics_of(of, columns, statistics)
        parts.append((columns, fixed_scaling(of, some, of_columns, signed=signed)))
    return ByColumn(names, parts, {}, statistics[CLIP])


def largest(
    mode: str, names: tuple[str, ...], own: Mapping[str, ColumnScaling], statistics: Mapping[str, Any]
) -> npt.NDArray[np.float64]:
    """Return, for each column, the largest number that is accepted, float64 [columns].

    A larger number could exceed the range of float32, unscaled or scaled. With scaling `max`, numbers up to the
    training maximum are always valid; with `log`, and if larger numbers are clipped, all numbers are.
    """
    found = np.full(len(names), np.finfo(np.float64).max)
    for of, columns, _ in _by_mode(mode, names, own):
        if of == "log":
            continue
        known = _statistics_of(of, columns, statistics)["dense_max" if of == "max" else "dense_deviation"]
        most: Numbers = LARGEST * np.minimum(np.where(known > 0, known, 1.0), 1.0)
        found[columns] = np.maximum(most, known) if of == "max" else most
    for name in statistics.get(CLIP, {}) if own else ():
        found[names.index(name)] = np.finfo(np.float64).max
    return found


def _statistics_of(mode: str, columns: npt.NDArray[np.int64], statistics: Mapping[str, Any]) -> dict[str, Numbers]:
    """Return the statistics that a scaling mode has, for some columns, each float64 [len(columns)]."""
    return {name: np.array(statistics[name], np.float64)[columns] for name in STATISTICS_OF[mode]}


def _by_mode(
    mode: str, names: tuple[str, ...], own: Mapping[str, ColumnScaling]
) -> Iterator[tuple[str, npt.NDArray[np.int64], tuple[str, ...]]]:
    """Yield each mode with the indices and the names of its columns."""
    modes = [own[name].mode or mode if name in own else mode for name in names]
    for of in dict.fromkeys(modes):
        columns = np.array([i for i, one in enumerate(modes) if one == of], np.int64)
        yield of, columns, tuple(names[i] for i in columns)


def learn(scaling: Scaling, known: Callable[[], Iterator[Numbers]], done: Callable[[], object] = lambda: None) -> None:
    """Learn from the numbers of training rows that `known` yields, in order; call `done` after each array."""
    if isinstance(scaling, ByColumn):
        scaling.find_limits(known)
    for numbers in known():
        scaling.observe(numbers)
        done()


def select(numbers: Callable[[], Iterable[Numbers]], quantiles: Sequence[float]) -> list[float] | None:
    """Return exact quantiles of n numbers, not counting NaN, or None if n is 0.

    The quantile q is the number of rank floor(q * (n - 1)), from 0. `numbers` yields float64 arrays; it is called
    several times, so that not all numbers have to be in memory.
    """
    total = sum(int(np.count_nonzero(~np.isnan(some))) for some in numbers())
    return [_select(numbers, int(q * (total - 1))) for q in quantiles] if total else None


def _select(numbers: Callable[[], Iterable[Numbers]], rank: int) -> float:
    """Return the number of this rank, from 0, by radix selection on keys, from the most significant digit."""
    known = np.uint64(0)
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        counts = np.zeros(1 << _DIGIT, np.int64)
        for some in numbers():
            keys = _keys(some[~np.isnan(some)])
            if shift < 64 - _DIGIT:
                keys = keys[keys >> np.uint64(shift + _DIGIT) == known]
            digits = (keys >> np.uint64(shift)) & np.uint64((1 << _DIGIT) - 1)
            counts += np.bincount(digits.astype(np.int64), minlength=len(counts))
        ends = np.cumsum(counts)
        digit = int(np.searchsorted(ends, rank, "right"))
        rank -= int(ends[digit - 1]) if digit else 0
        known = known << np.uint64(_DIGIT) | np.uint64(digit)
    is_positive = known >> np.uint64(63)
    bits = known ^ np.uint64(1 << 63) if is_positive else ~known
    return float(np.uint64(bits).view(np.float64))


def _keys(numbers: Numbers) -> npt.NDArray[np.uint64]:
    """Map numbers to integers in the same order; 0.0 and -0.0 get the same integer."""
    bits = (np.ascontiguousarray(numbers) + 0.0).view(np.uint64)
    return np.where(bits >> np.uint64(63), ~bits, bits ^ np.uint64(1 << 63))
