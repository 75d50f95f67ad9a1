"""Tracks how the losses of one batch were scaled, and whether its rows' gradients were divided by the scale."""

import torch
from torch import Tensor
from torch.amp import GradScaler

from hostdev.distributed.world import World
from hostdev.runtime import scaling
from hostdev.runtime.body_batch import BodyBatch


class LossScaling:
    """The record of what a `GradScaler` has done to one batch.

    Args:
        batch: The batch in the body.
        device: The rows' device.
        world: The ranks of this run.
    """

    def __init__(self, batch: BodyBatch, device: torch.device, world: World) -> None:
        self._batch, self._device, self._world = batch, device, world
        self._since = scaling.losses_scaled()
        self._origin: scaling.Origin | None = None  # None: no loss was scaled
        self._overflow: Tensor | None = None  # float32 scalar: 0 if all divided gradients are finite, else more
        self.is_unscaled = False
        self._by_optimizer = False  # whether a scaler divided the gradients through `Runtime.optimizer`

    @property
    def has_scaled(self) -> bool:
        """Whether rows have gradients from scaled losses."""
        return self._origin is not None and self._origin.has_scaled

    @property
    def waiting_scaler(self) -> GradScaler | None:
        """The scaler that has yet to divide the gradients, if any."""
        scaled = scaling.scaler_since(self._since) if self.has_scaled and not self.is_unscaled else None
        return None if scaled is None else scaled[0]

    def scaled(self, losses: object) -> None:
        """Record that a scaler has multiplied these losses by its scale."""
        if self._origin is None:
            self._origin = scaling.Origin(plain=bool(self._batch.gradients))
            for leaf in self._batch.all_leaves:
                if leaf.trained:
                    self._origin.watch(leaf.rows)
        self._origin.expect(losses)

    def is_scaled(self) -> bool:
        """Return whether the gradients come from scaled losses; raise ValueError if only some do."""
        return self._origin is not None and self._origin.is_scaled()

    def forget_gradients(self) -> None:
        """Forget the gradients so far."""
        if self._origin is not None:
            self._origin.forget()
        self._by_optimizer = False

    def unscale(self, scaler: GradScaler) -> dict[torch.device, Tensor]:
        """Divide the rows' gradients by the scale, unless this was done before.

        Returns:
            A flag for each device, a float32 scalar: 0 if all divided gradients are finite, else 1. There are no flags
            if nothing was divided.
        """
        if self.is_unscaled or not self.is_scaled():
            return {}
        scaled = scaling.scaler_since(self._since)
        if scaled is None or scaled[0] is not scaler:
            return {}
        self._require_alone()
        grads = self._batch.gradients
        if not grads:
            return {}
        self.is_unscaled = True
        found, factor = self._scalar(0.0), self._scalar(scaling.inverse(scaled[1]))
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
        return {self._device: found}

    def require_scaled_alike(self) -> None:
        """Raise ValueError if only some gradients come from scaled losses, or if any do and there are several ranks."""
        if self.is_scaled():
            self._require_alone()

    def rows_unscaled(self, found: dict[torch.device, Tensor]) -> None:
        """Record that a scaler has divided the rows' gradients, which it got from `Runtime.optimizer`.

        Args:
            found: The scaler's record of overflows by device. If it is empty, this method fills it in.
        """
        if not found:  # the gradients were already divided, or there are none
            found[self._device] = self._scalar(0.0) if self._overflow is None else self._overflow.to(self._device)
        self.is_unscaled = self._by_optimizer = True
        for wrong in found.values():
            self.overflowed(wrong)

    def overflowed(self, found: Tensor) -> None:
        """Record the result of a check of gradients: a float32 scalar, 0 if all are finite, else more."""
        self._overflow = found if self._overflow is None else self._overflow + found.to(self._overflow.device)

    def skips_step(self, owner: object) -> bool:
        """Divide the gradients by the scale, unless this was done before; return whether to skip the step.

        The step is skipped if a gradient is not finite after the division.

        Args:
            owner: An object that stands for an optimizer: the scaler records an overflow under its `id`.
        """
        scaled = scaling.scaler_since(self._since) if self.is_scaled() else None
        if scaled is not None:
            for found in self.unscale(scaled[0]).values():
                self.overflowed(found)
                if found.item():
                    scaling.report(scaled[0], owner, self._device)
        known = scaled is not None or self._by_optimizer
        return known and self._overflow is not None and bool(self._overflow.item())

    def _require_alone(self) -> None:
        self._world.require_own_gradients(
            "a loss was scaled, but training has several ranks, which cannot see overflows in each other's row "
            "gradients; do not use GradScaler here: train in bfloat16, which needs no loss scaling"
        )

    def _scalar(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=self._device)
