"""Effects of steps on rows without a gradient: weights decay; with Adam, moments also decay and move the weights.

Each row stores the step of its last write. When the row is next read or updated, one operation applies the effects of
all steps since then: it brings the row up to date. Steps therefore cost no time for unused rows.

Let a_j be the learning rate of step j (Adam's `lr_t`), e_j its eps, d_j the fraction by which it decays the weights, L
the step of the row's last write, T the table's last step, and q = sqrt(beta2)::

    D(L, T) = (1 - d_{L+1}) * ... * (1 - d_T)
    w <- D(L, T) * (w - m * sum over i = 1 .. T - L of  a_{L+i} * beta1^i / D(L, L+i) / (sqrt(v) * q^i + e_{L+i}))
    m <- beta1^(T - L) * m
    v <- beta2^(T - L) * v

This equals T - L steps of Adam with zero gradients; with other optimizers, the weights only decay, w <- D(L, T) * w.

With s = sqrt(v) and a number e, let x = (s - e) / (s + e) and g_i = e_{L+i} / e. Each divisor in the sum is
(s + e) * (g_i + q^i - x * (g_i - q^i)) / 2, and its reciprocal is a Chebyshev series in x, with the closed form of the
generating function::

    1 / (s + e) / sqrt(g_i * q^i) * (1 + 2 * t_i * T_1(x) + 2 * t_i^2 * T_2(x) + ...)
    t_i = (sqrt(g_i) - sqrt(q^i)) / (sqrt(g_i) + sqrt(q^i))

The sum is therefore a series in x, divided by s + e, whose coefficients do not depend on the row's values. With e(L)
such that g_i is near 1 for the steps that matter (`core.optimizer_base.central_step`), 10 terms suffice for float32.

If e_j is eps in each step (`epsilon_hat`), then e = eps, the variable is u = s / (s + e), each divisor is
(s + e) * (1 - u * (1 - q^i)), and its reciprocal is a geometric series in u, of which 4 or 10 terms suffice.

In both cases the sum is (M_0 + M_1 * x + M_2 * x^2 + ...) / (s + e), where x is (s - shift * e) / (s + e). The sums end
at i = N, beyond which beta1^i is negligible.

P: number of coefficients M_p(L, T).
S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

from typing import Any

import numpy as np

from hostdev.kernels.arrays import Positions, Rows, identity
from hostdev.kernels.clock import LEAST, MOST_TERMS, Clock
from hostdev.kernels.jit import bare, inline, kernel, prefetch_update
from hostdev.kernels.pool import Task, get_grain, tasks_over
from hostdev.kernels.rounding import SplitRows, bare_rows, load_slot, load_weights, make_scratch, prefetch_row


@kernel
def record(rates, decays, epsilons, first, powers, product, sums, inverse, basis, frozen):
    """Record steps; stop early once the product is so small that the caller must scale it before the next step.

    Args:
        rates: float64 [n], a_j of each step.
        decays: float64 [n], d_j of each step.
        epsilons: float64 [n], e_j of each step; [0] for `epsilon_hat`, and if moments do not decay.
        first: The number of steps already recorded.
        powers: float64 [N + 1, P]: beta1^k * (1 - q^k)^p for each k and p; float64 [N + 1, 2]: beta1^k and sqrt(q^k)
            if there are `epsilons`.
        product: float64 [1], updated: D(0, T) times the caller's scale.
        sums: float64 [P, N + 1], updated: the coefficients of L = T - k for each k, in powers of u or in Chebyshev
            polynomials of x.
        inverse: float64 [more than T]; for each recorded step T, inverse[T] becomes 1 / product.
        basis: float64 [P, P]: the coefficients M_p are basis^T @ sums.
        frozen: float32 [more than T, P + 1]. The last column holds e(L) for L < T; for each recorded step T >= N, the
            other columns of frozen[T - N] become M_p(T - N, T).

    Returns:
        The number of steps that were recorded.
    """
    N, P = powers.shape[0] - 1, sums.shape[0]
    term, ratio, last = np.empty(N + 1), np.empty(N + 1), np.empty((1, P + 1), np.float32)
    for t in range(len(rates)):
        now = first + t + 1
        product[0] *= 1.0 - decays[t]
        inverse[now] = 1.0 / product[0]
        most = min(N, now)
        for k in range(1, most + 1):
            term[k] = rates[t] / (product[0] * inverse[now - k])
        if len(epsilons):
            for k in range(1, most + 1):
                g, q = np.sqrt(epsilons[t] / np.float64(frozen[now - k, P])), powers[k, 1]
                term[k] = term[k] * powers[k, 0] / (g * q)
                ratio[k] = (g - q) / (g + q)
        for p in range(P):
            if len(epsilons):
                for k in range(most, 0, -1):
                    sums[p, k] = sums[p, k - 1] + term[k]
                    term[k] *= ratio[k]
            else:
                for k in range(most, 0, -1):
                    sums[p, k] = sums[p, k - 1] + term[k] * powers[k, p]
        if N > 0 and now >= N:
            _in_powers(sums[:, N:], basis, last)
            for p in range(P):
                frozen[now - N, p] = last[0, p]
        if product[0] < LEAST:
            return t + 1
    return len(rates)


@kernel
def _in_powers(sums, basis, out):
    """Write (basis^T @ sums)^T, of float64 [P, P] and [P, n], to the first P columns of out, float32 [n, P + 1]."""
    row = np.empty(sums.shape[1])
    for p in range(len(basis)):
        row[:] = 0.0
        for i in range(len(basis)):
            factor = basis[i, p]
            if factor != 0.0:
                for k in range(len(row)):
                    row[k] += factor * sums[i, k]
        for k in range(len(row)):
            out[k, p] = row[k]


@kernel
def write_recent(sums, basis, frozen, now, out):
    """Write M_p(now - k, now), then e(now - k), for each k = 0 .. N to out, float32 [N + 1, P + 1].

    The other arguments are those of `record`. For steps before the first one, e is 1.
    """
    P = len(basis)
    _in_powers(sums, basis, out)
    for k in range(len(out)):
        out[k, P] = frozen[now - k, P] if k <= now else np.float32(1)


# In loops with branches, numba counts references to array slices in memory that threads share, and a call with array
# arguments takes as long as the arithmetic on a row. So kernels unpack a clock before their loops, collect the
# coefficients of some rows, and then update these rows in a loop without calls.

_ROWS = 64  # rows whose coefficients are collected at a time
_WIDTH = MOST_TERMS + 3  # coefficients per row: the terms, e, then the decay of both moments or of the weights


@inline
def last_step(row_slots, row, now):
    """Return the step at which a row was last written, or `now` if the stored step is not in [0, now)."""
    held = row_slots[row, np.uint64(row_slots.shape[1] - 1)]
    return np.int64(held) if held >= np.float32(0) and held < np.float32(now) else now


@kernel
def _collect(coefficients, i, last, now, recent, frozen, powers):
    """Write the coefficients of a row that was last written at step `last` to coefficients[i], float32 [_WIDTH]."""
    k, at, terms = now - last, np.uint64(now - last), np.uint64(recent.shape[1] - 1)
    for p in range(terms):
        coefficients[i, p] = recent[at, p] if k < recent.shape[0] else frozen[np.uint64(last), p]
    for p in range(terms, np.uint64(MOST_TERMS)):
        coefficients[i, p] = np.float32(0)
    coefficients[i, MOST_TERMS] = recent[at, terms] if k < recent.shape[0] else frozen[np.uint64(last), terms]
    known = k < powers.shape[0]
    coefficients[i, MOST_TERMS + 1] = powers[at, 0] if known else np.float32(0)
    coefficients[i, MOST_TERMS + 2] = powers[at, 1] if known else np.float32(0)


@inline
def moved(w, m, v, e, shift, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9):
    """Return the weight w after its moments m and v have moved it in the missed steps.

    e is that of the row's last step; c0, c1, ... are the row's coefficients. From c_P on, they are 0, which changes no
    bit of the result.
    """
    s = np.sqrt(v)
    r = np.float32(1) / (s + e)
    x = (s - shift * e) * r
    a = c9 * x + c8
    a = a * x + c7
    a = a * x + c6
    a = a * x + c5
    a = a * x + c4
    a = a * x + c3
    a = a * x + c2
    a = a * x + c1
    a = a * x + c0
    return w - m * r * a


@kernel
def decay(weights, last, product, inverse):
    """Multiply the weights of a row, [D], by their decay since step `last`."""
    factor = np.float32(product * inverse[np.uint64(last)])
    if factor != np.float32(1):
        for j in range(np.uint64(len(weights))):
            weights[j] *= factor


@kernel
def catch_up(weights, first, second, last, now, product, inverse, recent, frozen, powers, shift):
    """Apply the steps after `last`, up to `now`, to a row's weights and its first and second moments, each [D]."""
    if now > last and recent.shape[0] > 0:
        k = np.empty((1, _WIDTH), np.float32)
        _collect(k, 0, last, now, recent, frozen, powers)
        c0, c1, c2, c3, c4 = k[0, 0], k[0, 1], k[0, 2], k[0, 3], k[0, 4]
        c5, c6, c7, c8, c9 = k[0, 5], k[0, 6], k[0, 7], k[0, 8], k[0, 9]
        e, beta1, beta2 = k[0, MOST_TERMS], k[0, MOST_TERMS + 1], k[0, MOST_TERMS + 2]
        for j in range(np.uint64(len(weights))):
            m, v = first[j], second[j]
            weights[j] = moved(weights[j], m, v, e, shift, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9)
            first[j] = m * beta1
            second[j] = v * beta2
    decay(weights, last, product, inverse)


