"""Makes the loop of `Runtime.train` from its options."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hostdev.runtime.loop import TrainLoop
from hostdev.runtime.read_ahead import require_read_ahead
from hostdev.runtime.requests import GetCursor, GetIds, Reader

Program = tuple[GetIds[Any] | None, Callable[[Any], Any] | None, GetCursor[Any] | None]  # `ids`, `send` and `cursor`


@dataclass(frozen=True)
class StepOptions:
    """The options of `Runtime.train` about the batches of a step."""

    accumulate: int
    micro_batches: int | None
    by_step: bool
    reduce_early: bool


def make_train_loop(
    runtime: Any,  # a `Runtime`, whose module imports this one
    batches: Iterable[Any],
    program: Program,
    options: StepOptions,
    reading: dict[str, Any],
) -> TrainLoop[Any]:
    """Return the loop; raise ValueError for options that contradict each other.

    Args:
        reading: The options `read_ahead` and `background`.
    """
    ids, send, cursor = program
    accumulate, micro_batches = options.accumulate, options.micro_batches
    if accumulate < 1:
        raise ValueError(f"accumulate must be a number of batches, 1 or more, not {accumulate}")
    require_read_ahead(**reading)
    tables = runtime.bindings, runtime.group_specs
    by_rank = runtime.world.micro_batches
    if micro_batches is None and by_rank is None:
        if options.reduce_early:
            raise ValueError("reduce_early requires micro_batches=N")
        return TrainLoop(runtime, batches, Reader(*tables, ids, send, accumulate, cursor=cursor), **reading)
    if micro_batches is None and accumulate != 1:
        raise ValueError(f"with other ranks, give micro_batches={accumulate} instead of accumulate={accumulate}")
    micro_batches = by_rank if micro_batches is None else micro_batches
    if micro_batches < 1 or accumulate != 1:
        raise ValueError(
            f"micro_batches must be a number of batches, 1 or more, not {micro_batches}"
            if micro_batches < 1
            else "micro_batches and accumulate both set the number of batches per step; give only one of them"
        )
    if options.by_step and by_rank is None:
        raise ValueError("by_step requires other ranks, but this process is alone")
    reader = Reader(*tables, ids, send, micro_batches, whole=True, asks=runtime.world.leads, cursor=cursor)
    how = {"reduce_early": options.reduce_early, "by_step": options.by_step}
    return TrainLoop(runtime, batches, reader, micro_batches, **how, **reading)
