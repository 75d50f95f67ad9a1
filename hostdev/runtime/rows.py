"""A batch's rows as a model gets them, and the gradients that come back to them."""

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hostdev.device.pinned import Slab
from hostdev.device.rows import GroupUses, pull
from hostdev.device.staging import Staging
from hostdev.pipeline.flight import Flight
from hostdev.pipeline.outcome import Outcome
from hostdev.runtime.features import FeatureBinding
from hostdev.runtime.finite import Flags

Value = Tensor | tuple[Tensor, ...]


class Order:
    """The order of the ids, where a cache's plan has the rows in another; sent to the device when somebody asks.

    places  int32 [U], where the row of each id lies
    """

    def __init__(self, places: npt.NDArray[np.int32], staging: Staging, memory: Slab) -> None:
        self._places, self._staging, self._memory = places, staging, memory
        self._there: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """The places on the device, int64 [U]."""
        if self._there is None:
            [there], mark = self._staging.send([torch.from_numpy(self._places)], self._memory)
            self._staging.await_sent([mark], [there])
            self._there = there.long()
        return self._there

    def in_ids(self, values: Tensor) -> Tensor:
        """Return values [U, ...] of the rows in the order of the ids."""
        return values.index_select(0, self.places)

    def in_rows(self, values: Tensor) -> Tensor:
        """Return values [U, ...] of the ids in the order of the rows."""
        out = torch.empty_like(values)
        out[self.places] = values  # all different; a sum would lose the sign of a zero
        return out


class Leaf:
    """A batch's unique rows of one table, float32 [U, D] on the device, and their gradient.

    With a cache they lie in the order of its plan. What is added over rows, such as a norm, is added in the order of
    the ids, as without one: so `parameter` gives the gradient in that order, and `take_grad` brings it back.
    """

    def __init__(self, table: Any, values: Tensor, order: Order | None, *, trained: bool) -> None:
        self.table, self._order = table, order
        self.rows = values.requires_grad_() if trained else values
        self._parameter: Tensor | None = None  # in the order of the ids, where somebody has asked for it

    @property
    def trained(self) -> bool:
        """Tell whether a gradient may come."""
        return self.rows.requires_grad

    def grads(self) -> list[Tensor]:
        """Return the gradient, in the order in which it is; none if none has come."""
        held = self.rows if self._parameter is None else self._parameter
        return [] if held.grad is None else [held.grad]

    def take_grad(self) -> Tensor | None:
        """Return the gradient float32 [U, D] in the order of the rows, and forget it; None if none has come."""
        held = self.rows if self._parameter is None else self._parameter
        grad, held.grad = held.grad, None
        if grad is None:
            return None
        grad = grad.detach().contiguous()  # somebody may have put it there
        return grad if self._order is None or self._parameter is None else self._order.in_rows(grad)

    def add_grad(self, grad: Tensor) -> None:
        """Add float32 [U, D], in the order of the rows, to the gradient."""
        if self.rows.grad is not None:
            self.rows.grad.add_(grad)
        elif self._parameter is None or self._order is None:
            self.rows.grad = grad
        else:
            grad = self._order.in_ids(grad)
            self._parameter.grad = grad if self._parameter.grad is None else self._parameter.grad + grad

    def drop_grad(self) -> None:
        """Forget the gradient."""
        self.rows.grad = None
        if self._parameter is not None:
            self._parameter.grad = None

    def parameter(self) -> Tensor:
        """Return a tensor with the gradient in the order of the ids, which may be changed in place, or replaced.

        Gradients of later backward passes come to it, too.
        """
        if self._order is None:
            return self.rows
        if self._parameter is None:
            self._parameter = self._order.in_ids(self.rows.detach()).requires_grad_()
            hand_on = partial(_hand_on, self._parameter, self._order)
            self.rows.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]
            if self.rows.grad is not None:
                hand_on(self.rows)
        return self._parameter

    def in_ids(self) -> Tensor:
        """Return the rows in the order of the ids, through which gradients go."""
        if self._order is None:
            return self.rows
        out: Tensor = _InOrderOfIds.apply(self.rows, self._order)  # type: ignore[no-untyped-call]
        return out

    def chosen(self, places: Tensor) -> Tensor:
        """Return some of the rows, all different, int64 [any], through which gradients go."""
        out: Tensor = _Chosen.apply(self.rows, places)  # type: ignore[no-untyped-call]
        return out

    def reordered(self, values: Tensor) -> Tensor:
        """Return values [U] of the rows in the order of the ids."""
        return values if self._order is None else self._order.in_ids(values)


