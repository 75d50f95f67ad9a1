"""Hooks into the pipeline, for tests and for commands that check it.

S: number of optimizer state columns of D values per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

BeforeStage = Callable[[str, int], None]
AfterUpdate = Callable[[int, int, Any, list[tuple[Any, Any]]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineHooks:
    """Points at which a test observes or changes a pipeline.

    Attributes:
        before_stage: Called in a stage's thread before it works on a batch, with the stage's name and the batch's
            number.
        after_update: Called when rows of a batch have been updated, before a later batch changes them. Called with the
            batch's number, the group's number, the rows' ids and, for each table, a pair: the memory that holds the
            rows, [any, 1 + S, D], and the rows' positions in this memory.
        ignore_hazards: Numbers of groups whose read-after-write hazards are ignored, which makes results wrong.
        forward: Whether to forward rows even if rows are not copied to the device, as on the CPU.
        staleness: Number of preceding batches whose updates a lookup may miss. Results are exact only with 0.
    """

    before_stage: BeforeStage | None = None
    after_update: AfterUpdate | None = None
    ignore_hazards: Sequence[int] = ()
    forward: bool = False
    staleness: int = 0
