"""Makes the program's own random generators draw the same numbers at any depth, or raises an error.

The global generators use separate random streams while a batch is read (see `random_streams`). A generator of the
program, such as `numpy.random.default_rng(0)`, has the same order of draws at any depth if it is used only while
batches are read (by the loader, `ids` or `send`) or only in the body. If it is used in both, the order depends on the
depth, and the loop raises an error. To detect this, the generators that the loader, `ids` and `send` can reach are
found once, and their states are compared before and after each read. A loop that ends early restores the states that
these generators had when the last yielded batch had been read.
"""

import functools
import gc
import pickle
import random
import types
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from hostdev.runtime.generators import set_torch_state, torch_state

_MOST_OBJECTS = 2000  # maximum number of objects to search
_DEEPEST = 6  # levels of references to follow from the loader, `ids` and `send`
_LONGEST = 64  # items; longer containers are not searched


class Draw(NamedTuple):
    """The loader's draws from one generator for a prefetched batch; a later loop that yields the batch repeats them."""

    generator: Any
    before: bytes  # the generator's state before the draws
    after: bytes  # and after the draws


class OwnGenerators:
    """The program's random generators that the loader, `ids` and `send` can reach.

    Args:
        roots: The loader, `ids` and `send`.
    """

    def __init__(self, *roots: Any) -> None:
        self._found = {id(one): one for one in _generators_in(roots)}
        self._states = {key: _state(one) for key, one in self._found.items()}  # at the last comparison
        self._ahead: deque[dict[int, bytes]] = (
            deque()
        )  # for each prefetched batch: the generators that its read drew from, each with its state before the read
        self._is_first = True
        self._read: set[int] = (
            set()
        )  # generators that a read drew from; the first read is not ahead, and does not count
        self._elsewhere: set[int] = set()  # generators that other code drew from between two reads

    def before_read(self) -> None:
        """Record the generators that other code used since the last read; raise ValueError if reads use one of them."""
        self._elsewhere |= self._changed().keys()
        self._require_own()

    def loaded(self) -> list[Draw]:
        """Return the loader's draws in the current read; call this before `ids` and `send` run."""
        now = {key: _state(one) for key, one in self._found.items()}
        changed = [(key, before) for key, before in self._states.items() if now[key] != before]
        return [Draw(self._found[key], before, now[key]) for key, before in changed]

    def after_read(self) -> None:
        """Record the generators that the read has drawn from; raise ValueError if other code uses one of them."""
        changed = self._changed()
        if not self._is_first:
            self._read |= changed.keys()
        self._is_first = False
        self._ahead.append(changed)
        self._require_own()

    def failed(self) -> None:
        """Accept the draws of a read that raised an error: a loop at depth 0 would have made the same draws."""
        self._changed()

    def give(self) -> None:
        """Count a batch as yielded; raise ValueError if the previous body drew from a generator that reads also use."""
        self.before_read()
        self._ahead.popleft()

    def leave(self) -> None:
        """Restore the states that the generators would have without any prefetch.

        Raises:
            ValueError: The last body has drawn from a generator that reading had used.
        """
        before: dict[int, bytes] = {}
        for changed in reversed(self._ahead):
            before |= changed
        self._read |= before.keys()
        self._elsewhere |= self._changed().keys()
        for key in before.keys() - self._elsewhere:
            _restore(self._found[key], before[key])
        self._require_own()

    def _changed(self) -> dict[int, bytes]:
        """Return the generators that were drawn from since the last call, each with its state at the last call."""
        changed = {}
        for key, one in self._found.items():
            state = _state(one)
            if state != self._states[key]:
                changed[key], self._states[key] = self._states[key], state
        return changed

    def _require_own(self) -> None:
        if both := self._read & self._elsewhere:
            raise ValueError(_SHARED.format("the loop's body", type(self._found[both.pop()]).__name__))


