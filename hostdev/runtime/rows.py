"""A batch's rows as a model gets them, and their gradients."""

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, TypeAlias, TypeVar, overload

import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.device.rows import GroupUses, Lookup, pull
from hostdev.device.staging import Staging
from hostdev.pipeline.results import Outcome, StepBatch
from hostdev.runtime.features import FeatureBinding, GroupSpec, Stack
from hostdev.runtime.reduction import Flags, Reduction
from hostdev.runtime.row_parameter import RowParameter

Value: TypeAlias = Tensor | tuple[Tensor, ...]  # a feature's rows: one tensor, or one per table
Default = TypeVar("Default")
Read: TypeAlias = Callable[[list[npt.NDArray[Any]]], Any]  # turns arrays of any dtype into the value of an outcome


class FeatureRows:
    """Rows by feature, with the methods of a read-only dict, which raise ValueError once the batch is over.

    This class is not a Mapping: frameworks that move or convert the tensors of a batch rebuild every Mapping from its
    items, which is impossible for rows, but leave other objects unchanged.

    Args:
        values: The rows of each feature.
        hint: The end of the message for an unknown feature.
    """

    def __init__(self, values: Mapping[str, Value], hint: str) -> None:
        self._values, self._hint = values, hint
        self.over = False

    def __getitem__(self, feature: str) -> Value:
        """Return a feature's rows."""
        self._require_open()
        try:
            return self._values[feature]
        except KeyError:
            raise KeyError(f"no feature {feature!r}; the features are {', '.join(self._values)}{self._hint}") from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the features' names."""
        self._require_open()
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of features."""
        self._require_open()
        return len(self._values)

    def __contains__(self, feature: object) -> bool:
        """Return whether there is a feature of this name."""
        self._require_open()
        return feature in self._values

    def keys(self) -> KeysView[str]:
        """Return the features' names."""
        self._require_open()
        return self._values.keys()

    def values(self) -> ValuesView[Value]:
        """Return each feature's rows."""
        self._require_open()
        return self._values.values()

    def items(self) -> ItemsView[str, Value]:
        """Return the features' names with their rows."""
        self._require_open()
        return self._values.items()

    @overload
    def get(self, feature: str) -> Value | None: ...
    @overload
    def get(self, feature: str, default: Default) -> Value | Default: ...
    def get(self, feature: str, default: object = None) -> object:
        """Return a feature's rows, or `default` if there is no such feature."""
        self._require_open()
        return self._values.get(feature, default)

    def _require_open(self) -> None:
        if self.over:
            raise ValueError(
                "this batch is over: the loop has asked for the next batch, or an evaluation has finished this one; "
                "use rows only in the body of their own batch, before evaluations"
            )


