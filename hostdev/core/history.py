"""The step history of a table whose rows change even when no batch uses them; see `kernels.catch_up`."""

import base64
import math
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.catch_up import SMALL, CatchUp, adam_rate, get_terms
from hostdev.kernels.catch_up import record
from hostdev.kernels.clock import LEAST, Clock

MOST_STEPS = 1 << 24  # per-row state is float32, which represents all integers up to here
_ROOM = 1024
_DAMAGED = "its step history is damaged"


class _Run(NamedTuple):
    """Successive steps with one learning rate."""

    lr: float
    first: int  # number of the first step
    length: int


class History:
    """A table's steps so far: learning rates, decays, and the sums from which a row's missed steps are computed.

    Memory per step: 24 bytes with Adam, 48 with Adam and an unusually small beta2, and 8 with other optimizers.

    Args:
        how: The effect of a step on rows without a gradient.
    """

    def __init__(self, how: CatchUp) -> None:
        self.how = how
        beta1, beta2 = how.betas or (0.0, 0.0)
        N, terms = 0, 0
        if how.betas is not None:
            N, terms = max(1, math.ceil(math.log(SMALL) / math.log(beta1)) if beta1 else 1), get_terms(beta1, beta2)
        k = np.arange(N + 1, dtype=np.float64)[:, None]
        root = math.sqrt(beta2)
        with np.errstate(divide="ignore"):
            self._weights = beta1**k * (1 - root**k) ** np.arange(terms, dtype=np.float64)
        self._powers = _powers(beta1, beta2) if how.betas is not None else np.zeros((1, 2), np.float32)
        self._runs: list[_Run] = []
        self._restart()

    def _restart(self) -> None:
        self.steps = 0  # steps so far
        self._product = np.ones(1, np.float64)
        self._sums = np.zeros_like(self._weights)
        self._inverse = np.ones(_ROOM, np.float64)
        self._frozen = np.zeros((_ROOM if self._weights.size else 0, self._weights.shape[1]), np.float32)
        self._clock: Clock | None = None

    def record(self, lr: float, step: int, table: str) -> Clock:
        """Record a step; return the clock for its updates, which first apply the earlier steps that a row has missed.

        Args:
            lr: The learning rate.
            step: The step's number, from 1, for Adam's bias correction.
            table: The table's name.

        Raises:
            ValueError: lr * weight_decay is 1 or more, or the table has taken 2^24 steps.
        """
        decays = lr * self.how.weight_decay
        if decays >= 1:
            raise ValueError(
                f"table {table!r}: lr {lr} times weight_decay {self.how.weight_decay} must be below 1, not {decays}"
            )
        if self.steps >= MOST_STEPS:
            raise ValueError(
                f"table {table!r} has taken {MOST_STEPS:,} steps, the limit for Adam and for weight_decay; use an "
                "optimizer that changes only the rows of a batch, such as LazyAdam without weight_decay"
            )
        before = self.clock()
        runs = self._runs
        if runs and runs[-1].lr == lr and runs[-1].first + runs[-1].length == step:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
        else:
            runs.append(_Run(lr, step, 1))
        self._extend([self._rate(lr, step)], [decays])
        frozen = self._frozen if before.moments else before.frozen
        # Recording the step may have changed the scale of the product and the size of the arrays.
        return before._replace(product=self._product[0], inverse=self._inverse, frozen=frozen)

    def _rate(self, lr: float, step: int) -> float:
        return 0.0 if self.how.betas is None else float(adam_rate(lr, *self.how.betas, step))

    def forget(self, steps: int) -> None:
        """Undo the last `steps` steps."""
        if not steps:
            return
        while steps and self._runs:
            last = self._runs.pop()
            taken = min(steps, last.length)
            steps -= taken
            if taken < last.length:
                self._runs.append(last._replace(length=last.length - taken))
        self._replay()

    def _replay(self) -> None:
        self._restart()
        rates = [self._rate(run.lr, run.first + i) for run in self._runs for i in range(run.length)]
        self._extend(rates, [run.lr * self.how.weight_decay for run in self._runs for _ in range(run.length)])

    def _extend(self, added_rates: list[float], added_decays: list[float]) -> None:
        """Add steps; adding them one at a time or all at once gives bit-identical results."""
        first = self.steps
        self.steps += len(added_rates)
        needed = self.steps + 1
        if needed > len(self._inverse):  # older clocks keep the previous arrays
            more = max(needed, 2 * len(self._inverse)) - len(self._inverse)
            self._inverse = np.concatenate([self._inverse, np.ones(more)])
            if self._weights.size:
                self._frozen = np.concatenate([self._frozen, np.zeros((more, self._weights.shape[1]), np.float32)])
        rates, decays = np.array(added_rates), np.array(added_decays)
        while len(rates):
            done = record(rates, decays, first, self._weights, self._product, self._sums, self._inverse, self._frozen)
            if self._product[0] < LEAST:  # a power of 2: product * inverse keeps its bits
                self._inverse = self._inverse * LEAST
                self._product[0] /= LEAST
            rates, decays, first = rates[done:], decays[done:], first + done
        self._clock = None

    def clock(self) -> Clock:
        """Return the clock, from which kernels apply the steps that a row has missed, up to the last step."""
        if self._clock is None:
            recent = self._sums.astype(np.float32) if self._weights.size else np.empty((0, 0), np.float32)
            frozen = self._frozen if self._weights.size else np.empty((0, 0), np.float32)
            product, eps = self._product[0], np.float32(self.how.eps)
            self._clock = Clock(np.int64(self.steps), product, self._inverse, recent, frozen, self._powers, eps)
        return self._clock

    def packed(self) -> str:
        """Return all steps as text for a checkpoint; successive steps with one learning rate are one entry."""
        content = np.array(self._runs, np.float64).reshape(-1, 3).T.tobytes()
        return base64.b64encode(zlib.compress(content, 6)).decode()

    def restore(self, text: str) -> None:
        """Restore the steps from text that `packed` has returned; raise ValueError if the text is damaged."""
        try:
            content = zlib.decompressobj()
            found = content.decompress(base64.b64decode(text, validate=True), 24 * MOST_STEPS)
        except (ValueError, zlib.error):
            raise ValueError(_DAMAGED) from None
        if not content.eof or len(found) % 24:
            raise ValueError(_DAMAGED)
        lrs, firsts, counts = np.frombuffer(found, np.float64).reshape(3, -1)
        decays = lrs * self.how.weight_decay
        right = ((lrs >= 0) & np.isfinite(lrs) & (decays < 1) & (firsts >= 1) & (counts >= 1)).all()
        whole = (firsts == np.floor(firsts)).all() and (counts == np.floor(counts)).all()
        if not (right and whole and (firsts < 2**53).all() and counts.sum() <= MOST_STEPS):
            raise ValueError(_DAMAGED)
        self._runs = [_Run(*run) for run in zip(lrs.tolist(), map(int, firsts), map(int, counts), strict=True)]
        self._replay()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and (self.how, self._runs) == (other.how, other._runs)

    __hash__: Any = None


def _powers(beta1: float, beta2: float) -> npt.NDArray[np.float32]:
    """Return beta1^k and beta2^k, float32 [any, 2], for k = 0, 1, ... until both are below the least normal float32."""
    least = float(np.finfo(np.float32).tiny)
    longest = max(math.ceil(math.log(least) / math.log(beta)) if beta else 1 for beta in (beta1, beta2))
    found = np.array([beta1, beta2]) ** np.arange(longest + 1, dtype=np.float64)[:, None]
    return np.where(found < least, 0.0, found).astype(np.float32)
