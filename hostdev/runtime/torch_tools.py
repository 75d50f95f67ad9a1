"""Watches what torch's own tools do to gradients: `GradScaler`, clipping, `backward` and optimizers' steps.

A scaler multiplies the loss, and divides the gradients of the parameters of each optimizer that is passed to it.
Clipping changes the gradients of the parameters that are passed to it. A program may pass `runtime.optimizer`, whose
parameters are the batch's rows, or leave it out. Therefore, while a loop is open, this module watches these calls in
the loop's thread; afterwards it restores torch's own functions:

- `GradScaler.scale`: the scale of the loss is recorded.
- `GradScaler.unscale_`, and the check of fused optimizers: the gradients of the rows are divided together with those of
  the optimizer, and the scaler skips the step if a gradient of the rows is not finite.
- The function that groups gradients for torch.nn.utils's clipping functions: gradients that it gets, and that have
  changed in place by the next watched call, were clipped. The user is warned if the rows' gradients were left out.
- `clip_grad_norm_` and `clip_grad_value_` of torch.nn.utils, only while the loop of a `train_loader` is open: a trainer
  clips the parameters of its optimizers, and the batch's rows are added to them, once per step.
- `backward`: a loss that is not finite is detected.
- `step` of every optimizer: the runtime learns whether an optimizer has stepped with the batch.

A scaler class that overrides these methods is not watched.
"""

import functools
import threading
import warnings
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import GradientEdge
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hostdev.runtime.loss_scaling import Function, Replacement, TorchHooks, note_scale
from hostdev.runtime.table_optimizer import TableOptimizer
from hostdev.runtime.watcher import TrainWatcher

_GROUPING = "_group_tensors_by_device_and_dtype"
_watchers: WeakSet[TrainWatcher] = WeakSet()  # of open loops


def watch(watcher: TrainWatcher) -> None:
    """Report the calls of torch's tools to a loop's watcher from now on, until it is deleted or `forget` is called.

    Raises:
        RuntimeError: This version of torch lacks one of the functions.
    """
    with _hooks.lock:
        _hooks.place()
        if watcher.adds_rows_to_clips:
            _clip_hooks.place()
        _watchers.add(watcher)
        _require_grouping()


def forget(watcher: TrainWatcher) -> None:
    """Undo `watch`; if nothing is watched any more, restore torch's own functions."""
    with _hooks.lock:
        _watchers.discard(watcher)
        if not any(other.adds_rows_to_clips for other in _watchers):
            _clip_hooks.remove()
        if not list(_watchers):  # len() may count an object that is being deleted
            _hooks.remove()


@functools.cache
def _require_grouping() -> None:
    """Raise RuntimeError unless torch's clipping functions call the function through which they are watched."""
    probe = nn.Parameter(torch.zeros(1))
    for clip in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_):
        probe.grad = torch.zeros(1)
        _probed.grad, _probed.count = probe.grad, 0
        clip(probe, 1.0)
        _probed.grad = None
        if not _probed.count:
            raise RuntimeError(
                f"in torch {torch.__version__}, {clip.__name__} does not call {clip_grad.__name__}.{_GROUPING}, so "
                "hostdev cannot detect clipping that leaves out the rows; use a torch version that hostdev supports"
            )


class _Probed(threading.local):
    """The gradient that `_require_grouping` clips in this thread, and how often the grouping function got it."""

    grad: Tensor | None = None
    count = 0


_probed = _Probed()


def _list_own() -> list[TrainWatcher]:
    """Return the watchers of this thread's loops."""
    return [watcher for watcher in _watchers if watcher.thread == threading.get_ident()]


def _watch_backward(original: Function) -> Function:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        """Check losses that give gradients to rows, since the gradients may be finite although a loss is not."""
        given = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
        versions = [(watcher, watcher.gradients_version()) for watcher in _note_clips()]
        original(given, grad_tensors, *args, **kwargs)
        if grad_tensors is None and kwargs.get("grad_variables") is None:
            roots = [root.detach() for root in given if isinstance(root, Tensor)]
            losses = [root for root in roots if root.numel() == 1 and root.is_floating_point()]
            for watcher, version in versions:
                watcher.backward([loss.view(()) for loss in losses], version)

    return backward


