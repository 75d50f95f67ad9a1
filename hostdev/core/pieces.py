"""A network as a sequence of segments."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn


class Piece(NamedTuple):
    """A segment of a network; it takes the output of the previous segment.

    Attributes:
        name: The name by which `--stage-cut` refers to the segment.
        call: Takes tensors and returns a tensor or a tuple of tensors; the first segment takes the network's inputs.
        holds: The modules and parameters that the segment uses.
    """

    name: str
    call: Callable[..., Any]
    holds: tuple[nn.Module | nn.Parameter, ...] = ()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The segment's parameters, each once."""
        found: dict[int, nn.Parameter] = {}
        for one in self.holds:
            for parameter in [one] if isinstance(one, nn.Parameter) else one.parameters():
                found.setdefault(id(parameter), parameter)
        return list(found.values())


def run(pieces: Iterable[Piece], *values: Any) -> Any:
    """Apply the segments in order, starting with the network's inputs; return the last output."""
    result: Any = values
    for piece in pieces:
        result = piece.call(*result) if isinstance(result, tuple) else piece.call(result)
    return result
