"""One interface for the global random number generators: torch's, NumPy's, Python's, and the device's.

`find_unknown` says which loaders may be read ahead: those known to draw from no random generator of their own. The
global generators use separate random streams while a batch is read (see `random_streams`). A generator of the program,
such as `numpy.random.default_rng(0)`, has no such streams: if the loader, `ids` or `send` draws from it, the order of
the draws, and the state that a loop leaves, depend on how far ahead the loop reads. Therefore a loop reads ahead only
if all three are known to have no random generator, or if the program sets `read_ahead`. This is known of containers of
batches, torch's loaders, objects with `own_generators = False`, and functions that use only data and other such
functions. It is also known of an iterator that such a function with `yield` has returned, if the iterator has not
begun. A function uses the globals that its code names. Of the program's modules it uses the attributes that it names,
and of the program's classes what their methods name. Modules and classes of installed packages count as having no
random generators. A random generator that a function creates itself is no problem: if a loop is left, the batches that
the loop has read ahead from an iterator are kept.
"""

import ctypes
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
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from hostdev.core import registry

LOADER_STATES = "loader_states"  # the kind of `reading.LoaderStates` in the registry; its names are loaders' modules
_MOST_OBJECTS = 2000  # maximum number of objects that a search visits, including the items of containers
_DATA = (types.NoneType, str, bytes, int, float, complex, range, np.generic, pathlib.PurePath)
_CODE = (types.ModuleType, operator.itemgetter, operator.attrgetter, operator.methodcaller)
_TORCH = (torch.Tensor, torch.dtype, torch.device)
# Packages whose objects, other than random generators, are data or do not draw.
_LIBRARIES = ("hostdev", "numpy", "pandas", "pyarrow", "polars", "datetime", "decimal", "logging", "re", "_thread")
_INSTALLED = {"site-packages", "dist-packages"}  # names of folders of installed packages
_CONTAINERS = (list, tuple, set, frozenset, deque)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Generator(Protocol):
    """A global random number generator."""

    name: str

    def state(self) -> Any:
        """Return the state, which can be compared with `==`."""

    def restore(self, state: Any) -> None:
        """Set the generator to a state that `state` has returned."""

    def seed(self, seed: int) -> None:
        """Restart from a 64-bit seed."""

    def draw(self) -> None:
        """Draw one number, which changes the state."""

    def fingerprint(self) -> int:
        """Return a 64-bit fingerprint of the state."""


def get_generators(device: torch.device) -> list[Generator]:
    """Return the global generators of the host, and that of the device if torch provides it."""
    found: list[Generator] = [_Torch(torch.default_generator, "torch"), _NumPy(), _Python()]
    if device.type != "cpu":
        defaults = getattr(torch.get_device_module(device), "default_generators", ())
        index = device.index or 0
        found += [_Torch(one, "device") for one in defaults[index : index + 1]]
    return found


def is_global(generator: Any) -> bool:
    """Return whether a generator is one of the host's global ones, such as that of `random.choice`."""
    if isinstance(generator, torch.Generator):
        return generator is torch.default_generator
    if isinstance(generator, np.random.RandomState):
        return generator is getattr(np.random.random_sample, "__self__", None)
    return generator is getattr(random.random, "__self__", None)


