"""Hooks into a pipeline, for tests and `hostdev.verify`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hostdev.pipeline.stages import AfterUpdate


@dataclass(frozen=True, kw_only=True)
class PipelineHooks:
    """What tests and `hostdev.verify` change in a pipeline.

    Attributes:
        staleness: Batches by which lookups may lag behind the updates; 0 for exact results.
        ignore_hazards: Numbers of the groups whose reads do not wait for earlier updates; their results are wrong.
        before_stage: Called with a stage's name and a batch's number before each stage.
        after_update: Called after the update of each batch.
    """

    staleness: int = 0
    ignore_hazards: Sequence[int] = ()
    before_stage: Callable[[str, int], None] | None = None
    after_update: AfterUpdate | None = None