def _hand_on(parameter: Tensor, order: Order, rows: Tensor) -> None:
    """Add the rows' gradient to that of a parameter in the order of the ids."""
    assert rows.grad is not None
    grad, rows.grad = order.in_ids(rows.grad), None
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class _InOrderOfIds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return order.in_ids(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.order.in_rows(grads[0]), None


class _Chosen(torch.autograd.Function):
    """A node that can be used again after a backward pass, as `_Pull`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.places, ctx.size = places, len(rows)
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = grads[0].new_zeros(ctx.size, grads[0].shape[1])
        return out.index_copy_(0, ctx.places, grads[0]), None


class Rows:
    """A batch's rows by feature, on the device, with gradients that go to their tables.

    It has what a read-only dict has, and is none for `isinstance`: frameworks that move or convert the tensors of a
    batch rebuild every Mapping in it from its items, and rows cannot be rebuilt. So they hand it on as it is.

    Of a feature with one id a sample [B, D]; with k ids [B, k, D]; with bags, pooled [B, D], else [N, D]. A tuple of
    these, one for each table, where the feature has several.
    """

    def __init__(
        self,
        flight: Flight,
        uses: Sequence[GroupUses],
        leaves: Sequence[Sequence[Leaf]],
        values: dict[str, Value],
        order: Sequence[tuple[int, int]],
        staging: Staging,
        flags: Flags | None,
        *,
        due: bool,
        shares_rows: bool = False,
        reduction: Any = None,
        losses: Sequence[Tensor] = (),
        hint: str = "",
    ) -> None:
        self._flight, self._staging, self._flags, self._due = flight, staging, flags, due
        self._hint = hint  # where features have been left out
        self._losses = losses  # that `backward` was called on: 0, or not finite
        self._reduction = reduction  # of a step's micro-batches
        self._has_others = shares_rows or reduction is not None  # rows that other batches of the step use
        self.reduced = False
        self._uses, self._leaves, self._values = uses, leaves, values
        self._order = order  # of each table its group, and its place in that: as the features name them
        self._unique: dict[str, Tensor] = {}
        self.guarded: tuple[Tensor, Outcome] | None = None  # by `guard`: the flag on the device, and what comes of it
        self.over = False

    def __getitem__(self, feature: str) -> Value:
        """Return a feature's rows."""
        self._require_open()
        try:
            return self._values[feature]
        except KeyError:
            raise KeyError(f"no feature {feature!r}; there are {', '.join(self._values)}{self._hint}") from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the features' names."""
        self._require_open()
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of features."""
        return len(self._values)

    def __contains__(self, feature: object) -> bool:
        """Tell whether there is a feature of this name."""
        self._require_open()
        return feature in self._values

    def keys(self) -> KeysView[str]:
        """Return the features' names."""
        self._require_open()
        return self._values.keys()

    def values(self) -> ValuesView[Value]:
        """Return the rows of the features."""
        self._require_open()
        return self._values.values()

    def items(self) -> ItemsView[str, Value]:
        """Return the features' names with their rows."""
        self._require_open()
        return self._values.items()

    def get(self, feature: str, default: Any = None) -> Any:
        """Return a feature's rows, or `default` where there is no such feature."""
        self._require_open()
        return self._values.get(feature, default)

    @property
    def uses(self) -> Sequence[GroupUses]:
        """Where the batch uses the rows of each group."""
        return self._uses

    @property
    def leaves(self) -> list[Leaf]:
        """The unique rows of every table that is trained, in an order that does not depend on where the tables are."""
        return [leaf for group, place in self._order if (leaf := self._leaves[group][place]).trained]

    def parameters(self) -> list[Tensor]:
        """Return the rows as parameters whose gradients a clip by norm is to see and to scale; after `backward`.

        ::

            clip_grad_norm_([*model.parameters(), *rows.parameters()], 1.0)

        Each is float32 [U, D], a row for each different id of the batch, in order of first occurrence. With
        `accumulate` they are those of all batches of the step, with the gradients that have come so far. With
        micro-batches after the last `reduce`. ValueError with other ranks, where no rank has the sums over all.
        """
        self._require_open()
        if self._reduction is not None:
            self._reduction.require_sums(reduced=self.reduced)
        return [leaf.parameter() for leaf in self.leaves]

    def reduce(self, parameters: Iterable[Tensor], values: Tensor | None = None) -> Tensor | None:
        """Add up the gradients of a step's micro-batches; to be called once with each, after its `backward`.

        ::

            (loss * weight).backward()  # weight: the micro-batch's part of the batch's samples
            rows.reduce(model.parameters())
            if rows.is_due:
                optimizer.step()
                optimizer.zero_grad()

        Takes the gradients of the parameters and of the rows away, and with the last micro-batch gives both the sums
        over all, in the order of a tree, which depends on nothing but how many there are. A micro-batch without samples
        has nothing to add, but is to be counted, too. Without `micro_batches` nothing changes.

        parameters  of the dense side, the same ones each time
        values      small and of one shape each time, [] or [n], such as losses; or None
        returns     with the last micro-batch the values of all, float32 [M, ...], 0 where there were none; else None

        ValueError for other shapes, for other parameters than with the micro-batch before, and with other ranks for
        gradients that are not float32.
        """
        self._require_open()
        if self._reduction is None:
            return None if values is None else values[None]
        if self.reduced:
            raise ValueError("reduce() was called twice with a micro-batch")
        self.reduced = True
        found: Tensor | None = self._reduction.add(parameters, values)
        return found

    def unique(self, table: str) -> tuple[Tensor, Tensor]:
        """Return a table's rows of the batch, each once, and how often the batch uses it: for a term of the loss.

        returns  float32 [U, D], through which gradients go, in order of first occurrence; float32 [U]. Where several
                 batches make a step (`accumulate`, `micro_batches`), the rows that this one uses itself

        ValueError where there is no table of this name.
        """
        self._require_open()
        for uses, group in zip(self._uses, self._leaves, strict=True):
            for leaf in group:
                if leaf.table.name == table:
                    own = uses.first_uses() if self._has_others else None
                    if table not in self._unique:  # one node of the graph: its gradients add up as without a cache
                        self._unique[table] = leaf.in_ids() if own is None else leaf.chosen(own)
                    counts = uses.counts()
                    return self._unique[table], leaf.reordered(counts) if own is None else counts[own]
        names = [leaf.table.name for group in self._leaves for leaf in group]
        raise ValueError(f"no table {table!r}; there are {', '.join(names)}")

    def to_host(self, tensors: Sequence[Tensor], read: Callable[[list[npt.NDArray[Any]]], Any]) -> Outcome:
        """Let small tensors of the step come to the host; nobody waits until the value is asked for with `get`.

        tensors  not to be changed in place from now on
        read     makes a value of the arrays, or raises
        """
        self._require_open()
        outcome = Outcome(tensors, read, self._staging, self._flight.memory)
        self._flight.outcomes.append(outcome)
        return outcome

    def guard(
        self,
        optimizer: torch.optim.Optimizer,
        look_at: Sequence[Tensor],
        results: Sequence[Tensor],
        read: Callable[[list[npt.NDArray[Any]]], Any],
    ) -> Outcome:
        """Let a step that is not finite change nothing, on the device and the host, and nobody wait to find out.

        Called between `backward` and the optimizer's step. A pass over the gradients of the optimizer's parameters,
        those of the rows and what else there is to look at sets a number on the device; while it is not 0, the
        optimizer and the updates of rows there do nothing, in this step and in those queued behind it.

        optimizer  one that takes torch's `found_inf`, such as Adam(fused=True)
        look_at    others that are to be finite: losses, float32
        results    small tensors for the host, not to be changed in place from now on
        read       makes the value of the outcome from these, and at their end the number, float32 [1]; it is to raise
                   an error where that is not 0, which the loop raises before the host's rows change
        """
        self._require_open()
        if self._flags is None:
            raise ValueError("nothing is stepped in a loop over `predict`")
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(f"{type(optimizer).__name__} takes no found_inf; use one of torch's with fused=True")
        dense = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [(grad, leaf.table) for leaf in self.leaves for grad in leaf.grads()]
        self._flags.check_others([*look_at, *dense, *self._losses])
        if grads:
            self._flags.check(*zip(*grads, strict=True))
        optimizer.found_inf = self._flags.stop  # type: ignore[attr-defined]
        outcome = Outcome([*results, self._flags.stop.clone().view(1)], read, self._staging, self._flight.memory)
        self._flight.outcomes.append(outcome)
        self.guarded = self._flags.stop, outcome
        return outcome

    @property
    def is_due(self) -> bool:
        """Tell whether the optimizer is to step with this batch: the last one of those that are accumulated."""
        return self._due

    @property
    def number(self) -> int:
        """The batch's number in the trace."""
        return self._flight.number

    @property
    def step(self) -> int:
        """The step's number in its loop, from 1: with `accumulate` several batches have the same."""
        return self._flight.position

    def let_go(self) -> None:
        """Let go of the features' rows: their gradients have come."""
        self._values, self._unique = {}, {}

    def end(self) -> None:
        """Let go of everything: the loop has come back."""
        self.over = True
        self._leaves, self._uses, self._values, self._unique, self._order = [], [], {}, {}, []
        self.guarded = self._reduction = None

    def _require_open(self) -> None:
        if self.over:
            raise ValueError(
                "this batch is over: the loop has come back for the next one, or an evaluation has seen it as finished"
            )


def values_of(
    bindings: Sequence[FeatureBinding],
    features: Sequence[Sequence[int]],
    leaves: Sequence[Sequence[Leaf]],
    uses: Sequence[GroupUses],
    shapes: Sequence[tuple[int, ...] | None],
) -> dict[str, Value]:
    """Return each feature's rows.

    Args:
        bindings: Of the features.
        features: Of each group, the numbers of its features.
        leaves: The unique rows of each group's tables.
        uses: Of each group's rows.
        shapes: Of the ids of each feature; None for one that is pooled.
    """
    parts: dict[tuple[int, int], dict[int, Tensor]] = {}
    for group, (mine, group_uses) in enumerate(zip(leaves, uses, strict=True)):
        for place, leaf in enumerate(mine):
            dtypes = [
                bindings[number].dtypes[bindings[number].tables.index((group, place))] for number in features[group]
            ]
            pulled = pull(leaf.rows, group_uses, dtypes)
            parts[group, place] = dict(zip(features[group], pulled, strict=True))
    values: dict[str, Value] = {}
    for number, feature in enumerate(bindings):
        outputs = [parts[at][number] for at in feature.tables]
        shape = shapes[number]
        if shape is not None:
            outputs = [rows.view(*shape, rows.shape[1]) for rows in outputs]
        values[feature.name] = outputs[0] if feature.feature.is_single else tuple(outputs)
    return values
