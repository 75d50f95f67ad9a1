"""Watches what torch's own tools do to gradients: `GradScaler`, clipping and optimizers' steps.

A scaler multiplies the loss, and divides the gradients of the parameters of each optimizer that is passed to it.
Clipping changes the gradients of the parameters that are passed to it. A program may pass `runtime.optimizer`, whose
parameters are the batch's rows, or leave it out. Therefore, while a loop is open or its gradients wait for a step, this
module watches these calls in the loop's thread; afterwards it restores torch's own functions:

- `GradScaler.scale`: the scale of the loss is recorded.
- `GradScaler.unscale_`, and the check of fused optimizers: the gradients of the rows are divided, too, and the scaler
  skips the step if one of them is not finite.
- The clipping functions of torch.nn.utils: the user is warned if the rows were left out.
- `backward`: a loss that is not finite is detected.
- `step` of every optimizer: the runtime learns whether an optimizer has stepped with the batch.

A scaler class that overrides these methods is not watched.
"""

import functools
import inspect
import sys
import threading
import warnings
from collections import deque
from contextlib import nullcontext
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import GradientEdge
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from hostdev.runtime.table_optimizer import TableOptimizer
from hostdev.runtime.torch_hooks import Function, Replacement, TorchHooks, call_after_steps, end_calls

_MOST_SCALES = 64  # values kept for each scaler; only those of the current batch matter
_GROUPING = "_group_tensors_by_device_and_dtype"
_CLIPS = {"clip_grad_norm_": "max_norm", "_clip_grads_with_norm_": "max_norm, total_norm", "clip_grad_value_": "value"}


class Scaled(Protocol):
    """Gradients of rows, as a scaler sees them."""

    def is_scaled(self) -> bool:
        """Return whether the gradients come from scaled losses; raise ValueError if only some do."""

    def unscale(self, scaler: GradScaler) -> dict[torch.device, Tensor]:
        """Divide the gradients by the scale.

        Return a flag for each device, a float32 scalar: 0 if all its gradients are finite, else 1.
        """


class Waiting(Scaled, Protocol):
    """Gradients from a loop that ended before their step."""

    thread: int

    @property
    def optimizers(self) -> list[Optimizer]:
        """The dense optimizers whose parameters have gradients from the same batches as these rows."""


class LossRecord(Scaled, Protocol):
    """The record of the scaled losses of a loop's batch."""

    def scaled(self, losses: object) -> None:
        """Record that a scaler has multiplied these losses by its scale."""

    def overflowed(self, found: Tensor) -> None:
        """Record the result of a check of gradients: a float32 scalar, 0 if all are finite, else more."""


class Watcher(Protocol):
    """An object that is notified, for one loop, of the calls of torch's tools."""

    thread: int

    @property
    def losses(self) -> LossRecord:
        """The record of the batch's scaled losses."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has taken a step."""

    def expect_backward(self, roots: list[Any]) -> None:
        """Prepare for a `backward` from these tensors."""

    def gradients_version(self) -> int | None:
        """Return a number that changes with the rows' gradients: 0 without gradients, None if no batch is open."""

    def backward(self, losses: list[Tensor], version: int | None) -> None:
        """Record that `backward` on scalar losses has ended; `version` is the `gradients_version` before it."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Prepare for an optimizer's step."""

    def clips_rows(self, gradients: list[Tensor]) -> bool | None:
        """Return whether gradients of the batch's rows are among these; None if the rows have no gradients."""


class Origin:
    """Tracks whether the rows' gradients come from scaled losses, since a scaler may belong to another model.

    Args:
        plain: Whether the rows already have gradients from losses that were not scaled.
    """

    def __init__(self, *, plain: bool) -> None:
        self._plain, self._scaled = plain, False
        self._inside = 0  # running backward passes of scaled losses

    def expect(self, losses: Any) -> None:
        """Watch for backward passes from these tensors."""
        for loss in tree_leaves(losses):
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(self._enter)  # type: ignore[no-untyped-call]

    def watch(self, parameter: Tensor) -> None:
        """Watch for the gradients of a tensor."""
        parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    @property
    def has_scaled(self) -> bool:
        """Whether some gradients come from scaled losses."""
        return self._scaled

    def is_scaled(self) -> bool:
        """Return whether the gradients come from scaled losses, as far as known; raise ValueError if only some do."""
        if self._plain and self._scaled:
            raise ValueError(
                "the gradients of the rows come from scaled and from unscaled losses; scale all losses of a step"
            )
        return not self._plain  # assigned gradients count as scaled, as for any parameter

    def forget(self) -> None:
        """Forget the gradients so far."""
        self._plain = self._scaled = False

    def _enter(self, _: Tensor) -> None:
        self._inside += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._leave)  # at the end of this backward pass

    def _leave(self) -> None:
        self._inside -= 1

    def _note_gradient(self, _: Tensor) -> None:
        if self._inside:
            self._scaled = True
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
_watchers: WeakSet[Any] = WeakSet()  # open loops
_pending: WeakSet[Any] = WeakSet()  # gradients that wait for a step after their loop


