"""Types of the options for `Runtime.train` and `Runtime.predict`."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

B = TypeVar("B")  # a loader's batch
S = TypeVar("S")  # the result of `send`
Send: TypeAlias = Callable[[B], S]


class TrainKwargs(TypedDict, total=False):
    """Options of a loop over `Runtime.train` that yields one batch at a time."""

    cursor: Callable[[Any], Any] | None
    accumulate: int
    micro_batches: int | None
    reduce_early: bool
    by_step: Literal[False]
    read_ahead: int | None
    background: bool


class PredictKwargs(TypedDict, total=False):
    """Options of a loop over `Runtime.predict` that yields one batch at a time."""

    micro_batches: None
    features: Iterable[str] | None
    read_ahead: int | None
    background: bool
