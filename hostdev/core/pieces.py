"""A network as pieces that follow each other."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn


class Piece(NamedTuple):
    """A part of a network that takes what the one before it has returned.

    name   by which `--stage-cut` says that a stage begins with it
    call   takes tensors and returns one or a tuple of them; that of the first piece takes the network's inputs
    holds  the modules and parameters that it uses
    """

    name: str
    call: Callable[..., Any]
    holds: tuple[nn.Module | nn.Parameter, ...] = ()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Its parameters, each once."""
        found: dict[int, nn.Parameter] = {}
        for one in self.holds:
            for parameter in [one] if isinstance(one, nn.Parameter) else one.parameters():
                found.setdefault(id(parameter), parameter)
        return list(found.values())


def run(pieces: Iterable[Piece], *values: Any) -> Any:
    """Return what pieces, one after the other, make of values."""
    result: Any = values
    for piece in pieces:
        result = piece.call(*result) if isinstance(result, tuple) else piece.call(result)
    return result
