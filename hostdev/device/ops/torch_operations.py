"""Row operations in torch, for any accelerator: the host kernels' operations in the same order, each rounded once.

Each operation is a separate torch op, so that no compiler fuses a multiplication with an addition. Divisors are
tensors, because torch replaces division by a number with multiplication by its reciprocal. FTRL with an lr_power other
than -0.5 computes the power in float64 and rounds it to float32: host and device differ only where their pow functions
differ near a rounding boundary. Empty inputs launch nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hostdev.device.ops.catch_up import Clocks, bring, square_root
from hostdev.device.ops.uses import Expansion, FeatureUses, concatenate, expand, get_bag_sizes, get_bags
from hostdev.kernels import eight_bits
from hostdev.kernels.adagrad import LANES
from hostdev.kernels.bfloat16 import WEYL
from hostdev.kernels.clock import Clock
from hostdev.kernels.plane_formats import BFLOAT16, FLOAT32, UNSIGNED_8

_LOW32 = 0xFFFFFFFF


def lookup(block: Tensor, ids: Tensor) -> Tensor:
    """See `host_kernels`."""
    return block[:, 0].index_select(0, ids)


def assemble(block: Tensor, hit_slots: Tensor, admitted: Tensor, passed: Tensor) -> Tensor:
    """See `host_kernels`."""
    if len(hit_slots) and not len(admitted) + len(passed):
        return lookup(block, hit_slots)
    parts = [lookup(block, hit_slots)] if len(hit_slots) else []
    return torch.cat([*parts, *(part for part in (admitted[:, 0], passed) if len(part)), passed[:0]])


def gather(rows: Tensor, inverse: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `host_kernels`."""
    uses = rows.index_select(0, inverse)
    return (uses if weights is None else uses * weights.unsqueeze(1)).to(dtype)


def pool(
    rows: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool, dtype: torch.dtype
) -> Tensor:
    """See `host_kernels`; `sum_uses` describes the order of additions on CUDA."""
    terms = gather(rows, inverse, weights, torch.float32)
    sums = _sum(terms, get_bags(offsets, len(inverse)).long(), len(offsets) - 1)
    if mean:
        sums /= get_bag_sizes(offsets)
    return sums.masked_fill_((offsets[1:] == offsets[:-1]).unsqueeze(1), 0.0).to(dtype)


def expand_many(features: Sequence[Expansion]) -> list[Tensor]:
    """See `host_kernels`."""
    return [expand(one, gather, pool) for one in features]


def stack(features: Sequence[Expansion]) -> Tensor:
    """See `host_kernels`."""
    return torch.stack(expand_many(features), 1)


class TorchUses(NamedTuple):
    """A batch's occurrences of rows in several features; B and N differ by feature."""

    rows: int
    inverse: Tensor  # int64, the concatenated `inverse` of all features
    features: list[tuple[Tensor | None, Tensor | None, Tensor | None]]  # divisors [B, 1], bags [N], weights [N, 1]


def uses_of(features: Sequence[FeatureUses], rows: int, *, in_order: bool) -> TorchUses:
    """See `host_kernels`."""
    parts = []
    for inverse, offsets, weights, mean, _ in features:
        sizes = get_bag_sizes(offsets) if mean and offsets is not None else None
        bags = None if offsets is None else get_bags(offsets, len(inverse))
        parts.append((sizes, bags, None if weights is None else weights.unsqueeze(1)))
    return TorchUses(rows, concatenate([feature.inverse for feature in features]).long(), parts)


def sum_uses(grads: Sequence[Tensor], uses: TorchUses) -> Tensor:
    """See `host_kernels`.

    On CUDA the order of the additions is fixed, without atomics. It is the order of occurrence, except that torch
    chooses another order for rows with 32 or more occurrences if D = 1. Host and device tables get the same sums,
    because both use this function.
    """
    terms = []
    for grad, (sizes, bags, weights) in zip(grads, uses.features, strict=True):
        term = grad.float()
        if sizes is not None:
            term = term / sizes
        if bags is not None:
            term = term.index_select(0, bags)
        terms.append(term if weights is None else term * weights)
    return _sum(concatenate(terms), uses.inverse, uses.rows)


