"""The two losses of MindSpore's Wide & Deep: the wide loss, and the deep loss, which adds an L2 term."""

import torch.nn.functional as F
from torch import Tensor

L2_COEFFICIENT = 8e-5
L2_MODES = ("none", "batch", "table")


def wide_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Return the mean sigmoid cross entropy of logits [B] and labels [B]."""
    return F.binary_cross_entropy_with_logits(logits, label)


def deep_l2(rows: Tensor, uses: Tensor | None, places: Tensor | None = None) -> Tensor:
    """Return the L2 term of the deep loss for the looked-up rows, 8e-5 / 2 * sum of squares.

    Args:
        rows: float32 [U, D], the batch's unique deep rows, not weighted.
        uses: float32 [U], occurrences of each row in the batch (`--l2 batch`); None counts each row once (`--l2
            table`, whose gradient reaches only the batch's rows, as with lazy optimizers).
        places: int32 [U], indices of the rows in the order of summation; None for the order of `rows`.
    """
    squares = rows.square().sum(1)
    terms = squares if uses is None else squares * uses
    return (terms if places is None else terms.index_select(0, places)).sum() * (L2_COEFFICIENT / 2)
