"""The numba policy: how kernels are compiled, and what their arithmetic guarantees.

The results of a kernel depend only on its arguments. If its first two arguments are `start, stop`, a half-open range of
items, then calls for different ranges never write the same memory, so any thread may run any range. If its last
argument is `piece`, this is the number of the range.

Indices are converted to `np.uint64` before use: numba adds wrap-around for negative signed indices, which prevents
vectorization.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import ffi as llvm
from numba import types
from numba.core import cgutils as _cgutils
from numba.core.compiler_lock import global_compiler_lock as _numbas_lock
from numba.extending import intrinsic
from numba.np import arrayobj as _arrayobj

from hostdev.kernels.cached import check_cache

_OPTIONS: dict[str, Any] = {
    "nogil": True,  # the pool runs ranges of one kernel on several Python threads
    "fastmath": False,  # no reassociation and no contraction to FMA: each operation is rounded once
    "error_model": "numpy",  # Python's check for a zero divisor prevents vectorization
    "boundscheck": False,  # ids are checked once, before they are passed to a kernel
}

_turns: Callable[[], AbstractContextManager[object]] = nullcontext
_lock: Any = _numbas_lock  # numba has no annotations
_codegen: Any = _cgutils
_arrays: Any = _arrayobj
_llvms_lock: Any = llvm.lib._lock._lock  # a reentrant lock, which a Python function acquires for each call of LLVM


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` at its first call with each combination of argument types, and cache the code on disk.

    The cache is in a folder next to the source or in the user's cache folder; if neither is writable, every process
    compiles the function.
    """
    try:
        made = check_cache(numba.njit(function, cache=True, **_OPTIONS))
    except RuntimeError:  # numba: "cannot cache function ...: no locator available"
        made = numba.njit(function, **_OPTIONS)
    return _unlock_after_errors(made)


def _unlock_after_errors(dispatcher: Any) -> Any:
    """Make a kernel release numba's and LLVM's locks if its compilation ends in an error; return the kernel.

    Ctrl-C can arrive when the main thread has just acquired a lock but has not recorded that yet. The pool's helper
    threads would then wait forever for the lock, and the main thread for the helper threads.
    """
    compile_for = dispatcher._compile_for_args

    def compile_and_unlock(*args: Any, **given: Any) -> Any:
        if _lock.is_locked():  # locked by this thread, which compiles another kernel that calls this one
            return compile_for(*args, **given)
        try:
            with _turns():
                return compile_for(*args, **given)
        finally:
            while _lock.is_locked():
                _lock.release()
            while _llvms_lock._is_owned():
                _llvms_lock.release()

    dispatcher._compile_for_args = compile_and_unlock
    return dispatcher


def take_turns(turns: Callable[[], AbstractContextManager[object]]) -> None:
    """Make this process hold the context that `turns` returns while it loads or compiles a kernel.

    If this is a lock that processes share, they do not all compile the same kernels: the first one fills the cache.
    """
    global _turns
    _turns = turns


def inline(function: Callable[..., Any]) -> Any:
    """Compile `function`, a small helper, into each kernel that calls it."""
    return numba.njit(function, inline="always", **_OPTIONS)


def inline_code(function: Callable[..., Any]) -> Any:
    """Compile `function` once for each combination of types, and copy its code into each kernel that calls it.

    For large helpers, which `inline` would compile again in each place. Kernels that convert rounded values compile in
    less than half the time, and are up to a fifth faster; those that apply missed steps are slower than with `inline`.
    """
    return numba.njit(function, forceinline=True, **_OPTIONS)


def _prefetch(to_write: int, locality: int) -> Any:
    """Return an intrinsic that prefetches the cache line at an address.

    Args:
        to_write: 1 to prefetch for writing, 0 for reading.
        locality: 3 for the L1 cache, 2 for L2, 0 for data that is used only once.
    """

    @intrinsic
    def ask(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
            function = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            )
            constants = [ir.Constant(word, value) for value in (to_write, locality, 1)]  # the last: data, not code
            builder.call(function, [builder.inttoptr(arguments[0], byte), *constants])
            return context.get_dummy_value()

        return types.void(types.intp), generate

    return ask