def sum_many(calls: Sequence[tuple[Sequence[Tensor], TorchUses]]) -> list[Tensor]:
    """See `host_kernels`."""
    return [sum_uses(*call) for call in calls]


def _sum(terms: Tensor, to: Tensor, n: int) -> Tensor:
    """Return n sums, float32 [n, D]: terms[i] is added to sum to[i], in order of i; -0 for a sum without terms."""
    # Unlike index_add_, index_put_ needs no deterministic mode: torch sorts indices stably and adds by segment.
    shape = n, terms.shape[1]
    sums = torch.full(shape, -0.0, dtype=torch.float32, device=terms.device)  # the neutral element of addition
    return sums.index_put_((to,), terms, accumulate=True)


def update(
    primitive: str,
    block: Tensor,
    row_slots: Tensor,
    ids: Tensor,
    grads: Tensor,
    scalars: tuple[Any, ...],
    skip: Tensor | None = None,
    admitted: Tensor | None = None,
    admitted_row_slots: Tensor | None = None,
    clock: Clock | None = None,
    clocks: Clocks | None = None,
) -> None:
    """See `host_kernels`."""
    H, A = len(ids), 0 if admitted is None else len(admitted)
    if not H + A:
        return
    old = [_join_rows(held, ids, new) for held, new in ((block, admitted), (row_slots, admitted_row_slots))]
    new = old if skip is None else [values.clone() for values in old]
    if clock is not None:
        bring(new[0], new[1], clock, clocks or Clocks())
        new[1][:, -1] = float(clock.now + 1)
    _TWINS[primitive](new[0], new[1], grads[: H + A], *map(float, scalars))
    if skip is not None:
        new = [torch.where(skip.bool(), before, after) for before, after in zip(old, new, strict=True)]
    for held, values, at in ((block, new[0], admitted), (row_slots, new[1], admitted_row_slots)):
        if not values.shape[1]:
            continue
        if H:
            held.index_copy_(0, ids.long(), values[:H])
        if A and at is not None:
            at.copy_(values[H:])


def _join_rows(held: Tensor, ids: Tensor, admitted: Tensor | None) -> Tensor:
    """Return copies of the rows of these ids, followed by the admitted rows."""
    if not held.shape[1]:
        return held.new_empty((len(ids) + (0 if admitted is None else len(admitted)), 0))
    if admitted is None or not len(admitted):
        return held.index_select(0, ids)
    return torch.cat([held.index_select(0, ids), admitted]) if len(ids) else admitted.clone()


def _lazy_adam(rows: Tensor, per_row: Tensor, g: Tensor, *scalars: float) -> None:
    lr_t, beta1, rest1, beta2, rest2, eps, nesterov = scalars
    w, m, v = rows.unbind(1)
    g1 = g * rest1
    m.mul_(beta1).add_(g1)
    v.mul_(beta2).add_((g * g).mul_(rest2))
    numerator = (m * beta1).add_(g1) if nesterov else m
    w.sub_((numerator * lr_t).div_(square_root(v).add_(eps)))


def _ftrl(rows: Tensor, per_row: Tensor, g: Tensor, lr: float, l1: float, two_l2: float, exponent: float) -> None:
    w, n, z = rows.unbind(1)
    lr_tensor = torch.full((), lr, dtype=torch.float32, device=rows.device)
    n1 = (g * g).add_(n)
    root, old_root = _power(n1, exponent), _power(n, exponent)
    sigma = (root - old_root).div_(lr_tensor)
    z.add_(g - sigma.mul_(w))
    n.copy_(n1)
    l1_tensor = torch.full((), l1, dtype=torch.float32, device=rows.device)
    sign_l1 = torch.where(z > 0, l1_tensor, -l1_tensor)
    new_w = (sign_l1 - z).div_((root / lr_tensor).add_(two_l2))
    w.copy_(new_w.masked_fill_(z.abs() <= l1, 0.0))  # NaN stays NaN