class _Torch:
    def __init__(self, generator: torch.Generator, name: str) -> None:
        self._generator, self.name = generator, name

    def state(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()

    def restore(self, state: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def draw(self) -> None:
        torch.empty((), dtype=torch.int64, device=self._generator.device).random_(generator=self._generator)

    def fingerprint(self) -> int:
        return _hash(self.state())


class _Python:
    name = "random"
    state = staticmethod(random.getstate)
    restore = staticmethod(random.setstate)
    seed = staticmethod(random.seed)

    def draw(self) -> None:
        random.getrandbits(32)

    def fingerprint(self) -> int:
        version, words, gauss = random.getstate()
        return _hash(repr((version, gauss)).encode() + np.array(words, np.uint64).tobytes())


class _State(NamedTuple):
    raw: bytes  # the bit generator's memory; empty if its layout is unknown
    full: str  # the state outside `raw`, as text; empty if `raw` is the full state
    values: Any  # NumPy's own state, if `full` is not empty


_WORDS = 625  # 32-bit words in a Mersenne Twister: 624 of its state, and the position


class _NumPy:
    """The generator behind the functions of `numpy.random`.

    NumPy takes 35 us to return its state as a dict, and as long to set it, so this class copies the bit generator's
    memory instead. NumPy draws normal values in pairs and holds the second one outside that memory, so the class also
    gets the dict, unless the memory is the same as when NumPy last held no such value.
    """

    name = "NumPy"

    def __init__(self) -> None:
        self._plain = b""  # the memory when NumPy last held no second normal value

    def state(self) -> _State:
        raw = _raw()
        if raw and raw == self._plain:
            return _State(raw, "", None)
        values = np.random.get_state(legacy=False)
        if raw and not values["has_gauss"]:
            self._plain = raw
            return _State(raw, "", None)
        if raw:
            return _State(raw, repr(values["gauss"]), values)
        with np.printoptions(threshold=2**31):
            return _State(raw, repr(values), values)

    def restore(self, state: _State) -> None:
        if state.full or not _raw():
            np.random.set_state(state.values)
            return
        if self.state().full:
            np.random.seed(0)  # makes NumPy forget the second normal value
        bits = _bits()
        with bits.lock:
            ctypes.memmove(bits.ctypes.state_address, state.raw, len(state.raw))
        self._plain = state.raw

    def seed(self, seed: int) -> None:
        bits = _bits()
        if isinstance(bits, np.random.MT19937):
            np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
            self._plain = _raw()
        else:  # the program has set another bit generator
            np.random.set_state({**type(bits)(seed).state, "has_gauss": 0, "gauss": 0.0})

    def draw(self) -> None:
        np.random.random_sample()

    def fingerprint(self) -> int:
        state = self.state()
        return _hash(state.raw + state.full.encode())


def _bits() -> Any:
    """Return the bit generator behind the functions of `numpy.random`; NumPy's type stubs lack this function."""
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


def _raw() -> bytes:
    """Return the memory of NumPy's Mersenne Twister; b"" for another bit generator."""
    bits = _bits()
    if not isinstance(bits, np.random.MT19937) or not _is_known():
        return b""
    with bits.lock:
        return ctypes.string_at(bits.ctypes.state_address, _WORDS * 4)


@functools.cache
def _is_known() -> bool:
    """Return whether this NumPy's Mersenne Twister has the memory layout that this module expects."""
    bits = np.random.MT19937(1)
    bits.random_raw(7)
    words = np.frombuffer(ctypes.string_at(bits.ctypes.state_address, _WORDS * 4), np.uint32)
    state = bits.state["state"]
    return bool((words[:-1] == state["key"]).all() and words[-1] == state["pos"])


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


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
    """Return whether a loader class iterates as torch's own, or its module has registered `LoaderStates`."""
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
    # A ConcatDataset has `datasets`, a Subset has `dataset`.
    parts = getattr(dataset, "datasets", [getattr(dataset, "dataset", None)])
    parts = parts.values() if isinstance(parts, dict) else parts
    return _first(_find_in_dataset(part, seen) for part in parts)


def _is_of(thing: Any, libraries: Sequence[str]) -> bool:
    """Return whether an object's class belongs to one of these packages."""
    return type(thing).__module__.partition(".")[0] in libraries


def _find(thing: Any, seen: set[int]) -> Any:
    """Return `thing`, or an object that it uses, that may have a random generator; None if there is none."""
    if isinstance(thing, (*_DATA, *_CODE, *_TORCH, *_ITERATORS)) or _is_declared(thing) or id(thing) in seen:
        return None
    if isinstance(thing, _GENERATORS):
        # A SystemRandom has no state that draws could change.
        return None if is_global(thing) or isinstance(thing, random.SystemRandom) else thing
    if _is_of(thing, _LIBRARIES) or type(thing) is object:
        return None
    seen.add(id(thing))
    used = _list_used(thing)
    if used is None or len(seen) + len(used) > _MOST_OBJECTS:
        return thing
    return _first(_find(item, seen) for item in used)


def _list_used(thing: Any) -> list[Any] | None:
    """Return the objects that a function, class, iterator or container uses; None if they are unknown."""
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, torch.nn.Module):  # a module is called in the body; only its own generators matter
        return [value for value in vars(thing).values() if isinstance(value, _GENERATORS)]
    if isinstance(thing, _CONTAINERS):
        return list(thing)
    if isinstance(thing, type):
        return _list_used_by_class(thing)
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):  # the function of a compiled method, such as NumPy's, has no globals
        return [thing.__self__, *([thing.__func__] if isinstance(thing.__func__, types.FunctionType) else [])]
    if isinstance(thing, types.GeneratorType):
        if inspect.getgeneratorstate(thing) != inspect.GEN_CREATED:  # an iterator that has begun may hold anything
            return None
        assert thing.gi_frame is not None
        return _list_named(thing.gi_code, thing.gi_frame.f_globals, [*inspect.getgeneratorlocals(thing).values()])
    if not isinstance(thing, types.FunctionType):
        return [thing.__self__] if hasattr(thing, "__self__") else None  # a compiled function's module or object
    own = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    for cell in thing.__closure__ or ():
        with suppress(ValueError):  # the variable has no value yet
            own.append(cell.cell_contents)
    return own if _is_of_library(thing.__module__) else _list_named(thing.__code__, thing.__globals__, own)


def _list_used_by_class(kind: type[Any]) -> list[Any]:
    """Return the random generators among a class's own attributes, and the globals that its methods name."""
    shared = [value for base in kind.__mro__ if _is_of_program(base.__module__) for value in vars(base).values()]
    functions = [getattr(value, "__func__", getattr(value, "fget", value)) for value in shared]
    methods = [one for one in functions if isinstance(one, types.FunctionType)]
    named = [used for one in methods for used in _list_named(one.__code__, one.__globals__, [])]
    return [value for value in shared if isinstance(value, _GENERATORS)] + named


def _list_named(code: types.CodeType, variables: dict[str, Any], own: Sequence[Any]) -> list[Any]:
    """Return what a function uses: its own objects, the globals that its code names, and what it names in modules."""
    names = {name for inner in _list_codes(code) for name in inner.co_names}
    found = [*own, *(variables[name] if name in variables else sys.modules.get(name) for name in names)]
    seen: set[int] = set()
    for module in found:  # `found` grows meanwhile: a module's attribute may be a module
        if isinstance(module, types.ModuleType) and id(module) not in seen and _is_of_program(module.__name__):
            seen.add(id(module))
            found += [vars(module)[name] for name in names if name in vars(module)]
    return found


def _is_of_library(module: str) -> bool:
    """Return whether a module belongs to Python or to a package whose objects are data."""
    return module.partition(".")[0] in (*sys.stdlib_module_names, *_LIBRARIES, "torch")


def _is_of_program(module: str) -> bool:
    """Return whether a module belongs to the program, not to Python or to an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not _is_of_library(module) and _INSTALLED.isdisjoint(pathlib.PurePath(file).parts)


def _list_codes(code: types.CodeType) -> list[types.CodeType]:
    """Return a function's code, and that of the functions and comprehensions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [code, *(nested for own in inner for nested in _list_codes(own))]
