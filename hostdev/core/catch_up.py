"""The effect of optimizer steps on rows without a gradient, and a check that it can be computed when a row is read."""

import math
from typing import NamedTuple

import numpy as np

from hostdev.kernels.clock import FEW_TERMS, MOST_TERMS

LAST = "last"  # name of the per-row state that holds the table's step count at the row's last write
SMALL = 2.0**-26  # a moment below this fraction of its value at the last write no longer moves a weight
_TRUNCATED = 2.0**-24  # largest relative error of the sum of the terms
_MOST_SUMMED = 1 << 15  # maximum number of steps in which a decaying moment may move a weight


class CatchUp(NamedTuple):
    """The effect of an optimizer's step on rows without a gradient.

    Attributes:
        weight_decay: A step multiplies the weights by 1 - lr * weight_decay.
        betas: (beta1, beta2) of Adam, whose decaying moments move the weights, or None for other optimizers.
        eps: Adam's eps.
        epsilon_hat: Whether eps is added to the uncorrected root, as in `core.optimizers.Adam`.
    """

    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float = 0.0
    epsilon_hat: bool = False


def adam_rate(lr: float, beta1: float, beta2: float, step: int) -> np.float32:
    """Return lr_t, Adam's bias-corrected learning rate."""
    return np.float32(lr * math.sqrt(1 - beta2**step) / (1 - beta1**step))


def eps_correction(beta2: float, step: float) -> float:
    """Return sqrt(1 - beta2^step), by which eps is multiplied where it is added to the uncorrected root."""
    return math.sqrt(1 - beta2**step)


def central_step(beta1: float, step: int) -> float:
    """Return a step in the middle, geometrically, of those after `step` whose effect on unused rows matters.

    `kernels.catch_up` expands a divisor around its value at this step. The factor 4 minimizes the largest error over
    beta1 in 0.5 .. 0.999, beta2 and first steps: at most 1e-7 of a row's movement for beta1 = 0.9, and for larger
    beta1, except for rows that were last used in a table's first steps (5e-6 for 0.99, 7e-5 for 0.999).
    """
    return math.sqrt((step + 1) * (step + 1 + 4 / (1 - beta1)))


def get_terms(beta1: float, beta2: float) -> int:
    """Return how many terms of a series, 4 or 10, suffice to sum a row's missed steps to float32 precision.

    `kernels.catch_up` defines the series, here for `epsilon_hat`; without it, 10 terms suffice where they do here. For
    a constant learning rate, the relative error is the largest omitted term, 1 / C(r + P, P) for P terms and
    r = 2 * ln(beta1) / ln(beta2), where C is the binomial coefficient.

    Raises:
        ValueError: More than 10 terms would be needed, or beta1 is too close to 1.
    """
    if beta1 == 0:
        return FEW_TERMS
    if math.log(SMALL) / math.log(beta1) > _MOST_SUMMED:
        raise ValueError(f"beta1 = {beta1} is too close to 1: moments of unused rows decay too slowly; reduce beta1")
    if beta2 == 0:
        raise ValueError(
            f"beta2 must be above 0 for beta1 = {beta1}: with beta2 = 0, the effect of steps on unused rows cannot be "
            "computed later"
        )
    r = 2 * math.log(beta1) / math.log(beta2)
    for terms in (FEW_TERMS, MOST_TERMS):
        if math.lgamma(r + 1 + terms) - math.lgamma(r + 1) - math.lgamma(terms + 1) >= -math.log(_TRUNCATED):
            return terms
    raise ValueError(
        f"beta2 = {beta2} is too small for beta1 = {beta1}: the effect of steps on unused rows would be inaccurate; "
        "for beta1 = 0.9, use a beta2 of at least 0.989, or use LazyAdam, which accepts any betas"
    )
