"""The optimizers of tables: hyperparameters, recurrences and slots. The arithmetic is in kernels/ and device/.

Only an optimizer's learning rate may be changed (`table.optimizer.lr = 1e-4`), from the next update on.

Scalars are computed in float64 and rounded to float32 once, except 1 - beta: the decay and its complement must add up
to 1 in float32, or a moment of constant gradients drifts (1e-5 for beta2 = 0.999); MindSpore's kernel does the same.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from hostdev.core.errors import UserError
from hostdev.core.history import LAST, CatchUp, require_betas
from hostdev.kernels.arrays import Scalars

_LEAST_NORM = 1e-12
_SQUARED = 2.0**46  # the largest gradient of which sums of squares are finite


class SparseOptimizer(Protocol):
    """The interface of an optimizer for tables."""

    primitive: ClassVar[str]  # the name of the op that applies it
    non_negative: ClassVar[frozenset[str]]  # slots of D values that are never negative: in 8 bits, twice as many codes
    lr: float  # may be set between updates

    @property
    def slots(self) -> Mapping[str, float]:
        """Initial value of each slot of D values per row, by name, in storage order."""

    @property
    def row_slots(self) -> Mapping[str, float]:
        """Initial value of each slot of one value per row, by name."""

    @property
    def catch_up(self) -> CatchUp | None:
        """What a step does to rows without a gradient; None: nothing."""

    @property
    def largest_gradient(self) -> float:
        """Largest absolute value of a row's summed gradient."""

    def clip_limit(self, dim: int) -> np.float32 | None:
        """Return the mean square above which the gradient of a row of `dim` columns is clipped; None: it never is."""

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return the kernel's scalars at the table's step 1, 2, 3, ... for rows of `dim` columns."""


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class _Optimizer:
    """Base of the optimizers: fields are checked and then fixed, except lr, which is checked again when it is set.

    Each optimizer takes `clip_norm`, a number c: before an update, a row's summed gradient g whose norm is above c is
    multiplied by c / norm(g)::

        q = (sum over the row of g^2) / D,   added as in `RowWiseAdagrad`
        g <- g * sqrt((c^2 / D) / q)         if q > c^2 / D

    Source: Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks", ICML 2013, algorithm
    1, applied to each row.

    Each but `FTRL` takes `weight_decay`, a number c: each step multiplies the weights of all rows by 1 - lr * c, before
    it updates the rows of its batch. A row that a batch does not use is brought up to date when it is next read, at 4
    bytes of state per row (`last`, the step of its last write), so that unused rows cost nothing.

    Source: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; `kernels.catch_up`.
    """

    lr: float = field(hash=False)
    clip_norm: float | None = None
    weight_decay: float = 0.0

    non_negative: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, *args: Any, **given: Any) -> Self:
        if (decay := given.get("weight_decay", 0.0)) != 0:
            if issubclass(cls, FTRL):
                raise TypeError(
                    f"{cls.__name__} has no weight_decay: its weights follow from its state; use l2 instead"
                )
            _check("weight_decay", decay, "at least 0")
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
    def row_slots(self) -> Mapping[str, float]:
        """The state of one value per row: the optimizer's own, and `last` if rows are brought up to date."""
        return self._own_row_slots if self.catch_up is None else {**self._own_row_slots, LAST: 0.0}

    @property
    def _own_row_slots(self) -> Mapping[str, float]:
        return {}

    @property
    def catch_up(self) -> CatchUp | None:
        """What a step does to rows without a gradient; None: nothing."""
        return CatchUp(self.weight_decay) if self.weight_decay else None

    @property
    def largest_gradient(self) -> float:
        """2^46, about 7e13: a sum of squares of such gradients cannot become infinite.

        A finite float32 number plus 2^102, a quarter of the largest gap between such numbers, stays finite. The square
        of 2^46 leaves room for sums over ranks. Optimizers therefore need not check the values that they write.
        """
        return _SQUARED

    def _within(self, largest: float) -> float:
        """Return the largest gradient of an optimizer that need not square it, unless it is clipped."""
        return largest if self.clip_norm is None else min(largest, _SQUARED)

    def clip_limit(self, dim: int) -> np.float32 | None:
        """Return c^2 / D, the mean square above which a row's gradient is clipped; None: it never is."""
        return None if self.clip_norm is None else np.float32(self.clip_norm * self.clip_norm / dim)


def hyperparameters(optimizer: Any) -> dict[str, Any]:  # Any: one of the dataclasses below
    """Return an optimizer's hyperparameters by name, without those that do nothing."""
    return {name: value for name, value in asdict(optimizer).items() if name not in _IDLE or value != _IDLE[name]}


_IDLE: dict[str, Any] = {"clip_norm": None, "weight_decay": 0.0}  # values that do nothing