def _fetch(operation: str, kind: Any) -> Any:
    """Return an intrinsic that changes the 64-bit integer at an address atomically, and returns its previous value."""

    @intrinsic
    def change(typing_context: Any, address: Any, by: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw(operation, pointer, arguments[1], "monotonic")

        return kind(types.intp, kind), generate

    return change


def _load(typing_context: Any, address: Any) -> Any:
    """Atomically load the int64 at an address, which other threads may change."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "monotonic", 8)

    return types.int64(types.intp), generate


fetch_add = _fetch("add", types.int64)
fetch_or = _fetch("or", types.uint64)  # sets bits
load: Any = intrinsic(_load)

_ask_to_write = _prefetch(1, 3)
ask_to_read = _prefetch(0, 2)
_ask_to_read_once = _prefetch(0, 0)


@inline
def prefetch_to_write(array, row, nbytes):
    """Prefetch the first `nbytes` of array[row] for writing; the row need not exist."""
    address = array.ctypes.data + np.int64(row) * np.int64(array.strides[0])
    for offset in range(0, nbytes, 64):
        _ask_to_write(address + offset)


@inline
def prefetch_to_read(array, row, nbytes):
    """Prefetch the first `nbytes` of array[row] into the L2 cache; the row need not exist."""
    address = array.ctypes.data + np.int64(row) * np.int64(array.strides[0])
    for offset in range(0, nbytes, 64):
        ask_to_read(address + offset)


@inline
def prefetch_to_read_once(array, row, nbytes):
    """Do the same as `prefetch_to_read`, for data that is used once and must not evict other data from the cache."""
    address = array.ctypes.data + np.int64(row) * np.int64(array.strides[0])
    for offset in range(0, nbytes, 64):
        _ask_to_read_once(address + offset)


@kernel
def address_of(array):
    """Return the address of an array, five times as fast as numpy's `array.ctypes.data`."""
    return array.ctypes.data


def _make_array(context: Any, builder: Any, of: Any, data: Any, shape: Sequence[Any]) -> Any:
    """Return a C-contiguous array of a numba type in memory that the caller keeps alive."""
    made, itemsize = _arrays.make_array(of)(context, builder), _codegen.intp_t(_arrays.get_itemsize(context, of))
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.bitcast(data, context.get_data_type(of.dtype).as_pointer())
    _arrays.populate_array(made, data, shape, strides, itemsize, meminfo=None)
    return made._getvalue()


def _array_at(typing_context: Any, address: Any, n: Any, dtype: Any) -> Any:
    """Return the C-contiguous array [n] at an address; the caller must keep the memory alive."""
    found = types.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return _make_array(context, builder, found, pointer, [arguments[1]])

    return found(types.intp, types.intp, dtype), generate


def _without_count(array: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the numba type of what `bare_bits(array, dtype)` returns, and the function that generates its code."""
    found = types.Array(dtype, array.ndim, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        before, after = (_arrays.get_itemsize(context, one) for one in (array, found))
        given = _arrays.make_array(array)(context, builder, arguments[0])
        *shape, last = _codegen.unpack_tuple(builder, given.shape)
        more, fewer = (_codegen.intp_t(max(1, ratio)) for ratio in (before // after, after // before))
        last = builder.udiv(builder.mul(last, more), fewer)
        return _make_array(context, builder, found, given.data, [*shape, last])

    return found, generate


def _bare(typing_context: Any, array: Any) -> Any:
    """Return the same C-contiguous array, but not reference-counted; for use in kernels.

    The caller must keep the array's memory alive. In a loop with branches, numba would count references to slices of
    the array atomically, in memory that threads share, which takes longer than the arithmetic on a short row.
    """
    found, generate = _without_count(array, array.dtype)
    return found(array), generate


def _bare_bits(typing_context: Any, array: Any, dtype: Any) -> Any:
    """Return the values of a C-contiguous array as another dtype, without conversion or reference counting.

    See `bare`. The length of the last dimension changes so that the number of bytes stays the same.
    """
    found, generate = _without_count(array, dtype.dtype)
    return found(array, dtype), generate


array_at: Any = intrinsic(_array_at)
bare: Any = intrinsic(_bare)
bare_bits: Any = intrinsic(_bare_bits)


@inline
def prefetch_update(block, ids, i, stop):
    """At iteration i of a loop that updates the rows block[ids[i]], prefetch the row of iteration i + 8.

    If the loop ends (at `stop`) before iteration i + 8, nothing is prefetched. The row is prefetched for reading, into
    the L2 cache: more such prefetches can be in flight than prefetches for writing.
    """
    ahead = i + np.uint64(8)
    if ahead < np.uint64(stop):
        prefetch_to_read(block, ids[ahead], block.strides[0])
