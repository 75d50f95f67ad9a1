"""Which keys lose their row of a table by key, and when.

Eviction is decided before each step whose number is a multiple of `every`, from what the steps before it used. The
rules with `keep` also evict before a step for whose new keys the table's capacity would not suffice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]
Counts = npt.NDArray[np.uint32]
Norms = npt.NDArray[np.float64]


def _require_steps(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be at least 1 step, not {value!r}")


class KeyUse:
    """What a rule may know of N keys that have a row, in no fixed order; each attribute is gathered when it is read.

    Args:
        rows: int32 [N], the keys' rows.
        keys: int64 [V], the key of each row.
        last: uint32 [V], the number of the step that last used each row's key.
        uses: uint32 [V], how often steps have used each row's key since it got the row, after decay.
        norms: Returns the Euclidean norms of rows' weights, float64 [N], after all earlier steps.
    """

    def __init__(self, rows: Rows, keys: Keys, last: Counts, uses: Counts, norms: Callable[[Rows], Norms]) -> None:
        self._rows, self._keys, self._last, self._uses, self._norms = rows, keys, last, uses, norms

    def __len__(self) -> int:
        """Return N."""
        return len(self._rows)

    @property
    def keys(self) -> Keys:
        """The keys, int64 [N]."""
        return self._keys[self._rows]

    @property
    def last(self) -> Counts:
        """The number of the step that last used each key, uint32 [N]."""
        return self._last[self._rows]

    @property
    def uses(self) -> Counts:
        """How often steps have used each key since it got its row, after decay, uint32 [N]."""
        return self._uses[self._rows]

    @property
    def norms(self) -> Norms:
        """The Euclidean norms of the rows' weights, float64 [N]."""
        return self._norms(self._rows)


class Eviction:
    """A rule that decides which keys lose their row: subclass it, and give an object to a table by key as `evict`.

    A rule either drops keys by themselves (`expired`), or orders all keys (`scores`), of which the least are evicted
    down to a share of the capacity. Its `repr` is stored in checkpoints; a frozen dataclass has a suitable one.

    Attributes:
        every: Number of steps between evictions.
        keep: For a rule with `scores`: the share of the capacity that an eviction leaves, above 0 and at most 1. None
            for a rule with `expired`.
        decay: After each eviction, uses are multiplied by this factor and rounded down; above 0 and at most 1.
        steps: For a rule with `expired`: no key that the last `steps` steps used expires; None if that may happen.
    """

    every: int = 100
    keep: float | None = None
    decay: float = 1.0
    steps: int | None = None

    def expired(self, use: KeyUse, step: int) -> npt.NDArray[np.bool_]:
        """Return which keys lose their row before a step, bool [N]; each key's answer is a function of its own use."""
        raise NotImplementedError

    def scores(self, use: KeyUse) -> npt.NDArray[Any]:  # Any: uint32 or float64
        """Return the keys' scores, uint32 [N] or non-negative float64 [N]: those with the smallest are evicted.

        Equal keys are ordered by a hash. Each key's score must be a function of its own use.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Unused(Eviction):
    """Evict the keys that the last `steps` steps have not used.

    Attributes:
        steps: Number of steps.
        every: Number of steps between evictions.
    """

    steps: int
    every: int = 100

    def __post_init__(self) -> None:
        _require_steps("steps", self.steps)
        _require_steps("every", self.every)

    def expired(self, use: KeyUse, step: int) -> npt.NDArray[np.bool_]:
        """See `Eviction`."""
        return use.last < max(0, step - self.steps)


@dataclass(frozen=True)
class _Keep(Eviction):
    """Evict keys down to a share of the table's capacity; equal keys are ordered by a hash.

    Attributes:
        keep: Share of the capacity that an eviction leaves, above 0 and at most 1.
        every: Number of steps between evictions.
    """

    keep: float = 0.9
    every: int = 100

    def __post_init__(self) -> None:
        if type(self.keep) not in (int, float) or not 0 < self.keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1, not {self.keep!r}")
        _require_steps("every", self.every)


@dataclass(frozen=True)
class LeastRecent(_Keep):
    """Evict the keys whose last use is the longest ago."""

    def scores(self, use: KeyUse) -> npt.NDArray[np.uint32]:
        """See `Eviction`."""
        return use.last


@dataclass(frozen=True)
class LeastFrequent(_Keep):
    """Evict the keys with the fewest uses.

    Attributes:
        decay: After each eviction, uses are multiplied by this factor and rounded down; above 0 and at most 1.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.decay) not in (int, float) or not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, not {self.decay!r}")

    def scores(self, use: KeyUse) -> npt.NDArray[np.uint32]:
        """See `Eviction`."""
        return use.uses


@dataclass(frozen=True)
class SmallestNorm(_Keep):
    """Evict the keys whose weights have the smallest Euclidean norm."""

    def scores(self, use: KeyUse) -> npt.NDArray[np.float64]:
        """See `Eviction`."""
        norms = use.norms
        scores: npt.NDArray[np.float64] = np.where(np.isnan(norms), np.inf, norms)
        return scores
