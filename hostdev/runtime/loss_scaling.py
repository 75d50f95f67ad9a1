"""Tracks how the losses of one batch were scaled, and whether its rows' gradients were divided by the scale.

For this, functions of torch are replaced while a loop is open.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hostdev.distributed.world import World
from hostdev.runtime.body_batch import BodyBatch

Function = Callable[..., Any]  # a torch function, of any signature
_MOST_SCALES = 64  # maximum number of scales kept for each scaler; only those of the current batch matter


class Replacement(NamedTuple):
    """A torch function to replace, and how to replace it.

    Attributes:
        owner: The module or class that has the function.
        name: The function's name in `owner`.
        wrap: Takes the function and returns its replacement.
        purpose: What hostdev cannot see without the replacement, for the error message.
    """

    owner: Any
    name: str
    wrap: Callable[[Function], Function]
    purpose: str


class TorchHooks:
    """Replacements and hooks that are active in torch between `place` and `remove`.

    Args:
        replacements: The functions to replace.
        register: Functions that register a hook and return torch's handle for it.
    """

    def __init__(
        self, replacements: Sequence[Replacement], register: Sequence[Callable[[], RemovableHandle]] = ()
    ) -> None:
        self._replacements, self._register = replacements, register
        self._placed: dict[tuple[Any, str], tuple[Function, Function]] = {}  # originals and replacements
        self._handles: list[RemovableHandle] = []
        self.lock = threading.RLock()  # reentrant: a finalizer may call `remove` within `place`

    def place(self) -> None:
        """Replace the functions that are not replaced yet.

        Raises:
            RuntimeError: This version of torch lacks one of the functions; then nothing is replaced.
        """
        with self.lock:
            found = [_get(one) for one in self._replacements]
            for (owner, name, wrap, _), now in zip(self._replacements, found, strict=True):
                if (placed := self._placed.get((owner, name))) is not None and now is not placed[0]:
                    continue  # it is our replacement, or another library's wrapper around it
                replacement = wrap(now)
                self._placed[owner, name] = now, replacement
                setattr(owner, name, replacement)
            if not self._handles:
                self._handles += [register() for register in self._register]

    def remove(self) -> None:
        """Restore torch's own functions, except those whose replacements another library has wrapped since."""
        with self.lock:
            for (owner, name), (original, replacement) in list(self._placed.items()):
                if getattr(owner, name, None) is replacement:
                    setattr(owner, name, original)
                    del self._placed[owner, name]
            while self._handles:
                self._handles.pop().remove()


def _get(one: Replacement) -> Function:
    found: Function | None = getattr(one.owner, one.name, None)
    if found is None:
        name = f"{getattr(one.owner, '__module__', '')}.{one.owner.__name__}".lstrip(".")
        raise RuntimeError(
            f"torch {torch.__version__} has no {name}.{one.name}, without which hostdev cannot see {one.purpose}; "
            "use a version of torch that hostdev supports"
        )
    return found


class LossScaling:
    """The record of what a `GradScaler` has done to one batch.

    Args:
        batch: The batch in the body.
        device: The rows' device.
        world: The ranks of this run.
    """

    def __init__(self, batch: BodyBatch, device: torch.device, world: World) -> None:
        self._batch, self._device, self._world = batch, device, world
        self._since = _seen.losses
        self._origin: _Origin | None = None  # None: no loss was scaled
        self._overflow: Tensor | None = None  # float32 scalar: 0 if all divided gradients are finite, else more
        self.is_unscaled = False
        self._by_optimizer = False  # whether a scaler divided the gradients through `Runtime.optimizer`

    @property
    def has_scaled(self) -> bool:
        """Whether rows have gradients from scaled losses."""
        return self._origin is not None and self._origin.has_scaled

    def scaled(self, losses: object) -> None:
        """Record that a scaler has multiplied these losses by its scale."""
        if self._origin is None:
            self._origin = _Origin(plain=bool(self._batch.gradients))
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
        """Divide the rows' gradients by the scale if `scaler` has scaled the losses and this was not done before.

        Returns:
            A flag for each device, a float32 scalar: 0 if all divided gradients are finite, else 1. There are no flags
            if nothing was divided.
        """
        if self.is_unscaled or not self.is_scaled():
            return {}
        scaled = _scaler_since(self._since)
        if scaled is None or scaled[0] is not scaler:
            return {}
        self._require_alone()
        grads = self._batch.gradients
        if not grads:
            return {}
        self.is_unscaled = True
        found, factor = self._scalar(0.0), self._scalar(_inverse(scaled[1]))
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
        scaled = _scaler_since(self._since) if self.is_scaled() else None
        if scaled is not None:
            for found in self.unscale(scaled[0]).values():
                self.overflowed(found)
                if found.item():
                    _report(scaled[0], owner, self._device)
        known = scaled is not None or self._by_optimizer
        return known and self._overflow is not None and bool(self._overflow.item())

    def _require_alone(self) -> None:
        self._world.require_own_gradients(
            "a loss was scaled, but training has several ranks, which cannot see overflows in each other's row "
            "gradients; do not use GradScaler here: train in bfloat16, which needs no loss scaling"
        )

    def _scalar(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=self._device)


