"""A step's losses on the host."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.kernels.norm import total
from hostdev.models.wide_deep.loss import L2_COEFFICIENT
from hostdev.runtime.loop import NonFiniteError


class Losses(NamedTuple):
    """A step's losses."""

    wide: float
    deep: float


class NonFiniteLossError(NonFiniteError):
    """A loss or a gradient is not a number or infinite; the message says which, and that no row was updated."""


def read_losses(
    squares: Any, shares: list[float], has_l2: bool, step: int, results: list[npt.NDArray[Any]]
) -> Losses:  # fmt: skip
    """Make losses of a step's results.

    squares  the table's, where its L2 is added
    shares   of the micro-batches in the batch's rows
    has_l2   the deep losses, which are weighted already, have a term of their own
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
