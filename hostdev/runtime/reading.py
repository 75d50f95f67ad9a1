"""Reads a loop's loader so that the program's code gives the same results at any depth, or raises an error.

The loader, `ids` and `send` are the program's code. They run in the loop's thread, but ahead of the body. Problems that
this causes are: random numbers (see `random_streams` and `generators`), reused memory (`InFlightMemory`), and
prefetched batches that a loop did not use (`ReadAhead` keeps them for the next loop over the iterator). A framework
whose loaders have a state that belongs to the body's batch, such as accelerate, registers a `LoaderStates` under the
name of the module that has these loaders.

A loader may reuse one buffer. That is safe in a plain loop, which has finished a batch when the next one is read, but
not in a loop that reads ahead. Ids are copied when they are read; the rest of a batch stays in the loader's memory.
Therefore in-flight batches are checked when a new batch is read: torch counts the writes to a tensor, and if two
batches share memory, their contents are compared before and after the read.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core import registry
from hostdev.runtime.generators import LOADER_STATES
from hostdev.runtime.random_streams import Place, RandomStreams

_DEEPEST = 4  # levels of containers and objects that are searched
_LONGEST = 256  # items; longer containers are not searched
_MOST_BYTES = 1 << 13  # compared bytes per array; a part suffices, since a refill changes the whole array

ArrayOrTensor = Tensor | npt.NDArray[Any]
_OWN_REFERENCES = 2  # references to the iterator: the field, and the argument of the counting call


class _Ahead(threading.local):
    is_set = False


_ahead = _Ahead()


@contextmanager
def reading_ahead() -> Iterator[None]:
    """Flag, for this thread within the block, that user code runs ahead of a training loop's body.

    How far ahead the loader, `ids` and `send` run depends on the pipeline's depth and the cache, and so would the
    values that they read from a table. The tables of an open loop over `train` therefore refuse reads and writes while
    the flag is set.
    """
    before, _ahead.is_set = _ahead.is_set, True
    try:
        yield
    finally:
        _ahead.is_set = before


def is_reading_ahead() -> bool:
    """Return whether the flag of `reading_ahead` is set for the calling thread."""
    return _ahead.is_set


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


class InFlightMemory:
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


class ReadAhead:
    """The batches of an iterator that were read but not used yet.

    A loop that ends early has read more batches than its body has used, because of the depth and the window of the
    caches. The next loop over the same iterator gets these batches first, so that none is lost.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.streams: RandomStreams | None = None  # random streams of the last loop over the iterator
        self.states: list[Any] = []  # the `reading.LoaderStates` of the kept batches
        self.may_read_ahead: bool | None = None  # whether the iterator may be read ahead; None if not yet determined
        self._kept: deque[Any] = deque()
        self._readers = 0
        self._reading = threading.Lock()  # an earlier reader may still run the loader's code

    @property
    def is_held(self) -> bool:
        """Whether other code holds the iterator, and may continue with it."""
        return sys.getrefcount(self.source) > _OWN_REFERENCES

    @property
    def place(self) -> Place | None:
        """The position of the last loop over the iterator, which selects the random streams; None if unknown."""
        return None if self.streams is None else self.streams.place

    def batches(self) -> Iterator[Any]:
        """Yield the kept batches, then new ones from the iterator, until `batches` is called again."""
        with self._reading:
            again = deque(self._kept)
            self._readers += 1
            reader = self._readers
        while again:
            yield again.popleft()
        while True:
            with self._reading:
                if reader != self._readers:  # the next loop has begun
                    return
                try:
                    held = [next(self.source)]
                except StopIteration:
                    return
                self._kept.append(held[0])
            yield held.pop()  # popped, so that only the caller keeps a batch alive

    def given(self) -> None:
        """Remove the first kept batch, which the loop has yielded."""
        self._kept.popleft()


class Iterators:
    """The iterators that a runtime's loops have read ahead, and their positions."""

    def __init__(self) -> None:
        self._held: list[ReadAhead] = []
        self._last: ReadAhead | None = None  # the iterator of the last loop over `train`
        self._loaded: Place | None = None  # a loaded checkpoint's position

    def get(self, source: Iterator[Any], *, train: bool) -> ReadAhead:
        """Return an iterator's record, which has the batches that an earlier loop has read but not used."""
        self._held = [one for one in self._held if one.is_held or one is self._last]
        found = self.find(source)
        if found is None:
            found = ReadAhead(source)
            self._held.append(found)
        if train:
            self._last = found
        return found

    def find(self, source: Any) -> ReadAhead | None:
        """Return an iterator's record, or None if no earlier loop has read the iterator."""
        return next((one for one in self._held if one.source is source), None)

    def remove(self, ahead: ReadAhead) -> None:
        """Forget an iterator that is at its end."""
        self._held = [one for one in self._held if one is not ahead]
        if self._last is ahead:
            self._last = None

    def clear(self) -> None:
        """Forget all iterators."""
        self._held, self._last = [], None

    @property
    def place(self) -> Place | None:
        """The position where the last loop over `train` left its iterator."""
        return None if self._last is None else self._last.place

    def continue_at(self, place: Place | None) -> None:
        """Make the next loop over `train` begin at a checkpoint's position in the batches."""
        self._loaded = place

    def take_loaded(self) -> Place | None:
        """Return a loaded checkpoint's position at the first call after loading; else None."""
        place, self._loaded = self._loaded, None
        return place


