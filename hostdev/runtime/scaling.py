"""What torch's own tools do to gradients, done to those of rows too: `GradScaler`, clipping by norm, optimizers' steps.

A scaler multiplies the loss and divides the gradients of the parameters that its optimizers have; a clip takes the
parameters that it is given. Rows of a table are in neither. So while a loop is open these calls are looked at, in the
thread of the loop: `GradScaler.scale` (with what was the loss multiplied?), `unscale_` and the check of fused
optimizers (the rows' gradients are divided, too, and those that are not finite make the scaler skip the step), the
functions of torch.nn.utils that clip (were the rows left out?), `backward` (is the loss finite?) and every optimizer's
step (was there one?). A scaler with methods of its own is not seen.
"""

import functools
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import GradientEdge
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

_MOST_SCALES = 64  # remembered of a scaler; only those of the current batch are of interest
_MARK = "_seen_by_hostdev"
_GROUPING = "_group_tensors_by_device_and_dtype"
_CLIPS = {"clip_grad_norm_": "max_norm", "_clip_grads_with_norm_": "max_norm, total_norm", "clip_grad_value_": "value"}
_seen_through: dict[str, tuple[Any, Any, Any]] = {}  # by name a module, its own function, and what is there meanwhile
_steps: list[Any] = []  # handles of the hook before steps, while a loop is open


class Stepped(Protocol):
    """Gradients of rows, as a scaler and an optimizer see them."""

    thread: int

    def is_scaled(self) -> bool:
        """Tell whether the rows' gradients are of scaled losses; ValueError where only some are."""

    def unscale(self, scaler: GradScaler) -> dict[torch.device, Tensor]:
        """Divide the rows' gradients; return by device whether there are some that are not finite, float32 []."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has taken a step."""


class Waiting(Stepped, Protocol):
    """Those that a loop was left with before their step."""

    def waits_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether they wait for a step of this one."""


class Watcher(Stepped, Protocol):
    """A loop, as these tools see it."""

    def scaled(self, losses: Any) -> None:
        """A scaler has multiplied these losses."""

    def overflowed(self, found: Tensor) -> None:
        """Take note of whether gradients of an optimizer's parameters or of rows are not finite, float32 []."""

    def expect_backward(self, roots: list[Any]) -> None:
        """`backward` of these tensors is about to begin."""

    def gradients_version(self) -> int | None:
        """Return a number that changes when gradients of rows come, 0 where there are none; None: no batch is open."""

    def backward(self, losses: list[Tensor], version: int | None) -> None:
        """`backward` of these losses, [], is over; the version of the rows' gradients was this one before."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to take a step."""

    def clips_rows(self, gradients: list[Tensor]) -> bool | None:
        """Tell whether gradients of the batch's rows are among these; None where it has none."""


class Origin:
    """Whether gradients come from losses that were scaled, or from others: another model in the loop may have them.

    plain  there are some already, of losses that were not
    """

    def __init__(self, *, plain: bool) -> None:
        self._plain, self._scaled = plain, False
        self._inside = 0  # backward passes of scaled losses that are on their way

    def expect(self, losses: Any) -> None:
        """Look out for the backward passes of these tensors."""
        for loss in tree_leaves(losses):
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(self._enter)  # type: ignore[no-untyped-call]

    def watch(self, parameter: Tensor) -> None:
        """Look at the gradients that come to a tensor."""
        parameter.register_post_accumulate_grad_hook(self._came)  # type: ignore[no-untyped-call]

    @property
    def has_scaled(self) -> bool:
        """Tell whether some are of scaled losses."""
        return self._scaled

    def is_scaled(self) -> bool:
        """Tell whether they are of scaled losses, as far as it is known; ValueError where only some are."""
        if self._plain and self._scaled:
            raise ValueError(
                "gradients of the rows are of losses of which some were scaled and some not; scale all of a step's"
            )
        return not self._plain  # those that somebody has put there are the scaler's, as a parameter's would be

    def forget(self) -> None:
        """The gradients that have come so far are gone."""
        self._plain = self._scaled = False

    def _enter(self, _: Tensor) -> None:
        self._inside += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._leave)  # at the end of this backward pass

    def _leave(self) -> None:
        self._inside -= 1

    def _came(self, _: Tensor) -> None:
        if self._inside:
            self._scaled = True
        else:
            self._plain = True


class _Scale:
    """A value of a scaler's scale, and the number of the last loss that it multiplied."""

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version  # grows with every change in place
        self.value = tensor.detach().clone()
        self.last = 0


class _Seen(threading.local):
    """What scalers have done in a thread."""

    def __init__(self) -> None:
        self.scales: WeakKeyDictionary[GradScaler, deque[_Scale]] = WeakKeyDictionary()
        self.losses = 0  # scaled so far, by any scaler


_seen = _Seen()
_watchers: WeakSet[Any] = WeakSet()  # open loops
_pending: WeakSet[Any] = WeakSet()  # gradients that loops were left with
_installed = threading.Lock()


def watch(loop: Watcher) -> None:
    """Let a loop see these calls from now on, until it is gone or `forget` is called."""
    with _installed:
        _install()
        _watchers.add(loop)
        _see(clip_grad, _GROUPING, _group_and_look, "a clip which leaves out the rows")
        _see(torch.autograd, "backward", _backward_and_look, "a loss that is not finite")
        if not _steps:
            _steps.append(register_optimizer_step_pre_hook(_before_step))


