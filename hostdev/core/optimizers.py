"""Table optimizers: hyperparameters, formulas and slots. The arithmetic is in kernels/ and device/.

Scalars are computed in float64 and rounded to float32 once. In `LazyAdam` and `RowWiseAdam`, 1 - beta is computed in
float32, as in MindSpore's kernel: beta and 1 - beta add up to 1 in float32, so that a moment of constant gradients does
not drift (1e-5 for beta2 = 0.999). `Adam` rounds both, as torch does.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from hostdev.core.errors import UserError
from hostdev.core.optimizer_base import CatchUp, adam_rate, check, check_lr, eps_correction, get_terms
from hostdev.core.optimizer_base import SparseOptimizer as SparseOptimizer
from hostdev.core.optimizer_base import hyperparameters as hyperparameters
from hostdev.kernels.arrays import Scalars


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class _AdamBase(SparseOptimizer):
    """The hyperparameters of the forms of Adam."""

    lr: float = field(default=3.5e-4, hash=False)
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_lr(self.lr)
        check("beta1", self.beta1, "in [0, 1)")
        check("beta2", self.beta2, "in [0, 1)")
        check("eps", self.eps, "positive")
        if self.lr:
            rate = self.lr * math.sqrt(1 - self.beta2) / (1 - self.beta1)
            check("lr * sqrt(1 - beta2) / (1 - beta1)", rate, "positive")

    def _scalars(self, step: int) -> tuple[np.float32, ...]:
        """Return lr_t, beta1, 1 - beta1, beta2, 1 - beta2 and eps."""
        one, first, second = map(np.float32, (1, self.beta1, self.beta2))
        lr_t = adam_rate(self.lr, self.beta1, self.beta2, step)
        return lr_t, first, one - first, second, one - second, np.float32(self.eps)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class _ElementwiseAdam(_AdamBase):
    """Adam with two moments per weight."""

    non_negative: ClassVar[frozenset[str]] = frozenset({"v"})

    @property
    def slots(self) -> Mapping[str, float]:
        """The first and second moments, which start at 0."""
        return {"m": 0.0, "v": 0.0}

    @property
    def largest_gradient(self) -> float:
        """2^58, about 2.9e17: moments are averages of at most its square, 2^116, with room left for sums over ranks."""
        return self._within(2.0**58)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class LazyAdam(_ElementwiseAdam):
    """Adam on the rows of a batch only; the moments of other rows do not decay.

    With g the summed gradient of a row and t the table's number of steps::

        lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w - lr_t * m / (sqrt(v) + eps)

    With `nesterov`, beta1 * m + (1 - beta1) * g takes the place of m in the last line.

    Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015; the efficient ordering at the end of
    section 2, which adds eps to the uncorrected root, as `torch.optim.SparseAdam` and MindSpore do, and unlike
    `torch.optim.Adam`. Deviations: only a batch's rows change; t counts table steps.
    """

    nesterov: bool = False

    primitive: ClassVar[str] = "FusedSparseLazyAdam"

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, nesterov) for `kernels.apply`."""
        return *self._scalars(step), bool(self.nesterov)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Adam(_ElementwiseAdam):
    """Adam on all rows: the moments of rows that a batch does not use decay in each step and move their weights.

    With g the summed gradient of a row, 0 if the batch does not use it, and t the table's number of steps::

        lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        eps_t = eps * sqrt(1 - beta2^t)
        w <- (1 - lr * weight_decay) * w
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w - lr_t * m / (sqrt(v) + eps_t)

    These are the results of `torch.optim.Adam`, up to rounding: adding eps_t to the uncorrected root equals
    adding eps to the corrected root. With weight_decay above 0, they are the results of `torch.optim.AdamW`. If a row
    was not used for k steps, one operation applies these k steps when the row is next read. This takes 4 bytes of state
    per row (`last`). `LazyAdam` leaves such rows unchanged.

    With `epsilon_hat`, eps_t = eps in all steps, as in `LazyAdam` and in TensorFlow's Adam: for small gradients, the
    first steps are then up to 1 / sqrt(1 - beta2) = 32 times as small. Checkpoints of earlier versions of hostdev have
    this form, and a table that loads such a checkpoint takes it over.

    Source: Kingma & Ba, 2015, algorithm 1; with `epsilon_hat`, the efficient ordering at the end of section 2;
    Loshchilov & Hutter, 2019; `kernels.catch_up`.
    """

    epsilon_hat: bool = False

    primitive: ClassVar[str] = "FusedSparseAdam"

    def __post_init__(self) -> None:
        super().__post_init__()
        check("eps * sqrt(1 - beta2)", self.eps * eps_correction(self.beta2, 1), "positive")
        get_terms(self.beta1, self.beta2)  # raises for betas with which missed steps cannot be applied later

    @property
    def catch_up(self) -> CatchUp:
        """The effect of a step on rows without a gradient: moments decay and move the weights."""
        return CatchUp(self.weight_decay, (self.beta1, self.beta2), self.eps, bool(self.epsilon_hat))

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps_t, False) for `kernels.apply`."""
        if self.epsilon_hat:
            return *self._scalars(step), False
        betas = self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        eps_t = self.eps * eps_correction(self.beta2, step)
        return adam_rate(self.lr, self.beta1, self.beta2, step), *map(np.float32, (*betas, eps_t)), False


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class RowWiseAdam(_AdamBase):
    """Adam with one second moment per row: 4 * D + 4 bytes of state per row instead of 8 * D.

    With g the summed gradient of a row, D columns and t the table's number of steps::

        lr_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * (sum over the row of g^2) / D
        w <- w - lr_t * m / (sqrt(v) + eps)

    The sum is computed as in `RowWiseAdagrad`. As with `LazyAdam`, only the rows of a batch change.

    Source: Kingma & Ba, 2015, as for `LazyAdam`, with eps added to the uncorrected root; the mean square of a row as in
    FBGEMM's PARTIAL_ROWWISE_ADAM, which adds eps to the corrected root.
    """

    primitive: ClassVar[str] = "FusedSparseRowWiseAdam"

    @property
    def slots(self) -> Mapping[str, float]:
        """The first moments, which start at 0."""
        return {"m": 0.0}

    @property
    def _own_row_slots(self) -> Mapping[str, float]:
        """The second moment, one value per row, which starts at 0."""
        return {"v": 0.0}

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr_t, beta1, 1 - beta1, beta2, 1 - beta2, eps, D) for `kernels.apply`."""
        return *self._scalars(step), np.float32(dim)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class FTRL(SparseOptimizer):
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
        if self.weight_decay:
            raise TypeError("FTRL has no weight_decay: each update computes the weights from the state; use l2")
        check("lr", self.lr, "positive", "; FTRL divides by lr, so a warm-up cannot start at 0")
        check("l1", self.l1, "at least 0")
        check("l2", self.l2, "at least 0")
        check("lr_power", self.lr_power, "at most 0")
        check("2 * l2", 2 * self.l2, "at least 0")
        check("initial_accum", self.initial_accum, "at least 0")

    @property
    def slots(self) -> Mapping[str, float]:
        """The sum of squared gradients and the linear term."""
        return {"accum": self.initial_accum, "linear": 0.0}

    @property
    def largest_gradient(self) -> float:
        """2^46, as for `Adagrad`; less if the power -lr_power of the sum of squares could become infinite."""
        return float(2.0 ** (46 / max(1.0, -self.lr_power)))

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr, l1, 2 * l2, -lr_power) for `kernels.apply`; they are the same at every step."""
        return (*map(np.float32, (self.lr, self.l1, 2 * self.l2)), float(-self.lr_power))


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class SGD(SparseOptimizer):
    """Stochastic gradient descent: w <- w - lr * g, with g the summed gradient of a row. It has no slots."""

    lr: float = field(default=1e-2, hash=False)

    primitive: ClassVar[str] = "FusedSparseSGD"

    def __post_init__(self) -> None:
        check_lr(self.lr)

    @property
    def largest_gradient(self) -> float:
        """2^96 / max(lr, 1): gradients are not squared, and a weight changed by less than 2^102 stays finite."""
        return self._within(2.0**96 / max(self.lr, 1.0))

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr,) for `kernels.adagrad.sgd`."""
        return (np.float32(self.lr),)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Momentum(SparseOptimizer):
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
        check_lr(self.lr)
        check("momentum", self.momentum, "in [0, 1)")

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
class _AdagradBase(SparseOptimizer):
    """The hyperparameters of both forms of Adagrad."""

    lr: float = field(default=1e-2, hash=False)
    eps: float = 1e-10
    initial_accum: float = 0.0

    def __post_init__(self) -> None:
        check_lr(self.lr)
        check("eps", self.eps, "positive")
        check("initial_accum", self.initial_accum, "at least 0")


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Adagrad(_AdagradBase):
    """Adagrad, per element: accum <- accum + g^2;  w <- w - lr * g / (sqrt(accum) + eps).

    Source: Duchi, Hazan & Singer, "Adaptive Subgradient Methods", JMLR 2011, the diagonal case, with eps added to
    the root as in torch.optim.Adagrad. Deviation: accum may start above 0.
    """

    primitive: ClassVar[str] = "FusedSparseAdagrad"
    non_negative: ClassVar[frozenset[str]] = frozenset({"accum"})

    @property
    def slots(self) -> Mapping[str, float]:
        """The sum of squared gradients."""
        return {"accum": self.initial_accum}

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr, eps) for `kernels.adagrad.adagrad`."""
        return np.float32(self.lr), np.float32(self.eps)


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class RowWiseAdagrad(_AdagradBase):
    """Adagrad with one accumulator per row, as in DLRM: 4 bytes of state per row instead of 4 * D.

    With D columns::

        accum <- accum + (sum over the row of g^2) / D
        w <- w - lr * g / (sqrt(accum) + eps)

    The sum has 16 lanes: lane k adds the squares of columns k, k + 16, k + 32, ... in that order; then the lanes are
    added from 0 to 15.

    Source: Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation
    Models", ISCA 2022, section 4.1.4; FBGEMM's EXACT_ROWWISE_ADAGRAD.
    """

    primitive: ClassVar[str] = "FusedSparseRowWiseAdagrad"

    @property
    def _own_row_slots(self) -> Mapping[str, float]:
        """The sum of mean squared gradients, one value per row."""
        return {"accum": self.initial_accum}

    def scalars(self, step: int, dim: int) -> Scalars:
        """Return (lr, eps, D) for `kernels.adagrad.row_wise_adagrad`."""
        return np.float32(self.lr), np.float32(self.eps), np.float32(dim)


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


def complete_arguments(name: str, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer whose class has this name, from hyperparameters in a checkpoint.

    In a checkpoint without the argument `epsilon_hat`, Adam had the form with `epsilon_hat=True`.
    """
    return {"epsilon_hat": True, **hyperparameters} if name == Adam.__name__ else dict(hyperparameters)


