"""Which keys get a row of a table by key: after how many uses, with what probability, or by a rule of your own."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hostdev.core.memory import parse_bytes
from hostdev.kernels.counter import key64, uniform

MOST_USES = (1 << 24) - 1
LEAST_SKETCH = 1 << 16  # bytes


class Admission:
    """A rule that decides which keys get a row: subclass it, and give an object to a table by key as `admit`.

    A key without a row reads the table's values for unknown keys, and its gradients are dropped. The rule's `repr` is
    stored in checkpoints, so that a table is resumed with the same rule; a frozen dataclass has a suitable one.
    `hostdev.testing.check_admission` checks a rule.

    Attributes:
        counts: Whether the table counts the uses of keys that have no row, over all steps.
        expires: If `counts`: the table forgets the uses of a key that has been waiting without a use for this many
            steps; None for never.
        sketch_bytes: If `counts`: the size of a count-min sketch that counts in place of exact counts; 0 for exact.
    """

    counts: ClassVar[bool] = False
    expires: int | None = None

    @property
    def sketch_bytes(self) -> int:
        """See the class."""
        return 0

    def admit(
        self, keys: npt.NDArray[np.int64], uses: npt.NDArray[np.int64], *, seed: int, name: str, step: int
    ) -> npt.NDArray[np.bool_]:
        """Return which keys get a row at once, bool [N].

        The answer for a key must be a function of the arguments alone: ranks, threads and a resumed run ask in
        different compositions.

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

    def admit(
        self, keys: npt.NDArray[np.int64], uses: npt.NDArray[np.int64], *, seed: int, name: str, step: int
    ) -> npt.NDArray[np.bool_]:
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

    def admit(
        self, keys: npt.NDArray[np.int64], uses: npt.NDArray[np.int64], *, seed: int, name: str, step: int
    ) -> npt.NDArray[np.bool_]:
        """See `Admission`."""
        drawn: npt.NDArray[np.bool_] = uniform(key64(seed, name, "admit", step), keys.view(np.uint64)) < self.p
        return drawn
