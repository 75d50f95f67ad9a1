"""The step history of a table whose rows change even when no batch uses them; see `kernels.catch_up`."""

import base64
import math
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.checks import require_last
from hostdev.core.optimizer_base import SMALL, CatchUp, adam_rate, central_step, eps_correction, get_terms
from hostdev.core.optimizers import SparseOptimizer, take_over_form
from hostdev.kernels.arrays import AnyIds, Positions, Rows
from hostdev.kernels.bfloat16 import round_to_nearest
from hostdev.kernels.catch_up import bring_tasks, packed_planes, packed_width, record, write_recent
from hostdev.kernels.clock import LEAST, MOST_TERMS, Clock
from hostdev.kernels.pool import run_tasks

Formats = tuple[int, ...]  # the storage format of each plane of a row

MOST_STEPS = 1 << 24  # per-row state is float32, which represents all integers up to here
_ROOM = 1024
_DAMAGED = "its step history is damaged"


class NoHistory:
    """Replaces `History` if a step changes only its batch's rows: the stored rows are then always up to date."""

    how: CatchUp | None = None
    steps = 0
    planes = 0  # number of planes in a packed row; 0 if weights are fetched instead of packed rows

    def record(self, lr: float, step: int, table: str) -> Clock | None:
        """Return None: a step's updates need no clock, because rows have missed no steps."""
        return None

    def forget(self, steps: int) -> None:
        """Do nothing: no steps were recorded."""

    def clock(self) -> Clock | None:
        """Return None: rows have missed no steps."""
        return None

    def packed(self) -> str | None:
        """Return None: a checkpoint has no step history."""
        return None

    def renewed(self) -> "NoHistory":
        """Return a history without steps."""
        return self

    def hand_over(self, table: Any, *, whole: bool) -> None:
        """See `History`; here without effect."""

    def stamp(self, row_slots: Rows, step: int | None = None) -> None:
        """See `History`; here without effect."""

    def require_steps(self, table: str, ids: AnyIds, row_slots: Rows) -> None:
        """Accept all values."""

    def get_width(self, dim: int) -> int:
        """Return the number of float32 values that are fetched per row of `dim` columns."""
        return dim

    def bring(self, block: Rows, row_slots: Rows, positions: Positions | None, formats: Formats | None = None) -> None:
        """See `History`; here without effect."""


class _Run(NamedTuple):
    """Successive steps with one learning rate."""

    lr: float
    first: int  # number of the first step
    length: int


