"""The base of the table optimizers: their interface, gradient clipping, and decoupled weight decay.

Only an optimizer's learning rate may be changed (`table.optimizer.lr = 1e-4`); this takes effect at the next update.

An optimizer's `catch_up` describes the effect of steps on rows without a gradient, which is applied when a row is read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from hostdev.kernels.arrays import Scalars
from hostdev.kernels.clock import FEW_TERMS, MOST_TERMS

LAST = "last"  # name of the per-row state that holds the table's step count at the row's last write
SMALL = 2.0**-26  # a moment below this fraction of its value at the last write no longer moves a weight
_TRUNCATED = 2.0**-24  # largest allowed relative error of a series that is cut off; see `get_terms`
_MOST_SUMMED = 1 << 15  # maximum number of steps in which a decaying moment may move a weight
_LEAST_NORM = 1e-12
SQUARED = 2.0**46  # the largest gradient whose sums of squares are finite


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
    """Return the geometric middle of the steps after `step` whose effect on unused rows matters.

    `kernels.catch_up` expands a divisor around its value at this step. The factor 4 minimizes the largest error over
    beta1 in 0.5 .. 0.999, beta2 and first steps: at most 1e-7 of a row's movement for beta1 = 0.9, and for larger
    beta1, except for rows that were last used in a table's first steps (5e-6 for 0.99, 7e-5 for 0.999).
    """
    return math.sqrt((step + 1) * (step + 1 + 4 / (1 - beta1)))


def get_terms(beta1: float, beta2: float) -> int:
    """Return how many terms of a series, 4 or 10, suffice to sum a row's missed steps to float32 precision.

    `kernels.catch_up` defines two series. The number is computed for the series with `epsilon_hat`: for a constant
    learning rate, its relative error is the largest omitted term, 1 / C(r + P, P) for P terms and
    r = 2 * ln(beta1) / ln(beta2), where C is the binomial coefficient. If at most 10 terms suffice for this series, 10
    suffice for the series without `epsilon_hat`.

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


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class SparseOptimizer:
    """Base of the optimizers: fields are checked and then fixed, except lr, which is checked again when it is set.

    Each optimizer takes `clip_norm`, a number c: before an update, a row's summed gradient g whose norm is above c is
    multiplied by c / norm(g)::

        q = (sum over the row of g^2) / D,   summed as in `RowWiseAdagrad`
        g <- g * sqrt((c^2 / D) / q)         if q > c^2 / D

    Source: Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, algorithm
    1, applied to each row.

    Each optimizer except `FTRL` takes `weight_decay`, a number c: each step multiplies the weights of all rows by
    1 - lr * c and then updates the rows of its batch. For a row that batches do not use, the factors are applied
    together when the row is next read, so a step costs no time for unused rows. This takes 4 bytes of state per row
    (`last`, the step at which the row was last written).

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; `kernels.catch_up`.
    """

    lr: float = field(hash=False)
    clip_norm: float | None = None
    weight_decay: float = 0.0

    primitive: ClassVar[str]  # the name of the op that applies the optimizer
    non_negative: ClassVar[frozenset[str]] = frozenset()  # slots that are never negative, so that 8 bits need no sign

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Raise ValueError for wrong `weight_decay` or `clip_norm`, TypeError for `momentum` if the class has none."""
        if (decay := given.get("weight_decay", 0.0)) != 0:
            check("weight_decay", decay, "at least 0")
        if "momentum" in given and not hasattr(cls, "momentum"):
            raise TypeError(f"{cls.__name__} has no momentum; use hostdev.Momentum(lr=..., momentum=...)")
        if (norm := given.get("clip_norm")) is not None and not _LEAST_NORM <= norm <= 1 / _LEAST_NORM:
            raise ValueError(f"clip_norm must be in {_LEAST_NORM:g}..{1 / _LEAST_NORM:g}, or None, not {norm}")
        return super().__new__(cls)

    def __repr__(self) -> str:
        given = [(one.name, getattr(self, one.name)) for one in fields(self)]
        shown = (f"{name}={value!r}" for name, value in given if name not in _IDLE or value != _IDLE[name])
        return f"{type(self).__name__}({', '.join(shown)})"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in {field.name for field in fields(self)}:
            if name == "lr" and name in self.__dict__:
                replace(self, lr=value)  # raises ValueError for a wrong lr
            if name == "lr" or name not in self.__dict__:
                object.__setattr__(self, name, value)
                return
        raise FrozenInstanceError(f"{type(self).__name__}: only lr may be set, not {name}; create a new optimizer")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{type(self).__name__}: {name} cannot be deleted; create a new optimizer")

    @property
    def slots(self) -> Mapping[str, float]:
        """Initial values of the slots that hold D values per row, by name, in storage order."""
        return {}

    @property
    def row_slots(self) -> Mapping[str, float]:
        """Initial values of the slots that hold one value per row, by name.

        They include `last` if a step also changes rows without a gradient.
        """
        return self._own_row_slots if self.catch_up is None else {**self._own_row_slots, LAST: 0.0}

    @property
    def _own_row_slots(self) -> Mapping[str, float]:
        return {}

    @property
    def catch_up(self) -> CatchUp | None:
        """The effect of a step on rows without a gradient, or None if it leaves them unchanged."""
        return CatchUp(self.weight_decay) if self.weight_decay else None

    @property
    def largest_gradient(self) -> float:
        """2^46, about 7e13: a sum of squares of such gradients cannot become infinite.

        A finite float32 number stays finite if 2^102, a quarter of the largest gap between float32 numbers, is added.
        Squares are at most 2^92, which leaves room for sums over ranks. Optimizers therefore need not check the values
        that they write.
        """
        return SQUARED

    def _within(self, largest: float) -> float:
        """Return `largest`, reduced to 2^46 if gradients are clipped, since clipping sums their squares."""
        return largest if self.clip_norm is None else min(largest, SQUARED)

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return the kernel's scalar arguments for rows of `dim` columns; the table's steps are numbered from 1."""
        raise NotImplementedError

    def clip_limit(self, dim: int) -> np.float32 | None:
        """Return clip_norm^2 / D, the mean square above which a row's gradient is clipped, or None for no clipping."""
        return None if self.clip_norm is None else np.float32(self.clip_norm * self.clip_norm / dim)