def require_read_ahead(read_ahead: Any, *, background: bool) -> None:
    """Raise ValueError unless `read_ahead` is None, True, or a number of batches; `background` allows only None."""
    if read_ahead is None or (read_ahead is True and not background):
        return
    if read_ahead is not True and (isinstance(read_ahead, bool) or not isinstance(read_ahead, int) or read_ahead < 0):
        raise ValueError(f"read_ahead must be True, or a number of batches, 0 or more, not {read_ahead!r}")
    if background:
        raise ValueError("read_ahead has no effect with background=True; leave out one of them")


class LoaderStates(Protocol):
    """A framework's state for each batch that was read but not yet yielded; a loop creates it without arguments."""

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and record each one's state, unless an earlier loop has recorded it."""

    def show(self) -> None:
        """Show the framework the state of the batch that is about to be yielded."""

    def hide(self) -> None:
        """Stop showing a state to the framework, because the loop has ended."""


class Reading:
    """The batches of one loop, from its loader to its body.

    Args:
        batches: The loader, whose iterator is created here.
        keep: Called with an iterator; returns its `ReadAhead`, from which a later loop may continue.
    """

    def __init__(self, batches: Iterable[Any], keep: Callable[[Iterator[Any]], ReadAhead]) -> None:
        source = iter(batches)
        self.kept = kept = keep(source) if source is batches else None
        self._streams: RandomStreams | None = None
        self._in_flight: InFlightMemory | None = None  # None if no batch is read ahead of the body
        self._drew: deque[Sequence[str]] = deque()  # for each prefetched batch, the global generators that it drew from
        self._source = source if kept is None else kept.batches()
        self._states = [] if kept is None else kept.states
        if not self._states:
            names = [name for name in registry.names(LOADER_STATES) if name in sys.modules]
            self._states += [registry.find(LOADER_STATES, name)() for name in names]
        for states in self._states:
            self._source = states.reading(self._source)

    def watch(self, streams: RandomStreams, *, ahead: bool) -> None:
        """Prepare to watch what the program's code does while batches are read.

        Args:
            streams: The batches' random streams.
            ahead: Whether batches are read before the body needs them.
        """
        self._streams = streams
        if ahead:
            self._in_flight = InFlightMemory()
        if self.kept is not None:
            self.kept.streams = streams

    @property
    def copies(self) -> bool:
        """Whether ids must be copied when they are read, because the loader may reuse their memory."""
        return self._in_flight is not None

    @property
    def place(self) -> Place | None:
        """The loop's position in its sequence of batches, which selects their random streams; None if unknown."""
        return None if self._streams is None else self._streams.place

    @contextmanager
    def batch(self, number: int) -> Iterator[list[Any]]:
        """Read the next batch for a `with` block, which calls `ids` and `send` with the batch.

        Args:
            number: Number of batches that were read before this one.

        Yields:
            A list with the batch, which the block removes from the list; an empty list after the last batch.
        """
        if self._in_flight is not None:
            self._in_flight.before_read()
        with self._reading(number) as (held, drew):
            has_one = bool(held)
            yield held
        if has_one:
            self._drew.append(drew)

    @contextmanager
    def _reading(self, number: int) -> Iterator[tuple[list[Any], Sequence[str]]]:
        """Read the next batch; the loader, and the `with` block, draw from the batch's own random streams."""
        streams = self._streams
        position = 0 if streams is None else streams.start + number
        # The first `next` of a new sequence draws from the global generators, as in a plain torch loop.
        is_first = streams is not None and streams.is_new and not number
        with nullcontext() if self._in_flight is None or not number else reading_ahead():  # the first is not read ahead
            held = self._next() if is_first else []
            if is_first and not held:
                yield held, ()
                return
            with nullcontext(list[str]()) if streams is None else streams.reading(position) as drew:
                yield held if is_first else self._next(), drew

    def _next(self) -> list[Any]:
        """Return the loader's next batch in a list; the caller removes it, so that nothing keeps the batch alive."""
        for batch in self._source:
            return [batch]
        return []

    def has_read(self, batch: Any, number: int) -> None:
        """Record the memory of batch `number`; raise ValueError if reading this batch has changed an earlier one."""
        if self._in_flight is not None:
            self._in_flight.after_read(batch, number)

    def give(self) -> None:
        """Count the first prefetched batch as yielded; raise ValueError if reading a later batch has changed it."""
        if self.kept is not None:
            self.kept.given()
        if self._in_flight is not None:
            self._in_flight.given()
        if self._streams is not None:
            self._streams.give(self._drew.popleft())
        for states in self._states:
            states.show()

    def end(self) -> None:
        """Release the batches."""
        self._source, self._in_flight = iter(()), None
        for states in self._states:
            states.hide()