def _power(x: Tensor, exponent: float) -> Tensor:
    return square_root(x) if exponent == 0.5 else x.double().pow(exponent).float()


def _sgd(rows: Tensor, per_row: Tensor, g: Tensor, lr: float) -> None:
    rows[:, 0].sub_(g * lr)


def _momentum(rows: Tensor, per_row: Tensor, g: Tensor, lr: float, decay: float, nesterov: float) -> None:
    w, b = rows.unbind(1)
    b.mul_(decay).add_(g)
    step = (b * decay).add_(g) if nesterov else b
    w.sub_(step * lr)


def _adagrad(rows: Tensor, per_row: Tensor, g: Tensor, lr: float, eps: float) -> None:
    w, accum = rows.unbind(1)
    accum.add_(g * g)
    w.sub_((g * lr).div_(square_root(accum).add_(eps)))


def _mean_square(g: Tensor, columns: Any) -> Tensor:
    """Return the mean square of each row, [U], added as in `core.optimizers.RowWiseAdagrad`."""
    parts = -(-g.shape[1] // LANES)
    squares = torch.nn.functional.pad(g * g, (0, parts * LANES - g.shape[1])).view(len(g), parts, LANES)
    lanes = squares[:, 0] + 0.0
    for part in range(1, parts):
        lanes.add_(squares[:, part])
    total = lanes[:, 0] + 0.0
    for lane in range(1, LANES):
        total.add_(lanes[:, lane])
    return total / torch.full((), float(columns), dtype=torch.float32, device=g.device)


def clip_rows(grads: Tensor, limit: Any) -> Tensor:
    """See `host_kernels`."""
    mean, most = _mean_square(grads, grads.shape[1]), torch.full((), float(limit), device=grads.device)
    factor = torch.where(mean > most, square_root(most / mean), torch.ones_like(most))
    return grads * factor.unsqueeze(1)


def _row_wise_adagrad(rows: Tensor, per_row: Tensor, g: Tensor, lr: float, eps: float, columns: float) -> None:
    accum = per_row[:, 0]
    accum.add_(_mean_square(g, columns))
    rows[:, 0].sub_((g * lr) / (square_root(accum) + eps).unsqueeze(1))


def _row_wise_adam(rows: Tensor, per_row: Tensor, g: Tensor, *scalars: float) -> None:
    lr_t, beta1, rest1, beta2, rest2, eps, columns = scalars
    w, m = rows.unbind(1)
    v = per_row[:, 0]
    v.mul_(beta2).add_(_mean_square(g, columns).mul_(rest2))
    m.mul_(beta1).add_(g * rest1)
    w.sub_((m * lr_t) / (square_root(v) + eps).unsqueeze(1))


_TWINS: dict[str, Callable[..., None]] = {
    "FusedSparseAdagrad": _adagrad,
    "FusedSparseAdam": _lazy_adam,
    "FusedSparseFtrl": _ftrl,
    "FusedSparseLazyAdam": _lazy_adam,
    "FusedSparseMomentum": _momentum,
    "FusedSparseRowWiseAdagrad": _row_wise_adagrad,
    "FusedSparseRowWiseAdam": _row_wise_adam,
    "FusedSparseSGD": _sgd,
}


def round_rows(block: Tensor, ids: Tensor | None, row_ids: Tensor, key: int, formats: tuple[int, ...]) -> None:
    """See `host_kernels`."""
    if not len(row_ids):
        return
    held = block[: len(row_ids)] if ids is None else block.index_select(0, ids)
    for plane, kind in enumerate(formats):  # `held` is a copy, or a view of the block
        if kind == FLOAT32:
            continue
        random = _random_bits(row_ids.long(), block.shape[2], key, plane)
        values = held[:, plane].contiguous()
        if kind == BFLOAT16:
            held[:, plane] = _round_to_bfloat16(values, random)
        else:
            held[:, plane] = _round_to_eight_bits(values, random, int(kind == UNSIGNED_8))
    if ids is not None:
        block.index_copy_(0, ids.long(), held)


def _round_to_bfloat16(values: Tensor, random: Tensor) -> Tensor:
    bits = values.view(torch.int32).long() & _LOW32
    kept = (bits + random) & 0xFFFF0000
    kept = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, kept)
    signed = torch.where(kept >= 1 << 31, kept - (1 << 32), kept)
    return signed.to(torch.int32).view(torch.float32)


