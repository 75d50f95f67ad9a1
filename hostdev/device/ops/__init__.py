"""Operations on rows on the device: one module per implementation, all with the same functions.

All implementations give identical results, except that on CUDA many terms are added in a different order (see
`sum_uses`).

Shapes: N occurrences in B bags, U unique rows, D columns. A block [any, 1 + S, D] holds rows with S optimizer state
columns of D values; row_slots [any, R] holds their R state columns of one value per row. A batch's rows are in this
order: H hits, A admitted, M bypassing.
"""

from types import ModuleType

import torch

from hostdev.device import triton
from hostdev.device.ops import host_kernels, torch_operations, triton_kernels

Ops = ModuleType  # with the functions that `host_kernels` describes
FUSED = {"cuda"}  # device types with Triton kernels


def get_ops(device: torch.device) -> Ops:
    """Return a device's implementation: host kernels on the CPU, Triton on CUDA, torch operations elsewhere."""
    if device.type == "cpu":
        return host_kernels
    return triton_kernels if device.type in FUSED and triton.available() else torch_operations