def watch(loop: Watcher) -> None:
    """Report the calls of torch's tools to a loop from now on, until it is deleted or `forget` is called.

    Raises:
        RuntimeError: This version of torch lacks one of the functions.
    """
    with _hooks.lock:
        _require_clips()
        _watchers.add(loop)
        _hooks.place()


def watch_pending(pending: Waiting) -> None:
    """Report the calls of scalers and optimizers to `pending`, until it is deleted or `forget_pending` is called."""
    with _hooks.lock:
        _pending.add(pending)
        _hooks.place()
    for optimizer in pending.optimizers:
        call_after_steps(optimizer, pending)
    finalize(pending, _forget_pending, [ref(optimizer) for optimizer in pending.optimizers]).atexit = False


def _forget_pending(optimizers: list[ReferenceType[Optimizer]]) -> None:
    for held in optimizers:
        if (optimizer := held()) is not None:
            end_calls(optimizer)
    _remove_if_idle()


def forget(loop: Watcher) -> None:
    """Undo `watch`; if nothing is watched any more, restore torch's own functions."""
    with _hooks.lock:
        _watchers.discard(loop)
        _remove_if_idle()


def forget_pending(pending: Waiting) -> None:
    """Undo `watch_pending`."""
    with _hooks.lock:
        _pending.discard(pending)
    for optimizer in pending.optimizers:
        end_calls(optimizer, pending)
    _remove_if_idle()


def _remove_if_idle() -> None:
    with _hooks.lock:
        if not [*_watchers, *_pending]:  # len() may count an object that is being deleted
            _hooks.remove()


@functools.cache
def _require_clips() -> None:
    """Raise RuntimeError unless torch's clipping functions call the function through which they are watched."""
    users = {name for name in _CLIPS if _GROUPING in _names_in(getattr(clip_grad, name, None))}
    if "clip_grad_value_" not in users or len(users) < 2:
        raise RuntimeError(
            f"in torch {torch.__version__}, the gradient-clipping functions do not call "
            f"{clip_grad.__name__}.{_GROUPING}, so hostdev cannot detect clipping that leaves out the rows; use a "
            "torch version that hostdev supports"
        )


def _names_in(function: Function | None) -> tuple[str, ...]:
    return () if function is None else inspect.unwrap(function).__code__.co_names


def _watch_backward(original: Function) -> Function:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        """Check losses that give gradients to rows, since the gradients may be finite although a loss is not."""
        given = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
        loops = [(loop, loop.gradients_version()) for loop in _mine()]
        for loop, _ in loops:
            loop.expect_backward(given)
        original(given, grad_tensors, *args, **kwargs)
        if grad_tensors is None and kwargs.get("grad_variables") is None:
            roots = [root.detach() for root in given if isinstance(root, Tensor)]
            losses = [root for root in roots if root.numel() == 1 and root.is_floating_point()]
            for loop, version in loops:
                loop.backward([loss.view(()) for loss in losses], version)

    return backward


