"""What an optimizer does to rows without a gradient, and for which moments rows can be brought up to date."""

import math
from typing import NamedTuple

import numpy as np

from hostdev.kernels.clock import FEW_TERMS, MOST_TERMS

LAST = "last"  # the per-row state with the number of steps after which the row was last written
SMALL = 2.0**-26  # of a moment, relative to its value at the last write: below, it moves no weight
_TRUNCATED = 2.0**-24  # largest relative error of the sum of the terms
_MOST_SUMMED = 1 << 15  # steps for which a moment moves a weight


class CatchUp(NamedTuple):
    """What an optimizer's step does to rows without a gradient.

    Attributes:
        weight_decay: Weights are multiplied by 1 - lr * weight_decay.
        betas: (beta1, beta2) of Adam, if its moments decay and move the weights; else None.
        eps: The eps of Adam.
    """

    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float = 0.0


def adam_rate(lr: float, beta1: float, beta2: float, step: int) -> np.float32:
    """Return lr_t of Adam."""
    return np.float32(lr * math.sqrt(1 - beta2**step) / (1 - beta1**step))


def get_terms(beta1: float, beta2: float) -> int:
    """Return how many terms of the series give the sum of a row's missed steps to float32's precision: 4 or 10.

    For a constant rate, the relative error is that of the largest omitted term, 1 / C(r + P, P) for P terms and
    r = 2 * ln(beta1) / ln(beta2), where C is the binomial coefficient.

    Raises:
        ValueError: More terms would be needed, or beta1 is too near 1.
    """
    if beta1 == 0:
        return FEW_TERMS
    if math.log(SMALL) / math.log(beta1) > _MOST_SUMMED:
        raise ValueError(f"beta1 = {beta1} is too near 1: moments of rows that were not used would last too many steps")
    if beta2 == 0:
        raise ValueError(f"beta2 must be above 0 for beta1 = {beta1}: rows that were not used are brought up to date")
    r = 2 * math.log(beta1) / math.log(beta2)
    for terms in (FEW_TERMS, MOST_TERMS):
        if math.lgamma(r + 1 + terms) - math.lgamma(r + 1) - math.lgamma(terms + 1) >= -math.log(_TRUNCATED):
            return terms
    raise ValueError(
        f"beta2 = {beta2} is too small for beta1 = {beta1}: the moments of rows that were not used would be "
        "brought up to date with an error; for beta1 = 0.9, beta2 must be at least 0.989. LazyAdam takes any betas"
    )
