"""All numba policy: how a kernel is compiled, and what is promised of its arithmetic.

Every kernel is a pure function on arrays whose first two arguments are the half-open range `start, stop` of
items to work on; items of different ranges never touch the same memory, so a range may run on any thread.
"""

from collections.abc import Callable
from typing import Any

import numba

_OPTIONS: dict[str, Any] = {
    "nogil": True,  # the pool runs ranges of one kernel on several Python threads
    "fastmath": False,  # no reassociation and no contraction to FMA: each operation is rounded once
    "error_model": "numpy",  # a check for a zero divisor keeps a division from vectorising
    "boundscheck": False,  # ids are checked once, before a kernel sees them
}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` lazily, one machine-code version per argument type, cached on disk beside the source.

    Where neither the source's folder nor the user's cache folder can be written, it is compiled in every process.
    """
    try:
        return numba.njit(function, cache=True, **_OPTIONS)
    except RuntimeError:  # numba: "cannot cache function ...: no locator available"
        return numba.njit(function, **_OPTIONS)


def inline(function: Callable[..., Any]) -> Any:
    """Compile a scalar helper into the kernels that call it."""
    return numba.njit(function, inline="always", **_OPTIONS)
