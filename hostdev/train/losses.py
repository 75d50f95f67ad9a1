"""The losses of a step, which the host computes from the device's results."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.norm import total
from hostdev.models.wide_deep.loss import L2_COEFFICIENT
from hostdev.runtime.loop import NonFiniteError


class Losses(NamedTuple):
    """A step's losses: the wide loss has no L2 term, the deep loss includes it."""

    wide: float
    deep: float


class NonFiniteLossError(NonFiniteError):
    """A loss or a gradient is NaN or infinite; no row was updated."""


def read_losses(squares: Any, shares: list[float], has_l2: bool, step: int, results: list[npt.NDArray[Any]]) -> Losses:
    """Compute the losses from a step's results.

    Args:
        squares: With --l2 table, the sums of squares of the table's weights; otherwise None.
        shares: Each micro-batch's share of the batch's samples.
        has_l2: Whether the deep losses include an L2 term. If so, they are already multiplied by their micro-batches'
            weights.
        step: The step's number, for errors.
        results: Arrays from the device: the wide and deep losses [M, 2]; the squares, if the device computed them; and
            a flag that is not 0 if the update was skipped.
    """
    losses, *more, skipped = results
    each = losses.tolist()
    wide = sum(share * wide for share, (wide, _) in zip(shares, each, strict=True) if share)
    deep = sum(deep for _, deep in each) if has_l2 else wide
    if squares is not None:
        deep = wide + L2_COEFFICIENT / 2 * total(more[0] if more else squares)
    if skipped[0] or not np.isfinite([wide, deep]).all():
        what = f"wide_loss {wide}, deep_loss {deep}"
        which = "the loss" if not np.isfinite([wide, deep]).all() else "a gradient"
        raise NonFiniteLossError(f"{which} is not finite ({what}); no row was updated", step)
    return Losses(wide, deep)
