"""One interface for the global random number generators: torch's, NumPy's, Python's, and the device's."""

import ctypes
import random
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


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
        if index < len(defaults):
            found.append(_Torch(defaults[index], "device"))
    return found


def is_global(generator: Any) -> bool:
    """Return whether a generator is a global one of the host; `from random import choice` refers to Python's."""
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


def _is_known() -> bool:
    """Return whether this NumPy's Mersenne Twister has the memory layout that this module expects."""
    global _known
    if _known is None:
        bits = np.random.MT19937(1)
        bits.random_raw(7)
        words = np.frombuffer(ctypes.string_at(bits.ctypes.state_address, _WORDS * 4), np.uint32)
        state = bits.state["state"]
        _known = bool((words[:-1] == state["key"]).all() and words[-1] == state["pos"])
    return _known


_known: bool | None = None


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
