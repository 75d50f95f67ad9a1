"""Generators of a program's own, from which both reading and the loop's body draw: refused where a loop reads ahead.

A global generator has streams for reading (`random_streams`). One that the program made, such as
`numpy.random.default_rng(0)`, belongs to whoever draws from it. Where that is the loader, or `ids`, alone, or the body
alone, the order of its draws is the same at any depth. Where it is both, it is not. So the generators that reading can
reach are looked up once, and their states compared around each read.
"""

import functools
import gc
import pickle
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_MOST_OBJECTS = 2000  # that are looked at
_DEEPEST = 6
_LONGEST = 64  # items of a container


class SharedGenerators:
    """The generators that reading can reach.

    roots  the loader, `ids` and `send`
    """

    def __init__(self, *roots: Any) -> None:
        self._found = {id(one): one for one in _generators_in(roots)}
        self._states: dict[int, bytes] = {}  # after the last read
        self._is_first = True
        self._read: set[int] = set()  # those from which reading has drawn, after the first read: none is ahead of it
        self._elsewhere: set[int] = set()  # those from which somebody else has, between two reads

    def before_read(self) -> None:
        """Note which have been drawn from since the last read; ValueError for one that both draw from."""
        for key, one in self._found.items():
            state = _state(one)
            if key in self._states and state != self._states[key]:
                self._elsewhere.add(key)
            self._states[key] = state
        self._require_own()

    def after_read(self) -> None:
        """Note from which the read has drawn; ValueError for one that both draw from."""
        for key, one in self._found.items():
            state = _state(one)
            if state != self._states[key] and not self._is_first:
                self._read.add(key)
            self._states[key] = state
        self._is_first = False
        self._require_own()

    def _require_own(self) -> None:
        if both := self._read & self._elsewhere:
            one = self._found[both.pop()]
            raise ValueError(
                f"the loader, `ids` or `send` and the loop's body draw from one {type(one).__name__}, and the loop "
                "reads ahead: the order of the draws would depend on the depth. Give each a generator of its own, or "
                "draw from the global ones, or read nothing ahead, with read_ahead=0"
            )


def _generators_in(roots: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the generators that these objects refer to: in containers, fields, closures, globals that code names."""
    seen: set[int] = set()
    level = list(roots)
    for _ in range(_DEEPEST):
        following: list[Any] = []
        for thing in level:
            if id(thing) in seen or len(seen) > _MOST_OBJECTS:
                continue
            seen.add(id(thing))
            if isinstance(thing, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
                yield thing
            else:
                following += _referred(thing)
        level = following


def _referred(thing: Any) -> list[Any]:
    """Return what an object refers to, as far as a generator may be there."""
    if thing is None or isinstance(thing, _LEAVES):
        return []
    if isinstance(thing, dict):
        return list(thing.values()) if len(thing) <= _LONGEST else []
    if isinstance(thing, list | tuple | set):
        return list(thing) if len(thing) <= _LONGEST else []
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell.cell_contents is not thing]
        return [*cells, *_named(thing.__code__, thing.__globals__), *(thing.__defaults__ or ())]
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
    return [*fields, *_methods(type(thing))]


def _methods(kind: type) -> list[Any]:
    """Return the functions of a class that reading calls; of torch's and NumPy's own none draws by a global's name."""
    if kind.__module__.split(".")[0] in ("torch", "numpy", "hostdev"):
        return []
    names = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
    return [found for name in names if isinstance(found := vars(kind).get(name), types.FunctionType)]


def _named(code: types.CodeType, globals_: dict[str, Any]) -> list[Any]:
    """Return the globals that code names."""
    codes = [code, *(one for one in code.co_consts if isinstance(one, types.CodeType))]
    found = [globals_[name] for one in codes for name in one.co_names if name in globals_]
    return [one for one in found if not isinstance(one, types.ModuleType | type)]


_LEAVES = (
    str, bytes, int, float, complex, bool, type, types.ModuleType, types.CodeType, types.BuiltinFunctionType,
    np.ndarray, torch.Tensor, torch.nn.Module,
)  # fmt: skip


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)