def _watch_grouping(original: Function) -> Function:
    @functools.wraps(original)
    def group(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        if _probed.grad is not None:
            _probed.count += gradients[0][0] is _probed.grad
        else:
            _note_group(gradients[0])
        return original(gradients, *args, **kwargs)

    return group


def _note_group(gradients: list[Tensor]) -> None:
    """Note gradients that may be clipped next without the gradients of the rows.

    Nothing is noted if the rows have no gradients, or if those of one loop in this thread are included: other loops may
    belong to other models.
    """
    watchers = _note_clips()
    clips_rows = [watcher.clips_rows(gradients) for watcher in watchers]
    if not any(clips_rows) and False in clips_rows:
        for watcher in watchers:
            watcher.expect_clip(gradients)


def _note_clips() -> list[TrainWatcher]:
    """Note whether expected clips have happened, before other calls change gradients; return this thread's watchers."""
    watchers = _list_own()
    for watcher in watchers:
        watcher.note_clip()
    return watchers


def _add_rows(original: Function) -> Function:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for watcher in _list_own():
            if watcher.adds_rows_to_clips:
                given += watcher.take_clipped(given)
        return original(given, *args, **kwargs)

    return clip


def _watch_scale(original: Function) -> Function:
    @functools.wraps(original)
    def scale(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            note_scale(scaler)
            for watcher in _list_own():
                watcher.losses.scaled(result)
        return result

    return scale


def _watch_unscale(original: Function) -> Function:
    @functools.wraps(original)
    def unscale(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        _note_clips()
        if not isinstance(optimizer, TableOptimizer):
            result = original(scaler, optimizer, *args, **kwargs)
            if scaler.is_enabled():
                _unscale_rows(scaler, optimizer)
            return result
        own = [watcher.losses for watcher in _watchers if watcher.table_optimizer is optimizer]
        if not scaler.is_enabled() or not own:
            return original(scaler, optimizer, *args, **kwargs)
        [losses] = own
        losses.require_scaled_alike()
        with optimizer.without_rows() if losses.is_unscaled else nullcontext():  # divide only once
            result = original(scaler, optimizer, *args, **kwargs)
        losses.rows_unscaled(_get_overflows(scaler, optimizer))
        return result

    return unscale


def _get_overflows(scaler: GradScaler, optimizer: Optimizer) -> dict[torch.device, Tensor]:
    """Return a scaler's overflow flags for an optimizer: for each device, 0 if all gradients are finite, else 1."""
    overflows: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return overflows


def _unscale_rows(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Unscale the rows' gradients together with those of a dense optimizer."""
    overflows = _get_overflows(scaler, optimizer)
    scaled = [watcher.losses for watcher in _list_own() if watcher.losses.is_scaled()]
    for losses in scaled:
        for device, overflow in losses.unscale(scaler).items():
            overflows[device] = overflows[device] + overflow if device in overflows else overflow
    for losses in scaled:
        for overflow in overflows.values():
            losses.overflowed(overflow)


def _before_step(optimizer: Optimizer, *_: Any, **__: Any) -> None:
    watchers = _list_own()
    for watcher in watchers:
        watcher.before_step()
    missed = [watcher.take_missed_clip() for watcher in watchers]
    if any(missed):
        warnings.warn(
            "gradients were clipped without the batch's rows, whose gradients are therefore not clipped; give torch's "
            "clip_grad_norm_ or clip_grad_value_ both: [*model.parameters(), *rows.parameters()]",
            stacklevel=3,
        )


def _after_step(optimizer: Optimizer, *_: Any, **__: Any) -> None:
    for watcher in _list_own():
        watcher.stepped(optimizer)


_hooks = TorchHooks(
    [
        Replacement(GradScaler, "scale", _watch_scale, "which losses are scaled"),
        Replacement(GradScaler, "unscale_", _watch_unscale, "when gradients are divided by the scale"),
        Replacement(GradScaler, "_check_inf_per_device", _watch_unscale, "when a fused optimizer divides by the scale"),
        Replacement(clip_grad, _GROUPING, _watch_grouping, "a clip that leaves out the rows"),
        Replacement(torch.autograd, "backward", _watch_backward, "a loss that is not finite"),
    ],
    [
        lambda: register_optimizer_step_pre_hook(_before_step),
        lambda: register_optimizer_step_post_hook(_after_step),
    ],
)
_clip_hooks = TorchHooks(
    [
        Replacement(torch.nn.utils, name, _add_rows, "when a trainer clips gradients")
        for name in ("clip_grad_norm_", "clip_grad_value_")
    ]
)