class History:
    """A table's steps so far: learning rates, decays, and the sums from which a row's missed steps are computed.

    Memory per step: 52 bytes with Adam; with `epsilon_hat` 28, or 52 with an unusually small beta2; and 8 with other
    optimizers.

    Args:
        how: The effect of a step on rows without a gradient.
    """

    def __init__(self, how: CatchUp) -> None:
        self.how, self.planes = how, packed_planes(how.betas is not None)
        self._series = _NO_SERIES if how.betas is None else _make_series(how, *how.betas)
        self._powers = np.zeros((1, 2), np.float32) if how.betas is None else _powers(*how.betas)
        self._runs: list[_Run] = []
        self._restart()

    def _restart(self) -> None:
        self.steps = 0  # steps so far
        self._product = np.ones(1, np.float64)
        self._sums = np.zeros((len(self._series.basis), len(self._series.powers)))
        self._inverse = np.ones(_ROOM, np.float64)
        self._frozen = self._new_frozen(_ROOM)
        self._clock: Clock | None = None

    def _new_frozen(self, steps: int) -> npt.NDArray[np.float32]:
        """Return memory for `steps` steps: for each, the final coefficients of rows last written at this step."""
        if self.how.betas is None:
            return np.empty((0, 0), np.float32)
        return np.full((steps, len(self._series.basis) + 1), np.float32(self.how.eps))

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
        self._extend([_Run(lr, step, 1)])
        # Recording the step may have changed the scale of the product and the size of the arrays.
        return before._replace(product=self._product[0], inverse=self._inverse, frozen=self._frozen)

    def renewed(self) -> "History":
        """Return a history without steps."""
        return History(self.how)

    def hand_over(self, table: Any, *, whole: bool) -> None:
        """Give this history, loaded from a checkpoint, to a table with an equal optimizer; see `HostTable.adopt`."""
        table.adopt(self, whole=whole)
        take_over_form(table.optimizer, self.how)

    def stamp(self, row_slots: Rows, step: int | None = None) -> None:
        """Record in the per-row state [N, R] that the rows are up to date at `step`; None for the current step."""
        row_slots[:, -1] = self.steps if step is None else step

    def require_steps(self, table: str, ids: AnyIds, row_slots: Rows) -> None:
        """Raise ValueError unless the per-row state of the rows `ids` [N] names a step from 0 to the current one."""
        require_last(table, ids, row_slots[:, -1], self.steps)

    def get_width(self, dim: int) -> int:
        """See `NoHistory`."""
        return packed_width(dim, self.how.betas is not None)

    def bring(self, block: Rows, row_slots: Rows, positions: Positions | None, formats: Formats | None = None) -> None:
        """Apply the steps that rows have missed to copies of these rows.

        Args:
            block: float32 [N, 1 + S, D]: weights, then state of D values.
            row_slots: float32 [N, R]: per-row state.
            positions: Which rows of the arrays are copies to bring up to date, int32 [any]; None for all.
            formats: The storage formats of the planes, to which values are rounded to nearest; None for no rounding.
        """
        some = (block, row_slots) if positions is None else (block[positions], row_slots[positions])
        run_tasks(bring_tasks(*some, self.clock()))
        if formats is not None:
            round_to_nearest(some[0], formats)
        if positions is not None:
            block[positions], row_slots[positions] = some

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
        self._extend(self._runs)

    def _extend(self, runs: list[_Run]) -> None:
        """Add steps; adding them one at a time or all at once gives bit-identical results."""
        steps = [self._values(run.lr, run.first + i) for run in runs for i in range(run.length)]
        rates, decays, epsilons, central = np.array([*zip(*steps, strict=True)], np.float64).reshape(4, len(steps))
        first = self.steps
        self.steps += len(steps)
        needed = self.steps + 1
        if needed > len(self._inverse):  # older clocks keep the previous arrays
            more = max(needed, 2 * len(self._inverse)) - len(self._inverse)
            self._inverse = np.concatenate([self._inverse, np.ones(more)])
            self._frozen = np.concatenate([self._frozen, self._new_frozen(more)])
        if self.how.betas is not None:
            # e(L) is set only when step L + 1 is recorded: until then, the program may change the table's step number.
            self._frozen[first : self.steps, -1] = central
        if self.how.epsilon_hat or self.how.betas is None:
            epsilons = epsilons[:0]
        while len(rates):
            done = record(
                rates,
                decays,
                epsilons,
                first,
                self._series.powers,
                self._product,
                self._sums,
                self._inverse,
                self._series.basis,
                self._frozen,
            )
            if self._product[0] < LEAST:  # LEAST is a power of 2, so product * inverse keeps its bits
                self._inverse = self._inverse * LEAST
                self._product[0] /= LEAST
            rates, decays, epsilons, first = rates[done:], decays[done:], epsilons[done:], first + done
        self._clock = None

    def _values(self, lr: float, step: int) -> tuple[float, float, float, float]:
        """Return a step's a_j, d_j and e_j, and e(L) for the step L before it; see `kernels.catch_up`."""
        how, decay = self.how, lr * self.how.weight_decay
        if how.betas is None:
            return 0.0, decay, 0.0, 0.0
        beta1, beta2 = how.betas
        rate = float(adam_rate(lr, beta1, beta2, step))
        if how.epsilon_hat:
            return rate, decay, how.eps, how.eps
        central = central_step(beta1, step - 1)
        return rate, decay, how.eps * eps_correction(beta2, step), how.eps * eps_correction(beta2, central)

    def clock(self) -> Clock:
        """Return the clock, with which kernels apply the steps that a row has missed, up to the last step."""
        if self._clock is None:
            recent = np.empty((0, 0), np.float32)
            if self.how.betas is not None:
                recent = np.empty((len(self._series.powers), len(self._series.basis) + 1), np.float32)
                write_recent(self._sums, self._series.basis, self._frozen, self.steps, recent)
            product, shift = self._product[0], np.float32(not self.how.epsilon_hat)
            self._clock = Clock(np.int64(self.steps), product, self._inverse, recent, self._frozen, self._powers, shift)
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


def make_history(optimizer: SparseOptimizer) -> NoHistory | History:
    """Return the step history of a new table: a `History` if steps also change rows that no batch uses."""
    return NoHistory() if optimizer.catch_up is None else History(optimizer.catch_up)


class _Series(NamedTuple):
    """Constants of the sums from which a row's missed steps are computed; see `kernels.catch_up.record`."""

    powers: npt.NDArray[np.float64]
    basis: npt.NDArray[np.float64]


_NO_SERIES = _Series(np.zeros((1, 0)), np.zeros((0, 0)))


def _make_series(how: CatchUp, beta1: float, beta2: float) -> _Series:
    N = max(1, math.ceil(math.log(SMALL) / math.log(beta1)) if beta1 else 1)
    terms, root = get_terms(beta1, beta2), math.sqrt(beta2)
    k = np.arange(N + 1, dtype=np.float64)[:, None]
    if how.epsilon_hat:
        return _Series(beta1**k * (1 - root**k) ** np.arange(terms, dtype=np.float64), np.eye(terms))
    chebyshev = [[*np.polynomial.chebyshev.cheb2poly([0.0] * i + [2.0 if i else 1.0])] for i in range(MOST_TERMS)]
    basis = np.array([row + [0.0] * (MOST_TERMS - len(row)) for row in chebyshev])
    return _Series(np.concatenate([beta1**k, root ** (k / 2)], axis=1), basis)


def _powers(beta1: float, beta2: float) -> npt.NDArray[np.float32]:
    """Return beta1^k and beta2^k, float32 [any, 2], for k = 0, 1, ... until both are below the least normal float32."""
    least = float(np.finfo(np.float32).tiny)
    longest = max(math.ceil(math.log(least) / math.log(beta)) if beta else 1 for beta in (beta1, beta2))
    found = np.array([beta1, beta2]) ** np.arange(longest + 1, dtype=np.float64)[:, None]
    return np.where(found < least, 0.0, found).astype(np.float32)