class Rows(FeatureRows):
    """A batch's rows by feature, on the device; their gradients update the tables.

    It has the methods of a read-only dict. A feature's rows are [B, D] if pooled or with one id per sample, [B, k, D]
    with k ids per sample, and [N, D] for bags without pooling. A feature with several tables has a tuple of these, one
    for each table. Loops create this object.
    """

    def __init__(
        self,
        step_batch: StepBatch,
        uses: Sequence[GroupUses],
        leaves: Sequence[Sequence[RowParameter]],
        values: Mapping[str, Value],
        order: Sequence[tuple[int, int]],
        staging: Staging,
        flags: Flags | None,
        *,
        due: bool,
        shares_rows: bool = False,
        reduction: Reduction | None = None,
        losses: Sequence[Tensor] = (),
        hint: str = "",
    ) -> None:
        super().__init__(values, hint)
        self._step_batch, self._staging, self._flags, self._due = step_batch, staging, flags, due
        self._losses = losses  # for each loss on which `backward` was called: 0 if it is finite, else NaN
        self._reduction = reduction  # sums over a step's micro-batches
        # Whether some of the unique rows may be used only by other batches of the step.
        self._has_others = shares_rows or reduction is not None
        self.reduced = False
        self._uses, self._leaves = uses, leaves
        self._order = order  # for each table, in the order of the features: its group, and its index in the group
        self._unique: dict[str, Tensor] = {}
        self.guarded: tuple[Tensor, Outcome] | None = None  # set by `guard`: the device's flag, and the outcome

    @property
    def leaves(self) -> list[RowParameter]:
        """The unique rows of every trained table, in the order of the features, wherever the tables are stored."""
        return [leaf for group, place in self._order if (leaf := self._leaves[group][place]).trained]

    def parameters(self) -> list[Tensor]:
        """Return the rows as parameters for clipping by norm, which reads and scales their gradients.

        ::

            clip_grad_norm_([*model.parameters(), *rows.parameters()], 1.0)

        This must be called after `backward`; with micro-batches, after the last `reduce`. With `accumulate` the result
        has the rows of all batches of the step, with the gradients so far.

        Returns:
            For each table that is not frozen, float32 [U, D]: a row for each unique id, in order of first occurrence.

        Raises:
            ValueError: The last `reduce` is missing, or there are other ranks, so that no rank has all gradients.
        """
        self._require_open()
        if self._reduction is not None:
            self._reduction.require_sums(reduced=self.reduced)
        return [leaf.parameter() for leaf in self.leaves]

    def reduce(self, parameters: Iterable[Tensor], values: Tensor | None = None) -> Tensor | None:
        """Sum the gradients of a step's micro-batches. It must be called once per micro-batch, after its `backward`.

        ::

            (loss * weight).backward()  # weight: the micro-batch's share of the batch's samples
            rows.reduce(model.parameters())
            if rows.is_due:
                optimizer.step()
                optimizer.zero_grad()

        Each call removes the gradients of the parameters and of the rows. The call for the last micro-batch sets them
        to the sums over all micro-batches (with ranks, it sets only those of the parameters). The order of the
        additions is a tree that depends only on the number of micro-batches; a micro-batch without samples adds
        nothing, but is counted. In a loop without `micro_batches`, `reduce` does not change the gradients.

        Args:
            parameters: The dense parameters, the same ones each time.
            values: A small tensor, such as losses, or None. Its shape, [] or [n], is the same in all micro-batches.

        Returns:
            For the last micro-batch, all micro-batches' values, float32 [M, ...], with 0 for missing values; else None.

        Raises:
            ValueError: `reduce` was called twice for a micro-batch, parameters or shapes are wrong, or, with ranks, a
                parameter is not float32.
        """
        self._require_open()
        if self._reduction is None:
            return None if values is None else values[None]
        if self.reduced:
            raise ValueError("reduce() was called twice for a micro-batch; call it once, after backward()")
        self.reduced = True
        return self._reduction.add(parameters, values)

    def unique(self, table: str) -> tuple[Tensor, Tensor]:
        """Return the batch's unique rows of a table, and how often the batch uses each, for a loss term.

        Returns:
            The rows, float32 [U, D], differentiable, in order of first occurrence; and the counts, float32 [U]. If
            several batches make a step (`accumulate`, `micro_batches`), these are only the rows that this batch uses.

        Raises:
            ValueError: There is no table of this name.
        """
        self._require_open()
        for uses, group in zip(self._uses, self._leaves, strict=True):
            for leaf in group:
                if leaf.table.name == table:
                    own = uses.get_first_occurrences() if self._has_others else None
                    if table not in self._unique:  # one graph node, whose gradients add up as without a cache
                        self._unique[table] = leaf.in_ids() if own is None else leaf.select(own)
                    counts = uses.counts()
                    return self._unique[table], leaf.reordered(counts) if own is None else counts[own]
        names = [leaf.table.name for group in self._leaves for leaf in group]
        raise ValueError(f"no table {table!r}; the tables are {', '.join(names)}")

    def to_host(self, tensors: Sequence[Tensor], read: Read) -> Outcome:
        """Copy small tensors of the step to the host without a device sync; the result's `get` waits for the copies.

        Args:
            tensors: The tensors, which must not be changed in place afterwards.
            read: Called with the tensors as arrays; returns the value of the outcome, or raises an error.
        """
        self._require_open()
        outcome = Outcome(tensors, read, self._staging, self._step_batch.memory)
        self._step_batch.outcomes.append(outcome)
        return outcome

    def guard(
        self, optimizer: torch.optim.Optimizer, look_at: Sequence[Tensor], results: Sequence[Tensor], read: Read
    ) -> Outcome:
        """If gradients are not finite, make the step change nothing, on device and host; this needs no device sync.

        This must be called between `backward` and the optimizer's step. If a gradient of the optimizer's parameters or
        of the rows is not finite, a flag on the device is set. From then on, the optimizer and the updates of rows do
        nothing, in this step and in the steps that are queued after it.

        Args:
            optimizer: An optimizer that accepts torch's `found_inf`, such as Adam(fused=True).
            look_at: Other float32 tensors that must be finite, such as losses.
            results: Small tensors for the host, which must not be changed in place afterwards.
            read: Called with the results and the flag, float32 [1], as arrays; returns the value of the outcome. If the
                flag is not 0, `read` must raise an error; the loop raises the same error before the host's rows change.
        """
        self._require_open()
        if self._flags is None:
            raise ValueError("guard() was called in a loop over `predict`, which takes no steps")
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(f"{type(optimizer).__name__} ignores found_inf; use a torch optimizer with fused=True")
        dense = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [(grad, leaf.table) for leaf in self.leaves for grad in leaf.grads()]
        self._flags.check_others([*look_at, *dense, *self._losses])
        if grads:
            self._flags.check(*zip(*grads, strict=True))
        optimizer.found_inf = self._flags.stop  # type: ignore[attr-defined]
        outcome = Outcome([*results, self._flags.stop.clone().view(1)], read, self._staging, self._step_batch.memory)
        self._step_batch.outcomes.append(outcome)
        self.guarded = self._flags.stop, outcome
        return outcome

    @property
    def is_due(self) -> bool:
        """Whether the optimizer should step after this batch, because it is the last batch of the step."""
        return self._due

    @property
    def number(self) -> int:
        """The batch's number in the timeline."""
        return self._step_batch.number

    @property
    def step(self) -> int:
        """The step's number in its loop, from 1; with `accumulate` several batches share it."""
        return self._step_batch.position

    def let_go(self) -> None:
        """Release the rows of the features; called after their gradients were taken."""
        self._values, self._unique = {}, {}

    def end(self) -> None:
        """Release everything; called when the loop continues."""
        self.over = True
        self._leaves, self._uses, self._values, self._unique, self._order = [], [], {}, {}, []
        self.guarded = self._reduction = None