@kernel
def _pack(start, stop, ids, positions, block, row_slots, planes, out):
    block, out = bare_rows(block), bare(out)
    scratch = make_scratch(block)
    last = np.uint64(row_slots.shape[1] - 1)
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        prefetch_update(row_slots, ids, i, stop)
        row = np.uint64(ids[i])
        to = out[np.uint64(positions[i])]
        weights = load_weights(block, row, scratch)
        D = np.uint64(len(weights))
        for j in range(D):
            to[j] = weights[j]
        for plane in range(np.uint64(1), np.uint64(planes)):
            values = load_slot(block, row, plane - np.uint64(1), scratch)
            for j in range(D):
                to[plane * D + j] = values[j]
        to[np.uint64(planes) * D] = row_slots[row, last]


@kernel
def _look_up(start, stop, ids, positions, block, row_slots, clock, out):
    """Write up-to-date weights of rows that are stored as `SplitRows`."""
    now, product, inverse, recent, frozen, powers, shift = clock
    block, out = bare_rows(block), bare(out)
    scratch, D = make_scratch(block), np.uint64(out.shape[1])
    first, second = np.empty(out.shape[1], np.float32), np.empty(out.shape[1], np.float32)
    for i in range(np.uint64(start), np.uint64(stop)):
        prefetch_row(block, ids, i, stop)
        prefetch_update(row_slots, ids, i, stop)
        row = np.uint64(ids[i])
        weights = out[np.uint64(positions[i])]
        last, held = last_step(row_slots, row, now), load_weights(block, row, scratch)
        for j in range(D):
            weights[j] = held[j]
        if recent.shape[0] > 0:
            m, v = load_slot(block, row, 0, scratch), load_slot(block, row, 1, scratch)
            for j in range(D):
                first[j], second[j] = m[j], v[j]
        catch_up(weights, first, second, last, now, product, inverse, recent, frozen, powers, shift)


