"""`BodyBatch` takes the batch that a loop's body works on from the pipeline, and prepares its rows for the model.

`Step` has all of a rank's micro-batches of a step, for callers that choose their order, such as pipeline stages.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hostdev.core.micro_batches import Node
from hostdev.device.rows import FeatureUses, GroupUses
from hostdev.distributed.dense import Grads
from hostdev.pipeline.results import StepBatch
from hostdev.runtime.features import Table, require_stackable
from hostdev.runtime.reduction import Flags, RankReduction, Reduction
from hostdev.runtime.requests import MicroBatch
from hostdev.runtime.row_parameter import RowOrder, RowParameter
from hostdev.runtime.rows import Rows, Value

MicroBatchRows = tuple[Any, Rows]  # a batch, or the result of `send`, with its rows


class BodyBatch:
    """The in-flight batch that a loop's body works on; `clear` empties this object before the next batch.

    Args:
        runtime: The runtime that has the features and tables.
        asks: Whether this rank looks up the rows of its samples; otherwise another rank does so.
        flags: The flags that stop a step whose gradients or loss are not finite; None in a loop that takes no steps.
        features: The features that are looked up; None for all.

    Attributes:
        step_batch: The pipeline's batch.
        micros: The loader's batches that belong to `step_batch` and were not yet yielded.
        leaves: The step's unique rows, by group and by table.
        all_leaves: The same rows in one list.
        inverses: For each group, int32 [N]: for each id of the step, the position of its row among the unique rows.
        rows: The `Rows` that were yielded for `step_batch`.
        reduction: Sums the gradients of the step's micro-batches; None if `Rows.reduce` has nothing to sum.
        losses: For each loss on which `backward` was called, a float32 scalar: 0 if the loss is finite, else NaN.
        cursor: The program's position after the step's last batch; None if the program gives no position.
        shares_rows: Whether the step has several of the loader's batches; each may use only some of the unique rows.
    """

    def __init__(
        self, runtime: Any, *, asks: bool, flags: Flags | None = None, features: Sequence[str] | None = None
    ) -> None:
        self._runtime, self._asks, self._flags, self._features = runtime, asks, flags, features
        self._hint = "" if features is None else " in this loop over predict(..., features=...)"
        self.losses: list[Tensor] = []
        self.shares_rows = False
        self.clear()

    def clear(self) -> None:
        """Release the batch and its rows."""
        self.step_batch: StepBatch | None = None
        self.micros: list[MicroBatch] = []
        self.leaves: list[list[RowParameter]] = []
        self.all_leaves: list[RowParameter] = []
        self.inverses: list[Tensor] = []
        self._used: list[int] = []  # for each group, the number of ids in batches that were yielded
        self.rows: list[Rows] = []
        self.reduction: Reduction | None = None
        self.cursor: Any = None
        self._sent: list[Tensor] = []

    def take(self, step_batch: StepBatch, trains: Callable[[Table], bool]) -> None:
        """Replace the body's batch with the pipeline's next one.

        Args:
            step_batch: The batch.
            trains: Called with a table; returns whether the table's rows get gradients.
        """
        self.step_batch = step_batch
        self.micros = list(step_batch.request.note)
        self.shares_rows, self.cursor = len(self.micros) > 1, self.micros[-1].cursor
        self.losses = []
        step_batch.request.note.clear()  # keep the loader's batches no longer than the caller does
        self._sent = list(step_batch.tensors)
        self.inverses = [part.inverse for part in step_batch.groups]
        self._used = [0] * len(self.inverses)
        staging = self._runtime.staging
        self.leaves = []
        for group, part in zip(self._runtime.pipeline.groups, step_batch.groups, strict=True):
            order = None if part.own_places is None else RowOrder(part.own_places, staging, step_batch.memory)
            pairs = zip(group.embeddings, part.values, strict=True)
            self.leaves.append(
                [RowParameter(one.table, values, order, trained=trains(one.table)) for one, values in pairs]
            )
            part.values.clear()
        self.all_leaves = [leaf for group in self.leaves for leaf in group]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that the rows have so far on this rank."""
        return [grad for leaf in self.all_leaves for grad in leaf.grads()]

    def has_gradients(self) -> bool:
        """Return whether the rows have received gradients, on any rank."""
        return (self.reduction is not None and self.reduction.has_rows) or any(leaf.grads() for leaf in self.all_leaves)

    def is_reduced(self) -> bool:
        """Return whether the gradients of the last yielded micro-batch have been added to the step's sums."""
        return bool(self.rows) and self.rows[-1].reduced

    def next(self) -> tuple[Any, Rows]:
        """Return the loader's next batch, or the result of `send` for it, with its rows."""
        micro, runtime, step_batch = self.micros.pop(0), self._runtime, self.step_batch
        assert step_batch is not None
        uses, values = self._look_up(step_batch, micro) if self._asks else ([], {})
        if self._features is not None:
            values = {name: values[name] for name in self._features}
        batch = micro.batch([self._sent.pop(0) for _ in micro.tensors])
        order = list(dict.fromkeys(at for binding in runtime.bindings for at in binding.tables))
        rows = Rows(
            step_batch,
            uses,
            self.leaves,
            values,
            order,
            runtime.staging,
            self._flags,
            due=not self.micros,
            shares_rows=self.shares_rows,
            reduction=self.reduction,
            losses=self.losses,
            hint=self._hint,
        )
        self.rows.append(rows)
        return batch, rows

    def _look_up(self, step_batch: StepBatch, micro: MicroBatch) -> tuple[list[GroupUses], dict[str, Value]]:
        """Return the occurrences of the unique rows in a micro-batch, and the micro-batch's rows by feature."""
        runtime, located = self._runtime, []
        for ids, binding in zip(micro.ids, runtime.bindings, strict=True):
            offsets = self._sent.pop(0) if ids.offsets is not None else None
            weights = self._sent.pop(0) if ids.weights is not None else None
            located.append((offsets, weights, binding.feature.pooling == "mean"))
        uses = [self._get_uses(step_batch, group, micro, located) for group in range(len(runtime.group_specs))]
        with torch.set_grad_enabled(any(leaf.trained for leaf in self.all_leaves)):
            if runtime.stacks:
                require_stackable(runtime.stacks, runtime.bindings, micro.ids)
            return uses, runtime.layout.get_values(self.leaves, uses, [ids.shape for ids in micro.ids])

    def _get_uses(self, step_batch: StepBatch, group: int, micro: MicroBatch, located: list[Any]) -> GroupUses:
        part, features, inverse = step_batch.groups[group], [], self.inverses[group]
        numbers, start, size = self._runtime.group_specs[group].features, self._used[group], inverse.shape[0]
        for number in numbers:
            stop = start + len(micro.ids[number].values)
            mine = inverse if start == 0 and stop == size else inverse[start:stop]
            features.append(FeatureUses(mine, *located[number]))
            start = stop
        self._used[group] = start
        alone = len(step_batch.request.ids[group]) == len(numbers)
        return GroupUses(features, part.own_size, in_order=alone and part.own_places is None)


