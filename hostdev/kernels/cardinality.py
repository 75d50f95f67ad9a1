"""How many distinct values there are, from few bytes: HyperLogLog (Flajolet, Fusy, Gandouet & Meunier, 2007)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.counter import mix64
from hostdev.kernels.jit import kernel

Registers = npt.NDArray[np.uint8]

_BITS = 14  # 16,384 registers: the estimate's standard error is 0.8%
_SIZE = 1 << _BITS


@kernel
def _note(hashes: Any, registers: Any) -> None:
    for i in range(np.uint64(0), np.uint64(len(hashes))):
        h = hashes[i]
        place, rest = h >> np.uint64(64 - _BITS), h << np.uint64(_BITS)
        rank = np.uint8(1)
        while rank <= 64 - _BITS and (rest >> np.uint64(63)) == 0:
            rest <<= np.uint64(1)
            rank += np.uint8(1)
        registers[place] = max(registers[place], rank)


def registers_of(keys: npt.NDArray[np.uint64]) -> Registers:
    """Return the registers of keys [N], uint8 [16384]; those of several sets are the largest of each."""
    registers = np.zeros(_SIZE, np.uint8)
    _note(mix64(keys), registers)
    return registers


def estimate(registers: Registers) -> float:
    """Return about how many distinct keys the registers have seen, to 0.8%."""
    found = 0.7213 / (1 + 1.079 / _SIZE) * _SIZE**2 / float(np.sum(2.0 ** -registers.astype(np.float64)))
    empty = int(np.count_nonzero(registers == 0))
    if found <= 2.5 * _SIZE and empty:
        return float(_SIZE * np.log(_SIZE / empty))  # linear counting
    return found
