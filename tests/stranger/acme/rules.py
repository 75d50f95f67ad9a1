"""Rules of a table by key."""

from dataclasses import dataclass

import numpy as np

import hostdev


@dataclass(frozen=True)
class Even(hostdev.Admission):
    """Admit even keys once they were used twice."""

    counts = True

    def admit(self, keys, uses, *, seed, name, step):
        """See `hostdev.Admission`."""
        return (keys % 2 == 0) & (uses >= 2)


@dataclass(frozen=True)
class Rarest(hostdev.Eviction):
    """Evict the keys with the fewest uses per step since their last one."""

    every: int = 5
    keep: float = 0.8

    def scores(self, use):
        """See `hostdev.Eviction`."""
        return use.uses.astype(np.float64) * use.last