@kernel
def _look_up_flat(start, stop, ids, positions, flat, row_slots, clock, out):
    """Write up-to-date weights of rows of `flat`, float32 [V, D or more].

    A row of `flat` begins with its D weights. If moments decay, its D first and D second moments follow.
    """
    now, product, inverse, recent, frozen, _, shift = clock
    D = np.uint64(out.shape[1])
    k, late = np.empty((_ROWS, _WIDTH), np.float32), np.empty(_ROWS, np.bool_)
    last_column, columns = np.uint64(row_slots.shape[1] - 1), np.uint64(recent.shape[1])
    e_column, factor_column = np.uint64(MOST_TERMS), np.uint64(MOST_TERMS + 1)
    k[:] = np.float32(0)
    for begin in range(np.uint64(start), np.uint64(stop), np.uint64(_ROWS)):
        end = min(begin + np.uint64(_ROWS), np.uint64(stop))
        for i in range(begin, end):  # the same as `last_step` and `_collect`
            prefetch_update(flat, ids, i, stop)
            prefetch_update(row_slots, ids, i, stop)
            at, held = i - begin, row_slots[np.uint64(ids[i]), last_column]
            last = np.int64(held) if held >= np.float32(0) and held < np.float32(now) else now
            k[at, factor_column] = np.float32(product * inverse[np.uint64(last)])
            late[at] = now > last and columns > 0
            if late[at]:
                terms = columns - np.uint64(1)
                if now - last < recent.shape[0]:
                    for p in range(terms):
                        k[at, p] = recent[np.uint64(now - last), p]
                    k[at, e_column] = recent[np.uint64(now - last), terms]
                else:
                    for p in range(terms):
                        k[at, p] = frozen[np.uint64(last), p]
                    k[at, e_column] = frozen[np.uint64(last), terms]
        for i in range(begin, end):
            at, row, to = i - begin, np.uint64(ids[i]), np.uint64(positions[i])
            factor = k[at, factor_column]
            if late[at]:
                e = k[at, e_column]
                c0, c1, c2, c3, c4 = k[at, 0], k[at, 1], k[at, 2], k[at, 3], k[at, 4]
                c5, c6, c7, c8, c9 = k[at, 5], k[at, 6], k[at, 7], k[at, 8], k[at, 9]
                for j in range(D):
                    w, m, v = flat[row, j], flat[row, D + j], flat[row, D + D + j]
                    out[to, j] = moved(w, m, v, e, shift, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9) * factor
            else:
                for j in range(D):
                    out[to, j] = flat[row, j] * factor