def repeat(draws: list[Draw]) -> None:
    """Repeat the draws for a batch that an earlier loop read; raise ValueError if a generator was used since."""
    for draw in draws:
        if _state(draw.generator) != draw.before:
            raise ValueError(_SHARED.format("the code between two loops", type(draw.generator).__name__))
        _restore(draw.generator, draw.after)


_SHARED = (
    "the loader, `ids` or `send` draws from the same {1} as {0}, and the loop reads ahead: the order of the draws "
    "would depend on the depth. Use a separate generator for each, draw from the global generators, or pass "
    "read_ahead=0, which disables reading ahead in loops that do not accumulate"
)


def _generators_in(roots: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the generators reachable from objects: through containers, fields, closures and globals in their code."""
    seen: set[int] = set()
    level = list(roots)
    for _ in range(_DEEPEST):
        following: list[Any] = []
        for thing in level:
            if id(thing) in seen or len(seen) > _MOST_OBJECTS:
                continue
            seen.add(id(thing))
            if isinstance(thing, _GENERATORS):
                if not (_is_global(thing) or isinstance(thing, random.SystemRandom)):  # the latter has no state
                    yield thing
            else:
                following += _referred(thing)
        level = following


def _is_global(generator: Any) -> bool:
    """Return whether a generator is a global one; for example, `from random import choice` refers to Python's."""
    if isinstance(generator, torch.Generator):
        return generator is torch.default_generator
    if isinstance(generator, np.random.RandomState):
        return generator is getattr(np.random.seed, "__self__", None)
    return generator is getattr(random.random, "__self__", None)


def _referred(thing: Any) -> list[Any]:
    """Return the objects to which an object refers, except those that cannot have a generator."""
    if thing is None or isinstance(thing, _LEAVES):
        return []
    if isinstance(thing, dict):
        return list(thing.values()) if len(thing) <= _LONGEST else []
    if isinstance(thing, list | tuple | set):
        return list(thing) if len(thing) <= _LONGEST else []
    if isinstance(thing, types.FunctionType):
        defaults = *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()
        return [*_cells(thing), *_named(thing.__code__, thing.__globals__), *defaults]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.GeneratorType):
        if thing.gi_frame is None:
            return []
        frame = thing.gi_frame
        return [*frame.f_locals.values(), thing.gi_yieldfrom, *_named(thing.gi_code, frame.f_globals)]
    if type(thing).__module__ in ("builtins", "itertools"):  # map, zip, chain, iterators of containers
        return gc.get_referents(thing)
    fields = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    return [*fields, *_slots(thing), *_methods(type(thing))]


def _cells(function: types.FunctionType) -> list[Any]:
    """Return the values of a function's closure variables; some may not be set yet."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return [one for one in found if one is not function]


def _slots(thing: Any) -> list[Any]:
    """Return the fields of an object whose class names them in `__slots__`."""
    names: list[str] = []
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    found = []
    for name in names:
        with suppress(AttributeError):
            found.append(getattr(thing, name))
    return found


def _methods(kind: type) -> list[Any]:
    """Return a class's methods that may be called while a batch is read, except those of torch, NumPy and hostdev."""
    names = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
    bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in ("torch", "numpy", "hostdev")]
    found = [vars(base).get(name) for base in bases for name in names]
    return [one for one in found if isinstance(one, types.FunctionType)]


def _named(code: types.CodeType, globals_: dict[str, Any]) -> list[Any]:
    """Return the globals that a function's code names, except modules and classes."""
    codes = [code, *(one for one in code.co_consts if isinstance(one, types.CodeType))]
    found = [globals_[name] for one in codes for name in one.co_names if name in globals_]
    return [one for one in found if not isinstance(one, types.ModuleType | type)]


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PLAIN = (str, bytes, int, float, complex, bool, type)
_CODE = (types.ModuleType, types.CodeType, types.BuiltinFunctionType)
_LEAVES = (*_PLAIN, *_CODE, np.ndarray, torch.Tensor, torch.nn.Module)


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return torch_state(generator)
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def _restore(generator: Any, state: bytes) -> None:
    if isinstance(generator, torch.Generator):
        set_torch_state(generator, state)
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)
