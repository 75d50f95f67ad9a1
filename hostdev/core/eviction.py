"""Which keys lose their row of a table by key, and when.

Eviction is decided before each step whose number is a multiple of `every`, from what the steps before it used. The
policies with `keep` also evict before a step for whose new keys the table's capacity would not suffice.
"""

from dataclasses import dataclass


def _require_steps(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be at least 1 step, not {value!r}")


@dataclass(frozen=True)
class Unused:
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


@dataclass(frozen=True)
class _Keep:
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


@dataclass(frozen=True)
class SmallestNorm(_Keep):
    """Evict the keys whose weights have the smallest Euclidean norm."""


Eviction = Unused | LeastRecent | LeastFrequent | SmallestNorm
