"""Detects how the body of a `for` statement over a loop ended: by `break` or by an exception.

A loop without a dense optimizer takes its step at the end of the body, but takes no step if the body raised an
exception. So the loop must distinguish the two, but Python does not tell `__del__` whether an exception is propagating.
This module looks at the instruction at which the `for` statement drops its iterator: `POP_TOP` (`POP_ITER` from
Python 3.14 on) for `break` and `return`, or the instruction that raised the exception. If a variable or a generator
also holds the iterator, the iterator is dropped later: at the caller's call instruction when the function returns, or
at another instruction when the last traceback that contains the function's frame is deleted.
"""

import sys
from collections.abc import Iterator
from dis import opmap
from types import FrameType
from typing import Any, TypeVar

Item = TypeVar("Item")

_GENERATOR = 0x20 | 0x80 | 0x200  # co_flags of generators and coroutines
_LEAVING = {opmap[name] for name in ("POP_TOP", "POP_ITER", "END_FOR") if name in opmap}
_CALLING = {number for name, number in opmap.items() if name.startswith("CALL")}
_SUSPENDED = {opmap[name] for name in ("YIELD_VALUE", "RESUME", "SEND") if name in opmap}
_DELEGATING = opmap["SEND"]  # the opcode of `yield from`
_ADVANCING = {opmap["FOR_ITER"], _DELEGATING}


class BodyState:
    """How the last run of a loop's body ended, as far as known.

    Attributes:
        raised: Whether an exception ended the body; None while that is unknown.
        abandoned: Whether an exception propagated out of the `for` statement, and the loop has not continued since.
    """

    def __init__(self) -> None:
        self.raised: bool | None = None
        self.abandoned = False
        self._handled: int | None = None  # `id` of the exception that was being handled when the body began

    def begin(self) -> None:
        """Record that a body begins."""
        handled = sys.exception()
        self.raised, self.abandoned = None, False
        self._handled = None if handled is None else id(handled)  # not the exception, whose frames hold the loop

    def has_raised(self) -> bool:
        """Return whether an exception ended the body."""
        if self.raised is not None:
            return self.raised
        handled = sys.exception()
        return handled is not None and id(handled) != self._handled


class Body(Iterator[Item]):
    """The iterator of one `for` statement over a loop; it reports to the loop how the statement ended.

    Args:
        loop: A `batches.Loop`, untyped because its module imports this one.
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._in_for: tuple[int, int] | None = None  # the statement's frame; None for a call of `next`
        self._in_yield_from = False

    def __iter__(self) -> "Body[Item]":
        """Return a new iterator for each `for` statement; raise ValueError if the loop is over."""
        body: Body[Item] = iter(self._loop)
        return body

    def __next__(self) -> Item:
        """Return the loop's next batch with its rows."""
        frame = sys._getframe(1)
        opcode = _opcode(frame)
        self._in_for = _identity(_outside(frame, _ADVANCING)) if opcode in _ADVANCING else None
        self._in_yield_from = opcode == _DELEGATING
        del frame  # it may keep the loop alive
        item: Item = next(self._loop)
        return item

    def __len__(self) -> int:
        """Return the loop's number of batches; raise TypeError if the loader has no length."""
        return len(self._loop)

    def close(self) -> None:
        """Close the loop. Python also calls this when it closes a generator that is suspended in `yield from`."""
        if self._in_yield_from:
            self._left(sys._getframe(1))
        self._loop.close()

    def __del__(self) -> None:
        frame = sys._getframe().f_back  # None while the interpreter exits
        if self._in_for is not None and frame is not None:
            self._left(frame)

    def _left(self, frame: FrameType) -> None:
        frame = _outside(frame, _SUSPENDED)
        opcode = _opcode(frame)
        failed = opcode not in (_LEAVING if _identity(frame) == self._in_for else _CALLING)
        self._loop.left_body(raised=failed and opcode not in _ADVANCING, abandoned=failed)


def _opcode(frame: FrameType) -> int:
    return frame.f_code.co_code[frame.f_lasti]


def _outside(frame: FrameType, within: set[int]) -> FrameType:
    """Return the frame that iterates over the loop, skipping generators around the loop, such as tqdm's."""
    while frame.f_code.co_flags & _GENERATOR and _opcode(frame) in within and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _identity(frame: FrameType) -> tuple[int, int]:
    return id(frame), id(frame.f_code)
