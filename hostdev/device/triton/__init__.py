"""Triton kernels for a device's rows: one launch where torch needs several, with the host kernels' bits.

`ops` has the operations for callers; `rows`, `sums` and `updates` the kernels, `launch` how they are launched. CPU
builds of torch come without Triton, so nothing outside this package imports it, and here only a call on CUDA does.
"""

import importlib.util


def available() -> bool:
    """Tell whether Triton can be imported; it is not imported for that."""
    return importlib.util.find_spec("triton") is not None
