"""Estimates of the number of distinct keys and the sum of their weights, in little memory.

Sources: HyperLogLog (Flajolet, Fusy, Gandouet & Meunier, 2007) and priority sampling (Duffield, Lund & Thorup, 2007).
The summaries of several sets of keys can be combined into the summary of their union.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.counter import mix64
from hostdev.kernels.jit import kernel

Registers = npt.NDArray[np.uint8]

_BITS = 14  # 16,384 registers: the estimate's standard error is 0.8%
_SIZE = 1 << _BITS
_SAMPLED = 4096  # keys: the standard error of the estimated sum is 1.6%, for any weights


@kernel
def _note(hashes, registers):
    for i in range(np.uint64(0), np.uint64(len(hashes))):
        h = hashes[i]
        place, rest = h >> np.uint64(64 - _BITS), h << np.uint64(_BITS)
        rank = np.uint8(1)
        while rank <= 64 - _BITS and (rest >> np.uint64(63)) == 0:
            rest <<= np.uint64(1)
            rank += np.uint8(1)
        registers[place] = max(registers[place], rank)


def make_registers(keys: npt.NDArray[np.uint64]) -> Registers:
    """Return the HyperLogLog registers of the set of keys [N]: uint8 [16384].

    The registers of a union of sets are the element-wise maximum of the registers of the sets.
    """
    registers = np.zeros(_SIZE, np.uint8)
    _note(mix64(keys), registers)
    return registers


def estimate(registers: Registers) -> float:
    """Estimate how many distinct keys the registers were made from, with a standard error of 0.8%."""
    found = 0.7213 / (1 + 1.079 / _SIZE) * _SIZE**2 / float(np.sum(2.0 ** -registers.astype(np.float64)))
    empty = int(np.count_nonzero(registers == 0))
    if found <= 2.5 * _SIZE and empty:
        return float(_SIZE * np.log(_SIZE / empty))  # linear counting, which is more accurate for few keys
    return found


class Sample(NamedTuple):
    """A sample of a set: the 4097 keys, or fewer, with the largest weight / u, where u in (0, 1] is a hash of the key.

    Attributes:
        keys: uint64 [K], distinct.
        weights: int64 [K], above 0.
    """

    keys: npt.NDArray[np.uint64]
    weights: npt.NDArray[np.int64]


def draw_sample(keys: npt.NDArray[np.uint64], weights: npt.NDArray[np.int64]) -> Sample:
    """Sample distinct keys [N], to estimate the sum of their weights [N] later; keys of weight 0 are dropped."""
    there = weights > 0
    keys, weights = keys[there], weights[there]
    if len(keys) > _SAMPLED + 1:  # the smallest priority is only the threshold for the others
        priorities = _priorities(keys, weights)
        there = priorities >= np.partition(priorities, -_SAMPLED - 1)[-_SAMPLED - 1]
        keys, weights = keys[there], weights[there]
    return Sample(keys, weights)


def join(*samples: Sample) -> Sample:
    """Combine samples of several sets into a sample of their union; a key must have the same weight in all samples."""
    keys, weights = (np.concatenate(each) for each in zip(*samples, strict=True))
    if len(samples[0].keys) > _SAMPLED:  # most keys of the other samples are dropped here, so few are left to sort
        there = _priorities(keys, weights) >= _priorities(*samples[0]).min()
        keys, weights = keys[there], weights[there]
    keys, first = np.unique(keys, return_index=True)
    return draw_sample(keys, weights[first])


def total(sample: Sample) -> float:
    """Estimate the total weight of the sampled set: exact for up to 4096 keys, else with a standard error of 1.6%."""
    if len(sample.keys) <= _SAMPLED:
        return float(sample.weights.sum())
    priorities = _priorities(*sample)
    least = float(priorities.min())
    return float(np.maximum(sample.weights[priorities > least], least).sum())


def _priorities(keys: npt.NDArray[np.uint64], weights: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    uniform = ((mix64(keys) >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
    return weights / uniform