_NEEDED: dict[str, Callable[[float], bool]] = {
    "positive": lambda value: value > 0,
    "at least 0": lambda value: value >= 0,
    "at most 0": lambda value: value <= 0,
    "in [0, 1)": lambda value: 0 <= value < 1,
}


def _check(name: str, value: float, needed: str, why: str = "") -> None:
    """Raise ValueError unless a value is finite and is as `needed` says, both in float64 and rounded to float32."""
    holds = _NEEDED[needed]
    if not (math.isfinite(value) and holds(value)):
        raise ValueError(f"{name} must be {needed}, not {value}{why}")
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if not (math.isfinite(rounded) and holds(rounded)):
        raise ValueError(
            f"{name} must be {needed} when rounded to float32, which updates use; {value} becomes {rounded}"
        )


def _check_lr(lr: float) -> None:
    """Raise ValueError unless a learning rate is positive or 0; a warm-up may start at 0, which changes no weight."""
    _check("lr", lr, "at least 0")
    if lr:
        _check("lr", lr, "positive")


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class LazyAdam(_Optimizer):
    """Adam on the rows of a batch only; the moments of other rows do not decay.

    With g the summed gradient of a row and t the table's number of steps::

        lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w - lr_t * m / (sqrt(v) + eps)

    With `nesterov`, beta1 * m + (1 - beta1) * g takes the place of m in the last line.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015; the efficient ordering at the end of
    its section 2, which adds eps to the uncorrected root. Deviations: only a batch's rows change; t is the table's.
    """

    lr: float = field(default=3.5e-4, hash=False)
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    nesterov: bool = False

    primitive: ClassVar[str] = "FusedSparseLazyAdam"
    non_negative: ClassVar[frozenset[str]] = frozenset({"v"})

    def __post_init__(self) -> None:
        _check_adam(self.lr, self.beta1, self.beta2, self.eps)

    @property
    def slots(self) -> Mapping[str, float]:
        """The first and second moments, which start at 0."""
        return {"m": 0.0, "v": 0.0}

    @property
    def largest_gradient(self) -> float:
        """2^58, about 2.9e17: its square, 2^116, bounds the moments, which are averages; sums over ranks have room."""
        return self._within(2.0**58)

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, nesterov) for `kernels.lazy_adam`."""
        return *_adam_scalars(self.lr, self.beta1, self.beta2, self.eps, step), bool(self.nesterov)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Adam(_Optimizer):
    """Adam on all rows: moments of rows that a batch does not use decay in each step, and move their weights.

    With g the summed gradient of a row, 0 if the batch does not use it, and t the table's number of steps::

        lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        w <- (1 - lr * weight_decay) * w
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w - lr_t * m / (sqrt(v) + eps)

    These are the results of a dense Adam, up to rounding: a row that was not used for k steps is brought up to date by
    one operation when it is next read, with 4 bytes of state (`last`). `LazyAdam` leaves such rows unchanged. With
    weight_decay above 0, this is AdamW.

    Source: Kingma & Ba, 2015, as for `LazyAdam`; Loshchilov & Hutter, 2019; `kernels.catch_up`.
    """

    lr: float = field(default=3.5e-4, hash=False)
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    primitive: ClassVar[str] = "FusedSparseAdam"
    non_negative: ClassVar[frozenset[str]] = frozenset({"v"})

    def __post_init__(self) -> None:
        _check_adam(self.lr, self.beta1, self.beta2, self.eps)
        require_betas(self.beta1, self.beta2)

    @property
    def slots(self) -> Mapping[str, float]:
        """The first and second moments, which start at 0."""
        return {"m": 0.0, "v": 0.0}

    @property
    def catch_up(self) -> CatchUp:
        """Moments decay, and move the weights."""
        return CatchUp(self.weight_decay, (self.beta1, self.beta2), self.eps)

    @property
    def largest_gradient(self) -> float:
        """2^58, as for `LazyAdam`."""
        return self._within(2.0**58)

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, False) for `kernels.lazy_adam`."""
        return *_adam_scalars(self.lr, self.beta1, self.beta2, self.eps, step), False


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class RowWiseAdam(_Optimizer):
    """Adam with one second moment per row: 4 * D + 4 bytes of state per row instead of 8 * D.

    With g the summed gradient of a row, D columns and t the table's number of steps::

        lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * (sum over the row of g^2) / D
        w <- w - lr_t * m / (sqrt(v) + eps)

    The sum is that of `RowWiseAdagrad`. As with `LazyAdam`, only the rows of a batch change.

    Source: Kingma & Ba, 2015, as for `LazyAdam`; the mean square of a row as in FBGEMM's PARTIAL_ROWWISE_ADAM.
    """

    lr: float = field(default=3.5e-4, hash=False)
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    primitive: ClassVar[str] = "FusedSparseRowWiseAdam"

    def __post_init__(self) -> None:
        _check_adam(self.lr, self.beta1, self.beta2, self.eps)

    @property
    def slots(self) -> Mapping[str, float]:
        """The first moments, which start at 0."""
        return {"m": 0.0}

    @property
    def _own_row_slots(self) -> Mapping[str, float]:
        """The second moment, one value per row, which starts at 0."""
        return {"v": 0.0}

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, D) for `kernels.lazy_adam.row_wise_adam`."""
        return *_adam_scalars(self.lr, self.beta1, self.beta2, self.eps, step), np.float32(dim)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class FTRL(_Optimizer):
    """Follow the regularized leader, proximal, per coordinate.

    With g the summed gradient of a row, n = accum, z = linear and p = lr_power::

        n1 = n + g^2
        z <- z + (g - (n1^-p - n^-p) / lr * w)
        n <- n1
        w <- (sign(z) * l1 - z) / (n^-p / lr + 2 * l2)   if |z| > l1, else 0

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1. Deviations: the
    power of the learning rate is a parameter, and l2 counts twice, both as in TensorFlow's and MindSpore's kernels.
    """

    lr: float = field(default=5e-2, hash=False)
    l1: float = 1e-8
    l2: float = 1e-8
    lr_power: float = -0.5
    initial_accum: float = 1.0

    primitive: ClassVar[str] = "FusedSparseFtrl"
    non_negative: ClassVar[frozenset[str]] = frozenset({"accum"})

    def __post_init__(self) -> None:
        _check("lr", self.lr, "positive", "; FTRL divides by lr, so a warm-up cannot start at 0")
        _check("l1", self.l1, "at least 0")
        _check("l2", self.l2, "at least 0")
        _check("lr_power", self.lr_power, "at most 0")
        _check("2 * l2", 2 * self.l2, "at least 0")
        _check("initial_accum", self.initial_accum, "at least 0")

    @property
    def slots(self) -> Mapping[str, float]:
        """The sum of squared gradients and the linear term."""
        return {"accum": self.initial_accum, "linear": 0.0}

    @property
    def largest_gradient(self) -> float:
        """2^46, as for `Adagrad`; less if the power -lr_power of the sum of squares could become infinite."""
        return float(2.0 ** (46 / max(1.0, -self.lr_power)))

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr, l1, 2 * l2, -lr_power) for `kernels.ftrl`; they are the same at every step."""
        return (*map(np.float32, (self.lr, self.l1, 2 * self.l2)), float(-self.lr_power))


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class SGD(_Optimizer):
    """Stochastic gradient descent: w <- w - lr * g, with g the summed gradient of a row. It has no slots."""

    lr: float = field(default=1e-2, hash=False)

    primitive: ClassVar[str] = "FusedSparseSGD"

    def __post_init__(self) -> None:
        _check_lr(self.lr)

    @property
    def largest_gradient(self) -> float:
        """2^96 / max(lr, 1): gradients are not squared, and a weight changed by less than 2^102 stays finite."""
        return self._within(2.0**96 / max(self.lr, 1.0))

    @property
    def slots(self) -> Mapping[str, float]:
        """No slots."""
        return {}

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr,) for `kernels.adagrad.sgd`."""
        return (np.float32(self.lr),)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Momentum(_Optimizer):
    """Stochastic gradient descent with momentum; rows without a gradient neither move nor lose momentum.

    With g the summed gradient of a row::

        b <- momentum * b + g
        w <- w - lr * b

    With `nesterov` the step is lr * (g + momentum * b) with the new b.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, in the
    form of torch.optim.SGD with dampening 0, where lr multiplies the whole step. Deviation: only a batch's rows change.
    """

    lr: float = field(default=1e-2, hash=False)
    momentum: float = 0.9
    nesterov: bool = False

    primitive: ClassVar[str] = "FusedSparseMomentum"

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _check("momentum", self.momentum, "in [0, 1)")

    @property
    def largest_gradient(self) -> float:
        """2^58 * (1 - momentum) / max(lr, 1), rounded down to a power of 2; b stays below 2^58."""
        room = (1.0 - float(np.float32(self.momentum))) / max(self.lr, 1.0)
        return self._within(2.0 ** math.floor(58 + math.log2(room)))

    @property
    def slots(self) -> Mapping[str, float]:
        """The momentum buffer b, which starts at 0."""
        return {"momentum": 0.0}

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr, momentum, nesterov) for `kernels.adagrad.momentum`."""
        return np.float32(self.lr), np.float32(self.momentum), bool(self.nesterov)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Adagrad(_Optimizer):
    """Adagrad, per element: accum <- accum + g^2;  w <- w - lr * g / (sqrt(accum) + eps).

    Source: Duchi, Hazan & Singer, "Adaptive Subgradient Methods", JMLR 2011, the diagonal case. Deviation: accum may
    start above 0.
    """

    lr: float = field(default=1e-2, hash=False)
    eps: float = 1e-10
    initial_accum: float = 0.0

    primitive: ClassVar[str] = "FusedSparseAdagrad"
    non_negative: ClassVar[frozenset[str]] = frozenset({"accum"})

    def __post_init__(self) -> None:
        _check_adagrad(self.lr, self.eps, self.initial_accum)

    @property
    def slots(self) -> Mapping[str, float]:
        """The sum of squared gradients."""
        return {"accum": self.initial_accum}

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr, eps) for `kernels.adagrad.adagrad`."""
        return np.float32(self.lr), np.float32(self.eps)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class RowWiseAdagrad(_Optimizer):
    """Adagrad with one accumulator per row, as in DLRM: 4 bytes of state per row instead of 4 * D.

    With D columns::

        accum <- accum + (sum over the row of g^2) / D
        w <- w - lr * g / (sqrt(accum) + eps)

    The sum has 16 lanes: lane k adds the squares of columns k, k + 16, k + 32, ... in that order; then the lanes are
    added from 0 to 15.

    Source: Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation
    Models", ISCA 2022, section 4.1.4; FBGEMM's EXACT_ROWWISE_ADAGRAD.
    """

    lr: float = field(default=1e-2, hash=False)
    eps: float = 1e-10
    initial_accum: float = 0.0

    primitive: ClassVar[str] = "FusedSparseRowWiseAdagrad"

    def __post_init__(self) -> None:
        _check_adagrad(self.lr, self.eps, self.initial_accum)

    @property
    def slots(self) -> Mapping[str, float]:
        """No slots of D values per row."""
        return {}

    @property
    def _own_row_slots(self) -> Mapping[str, float]:
        """The sum of mean squared gradients, one value per row."""
        return {"accum": self.initial_accum}

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr, eps, D) for `kernels.adagrad.row_wise_adagrad`."""
        return np.float32(self.lr), np.float32(self.eps), np.float32(dim)