def hyperparameters(optimizer: Any) -> dict[str, Any]:  # Any: a dataclass of an optimizer
    """Return an optimizer's hyperparameters by name, without those that have no effect."""
    return {name: value for name, value in asdict(optimizer).items() if name not in _IDLE or value != _IDLE[name]}


_IDLE: dict[str, Any] = {"clip_norm": None, "weight_decay": 0.0}  # values without effect


_NEEDED: dict[str, Callable[[float], bool]] = {
    "positive": lambda value: value > 0,
    "at least 0": lambda value: value >= 0,
    "at most 0": lambda value: value <= 0,
    "in [0, 1)": lambda value: 0 <= value < 1,
}


def check(name: str, value: float, needed: str, why: str = "") -> None:
    """Raise ValueError unless a value is finite and satisfies the condition `needed`, in float64 and in float32."""
    holds = _NEEDED[needed]
    if not (math.isfinite(value) and holds(value)):
        raise ValueError(f"{name} must be {needed}, not {value}{why}")
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if not (math.isfinite(rounded) and holds(rounded)):
        raise ValueError(
            f"{name} must be {needed} when rounded to float32, which updates use; {value} becomes {rounded}"
        )


def check_lr(lr: float) -> None:
    """Raise ValueError unless a learning rate is positive or 0; a warm-up may start at 0, which changes no weight."""
    check("lr", lr, "at least 0")
    if lr:
        check("lr", lr, "positive")