def can_continue(optimizer: Any, name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a table's optimizer can continue from the state of an optimizer with this class and arguments.

    Learning rates may differ. `Adam` without `epsilon_hat` can continue from a state with it, and `take_over_form` then
    sets it.
    """
    mine = {**hyperparameters(optimizer), "lr": None}
    if mine.get("epsilon_hat") is False and arguments.get("epsilon_hat") is True:
        mine["epsilon_hat"] = True
    return type(optimizer).__name__ == name and mine == {**arguments, "lr": None}


def take_over_form(optimizer: Any, how: CatchUp) -> None:
    """Give `Adam` the `epsilon_hat` of the steps that a table has loaded; other optimizers have one form."""
    if isinstance(optimizer, Adam):
        object.__setattr__(optimizer, "epsilon_hat", how.epsilon_hat)


def build_optimizer(name: str, lr: float | None = None, weight_decay: float = 0.0) -> SparseOptimizer:
    """Return the optimizer with this name in OPTIMIZERS; raise UserError for an unknown name or an invalid value."""
    if name not in OPTIMIZERS:
        raise UserError(f"there is no table optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    given = {} if lr is None else {"lr": lr}
    try:
        return OPTIMIZERS[name](**given, weight_decay=weight_decay)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: {error}") from None


def require_optimizer(optimizer: object, table: str) -> None:
    """Raise TypeError unless `optimizer` is a table optimizer; names, classes and torch optimizers are rejected."""
    needed = ("primitive", "lr", "slots", "non_negative", "row_slots", "scalars", "clip_limit", "catch_up")
    if not isinstance(optimizer, type) and all(hasattr(optimizer, name) for name in needed):
        return
    classes = ", ".join(f"{made.__name__}()" for made in OPTIMIZERS.values() if isinstance(made, type))
    raise TypeError(
        f"table {table!r}: the optimizer must be hostdev's {classes}, or the result of "
        f"hostdev.core.optimizers.build_optimizer(name) with one of the names {', '.join(OPTIMIZERS)}; not "
        f"{optimizer!r}"
    )
