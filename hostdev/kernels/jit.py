"""All numba policy: how a kernel is compiled, and what is promised of its arithmetic.

Every kernel is a pure function on arrays. If its first two arguments are `start, stop`, the half-open range of items to
work on, items of different ranges never write the same memory, so a range may run on any thread. If it has a last
argument `piece` besides, that is the number of the range.

Indices are made unsigned (`np.uint64`) before they are used: for a signed one numba adds the wrap-around of negative
indices, which keeps a loop from vectorising.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hostdev.kernels.cached import check_cache

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
        return check_cache(numba.njit(function, cache=True, **_OPTIONS))
    except RuntimeError:  # numba: "cannot cache function ...: no locator available"
        return numba.njit(function, **_OPTIONS)


def inline(function: Callable[..., Any]) -> Any:
    """Compile a scalar helper into the kernels that call it."""
    return numba.njit(function, inline="always", **_OPTIONS)


def _prefetch(to_write: int, locality: int) -> Any:
    """An intrinsic that asks for the line at an address; locality 3 is the nearest cache, 2 the next, 0 used once."""

    @intrinsic
    def ask(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
            function = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            )
            constants = [ir.Constant(word, value) for value in (to_write, locality, 1)]  # 1: data, not code
            builder.call(function, [builder.inttoptr(arguments[0], byte), *constants])
            return context.get_dummy_value()

        return types.void(types.intp), generate

    return ask


def _fetch_add(typing_context: Any, address: Any, by: Any) -> Any:
    """Add to the int64 at an address and return what it was, in one step for all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "monotonic")

    return types.int64(types.intp, types.int64), generate


def _fetch_or(typing_context: Any, address: Any, bits: Any) -> Any:
    """Set bits of the uint64 at an address and return what it was, in one step for all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("or", pointer, arguments[1], "monotonic")

    return types.uint64(types.intp, types.uint64), generate


def _load(typing_context: Any, address: Any) -> Any:
    """The int64 at an address, read anew each time: another thread may have written it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "monotonic", 8)

    return types.int64(types.intp), generate


fetch_add: Any = intrinsic(_fetch_add)
fetch_or: Any = intrinsic(_fetch_or)
load: Any = intrinsic(_load)

_ask_to_write = _prefetch(1, 3)
_ask_to_read = _prefetch(0, 2)
_ask_to_read_once = _prefetch(0, 0)


@inline
def prefetch_to_write(array: Any, row: Any, nbytes: Any) -> None:
    """Ask the cache for the first `nbytes` of array[row], to be written; row need not be in range."""
    address = array.ctypes.data + np.int64(row) * np.int64(array.strides[0])
    for offset in range(0, nbytes, 64):
        _ask_to_write(address + offset)


@inline
def prefetch_to_read(array: Any, row: Any, nbytes: Any) -> None:
    """Ask the second cache for the first `nbytes` of array[row]; row need not be in range."""
    address = array.ctypes.data + np.int64(row) * np.int64(array.strides[0])
    for offset in range(0, nbytes, 64):
        _ask_to_read(address + offset)


@inline
def prefetch_to_read_once(array: Any, row: Any, nbytes: Any) -> None:
    """As `prefetch_to_read`, for a stream that must not drive out what is used again."""
    address = array.ctypes.data + np.int64(row) * np.int64(array.strides[0])
    for offset in range(0, nbytes, 64):
        _ask_to_read_once(address + offset)


def _as_pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


_pointer: Any = intrinsic(_as_pointer)


@kernel
def address_of(array: Any) -> Any:
    """Return where an array begins; in a fifth of the time that numpy takes."""
    return array.ctypes.data


@inline
def array_at(address: Any, n: Any, dtype: Any) -> Any:
    """The array [n] at an address, C-contiguous; somebody must keep its memory alive."""
    return numba.carray(_pointer(address), n, dtype)  # type: ignore[attr-defined]


@inline
def prefetch_update(block: Any, ids: Any, i: Any, stop: Any) -> None:
    """Ask the cache for the row that the update of item i + 8 of [.., stop) will write.

    To be read, for the second cache: more such rows may be on their way than rows asked for to be written.
    """
    ahead = i + np.uint64(8)
    if ahead < np.uint64(stop):
        prefetch_to_read(block, ids[ahead], block.strides[0])