class _Origin:
    """Tracks whether the rows' gradients come from scaled losses, since a scaler may belong to another model.

    Args:
        plain: Whether the rows already have gradients from losses that were not scaled.

    Attributes:
        has_scaled: Whether some gradients come from scaled losses.
    """

    def __init__(self, *, plain: bool) -> None:
        self._plain, self.has_scaled = plain, False
        self._inside = 0  # number of running backward passes of scaled losses

    def expect(self, losses: Any) -> None:
        """Watch for backward passes from these tensors."""
        for loss in tree_leaves(losses):
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(self._enter)  # type: ignore[no-untyped-call]

    def watch(self, parameter: Tensor) -> None:
        """Watch for the gradients of a tensor."""
        parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def is_scaled(self) -> bool:
        """Return whether the gradients come from scaled losses, as far as known; raise ValueError if only some do."""
        if self._plain and self.has_scaled:
            raise ValueError(
                "the gradients of the rows come from scaled and from unscaled losses; scale all losses of a step"
            )
        return not self._plain  # assigned gradients count as scaled, as for any parameter

    def forget(self) -> None:
        """Forget the gradients so far."""
        self._plain = self.has_scaled = False

    def _enter(self, _: Tensor) -> None:
        self._inside += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._leave)  # runs at the end of this backward pass

    def _leave(self) -> None:
        self._inside -= 1

    def _note_gradient(self, _: Tensor) -> None:
        if self._inside:
            self.has_scaled = True
        else:
            self._plain = True


class _Scale:
    """One value of a scaler's scale, and the number of the last loss that was multiplied by it."""

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version  # grows with every change in place
        self.value = tensor.detach().clone()
        self.last = 0


class _Seen(threading.local):
    """One thread's record of scaler calls."""

    def __init__(self) -> None:
        self.scales: WeakKeyDictionary[GradScaler, deque[_Scale]] = WeakKeyDictionary()
        self.losses = 0  # losses scaled so far, by any scaler


_seen = _Seen()


def note_scale(scaler: GradScaler) -> None:
    """Record that a scaler has multiplied a loss in this thread."""
    _seen.losses += 1
    tensor = scaler._scale
    if tensor is None:  # `scale` got an iterable, whose results must not be consumed here
        tensor = torch.tensor(scaler.get_scale())
    scales = _seen.scales.setdefault(scaler, deque(maxlen=_MOST_SCALES))
    if not scales or scales[-1].version != tensor._version:
        scales.append(_Scale(tensor))
    scales[-1].last = _seen.losses


def _scaler_since(since: int) -> tuple[GradScaler, float] | None:
    """Return the scaler of the losses after the first `since` ones, and its scale; None if there are no such losses.

    Raises:
        ValueError: These losses had several scalers or scales.
    """
    if since == _seen.losses:
        return None
    found = [
        (scaler, float(one.value)) for scaler, scales in _seen.scales.items() for one in scales if one.last > since
    ]
    if len(found) > 1:
        raise ValueError(
            "the losses of one step were scaled differently; use one GradScaler, and call its update() after the step"
        )
    return found[0] if found else None


def _inverse(scale: float) -> float:
    """Return the factor by which `GradScaler.unscale_` multiplies gradients: 1 / scale, rounded to float32."""
    return float(torch.tensor(scale, dtype=torch.float64).reciprocal().float())


def _report(scaler: GradScaler, owner: object, device: torch.device) -> None:
    """Record for a scaler's next `update` that gradients are not finite, as if `owner` were an optimizer."""
    found = torch.ones((), dtype=torch.float32, device=device)
    scaler._per_optimizer_states[id(owner)]["found_inf_per_device"][device] = found