def _round_to_eight_bits(values: Tensor, random: Tensor, unsigned: int) -> Tensor:
    """Return the values, float32 [U, D], that 8-bit slots would store, with the operations of `kernels.eight_bits`."""
    largest = values.abs().amax(1, keepdim=True)
    is_zero = largest < float(eight_bits.LEAST_SCALE)
    scale = torch.where(values.amax(1, keepdim=True) == largest, largest, -largest)
    x = values / torch.where(is_zero, torch.ones_like(scale), scale)
    s, y = torch.ones_like(x), x.abs()
    for below, factor, part in eight_bits.TO_LAST_DECADE:
        low = y < below
        s, y = torch.where(low, s * part, s), torch.where(low, y * factor, y)
    slope, offset, base, near_zero = eight_bits.CONSTANTS[unsigned].tolist()
    t = (y * slope).add_(offset).mul_(s).sub_(base).clamp_(min=1.0)
    t = torch.minimum(t, x.abs() * near_zero)
    u = (random >> 4).float().mul_(float(eight_bits.STEP)).add_(float(eight_bits.HALF_STEP))
    code = t.add_(u).long()
    if not unsigned:
        code = torch.where(x < 0, 256 - code.clamp(max=127), code) & 255
    found = torch.from_numpy(eight_bits.MAPS[unsigned]).to(x.device)[code].mul_(scale).add_(0.0)
    return found.masked_fill_(is_zero, 0.0)


def _random_bits(row_ids: Tensor, dim: int, key: int, plane: int) -> Tensor:
    """Return 16 random bits for each row and column of a plane, int64 [U, D], as `kernels.bfloat16` does.

    int64 represents unsigned 64-bit numbers: sums and products wrap, and right shifts are masked.
    """
    x = (row_ids ^ _signed(key)) + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    low, high = (x & _LOW32).unsqueeze(1), _shifted(x, 32).unsqueeze(1)
    pairs = (dim + 1) // 2
    steps = torch.arange(plane * pairs, (plane + 1) * pairs, device=row_ids.device) * WEYL & _LOW32
    y = low ^ steps
    y = ((y ^ (y >> 16)) * 0x7FEB352D) & _LOW32
    y = ((y ^ (y >> 15)) * _signed(0x846CA68B)) & _LOW32
    y = (y ^ (y >> 16)) ^ high
    return torch.stack([y & 0xFFFF, y >> 16], 2).view(len(row_ids), -1)[:, :dim]


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << 64 - by) - 1)


def exchange(
    block: Tensor, row_slots: Tensor, slots: Tensor, leaving: int, admitted: Tensor, admitted_row_slots: Tensor
) -> tuple[Tensor, Tensor]:
    """See `host_kernels`."""
    out = []
    for held, values in ((block, admitted), (row_slots, admitted_row_slots)):
        if leaving and held.shape[1]:
            out.append(held.index_select(0, slots[len(slots) - leaving :]))
        else:
            out.append(held.new_empty((leaving, *held.shape[1:])))
        if len(slots) and held.shape[1]:
            place(held, slots, values)
    return out[0], out[1]


def place(rows: Tensor, positions: Tensor, values: Tensor) -> None:
    """See `host_kernels`."""
    rows.index_copy_(0, positions.long(), values)
