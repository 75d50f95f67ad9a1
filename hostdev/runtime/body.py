"""The `for` statement over a loop: whether its body was left by `break` or by an exception.

A loop without a dense optimizer takes its step at the end of the body, so the two must be told apart, and Python tells
a `__del__` nothing about an exception on its way. But a `for` statement drops its iterator at the instruction that
leaves it: `POP_TOP` (`POP_ITER` from Python 3.14 on) for `break` and `return`, the one that raised for an exception.
Where a variable or a generator holds the iterator, it is dropped later: at a call that returns, when the function that
has it returns, and elsewhere, when a traceback that held the function's frame is gone.
"""

import sys
from collections.abc import Iterator
from dis import opmap
from types import FrameType
from typing import Any

_GENERATOR = 0x20 | 0x80 | 0x200  # co_flags of generators and coroutines
_LEAVING = {opmap[name] for name in ("POP_TOP", "POP_ITER", "END_FOR") if name in opmap}
_CALLING = {number for name, number in opmap.items() if name.startswith("CALL")}
_SUSPENDED = {opmap[name] for name in ("YIELD_VALUE", "RESUME", "SEND") if name in opmap}
_DELEGATING = opmap["SEND"]  # of `yield from`
_ADVANCING = {opmap["FOR_ITER"], _DELEGATING}


class Body(Iterator[Any]):
    """The iterator of one `for` statement over a loop, which is told how the statement was left."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._in_for: tuple[int, int] | None = None  # whose; None: the caller calls `next`, and there is no body
        self._in_yield_from = False

    def __iter__(self) -> "Body":
        """Return an iterator of its own for each `for` statement; ValueError where the loop is over."""
        body: Body = iter(self._loop)
        return body

    def __next__(self) -> Any:
        """Return the loop's next batch with its rows."""
        frame = sys._getframe(1)
        opcode = _opcode(frame)
        self._in_for = _identity(_outside(frame, _ADVANCING)) if opcode in _ADVANCING else None
        self._in_yield_from = opcode == _DELEGATING
        del frame  # it may hold the loop
        return next(self._loop)

    def __len__(self) -> int:
        """Return the loop's number of batches; TypeError where the loader has no length."""
        return len(self._loop)

    def close(self) -> None:
        """Close the loop; a generator that is closed within `yield from` calls it, too."""
        if self._in_yield_from:
            self._left(sys._getframe(1))
        self._loop.close()

    def __del__(self) -> None:
        frame = sys._getframe().f_back  # None where the interpreter ends
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
    """Return the frame that goes through the loop, outside of generators around it, such as tqdm's."""
    while frame.f_code.co_flags & _GENERATOR and _opcode(frame) in within and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _identity(frame: FrameType) -> tuple[int, int]:
    return id(frame), id(frame.f_code)
