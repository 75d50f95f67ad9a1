"""The sparse optimizers: hyperparameters, recurrences and slots. The arithmetic is in kernels/ and device/.

Scalars are computed in float64 and rounded to float32 once, but for 1 - beta: the decay and its complement must
add up to 1 in float32, or a moment of constant gradients drifts (1e-5 for beta2 = 0.999); MindSpore's kernel agrees.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np


class SparseOptimizer(Protocol):
    """What a table needs to know of its optimizer."""

    primitive: ClassVar[str]  # the name of the op that applies it

    @property
    def slots(self) -> Mapping[str, float]:
        """Initial value of each slot by name, in the order in which a row stores them."""

    def scalars(self, step: int) -> tuple[Any, ...]:
        """The kernel's scalar arguments at the table's step 1, 2, 3, ..."""


def _check(ok: bool, name: str, value: object, needed: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {needed}, not {value}")


@dataclass(frozen=True, kw_only=True)
class LazyAdam:
    """Adam on the rows of a batch only; the moments of the other rows do not decay.

    With g the summed gradient of a row and t the number of steps that the table has taken::

        lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w - lr_t * m / (sqrt(v) + eps)

    With `nesterov` the numerator's m is beta1 * m + (1 - beta1) * g with the new m.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015; the efficient ordering at the end
    of its section 2, which puts eps beside the uncorrected root. Deviations: lazy, and t is the table's.
    """

    lr: float = 3.5e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    nesterov: bool = False

    primitive: ClassVar[str] = "FusedSparseLazyAdam"

    def __post_init__(self) -> None:
        _check(self.lr > 0, "lr", self.lr, "positive")
        _check(0 <= self.beta1 < 1, "beta1", self.beta1, "in [0, 1)")
        _check(0 <= self.beta2 < 1, "beta2", self.beta2, "in [0, 1)")
        _check(self.eps > 0, "eps", self.eps, "positive")

    @property
    def slots(self) -> Mapping[str, float]:
        """First and second moments, from 0."""
        return {"m": 0.0, "v": 0.0}

    def scalars(self, step: int) -> tuple[Any, ...]:
        """(lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, nesterov) of `kernels.lazy_adam`."""
        lr_t = np.float32(self.lr * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step))
        one, beta1, beta2 = map(np.float32, (1, self.beta1, self.beta2))
        return lr_t, beta1, one - beta1, beta2, one - beta2, np.float32(self.eps), bool(self.nesterov)


@dataclass(frozen=True, kw_only=True)
class FTRL:
    """Follow the regularized leader, proximal, per coordinate.

    With g the summed gradient of a row, n = accum, z = linear and p = lr_power::

        n1 = n + g^2
        z <- z + (g - (n1^-p - n^-p) / lr * w)
        n <- n1
        w <- (sign(z) * l1 - z) / (n^-p / lr + 2 * l2)   if |z| > l1, else 0

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1. Deviations: the
    learning rate's power is free, and l2 counts twice, both as in TensorFlow's and MindSpore's kernels.
    """

    lr: float = 5e-2
    l1: float = 1e-8
    l2: float = 1e-8
    lr_power: float = -0.5
    initial_accum: float = 1.0

    primitive: ClassVar[str] = "FusedSparseFtrl"

    def __post_init__(self) -> None:
        _check(self.lr > 0, "lr", self.lr, "positive")
        _check(self.l1 >= 0, "l1", self.l1, "at least 0")
        _check(self.l2 >= 0, "l2", self.l2, "at least 0")
        _check(self.lr_power <= 0, "lr_power", self.lr_power, "at most 0")
        _check(self.initial_accum >= 0, "initial_accum", self.initial_accum, "at least 0")

    @property
    def slots(self) -> Mapping[str, float]:
        """The sum of squared gradients and the linear term."""
        return {"accum": self.initial_accum, "linear": 0.0}

    def scalars(self, step: int) -> tuple[Any, ...]:
        """(lr, l1, 2 * l2, -lr_power) of `kernels.ftrl`; the same at every step."""
        return (*map(np.float32, (self.lr, self.l1, 2 * self.l2)), float(-self.lr_power))
