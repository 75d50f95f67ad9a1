"""The context that all stages of a pipeline share."""

from collections.abc import Mapping, Sequence

import torch

from hostdev.core.primitive import OpLog, Primitive
from hostdev.core.timeline import Timeline
from hostdev.device.staging import Staging
from hostdev.distributed.exchange import Asked, Exchange
from hostdev.kernels.claims import Claims
from hostdev.kernels.groups import unique_groups
from hostdev.pipeline.forwarding import Forwarding
from hostdev.pipeline.groups import Group
from hostdev.pipeline.hooks import PipelineHooks
from hostdev.pipeline.row_ids import RowOffsets
from hostdev.pipeline.scheduling.turns import Turns
from hostdev.pipeline.tiers import find_tiers


class Context:
    """Objects that all stages share: tables, copies to and from the device, recorded durations, hooks.

    Args:
        groups: The tables.
        offsets: Numbers the rows of all groups.
        staging: Copies between host and device.
        last_writers: For each host row of all groups, the last batch that will write it.
        timeline: Records the stages' durations.
        log: Records the ops' durations.
        exchanges: The exchanges with the ranks that have the other parts of the tables: under the key True, the one for
            passes that update the tables; under False, the one for other passes. Empty if this rank has all rows.
        hooks: Hooks for tests.
        depth: The pipeline's depth.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        offsets: RowOffsets,
        staging: Staging,
        last_writers: Claims,
        timeline: Timeline,
        log: OpLog | None,
        exchanges: Mapping[bool, Exchange],
        hooks: PipelineHooks,
        depth: int,
    ) -> None:
        self.groups, self.staging, self.timeline = groups, staging, timeline
        self.exchanges, self.last_writers, self.hooks = exchanges, last_writers, hooks
        host = Staging(torch.device("cpu")) if exchanges else staging  # rows for other ranks stay in host memory
        self.cached = [number for number, group in enumerate(groups) if group.is_cached]
        self.row_stagings = [staging if number in self.cached else host for number in range(len(groups))]
        self.offsets = offsets
        self.unique = Primitive("Unique", unique_groups, log=log).add_prim_attr("primitive_target", "CPU")
        self.before_stage = hooks.before_stage or (lambda stage, number: None)
        self.on_host = any(group.on_host for group in groups)
        self.keyed = {number: group.keys for number, group in enumerate(groups) if group.keys is not None}
        self.tiers = find_tiers(groups)
        self.row_bytes = sum(group.row_bytes for group in groups if group.on_host)
        on_cpu = staging.device.type == "cpu"
        forwards = (staging.copies or hooks.forward) and not self.cached and not exchanges
        if any(group.late for group in groups):
            forwards = False  # forwarded rows are updated from the previous step only
        self.forwarding = Forwarding(groups) if forwards and depth else None
        self.turns = Turns(shares=on_cpu and not exchanges and hooks == PipelineHooks(), depth=depth)
        self.steps = 0  # steps whose updates are finished
        self.asked_before: tuple[int, list[Asked]] = 0, []  # number of the last training batch, its `Asked` by group