@kernel
def _bring(start, stop, block, row_slots, clock):
    now, product, inverse, recent, frozen, powers, shift = clock
    last_column, none = np.uint64(row_slots.shape[1] - 1), np.empty(0, np.float32)
    for i in range(np.uint64(start), np.uint64(stop)):
        last = last_step(row_slots, i, now)
        if recent.shape[0] > 0:
            catch_up(block[i, 0], block[i, 1], block[i, 2], last, now, product, inverse, recent, frozen, powers, shift)
        else:
            catch_up(block[i, 0], none, none, last, now, product, inverse, recent, frozen, powers, shift)
        row_slots[i, last_column] = np.float32(now)


def packed_planes(clock_has_moments: bool) -> int:
    """Return how many planes of a row (the weights, then the moments) are needed to compute its current weights."""
    return 3 if clock_has_moments else 1


def packed_width(dim: int, moments: bool) -> int:
    """Return the number of float32 values in a packed row: planes of `dim` values, and the step of the last write."""
    return packed_planes(moments) * dim + 1


def look_up_tasks(
    block: Rows | SplitRows, row_slots: Rows, ids: Any, clock: Clock, out: Rows, positions: Positions | None
) -> list[Task]:
    """Return tasks that write up-to-date weights of rows to out, float32 [N, D], or [any, D] with `positions`.

    `pack_tasks` describes the other arguments.
    """
    positions, grain = identity(len(ids)) if positions is None else positions, get_grain(out.strides[0])
    if isinstance(block, np.ndarray):
        flat = block.reshape(len(block), -1)
        return tasks_over(_look_up_flat, len(ids), ids, positions, flat, row_slots, clock, out, grain=grain)
    return tasks_over(_look_up, len(ids), ids, positions, block, row_slots, clock, out, grain=grain)


def pack_tasks(
    block: Rows | SplitRows, row_slots: Rows, ids: Any, out: Rows, positions: Positions | None, planes: int
) -> list[Task]:
    """Return tasks that copy rows to `out` in packed form, from which `unpack_tasks` later computes current weights.

    Args:
        block: float32 [V, 1 + S, D], or `rounding.SplitRows`.
        row_slots: float32 [V, R]; the last column has the step of each row's last write.
        ids: int32 or int64 [N], each in [0, V).
        out: float32 [N, W], written; with `positions`, [any, W]. `packed_width` returns W.
        positions: int32 [N]: the row ids[i] is copied to out[positions[i]]; None to copy it to out[i].
        planes: The number of planes in a packed row, from `packed_planes`.
    """
    positions, grain = identity(len(ids)) if positions is None else positions, get_grain(out.strides[0])
    return tasks_over(_pack, len(ids), ids, positions, block, row_slots, planes, out, grain=grain)


def unpack_tasks(packed: Rows, clock: Clock, out: Rows) -> list[Task]:
    """Return tasks that write up-to-date weights of packed rows, float32 [N, W], to out, float32 [N, D]."""
    rows = identity(len(packed))
    return tasks_over(
        _look_up_flat, len(packed), rows, rows, packed, packed, clock, out, grain=get_grain(packed.strides[0])
    )


def bring_tasks(block: Rows, row_slots: Rows, clock: Clock) -> list[Task]:
    """Return tasks that apply missed steps to all rows of a block, in place.

    Args:
        block: float32 [N, 1 + S, D].
        row_slots: float32 [N, R]; the last column, the step of each row's last write, becomes the clock's step.
        clock: The step history.
    """
    return tasks_over(_bring, len(block), block, row_slots, clock, grain=get_grain(block.strides[0]))
