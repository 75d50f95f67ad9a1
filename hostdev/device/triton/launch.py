"""Kernel launches: tiles of whole rows, and the options that make sure each operation is rounded once.

A kernel that updates in place has a barrier between its loads and stores. Without it, a warp could load a value that
another warp has already overwritten (https://github.com/triton-lang/triton/issues/1615).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Otherwise LLVM, or ptxas without --fmad=false, fuses a multiplication and the addition after it into one FMA.
OPTIONS = {"enable_fp_fusion": False}
_ELEMENTS = 1024  # per tile: 8 for each of 128 threads


@triton.jit
def tile(D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, program):
    """Return row, column and validity of each element of tile `program`, which has ROWS rows of D columns."""
    at = tl.arange(0, BLOCK)
    return program * ROWS + at // D, at % D, at < ROWS * D


def shape(D: int, elements: int = _ELEMENTS) -> dict[str, int]:
    """Return a tile's constants: as many whole rows as fit, so that few lanes are idle."""
    block = max(elements, triton.next_power_of_2(D))
    return {"D": D, "ROWS": block // D, "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


def tiles(rows: int, constants: dict[str, int]) -> int:
    """Return the number of tiles that hold this many rows."""
    return -(-rows // constants["ROWS"])


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the current stream of the first tensor's device; do nothing for 0 programs."""
    if programs == 0:
        return
    for tensor in arguments:
        if isinstance(tensor, Tensor) and not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    first = next(tensor for tensor in arguments if isinstance(tensor, Tensor))
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]  # no effect for the interpreter on a CPU
        kernel[(programs,)](*arguments, **constants, **OPTIONS)
