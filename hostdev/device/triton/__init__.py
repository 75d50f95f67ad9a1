"""Triton kernels for rows on the device: one launch where torch needs several, with the host kernels' exact results.

Callers use the operations in `ops`; `rows`, `sums` and `updates` contain the kernels, and `rows.launch` launches them.
CPU builds of torch lack Triton, so only a call on CUDA imports it.
"""

import importlib.util


def available() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None