def _check_adam(lr: float, beta1: float, beta2: float, eps: float) -> None:
    _check_lr(lr)
    _check("beta1", beta1, "in [0, 1)")
    _check("beta2", beta2, "in [0, 1)")
    _check("eps", eps, "positive")
    if lr:
        _check("lr * sqrt(1 - beta2) / (1 - beta1)", lr * math.sqrt(1 - beta2) / (1 - beta1), "positive")


def _adam_scalars(lr: float, beta1: float, beta2: float, eps: float, step: int) -> tuple[np.float32, ...]:
    """Return lr_t, beta1, 1 - beta1, beta2, 1 - beta2 and eps."""
    lr_t = np.float32(lr * math.sqrt(1 - beta2**step) / (1 - beta1**step))
    one, first, second = map(np.float32, (1, beta1, beta2))
    return lr_t, first, one - first, second, one - second, np.float32(eps)


def _check_adagrad(lr: float, eps: float, initial_accum: float) -> None:
    _check_lr(lr)
    _check("eps", eps, "positive")
    _check("initial_accum", initial_accum, "at least 0")


OPTIMIZERS: Mapping[str, Callable[..., SparseOptimizer]] = {
    "lazy_adam": LazyAdam,
    "adam": Adam,
    "ftrl": FTRL,
    "sgd": SGD,
    "adagrad": Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "row_wise_adam": RowWiseAdam,
    "momentum": Momentum,
}


def build_optimizer(name: str, lr: float | None = None) -> SparseOptimizer:
    """Return the optimizer that OPTIMIZERS lists under a name; raise UserError for a wrong name or learning rate."""
    if name not in OPTIMIZERS:
        raise UserError(f"there is no table optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    try:
        return OPTIMIZERS[name]() if lr is None else OPTIMIZERS[name](lr=lr)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def require_optimizer(optimizer: object, table: str) -> None:
    """Raise TypeError unless `optimizer` is an optimizer for tables; names, classes and torch's optimizers are not."""
    needed = ("primitive", "lr", "slots", "non_negative", "row_slots", "scalars", "clip_limit")
    if not isinstance(optimizer, type) and all(hasattr(optimizer, name) for name in needed):
        return
    classes = ", ".join(f"{made.__name__}()" for made in OPTIMIZERS.values() if isinstance(made, type))
    raise TypeError(
        f"table {table!r}: the optimizer must be hostdev's {classes}, or the result of "
        f"hostdev.core.optimizers.build_optimizer(name) for {', '.join(OPTIMIZERS)}; not {optimizer!r}"
    )
