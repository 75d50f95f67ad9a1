"""Hooks into the pipeline, for tests and for the commands that test it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

BeforeStage = Callable[[str, int], None]
AfterUpdate = Callable[[int, int, Any, list[tuple[Any, Any]]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineHooks:
    """What a test changes or observes in a pipeline.

    Attributes:
        before_stage: Called with a stage's name and a batch's number before the stage's work, in its thread.
        after_update: Called when rows of a batch have been updated and no later batch has changed them. Its arguments
            are the batch's number, the group's number, the rows' ids, and for each table the memory that holds the
            rows, [any, 1 + S, D], and their places in it.
        ignore_hazards: Numbers of groups whose read-after-write hazards are ignored. Results become wrong.
        staleness: **Not exact.** A lookup may miss the updates of this many batches before it.
    """

    before_stage: BeforeStage | None = None
    after_update: AfterUpdate | None = None
    ignore_hazards: Sequence[int] = ()
    staleness: int = 0