class Step:
    """The micro-batches of a step that this rank computes, fully or in part.

    Args:
        number: The step's number in the timeline.
        sizes: Number of samples in each micro-batch, 0 or more.
        following: Called for each micro-batch; returns the next one with its rows.
        reduction: Sums the micro-batches' gradients; None in a loop that takes no steps.
    """

    def __init__(
        self,
        number: int,
        sizes: Sequence[int],
        following: Callable[[], MicroBatchRows],
        reduction: RankReduction | None,
    ) -> None:
        self.number, self.sizes = number, list(sizes)
        self._following, self._reduction = following, reduction
        self._made: list[MicroBatchRows] = []

    def micro_batch(self, number: int) -> MicroBatchRows:
        """Return a micro-batch with its rows, which take device memory from the first call on.

        If the network's first part is on another rank, only that rank has the rows.
        """
        while len(self._made) <= number:
            self._made.append(self._following())
        return self._made[number]

    @property
    def last(self) -> Rows:
        """The last micro-batch's rows; `Rows.guard`, called on these, checks the whole step."""
        return self.micro_batch(len(self.sizes) - 1)[1]

    def came(self, number: int) -> None:
        """Take the gradients that the rows got from the `backward` of micro-batch `number`.

        Callers do this once for each micro-batch that has samples, in any order.
        """
        assert self._reduction is not None
        self._reduction.rows_came(number)
        self._made[number][1].let_go()

    def reduce(
        self, parameters: Sequence[Tensor], nodes: Sequence[Node[Grads]], values: Sequence[Tensor | None]
    ) -> Tensor | None:
        """Sum the gradients of all micro-batches of the step, on all ranks; see `Rows.reduce`.

        Args:
            parameters: The dense parameters that this rank has.
            nodes: The sums of the parameters' gradients over this rank's micro-batches, as nodes of the summation tree.
            values: The values of each micro-batch of this rank, or None if another rank has them.
        """
        assert self._reduction is not None
        self.last.reduced = True
        return self._reduction.add_step(parameters, nodes, values)
