"""Detects loaders that reuse the memory of prefetched batches before the loop yields them.

A loader may reuse one buffer. That is safe in a plain loop, which has finished a batch when the next one is read, but
not in a loop that reads ahead. Ids are copied when they are read; the rest of a batch stays in the loader's memory.
Therefore in-flight batches are checked when a new batch is read: torch counts the writes to a tensor, and if two
batches share memory, their contents are compared before and after the read.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_DEEPEST = 4  # levels of containers and objects that are searched
_LONGEST = 256  # items; longer containers are not searched
_MOST_BYTES = 1 << 13  # to compare per array; a part suffices, since a refill changes the whole array

ArrayOrTensor = Tensor | npt.NDArray[Any]


def arrays_in(thing: Any, depth: int = _DEEPEST) -> Iterator[ArrayOrTensor]:
    """Yield a batch's tensors and arrays in host memory, also inside lists, tuples, dicts and fields of objects."""
    if isinstance(thing, Tensor):
        if thing.device.type == "cpu" and thing.layout is torch.strided and thing.numel():
            yield thing
    elif isinstance(thing, np.ndarray):
        if thing.size and not thing.dtype.hasobject:
            yield thing
    elif depth and isinstance(thing, Mapping):
        if len(thing) <= _LONGEST:
            for value in thing.values():
                yield from arrays_in(value, depth - 1)
    elif depth and isinstance(thing, list | tuple):
        if len(thing) <= _LONGEST:
            for value in thing:
                yield from arrays_in(value, depth - 1)
    elif depth and hasattr(thing, "__dict__") and not isinstance(thing, type):
        for value in list(vars(thing).values()):
            yield from arrays_in(value, depth - 1)
    elif depth and hasattr(thing, "__slots__"):
        for name in thing.__slots__:
            yield from arrays_in(getattr(thing, name, None), depth - 1)


class _Held:
    """An array of an in-flight batch."""

    def __init__(self, leaf: ArrayOrTensor) -> None:
        self.leaf = leaf
        self.start, self.stop = _range(leaf)
        self.version = _version(leaf)
        self.content = _content(leaf)
        self.is_shared = False  # shares memory with another in-flight batch

    def overlaps(self, other: "_Held") -> bool:
        return self.start < other.stop and other.start < self.stop


class _Batch:
    """The arrays of an in-flight batch."""

    def __init__(self, batch: Any) -> None:
        self.arrays = [_Held(leaf) for leaf in arrays_in(batch)]
        self.changed_by: int | None = None  # the number of the batch whose read has changed it


class InFlight:
    """The memory of batches that were read but not yet yielded."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque()

    def before_read(self) -> None:
        """Record the contents that the next read must not change; before the read, the body may have changed them."""
        for held in self._all():
            held.version = _version(held.leaf)
            if held.is_shared:
                held.content = _content(held.leaf)

    def after_read(self, batch: Any, number: int) -> None:
        """Add a batch; raise ValueError, with the batch's number, if reading it has changed an in-flight batch."""
        new, changed = _Batch(batch), False
        for earlier in self._batches:
            for held in earlier.arrays:
                for one in new.arrays:
                    if held.overlaps(one):
                        held.is_shared = one.is_shared = True
                if _version(held.leaf) != held.version or (held.is_shared and _content(held.leaf) != held.content):
                    earlier.changed_by, changed = number, True
        if changed:
            raise ValueError(_REFILLED.format(number))
        self._batches.append(new)

    def given(self) -> None:
        """Forget the first batch, which the loop yields; raise ValueError if it was changed after it was read."""
        first = self._batches.popleft()
        if first.changed_by is not None:
            raise ValueError(_REFILLED.format(first.changed_by))

    def _all(self) -> Iterator[_Held]:
        return (held for batch in self._batches for held in batch.arrays)


def _version(leaf: ArrayOrTensor) -> int:
    """Return how often torch has written to a tensor; 0 for an array, or a tensor without such a count."""
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def _range(leaf: ArrayOrTensor) -> tuple[int, int]:
    """Return the start and end address of an array."""
    if isinstance(leaf, Tensor):
        reach = sum((n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride(), strict=True)) + 1
        return leaf.data_ptr(), leaf.data_ptr() + reach * leaf.element_size()
    if leaf.flags.c_contiguous:
        return leaf.ctypes.data, leaf.ctypes.data + leaf.nbytes
    return np.lib.array_utils.byte_bounds(leaf)


def _content(leaf: ArrayOrTensor) -> bytes:
    """Return the bytes of an array, or of some evenly spaced rows of a large one."""
    values = _as_numpy(leaf) if isinstance(leaf, Tensor) else leaf
    if values.nbytes > _MOST_BYTES and values.ndim:
        values = values[:: -(-values.nbytes // _MOST_BYTES)]
    return (values[:_MOST_BYTES] if values.ndim else values).tobytes()


def _as_numpy(leaf: Tensor) -> npt.NDArray[Any]:
    if leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
        leaf = leaf.detach().resolve_conj().resolve_neg()
    try:
        return leaf.numpy()
    except TypeError:  # NumPy lacks its dtype
        return leaf.contiguous().view(torch.uint8).numpy() if leaf.ndim else leaf.float().numpy()


_REFILLED = (
    "reading batch {0} has changed an earlier batch that the loop has not yet yielded: the loop reads ahead, and the "
    "loader reuses memory. Allocate new memory for each batch (tensor.clone(), array.copy()), or use read_ahead=0, "
    "which disables reading ahead in loops that do not accumulate"
)
