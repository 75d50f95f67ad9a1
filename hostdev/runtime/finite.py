"""Checks that gradients of rows are finite, and small enough for an optimizer's arithmetic to stay finite."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hostdev.core.errors import NonFiniteError as NonFiniteError
from hostdev.kernels.norm import largest_of_each


class Flags:
    """Flags on the device, each a float32 scalar: 0 until the flag is set, then more than 0.

    Attributes:
        stop: Set if a gradient or a loss is not finite, or a gradient of rows is too large; then no row may change.
        not_finite: Set if a gradient of rows is not finite.
        loss: Set if a loss is not finite.
    """

    def __init__(self, device: torch.device) -> None:
        self.stop, self.not_finite, self.loss = (
            torch.full((), 0.0, dtype=torch.float32, device=device) for _ in range(3)
        )

    def check(self, grads: Sequence[Tensor], tables: Sequence[Any], losses: Sequence[Tensor] = ()) -> None:
        """Check gradients of rows, without a device sync.

        Args:
            grads: Each table's row gradients, float32 [U, D]; a value too large for the table's optimizer sets `stop`.
            tables: The table of each of `grads`.
            losses: For each loss on which `backward` was called, a float32 scalar: 0 if it is finite, else NaN.
        """
        if losses:
            torch._amp_foreach_non_finite_check_and_unscale_(list(losses), self.loss, _power(0, self.loss.device))
            self.check_others(losses)
        if self.stop.device.type == "cpu":
            found = largest_of_each([grad.detach().contiguous().numpy() for grad in grads])
            for most, table in zip(found, tables, strict=True):
                if most > table.optimizer.largest_gradient:
                    self.stop.fill_(1.0)
                    self.not_finite.fill_(float(math.isinf(most)) or self.not_finite.item())
            return
        by_scale: dict[int, list[Tensor]] = {}
        for grad, table in zip(grads, tables, strict=True):
            by_scale.setdefault(_scale(table), []).append(grad)
        for scale, some in by_scale.items():  # scaling by powers of 2 is exact unless it overflows
            up, down = (_power(power, self.stop.device) for power in (scale, -scale))
            torch._amp_foreach_non_finite_check_and_unscale_(some, self.not_finite, up)
            torch._amp_foreach_non_finite_check_and_unscale_(some, self.stop, down)

    def check_others(self, tensors: Sequence[Tensor]) -> None:
        """Set `stop` if a value in these tensors is not finite."""
        # GradScaler's check with a factor of 1: one pass, no device sync
        torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), self.stop, _power(0, self.stop.device))

    def now(self) -> Tensor:
        """Return a copy of all flags, float32 [3]: later steps may change the flags before the host reads the copy."""
        return torch.stack([self.stop, self.not_finite, self.loss])

    def set(self, values: Tensor) -> None:
        """Set all flags to `values`, float32 [3], in the order of `now`."""
        for flag, value in zip((self.stop, self.not_finite, self.loss), values, strict=True):
            flag.copy_(value)


def _scale(table: Any) -> int:
    """Return p such that a gradient too large for the table's optimizer overflows float32 if multiplied by 2**p."""
    return 128 - math.floor(math.log2(table.optimizer.largest_gradient))


@cache
def _power(power: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), 2.0**power, dtype=torch.float32, device=device)
