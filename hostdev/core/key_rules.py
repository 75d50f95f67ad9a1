"""Rules of tables by key: which keys get a row, and which keys lose their row.

Keys get a row after a number of uses, with a probability, or by a rule of your own.

Eviction is decided before each step whose number is a multiple of `every`, from the uses in earlier steps. Rules with
`keep` also evict before a step whose new keys would exceed the table's capacity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hostdev.core.memory import parse_bytes
from hostdev.kernels.arrays import Array, Counts, Keys, Mask, Numbers, RowNumbers
from hostdev.kernels.counter import key64, uniform

MOST_USES = (1 << 24) - 1
LEAST_SKETCH = 1 << 16  # minimum bytes of a sketch
Recorded = npt.NDArray[np.uint32]  # [N], steps or numbers of uses


class Admission:
    """A rule that decides which keys get a row: subclass it, and give an object to a table by key as `admit`.

    The table's `unknown` says what a key without a row reads. If this is a shared row, the key's gradients train it,
    otherwise they are dropped. The rule's `repr` is stored in checkpoints, so that a table is resumed with the same
    rule; a frozen dataclass has a suitable one. `hostdev.testing.check_admission` checks a rule.

    Attributes:
        counts: Whether the table counts the uses of keys that have no row, over all steps.
        expires: If `counts`: the table forgets the uses of a key that has been waiting without a use for this many
            steps; None for never.
        sketch_bytes: If `counts`: bytes of a count-min sketch that replaces exact counts; 0 for exact counts.
    """

    counts: ClassVar[bool] = False
    expires: int | None = None

    @property
    def sketch_bytes(self) -> int:
        """See the class."""
        return 0

    def admit(self, keys: Keys, uses: Counts, *, seed: int, name: str, step: int) -> Mask:
        """Return which keys get a row in this step, bool [N].

        The answer for a key must be a function of the arguments alone: ranks, threads and a resumed run
        group the keys differently.

        Args:
            keys: int64 [N], distinct keys of a step that have no row.
            uses: int64 [N], if `counts` the uses of each key in all steps so far, else in this step alone.
            seed: The table's seed.
            name: The table's name.
            step: The step's number, from 1.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class MinCount(Admission):
    """Admit a key once it has been used `n` times; the batch with the n-th use trains its row.

    Attributes:
        n: Number of uses, from 1 to 2^24 - 1. All uses in a batch are counted before any key of it is admitted.
        sketch: None to count every key exactly, in about 27 bytes per waiting key; or the memory of a count-min sketch
            (Cormode and Muthukrishnan, 2005), such as "64MiB". Its counts may be too large, never too small. It does
            not forget the uses of a key that had a row, so a key that was evicted is admitted at its next use.
        expires: Forget the uses of a key that has been waiting without a use for this many steps, or None for never.
            Only for exact counts.

    Raises:
        ValueError: A value is out of range, or `sketch` and `expires` are both given.
    """

    counts: ClassVar[bool] = True

    n: int
    sketch: str | int | None = None
    expires: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or not 1 <= self.n <= MOST_USES:
            raise ValueError(f"MinCount needs a number of uses from 1 to {MOST_USES:,}, not {self.n!r}")
        if self.expires is not None and (type(self.expires) is not int or self.expires < 1):
            raise ValueError(f"expires must be at least 1 step, not {self.expires!r}")
        if self.sketch is not None and type(self.sketch) not in (int, str):
            raise ValueError(f"a sketch needs a size such as '64MiB', not {self.sketch!r}")
        if self.sketch is not None and self.expires is not None:
            raise ValueError("a sketch cannot forget single keys; leave out sketch or expires")
        if self.sketch is not None and self.sketch_bytes < LEAST_SKETCH:
            raise ValueError(f"a sketch needs at least 64 KiB, not {self.sketch!r}")

    @property
    def sketch_bytes(self) -> int:
        """Size of the sketch in bytes; 0 for exact counts."""
        if self.sketch is None:
            return 0
        return self.sketch if isinstance(self.sketch, int) else parse_bytes(self.sketch)

    def admit(self, keys: Keys, uses: Counts, *, seed: int, name: str, step: int) -> Mask:
        """See `Admission`."""
        return uses >= self.n


