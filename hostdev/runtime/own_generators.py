"""Which loaders may be read ahead: those that are known to draw from no random generator of their own.

The global generators use separate random streams while a batch is read (see `random_streams`). A generator of the
program, such as `numpy.random.default_rng(0)`, has no such streams: if the loader, `ids` or `send` draws from it, the
order of the draws, and the state that a loop leaves, depend on how far ahead the loop reads. Therefore a loop reads
ahead only if all of them are known to have no generator: containers of batches, torch's loaders, functions that use
only data and other such functions, generators of such functions that have not begun, and what the program declares with
`own_generators = False` or `read_ahead`. Generators that a function creates itself are no problem: a left loop keeps
the batches of an iterator that it has read ahead.
"""

import functools
import inspect
import operator
import pathlib
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from hostdev.core import registry
from hostdev.runtime.generators import is_global

LOADER_STATES = "loader_states"  # the kind of `reading.LoaderStates` in the registry; its names are loaders' modules

_MOST_OBJECTS = 2000  # that are searched; also the length of the longest container
_DATA = (types.NoneType, str, bytes, int, float, complex, range, np.generic, pathlib.PurePath)
_CODE = (type, types.ModuleType, operator.itemgetter, operator.attrgetter, operator.methodcaller)
_TORCH = (torch.Tensor, torch.dtype, torch.device)
_LIBRARIES = ("hostdev", "numpy", "pandas", "pyarrow", "polars")  # whose objects are data, but for NumPy's generators
_CONTAINERS = (list, tuple, set, frozenset, deque)
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def find_unknown(loader: Any, functions: Sequence[Any]) -> Any:
    """Return an object that may have a random generator of its own, or None if there is none.

    Args:
        loader: The loader.
        functions: The functions that are called for each batch; None for a missing one.
    """
    seen: set[int] = set()
    unknown = _find_in_loader(loader, seen)
    return _first(_find(function, seen) for function in functions) if unknown is None else unknown


def _first(found: Iterable[Any]) -> Any:
    return next((unknown for unknown in found if unknown is not None), None)


def _is_declared(thing: Any) -> bool:
    return getattr(thing, "own_generators", None) is False


def _find_in_loader(loader: Any, seen: set[int]) -> Any:
    if isinstance(loader, (*_CONTAINERS, *_ITERATORS)) or _is_declared(loader):  # its items are batches, not code
        return None
    if hasattr(loader, "wrapped_loader"):
        return _find_in_loader(loader.wrapped_loader, seen)
    if not isinstance(loader, DataLoader) or not _is_plain(type(loader)):
        return _find(loader, seen)
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    unknown = _first([loader.generator, *(_find_in_sampler(sampler, seen) for sampler in samplers)])
    if unknown is not None or loader.num_workers:  # in other processes, generators are copies
        return unknown
    unknown = _find_in_dataset(loader.dataset, seen)
    return _find(loader.collate_fn, seen) if unknown is None else unknown


def _is_plain(kind: type[DataLoader[Any]]) -> bool:
    """Return whether a kind of loader is torch's own, or one of a framework that has registered its states."""
    return kind.__iter__ is DataLoader.__iter__ or kind.__module__ in registry.names(LOADER_STATES)


def _find_in_sampler(sampler: Any, seen: set[int]) -> Any:
    if _is_of(sampler, ("torch",)) and not _is_declared(sampler):
        return getattr(sampler, "generator", None)
    return _find(sampler, seen)


def _find_in_dataset(dataset: Any, seen: set[int]) -> Any:
    if isinstance(dataset, _CONTAINERS):
        return None
    if not _is_of(dataset, ("torch",)):
        return _find(dataset, seen)
    parts = getattr(dataset, "datasets", [getattr(dataset, "dataset", None)])  # those of ConcatDataset, or of Subset
    parts = parts.values() if isinstance(parts, dict) else parts
    return _first(_find_in_dataset(part, seen) for part in parts)


def _is_of(thing: Any, libraries: Sequence[str]) -> bool:
    """Return whether an object's class belongs to one of these packages."""
    return type(thing).__module__.partition(".")[0] in libraries


def _find(thing: Any, seen: set[int]) -> Any:
    """Return `thing`, or an object that it uses, unless all of these are known to have no generator."""
    if isinstance(thing, (*_DATA, *_CODE, *_TORCH, *_ITERATORS)) or _is_declared(thing) or id(thing) in seen:
        return None
    if isinstance(thing, _GENERATORS):
        return None if is_global(thing) or isinstance(thing, random.SystemRandom) else thing  # the latter has no state
    if _is_of(thing, _LIBRARIES) or type(thing) is object:
        return None
    seen.add(id(thing))
    used = _list_used(thing)
    if used is None or len(seen) + len(used) > _MOST_OBJECTS:
        return thing
    return _first(_find(item, seen) for item in used)


def _list_used(thing: Any) -> list[Any] | None:
    """Return the objects that a function or a container uses; None for other objects."""
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, torch.nn.Module):  # called in the body, where all else in it belongs
        return [value for value in vars(thing).values() if isinstance(value, _GENERATORS)]
    if isinstance(thing, _CONTAINERS):
        return list(thing)
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):  # the function of a compiled method, as those of NumPy, has no globals
        return [thing.__self__, *([thing.__func__] if isinstance(thing.__func__, types.FunctionType) else [])]
    if isinstance(thing, types.GeneratorType):
        if inspect.getgeneratorstate(thing) != inspect.GEN_CREATED:  # it may hold anything by now
            return None
        assert thing.gi_frame is not None
        return [*inspect.getgeneratorlocals(thing).values(), *_list_globals(thing.gi_code, thing.gi_frame.f_globals)]
    if not isinstance(thing, types.FunctionType):
        return [thing.__self__] if hasattr(thing, "__self__") else None  # a compiled function's module or object
    own = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    for cell in thing.__closure__ or ():
        with suppress(ValueError):  # the variable has no value yet
            own.append(cell.cell_contents)
    if thing.__module__.partition(".")[0] in (*sys.stdlib_module_names, *_LIBRARIES, "torch"):
        return own
    return own + _list_globals(thing.__code__, thing.__globals__)


def _list_globals(code: types.CodeType, globals_: dict[str, Any]) -> list[Any]:
    """Return the globals that a function's code names."""
    names = {name for inner in _list_codes(code) for name in inner.co_names}
    return [globals_[name] for name in names if name in globals_]


def _list_codes(code: types.CodeType) -> list[types.CodeType]:
    """Return a function's code, and that of the functions and comprehensions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [code, *(nested for own in inner for nested in _list_codes(own))]
