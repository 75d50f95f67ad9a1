"""Whittle indices: the highest price per slot at which a row is worth caching, given its known and expected uses.

The uses of a row in the next batches are known; beyond them, only the probability that a batch uses it is known. A row
is worth a slot while the slot costs less per batch than caching the row saves. The highest such price is its Whittle
index. Keeping the rows with the largest indices is optimal if "C rows at a time" is relaxed to "C rows on average". If
the whole future is known, this is the linear program of offline caching.

Let x(s) be the future cost if the row is not cached minus the cost if it is, where a slot costs p per batch. The
sequence s says which of the known batches use the row, the next batch first:

    x(used, s)     = clip(x(s), -evicted, admitted - passed) + passed - p
    x(not used, s) = max(x(s), -evicted) - p

because an uncached row enters only when it is used, and a cached row may leave at any batch. Beyond the known batches,
x is the mean of both formulas, weighted by the probability of a use; after `HORIZON` batches it is 0. A cached row
stays if x > -evicted, and a row that was used enters if x > admitted - passed.

Sources: Whittle, "Restless Bandits: Activity Allocation in a Changing World", J. Applied Probability 25A (1988);
Albers, Arora & Khanna, "Page Replacement for General Caching Problems", SODA 1999 (the program).
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import parallel_for

RATES = 22  # classes of the probability that a batch uses a row: 1, >= 3/4, >= 1/2, >= 3/8, ..., the rest
PRICES = 161  # number of prices, 16 per octave; the highest is a little above any row's index
HORIZON = 100  # batches after the known ones; later costs are ignored
MOST_BITS = 16  # maximum number of known batches
STAY, ENTER = 0, 1  # first index into the result of `prices`: cached rows, other rows


class Costs(NamedTuple):
    """Costs of moving a row, in one unit: bytes, nanoseconds of the host, or a weighted sum."""

    passed: float = 2.0  # bypass: weights to the device, gradient to the host
    admitted: float = 3.0  # the row with its optimizer state to the device
    evicted: float = 3.0  # the row with its optimizer state to the host

    @classmethod
    def of(
        cls, passing: int, whole: int, *, down: float = 1.0, up: float = 1.0, host: "Costs | None" = None
    ) -> "Costs":
        """Return the costs of bus transfers plus the costs of the host's work.

        Args:
            passing: Bytes of a bypassing row, in each direction.
            whole: Bytes of a row with its optimizer state.
            down: Cost of sending a byte to the device; with 1, costs are numbers of bytes.
            up: Cost of sending a byte to the host.
            host: Costs of the host's work, in the same unit.
        """
        bus = cls((down + up) * passing, down * whole, up * whole)
        return bus if host is None else cls(*(one + other for one, other in zip(bus, host, strict=True)))

    def paid(self, passed: float, admitted: float, evicted: float) -> float:
        """Return the total cost of these numbers of bypassing, admitted and evicted rows."""
        return passed * self.passed + admitted * self.admitted + evicted * self.evicted


@lru_cache(maxsize=4)
def prices(costs: Costs, bits: int) -> npt.NDArray[np.uint8]:
    """Return the Whittle indices [2, RATES, 2 ** bits], for staying and for entering; 0: not worth a slot at any price.

    The position along the last axis has a bit per known batch, set if it uses the row; the nearest batch is the highest
    bit. Index i stands for a price proportional to 2 ** (i / 16).
    """
    if not 0 <= bits <= MOST_BITS:
        raise ValueError(f"the number of known batches must be in 0..{MOST_BITS}, not {bits}")
    table = np.zeros((2, RATES, 1 << bits), np.uint8)
    admitted, evicted = (np.float32(cost / costs.passed) for cost in costs[1:])
    of_rate = np.array([get_rate_middle(rate) for rate in range(RATES)], np.float32)
    at = (1.01 * 2.0 ** ((np.arange(PRICES) - PRICES + 1) / 16)).astype(np.float32)
    parallel_for(_fill, RATES, admitted, evicted, of_rate, at, table)
    table.flags.writeable = False
    return table


def get_rate_middle(rate: int) -> float:
    """Return the middle of a class of probabilities; 1 for the first class, 0 for the last."""
    if rate in (0, RATES - 1):
        return float(rate == 0)
    edge = 2.0 ** (-((rate + 1) // 2))
    return edge * 1.73 if rate % 2 else edge * 1.22  # geometric means of 1.5 and 2, and of 1 and 1.5


def get_price_index(price: float) -> int:
    """Return the index that stands for this price of a slot per batch; in the same unit, a bypass costs 2."""
    return int(np.clip(np.ceil(PRICES + 16 * np.log2(max(price, 1e-9) / 2.02)), 0, PRICES))


@kernel
def _fill(start: Any, stop: Any, admitted: Any, evicted: Any, of_rate: Any, at: Any, table: Any) -> None:
    """Count the prices at which rows of the classes [start, stop) are worth a slot; a bypass costs 1."""
    size = np.uint64(table.shape[2])
    x = np.empty(size, np.float32)
    passed, top, low, zero = np.float32(1), np.float32(admitted) - np.float32(1), -np.float32(evicted), np.float32(0)
    for rate in range(start, stop):
        chance, stay, enter = of_rate[rate], table[0, rate], table[1, rate]
        for price in at:
            far = zero
            for _ in range(HORIZON):
                unused = max(far, low)
                far = chance * (min(unused, top) + passed) + (np.float32(1) - chance) * unused - price
            x[0] = far
            known = np.uint64(1)
            while known < size:
                for s in range(known):
                    unused = max(x[s], low)
                    x[s + known] = min(unused, top) + passed - price
                    x[s] = unused - price
                known *= np.uint64(2)
            for s in range(size):
                stay[s] += np.uint8(x[s] > low)
                enter[s] += np.uint8(x[s] > top)