def watch_pending(pending: Waiting) -> None:
    """Let gradients that wait for a step see scalers and optimizers, until they are gone; that is nothing to restore.

    A loop was open before: what is installed once is there.
    """
    _pending.add(pending)


def forget(loop: Watcher) -> None:
    """End what `watch` began; with the last loop torch has its own functions again."""
    with _installed:
        _watchers.discard(loop)
        if _watchers:
            return
        for name, (owner, original, look) in list(_seen_through.items()):
            if getattr(owner, name, None) is look:  # else somebody has put another one around it
                setattr(owner, name, original)
                del _seen_through[name]
        while _steps:
            _steps.pop().remove()


def _see(owner: Any, name: str, look: Callable[..., Any], what: str) -> None:
    """Put a function around one of torch's, while a loop is open."""
    if (now := getattr(owner, name, None)) is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, so that {what} would not be seen; use a "
            "version of torch that hostdev supports"
        )
    if name in _seen_through and now is not _seen_through[name][1]:
        return  # it is there, or within what somebody has put around it
    _seen_through[name] = owner, now, look
    setattr(owner, name, look)


def _backward_and_look(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """Look at the losses whose gradients come to rows: these may be finite where a loss is not."""
    given = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
    loops = [(loop, loop.gradients_version()) for loop in _mine()]
    for loop, _ in loops:
        loop.expect_backward(given)
    _seen_through["backward"][1](given, grad_tensors, *args, **kwargs)
    if grad_tensors is None and kwargs.get("grad_variables") is None:
        roots = [root.detach() for root in given if isinstance(root, Tensor)]
        losses = [root for root in roots if root.numel() == 1 and root.is_floating_point()]
        for loop, version in loops:
            loop.backward([loss.view(()) for loss in losses], version)


def _group_and_look(gradients: Any, *args: Any, **kwargs: Any) -> Any:
    if (name := sys._getframe(1).f_code.co_name) in _CLIPS:
        _look_at_clip(name, gradients[0])
    return _seen_through[_GROUPING][1](gradients, *args, **kwargs)


def _mine() -> list[Watcher]:
    return _mine_of(_watchers)


def _mine_of(watchers: WeakSet[Any]) -> list[Any]:
    return [one for one in watchers if one.thread == threading.get_ident()]


def _install() -> None:
    """Put the functions below around torch's, once in a process."""
    if getattr(GradScaler, _MARK, False):
        return
    setattr(GradScaler, _MARK, True)
    GradScaler.scale = _around(GradScaler.scale, _after_scale)  # type: ignore[method-assign]
    GradScaler.unscale_ = _around(GradScaler.unscale_, _after_unscale)  # type: ignore[method-assign]
    if hasattr(GradScaler, "_check_inf_per_device"):  # of optimizers that unscale on their own
        original = GradScaler._check_inf_per_device
        GradScaler._check_inf_per_device = _around(original, _after_unscale)  # type: ignore[method-assign]
    register_optimizer_step_post_hook(_after_step)


def _around(original: Any, after: Callable[..., None]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    return call


def _after_scale(result: Any, scaler: GradScaler, *_: Any, **__: Any) -> None:
    if not scaler.is_enabled():
        return
    _seen.losses += 1
    tensor = scaler._scale
    if tensor is None:  # an iterator of outputs, not yet looked at
        tensor = torch.tensor(scaler.get_scale())
    scales = _seen.scales.setdefault(scaler, deque(maxlen=_MOST_SCALES))
    if not scales or scales[-1].version != tensor._version:
        scales.append(_Scale(tensor))
    scales[-1].last = _seen.losses
    for loop in _mine():
        loop.scaled(result)


def _after_unscale(_result: Any, scaler: GradScaler, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
    if not scaler.is_enabled():
        return
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    loops = [loop for loop in _mine() if loop.is_scaled()]
    waiting = [one for one in _mine_of(_pending) if one.is_scaled() and one.waits_for(optimizer)]
    for one in [*loops, *waiting]:
        for device, wrong in one.unscale(scaler).items():
            found[device] = found[device] + wrong if device in found else wrong
    for loop in loops:
        for wrong in found.values():
            loop.overflowed(wrong)


def _look_at_clip(name: str, gradients: list[Tensor]) -> None:
    """Warn where a clip leaves out the rows; of several models' loops in a thread the one of the model has them."""
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
        f"{said} was not given the rows of the batch, whose gradients stay as they are: "
        f"{said}([*model.parameters(), *rows.parameters()], {_CLIPS[name]})",
        stacklevel=depth,
    )


def _before_step(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
    for loop in _mine():
        loop.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
    for one in [*_mine(), *_mine_of(_pending)]:
        one.stepped(optimizer)


def losses_scaled() -> int:
    """Return how many losses have been scaled so far, for `scaler_since`."""
    return _seen.losses


def scaler_since(since: int) -> tuple[GradScaler, float] | None:
    """Return the scaler that has scaled a loss since so many, and what it has multiplied it by; None if none has.

    ValueError where there were two, or two scales.
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
    """Return what `GradScaler.unscale_` multiplies gradients with: the inverse, rounded to float32."""
    return float(torch.tensor(scale, dtype=torch.float64).reciprocal().float())


def report(scaler: GradScaler, owner: object, device: torch.device) -> None:
    """Let a scaler's next `update` know of gradients that were not finite, as if `owner` were an optimizer."""
    found = torch.ones((), dtype=torch.float32, device=device)
    scaler._per_optimizer_states[id(owner)]["found_inf_per_device"][device] = found