def _watch_clips(original: Function) -> Function:
    @functools.wraps(original)
    def group(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        if (name := sys._getframe(1).f_code.co_name) in _CLIPS:
            _look_at_clip(name, gradients[0])
        return original(gradients, *args, **kwargs)

    return group


def _watch_scale(original: Function) -> Function:
    @functools.wraps(original)
    def scale(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            _note_scale(scaler, result)
        return result

    return scale


def _watch_unscale(original: Function) -> Function:
    @functools.wraps(original)
    def unscale(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, TableOptimizer):
            result = original(scaler, optimizer, *args, **kwargs)
            if scaler.is_enabled():
                _unscale_rows(scaler, optimizer)
            return result
        if not scaler.is_enabled() or (loop := optimizer.loop) is None:
            return original(scaler, optimizer, *args, **kwargs)
        loop.losses.require_scaled_alike()
        with optimizer.without_rows() if loop.losses.is_unscaled else nullcontext():  # divide only once
            result = original(scaler, optimizer, *args, **kwargs)
        loop.losses.rows_unscaled(_get_found(scaler, optimizer))
        return result

    return unscale


def _get_found(scaler: GradScaler, optimizer: Optimizer) -> dict[torch.device, Tensor]:
    """Return a scaler's overflow flags for an optimizer: for each device, 0 if all gradients are finite, else 1."""
    found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return found


def _mine() -> list[Watcher]:
    return _of_this_thread(_watchers)


def _of_this_thread(watchers: WeakSet[Any]) -> list[Any]:
    return [one for one in watchers if one.thread == threading.get_ident()]


def _note_scale(scaler: GradScaler, result: Any) -> None:
    _seen.losses += 1
    tensor = scaler._scale
    if tensor is None:  # `scale` got an iterable, whose results must not be consumed here
        tensor = torch.tensor(scaler.get_scale())
    scales = _seen.scales.setdefault(scaler, deque(maxlen=_MOST_SCALES))
    if not scales or scales[-1].version != tensor._version:
        scales.append(_Scale(tensor))
    scales[-1].last = _seen.losses
    for loop in _mine():
        loop.losses.scaled(result)


def _unscale_rows(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Unscale the rows' gradients together with those of a dense optimizer."""
    found = _get_found(scaler, optimizer)
    loops = [loop.losses for loop in _mine() if loop.losses.is_scaled()]
    waiting = [one for one in _of_this_thread(_pending) if any(optimizer is other for other in one.optimizers)]
    for one in [*loops, *(one for one in waiting if one.is_scaled())]:
        for device, wrong in one.unscale(scaler).items():
            found[device] = found[device] + wrong if device in found else wrong
    for loop in loops:
        for wrong in found.values():
            loop.overflowed(wrong)


def _look_at_clip(name: str, gradients: list[Tensor]) -> None:
    """Warn if gradients are clipped without the rows of any loop in this thread.

    The rows of one loop suffice, since other loops may belong to other models.
    """
    clipped = [loop.clips_rows(gradients) for loop in _mine()]
    if any(clipped) or False not in clipped:
        return
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, clip_grad.__file__):
        frame, depth = frame.f_back, depth + 1
        if frame.f_code.co_name == "clip_grad_norm_" and frame.f_code.co_filename == clip_grad.__file__:
            name = "clip_grad_norm_"
    said = name.removeprefix("_")
    warnings.warn(
        f"{said} did not get the batch's rows, whose gradients are therefore not clipped; use "
        f"{said}([*model.parameters(), *rows.parameters()], {_CLIPS[name]})",
        stacklevel=depth,
    )


def _before_step(optimizer: Optimizer, *_: Any, **__: Any) -> None:
    for loop in _mine():
        loop.before_step(optimizer)


def _after_step(optimizer: Optimizer, *_: Any, **__: Any) -> None:
    for loop in _mine():
        loop.stepped(optimizer)


_hooks = TorchHooks(
    [
        Replacement(GradScaler, "scale", _watch_scale, "which losses are scaled"),
        Replacement(GradScaler, "unscale_", _watch_unscale, "when gradients are divided by the scale"),
        Replacement(GradScaler, "_check_inf_per_device", _watch_unscale, "when a fused optimizer divides by the scale"),
        Replacement(clip_grad, _GROUPING, _watch_clips, "a clip that leaves out the rows"),
        Replacement(torch.autograd, "backward", _watch_backward, "a loss that is not finite"),
    ],
    [
        lambda: register_optimizer_step_pre_hook(_before_step),
        lambda: register_optimizer_step_post_hook(_after_step),
    ],
)


def losses_scaled() -> int:
    """Return the number of losses scaled so far in this thread, for `scaler_since`."""
    return _seen.losses


def scaler_since(since: int) -> tuple[GradScaler, float] | None:
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


def inverse(scale: float) -> float:
    """Return the factor by which `GradScaler.unscale_` multiplies gradients: 1 / scale, rounded to float32."""
    return float(torch.tensor(scale, dtype=torch.float64).reciprocal().float())


def report(scaler: GradScaler, owner: object, device: torch.device) -> None:
    """Record for a scaler's next `update` that gradients are not finite, as if `owner` were an optimizer."""
    found = torch.ones((), dtype=torch.float32, device=device)
    scaler._per_optimizer_states[id(owner)]["found_inf_per_device"][device] = found