@dataclass(frozen=True)
class Probability(Admission):
    """Admit a key with probability `p` in each batch that uses it.

    The draw is a function of (seed, table name, key, number of the step).

    Raises:
        ValueError: p is not above 0 and at most 1.
    """

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"a probability must be above 0 and at most 1, not {self.p!r}")

    def admit(self, keys: Keys, uses: Counts, *, seed: int, name: str, step: int) -> Mask:
        """See `Admission`."""
        drawn: Mask = uniform(key64(seed, name, "admit", step), keys.view(np.uint64)) < self.p
        return drawn


def _require_steps(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be at least 1 step, not {value!r}")


class KeyUse:
    """How N keys with a row were used, as a rule reads it. Keys have no fixed order; attributes are gathered when read.

    Args:
        rows: int32 [N], the keys' rows.
        keys: int64 [V], the key of each row.
        last: uint32 [V], the number of the step that last used each row's key.
        uses: uint32 [V], how often steps have used each row's key, after decay. If the admission rule counts uses, the
            uses before the key had its row are included.
        squares: Returns the squares of the Euclidean norms of rows' weights, float64 [N], after all earlier steps.
    """

    def __init__(
        self, rows: RowNumbers, keys: Keys, last: Recorded, uses: Recorded, squares: Callable[[RowNumbers], Numbers]
    ) -> None:
        self._rows, self._keys, self._last, self._uses, self._squares = rows, keys, last, uses, squares

    def __len__(self) -> int:
        """Return N."""
        return len(self._rows)

    @property
    def keys(self) -> Keys:
        """The keys, int64 [N]."""
        return self._keys[self._rows]

    @property
    def last(self) -> Recorded:
        """The number of the step that last used each key, uint32 [N]."""
        return self._last[self._rows]

    @property
    def uses(self) -> Recorded:
        """How often steps have used each key, after decay, uint32 [N]; see `uses` of the class."""
        return self._uses[self._rows]

    @property
    def norms(self) -> Numbers:
        """The Euclidean norms of the rows' weights, float64 [N]."""
        return np.sqrt(self._squares(self._rows))

    @property
    def square_norms(self) -> Numbers:
        """The squares of `norms`, float64 [N]: the same order, but they differ where two roots are rounded alike."""
        return self._squares(self._rows)


class Eviction:
    """A rule that decides which keys lose their row: subclass it, and give an object to a table by key as `evict`.

    A rule either decides about each key alone (`expired`), or orders all keys (`scores`): then keys with the smallest
    scores are evicted until the rest fill the share `keep` of the capacity. The rule's `repr` is stored in
    checkpoints; a frozen dataclass has a suitable one. `hostdev.testing.check_eviction` checks a rule.

    Attributes:
        every: Number of steps between evictions.
        keep: For a rule with `scores`: the share of the capacity that is still filled after an eviction, above 0 and at
            most 1. None for a rule with `expired`.
        decay: After each eviction, uses are multiplied by this factor and rounded down; above 0 and at most 1.
        steps: For a rule with `expired`: keys that the last `steps` steps used do not expire; None if such keys may.
    """

    every: int = 100
    keep: float | None = None
    decay: float = 1.0
    steps: int | None = None

    def expired(self, use: KeyUse, step: int) -> Mask:
        """Return which keys lose their row before a step, bool [N]; each key's answer is a function of its own use."""
        raise NotImplementedError

    def scores(self, use: KeyUse) -> Array:
        """Return the keys' scores, uint32 [N] or non-negative float64 [N]; keys with the smallest scores are evicted.

        Keys with equal scores are ordered by a hash. Each key's score must be a function of its own use.
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

    def expired(self, use: KeyUse, step: int) -> Mask:
        """See `Eviction`."""
        return use.last < max(0, step - self.steps)


@dataclass(frozen=True)
class _Keep(Eviction):
    """Evict keys down to a share of the table's capacity; keys with equal scores are ordered by a hash.

    Attributes:
        keep: Share of the capacity that is still filled after an eviction, above 0 and at most 1.
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

    def scores(self, use: KeyUse) -> Recorded:
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

    def scores(self, use: KeyUse) -> Recorded:
        """See `Eviction`."""
        return use.uses


@dataclass(frozen=True)
class SmallestNorm(_Keep):
    """Evict the keys whose weights have the smallest Euclidean norm."""

    def scores(self, use: KeyUse) -> Numbers:
        """See `Eviction`."""
        squares = use.square_norms
        scores: Numbers = np.where(np.isnan(squares), np.inf, squares)
        return scores
