"""Scaling and clipping of numbers with settings per column."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.core.json_files import parse
from hostdev.data.manifest_values import CLIP, STATISTICS_OF
from hostdev.data.preprocess import dense
from hostdev.data.preprocess.dense import MODES
from hostdev.kernels.arrays import Numbers

_DIGIT = 16  # bits of a key that each selection pass resolves


@dataclass(frozen=True, kw_only=True)
class ColumnScaling:
    """Scaling settings of a numeric column.

    Attributes:
        mode: One of `dense.MODES`, or None for the mode of --dense.
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
        parts: Pairs of column indices and the scaling of these columns.
        clips: The two quantiles of each clipped column, by name.
        limits: The learned limits of clipped columns, or None if `find_limits` will learn them.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        parts: Sequence[tuple[npt.NDArray[np.int64], dense.Scaling]],
        clips: Mapping[str, tuple[float, float]],
        limits: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._names, self._parts, self._clips = names, parts, clips
        self._low, self._high = np.full(len(names), -np.inf), np.full(len(names), np.inf)
        for name, (low, high) in (limits or {}).items():
            self._low[names.index(name)], self._high[names.index(name)] = low, high

    @property
    def parts(self) -> Sequence[tuple[npt.NDArray[np.int64], dense.Scaling]]:
        """Pairs of column indices and the scaling of these columns."""
        return self._parts

    @property
    def clips(self) -> bool:
        """Whether a column is clipped, so that its limits are learned before anything else."""
        return bool(self._clips)

    def find_limits(self, numbers: Callable[[], Iterator[Numbers]]) -> None:
        """Learn the clipping limits from training rows.

        `numbers` yields the rows' numbers, float64 [n, columns]; it is called several times.
        """
        for name, quantiles in self._clips.items():
            column = self._names.index(name)
            found = select(lambda column=column: (some[:, column] for some in numbers()), quantiles)  # type: ignore[misc]
            if found is not None:
                self._low[column], self._high[column] = found

    def observe(self, numbers: Numbers) -> None:
        """Update the statistics with the numbers of training rows, float64 [n, columns]."""
        clipped = np.clip(numbers, self._low, self._high)
        for columns, scaling in self._parts:
            scaling.observe(np.ascontiguousarray(clipped[:, columns]))

    def transform(self, numbers: Numbers) -> npt.NDArray[np.float32]:
        """Return the scaled numbers, float32 [n, columns]."""
        clipped, scaled = np.clip(numbers, self._low, self._high), np.empty(numbers.shape, np.float32)
        for columns, scaling in self._parts:
            scaled[:, columns] = scaling.transform(np.ascontiguousarray(clipped[:, columns]))
        return scaled

    def statistics(self) -> dict[str, Any]:
        """Return the clipping limits, and the statistics of all columns (0 where a column's scaling has none)."""
        found = {name: np.zeros(len(self._names)) for names in STATISTICS_OF.values() for name in names}
        for columns, scaling in self._parts:
            for name, values in scaling.statistics().items():
                found[name][columns] = values
        limits = {
            name: [self._low[i], self._high[i]] for i, name in enumerate(self._names) if np.isfinite(self._high[i])
        }
        return {**{name: values.tolist() for name, values in found.items()}, CLIP: limits}


def make(mode: str, names: tuple[str, ...], own: Mapping[str, ColumnScaling], *, signed: bool) -> dense.Scaling:
    """Return the scaling of columns; the per-column settings in `own` override `mode`."""
    if not own:
        return dense.make_scaling(mode, names, signed=signed)
    parts = [(columns, dense.make_scaling(of, some, signed=signed)) for of, columns, some in _by_mode(mode, names, own)]
    return ByColumn(names, parts, _clips(own))


def fixed(
    mode: str, names: tuple[str, ...], own: Mapping[str, ColumnScaling], statistics: Mapping[str, Any], *, signed: bool
) -> dense.Scaling:
    """Return the scaling that a manifest's statistics define."""
    if not own:
        return dense.fixed_scaling(mode, names, statistics, signed=signed)
    parts = []
    for of, columns, some in _by_mode(mode, names, own):
        mine = {name: np.array(statistics[name], np.float64)[columns] for name in STATISTICS_OF[of]}
        parts.append((columns, dense.fixed_scaling(of, some, mine, signed=signed)))
    return ByColumn(names, parts, _clips(own), statistics[CLIP])


def largest(
    mode: str, names: tuple[str, ...], own: Mapping[str, ColumnScaling], statistics: Mapping[str, Any]
) -> npt.NDArray[np.float64]:
    """Return, for each column, the largest number that is accepted, float64 [columns]; see `dense.largest`."""
    found = np.empty(len(names))
    for of, columns, _ in _by_mode(mode, names, own):
        mine = {name: np.array(statistics[name], np.float64)[columns] for name in STATISTICS_OF[of]}
        found[columns] = dense.largest(of, mine, len(columns))
    for name in statistics.get(CLIP, {}) if own else ():  # larger numbers are clipped
        found[names.index(name)] = np.finfo(np.float64).max
    return found


def _by_mode(
    mode: str, names: tuple[str, ...], own: Mapping[str, ColumnScaling]
) -> Iterator[tuple[str, npt.NDArray[np.int64], tuple[str, ...]]]:
    """Yield each mode with the indices and the names of its columns."""
    modes = [own[name].mode or mode if name in own else mode for name in names]
    for of in dict.fromkeys(modes):
        columns = np.array([i for i, one in enumerate(modes) if one == of], np.int64)
        yield of, columns, tuple(names[i] for i in columns)


def _clips(own: Mapping[str, ColumnScaling]) -> dict[str, tuple[float, float]]:
    return {name: one.clip for name, one in own.items() if one.clip is not None}


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