class FeatureLayout:
    """How the rows of a runtime's tables become the rows of its stacks, and of its features outside stacks.

    Args:
        bindings: The features' bindings.
        groups: The groups of tables.
        stacks: The stacks. The features of a stack are returned as one tensor.
    """

    def __init__(
        self, bindings: Sequence[FeatureBinding], groups: Sequence[GroupSpec], stacks: Sequence[Stack]
    ) -> None:
        tables = [(g, place) for g, group in enumerate(groups) for place in range(len(group.tables))]
        outputs = {  # where `pull` returns the rows of a table for a feature
            (table, feature): (number, at)
            for number, table in enumerate(tables)
            for at, feature in enumerate(groups[table[0]].features)
        }
        self._dtypes = [
            [bindings[feature].dtypes[bindings[feature].tables.index(table)] for feature in groups[table[0]].features]
            for table in tables
        ]
        self._stacks = stacks
        self._members = [[outputs[bindings[number].tables[0], number] for number in stack.features] for stack in stacks]
        stacked = {number for stack in stacks for number in stack.features}
        self._features = [  # of each feature: its name, whether it has one table, and where its rows are
            (one.name, one.feature.is_single, [outputs[table, number] for table in one.tables if number not in stacked])
            for number, one in enumerate(bindings)
        ]

    def get_values(
        self,
        leaves: Sequence[Sequence[RowParameter]],
        uses: Sequence[GroupUses],
        shapes: Sequence[tuple[int, ...] | None],
    ) -> dict[str, Value]:
        """Return the rows of each stack, and of each feature outside stacks.

        Args:
            leaves: The unique rows of each group's tables.
            uses: The occurrences of each group's rows.
            shapes: The shape of each feature's ids; None for a pooled feature.
        """
        rows = [(leaf.rows, of_group) for group, of_group in zip(leaves, uses, strict=True) for leaf in group]
        pulled = pull([Lookup(*part, dtypes) for part, dtypes in zip(rows, self._dtypes, strict=True)], self._members)
        values: dict[str, Value] = {}
        for (name, is_single, places), shape in zip(self._features, shapes, strict=True):
            outputs: list[Any] = [pulled.features[table][place] for table, place in places]
            if not outputs:
                continue
            if shape is not None and len(shape) > 1:
                outputs = [output.view(*shape, output.shape[1]) for output in outputs]
            values[name] = outputs[0] if is_single else tuple(outputs)
        for stack, stacked in zip(self._stacks, pulled.stacks, strict=True):
            values[stack.name] = stacked
        return values
