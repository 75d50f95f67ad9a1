"""Device rows that change even in steps that do not use them: packs such rows, and applies the steps that they missed.

The arithmetic is that of `kernels.catch_up`: the CPU runs its kernels, and other devices run torch operations, each
rounded once.

S and R: number of optimizer state columns with D values per row, and with one value per row.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hostdev.kernels.catch_up import bring_tasks, packed_planes, unpack_tasks
from hostdev.kernels.clock import Clock
from hostdev.kernels.pool import run_tasks

_ROUNDED = {"cuda", "xpu"}  # device types on which torch rounds square roots once


def square_root(x: Tensor) -> Tensor:
    """Return the square roots of float32 numbers, each rounded once.

    On the CPU, torch's float32 square root may be off by one unit in the last place, as MKL computes it.
    """
    return x.sqrt() if x.device.type in _ROUNDED else x.double().sqrt().float()


class _OnDevice(NamedTuple):
    """The arrays of a clock on a device; they may have more entries than the clock needs."""

    inverse: Tensor
    frozen: Tensor
    powers: Tensor
    source: Any  # the host array behind `inverse`; all arrays are copied again if the clock has another one
    known: int  # entries of `inverse` and `frozen` that are on the device


class Clocks:
    """Copies of a table's clocks on a device, extended with each step. Nothing is copied to the CPU."""

    def __init__(self) -> None:
        self._held: _OnDevice | None = None

    def get(self, clock: Clock, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the arrays `inverse`, `recent`, `frozen` and `powers` of a clock, on the device."""
        held, needed = self._held, int(clock.now) + 1
        if held is None or held.source is not clock.inverse:
            inverse, frozen, powers = (
                torch.from_numpy(one).to(device) for one in (clock.inverse, clock.frozen, clock.powers)
            )
            held = _OnDevice(inverse, frozen, powers, clock.inverse, needed)
        elif held.known < needed:
            for to, values in ((held.inverse, clock.inverse), (held.frozen, clock.frozen)):
                # Entries of `frozen` become final N steps later than entries of `inverse`.
                first = max(0, held.known - len(clock.recent)) if to is held.frozen else held.known
                to[first:needed].copy_(torch.from_numpy(values[first:needed]))
            held = held._replace(known=needed)
        self._held = held
        return held.inverse, torch.from_numpy(clock.recent).to(device), held.frozen, held.powers


def pack(block: Tensor, row_slots: Tensor, moments: bool) -> Tensor:
    """Pack rows float32 [N, 1 + S, D] and their per-row state [N, R]; return float32 [N, W]."""
    return torch.cat([block[:, : packed_planes(moments)].flatten(1), row_slots[:, -1:]], 1)


def unpack(packed: Tensor, dim: int, clock: Clock, clocks: Clocks) -> Tensor:
    """Return the weights of packed rows [N, W] as they are after the last step, float32 [N, D]."""
    if packed.device.type == "cpu":
        out = torch.empty((len(packed), dim), dtype=torch.float32)
        run_tasks(unpack_tasks(packed.contiguous().numpy(), clock, out.numpy()))
        return out
    rows = packed[:, :-1].reshape(len(packed), -1, dim).clone()
    _bring(rows, packed[:, -1], clock, clocks)
    return rows[:, 0].contiguous()


def bring(block: Tensor, row_slots: Tensor, clock: Clock, clocks: Clocks) -> None:
    """Apply the steps that rows have missed, in place: block float32 [N, 1 + S, D], row_slots float32 [N, R]."""
    if block.device.type == "cpu":
        run_tasks(bring_tasks(block.numpy(), row_slots.numpy(), clock))
        return
    _bring(block, row_slots[:, -1], clock, clocks)
    row_slots[:, -1] = float(clock.now)


def _bring(rows: Tensor, last: Tensor, clock: Clock, clocks: Clocks) -> None:
    """Apply missed steps, in place, to rows [N, planes, D] that were last written at the steps `last`, float32 [N]."""
    if not len(rows):
        return
    inverse, recent, frozen, powers = clocks.get(clock, rows.device)
    now = int(clock.now)
    # Steps out of range, even NaN, count as `now`, which keeps indices valid.
    begun = torch.where((last >= 0) & (last < now), last, torch.full_like(last, now)).long()
    w = rows[:, 0]
    if clock.moments:
        k, N = now - begun, len(recent) - 1
        near = (k <= N).unsqueeze(1)
        c = torch.where(near, recent[k.clamp(max=N)], frozen[begun.clamp(max=len(frozen) - 1)])
        powers_of = torch.where((k < len(powers)).unsqueeze(1), powers[k.clamp(max=len(powers) - 1)], 0.0)
        m, v = rows[:, 1], rows[:, 2]
        s, c, e = square_root(v), c[:, :-1], c[:, -1:]
        divisor = s + e
        r = torch.ones_like(divisor) / divisor
        x = (s - float(clock.shift) * e) * r
        terms = c.shape[1]
        a = c[:, terms - 1 :] * x + c[:, terms - 2 : terms - 1]
        for p in range(terms - 3, -1, -1):
            a = a * x + c[:, p : p + 1]
        missed = (k > 0).unsqueeze(1)
        w.copy_(torch.where(missed, w - m * r * a, w))
        m.copy_(torch.where(missed, m * powers_of[:, :1], m))
        v.copy_(torch.where(missed, v * powers_of[:, 1:], v))
    product = torch.from_numpy(np.array([clock.product])).to(rows.device)  # float64; a Python number might be rounded
    factor = (inverse[begun] * product).float().unsqueeze(1)
    w.mul_(factor)
