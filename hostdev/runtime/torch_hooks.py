"""Temporary replacements of torch's functions."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

Function = Callable[..., Any]  # a torch function, of any signature


class Replacement(NamedTuple):
    """A torch function to replace, and how to replace it.

    Attributes:
        owner: The module or class that has the function.
        name: The function's name there.
        wrap: Takes the function and returns its replacement.
        purpose: What hostdev cannot see without the replacement, for the error message.
    """

    owner: Any
    name: str
    wrap: Callable[[Function], Function]
    purpose: str


class TorchHooks:
    """Replacements and hooks that are active in torch between `place` and `remove`.

    Args:
        replacements: The functions to replace.
        register: Functions that register a hook and return torch's handle for it.
    """

    def __init__(
        self, replacements: Sequence[Replacement], register: Sequence[Callable[[], RemovableHandle]] = ()
    ) -> None:
        self._replacements, self._register = replacements, register
        self._placed: dict[tuple[Any, str], tuple[Function, Function]] = {}  # originals and replacements
        self._handles: list[RemovableHandle] = []
        self.lock = threading.RLock()  # reentrant: a finalizer may call `remove` within `place`

    def place(self) -> None:
        """Replace the functions that are not replaced yet.

        Raises:
            RuntimeError: This version of torch lacks one of the functions; then nothing is replaced.
        """
        with self.lock:
            found = [_get(one) for one in self._replacements]
            for (owner, name, wrap, _), now in zip(self._replacements, found, strict=True):
                if (placed := self._placed.get((owner, name))) is not None and now is not placed[0]:
                    continue  # it is our replacement, or another library's wrapper around it
                replacement = wrap(now)
                self._placed[owner, name] = now, replacement
                setattr(owner, name, replacement)
            if not self._handles:
                self._handles += [register() for register in self._register]

    def remove(self) -> None:
        """Restore torch's own functions, except those whose replacements another library has wrapped since."""
        with self.lock:
            for (owner, name), (original, replacement) in list(self._placed.items()):
                if getattr(owner, name, None) is replacement:
                    setattr(owner, name, original)
                    del self._placed[owner, name]
            while self._handles:
                self._handles.pop().remove()


def _get(one: Replacement) -> Function:
    found: Function | None = getattr(one.owner, one.name, None)
    if found is None:
        name = f"{getattr(one.owner, '__module__', '')}.{one.owner.__name__}".lstrip(".")
        raise RuntimeError(
            f"torch {torch.__version__} has no {name}.{one.name}, without which hostdev cannot see {one.purpose}; "
            "use a version of torch that hostdev supports"
        )
    return found
