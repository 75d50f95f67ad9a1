"""A model whose parts are on several ranks: its rows come to where it begins, and its losses from where it ends."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from hostdev.core.errors import UserError
from hostdev.core.timeline import Timeline
from hostdev.data.batch import Batch
from hostdev.distributed.process_group import Ranks
from hostdev.models.model import Model
from hostdev.parallel.layout import Layout
from hostdev.parallel.parts import Parts
from hostdev.runtime.features import read_ids
from hostdev.runtime.step import Step

Given = Callable[[int], tuple[Tensor, Any]]  # a micro-batch's dense columns and rows, of its number


class Staged:
    """The part of a model that is on this rank.

    sample    a batch, which shows what the model's inputs look like
    extra     returns a further term of the loss, [], of the model's rows; None: there is none
    timeline  where the forward and backward passes of micro-batches go
    ops       time these: each calls its first argument
    """

    def __init__(
        self, model: Model, layout: Layout, ranks: Ranks, device: torch.device, autocast: torch.dtype | None,
        sample: Batch, extra: Callable[[Any], Tensor] | None, timeline: Timeline, ops: Sequence[Callable[..., Any]],
    ) -> None:  # fmt: skip
        self._ranks, self._extra, self._device = ranks, extra, device
        self._like = partial(inputs_like, model, sample, autocast)
        self._parts = Parts(
            model, layout, ranks, self._like, device, autocast=autocast, aside=extra is not None, timeline=timeline,
            ops=ops,
        )  # fmt: skip
        self.parameters, self.state, self.load = self._parts.parameters, self._parts.state, self._parts.load
        self._sent = 0  # values of rows, to ranks with other slices
        self._slices = ranks.channel("model") if ranks.mesh.model > 1 else None

    def describe(self) -> str:
        """Return how the model is cut, as text."""
        return self._parts.text

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to ranks with other parts, in training."""
        return self._parts.sent_bytes + self._sent

    def step(
        self, step: Step, given: Given, loss: Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """Take a step's micro-batches forward and back, and add their gradients up on all ranks.

        given    returns a micro-batch's dense columns and rows, where the network begins
        loss     returns what to differentiate of a micro-batch, and values to be known everywhere, of its number, its
                 logits and the further term
        returns  the values of all micro-batches, float32 [M, any]
        """

        def of_output(number: int, output: Any) -> tuple[Tensor, Tensor]:
            return loss(number, *output) if self._extra is not None else loss(number, output, None)

        def came(number: int) -> None:
            if self._ranks.leads:
                step.came(number)

        ran = self._parts.step(step.number, step.sizes, self._inputs(step, given), of_output, came)
        found = step.reduce(*ran)
        self._parts.finish()
        return found

    def predict(self, step: Step, given: Given) -> list[tuple[int, Tensor]]:
        """Return the logits of the micro-batches that have samples, with their numbers, on one rank."""
        found = self._parts.predict(step.number, step.sizes, self._inputs(step, given))
        return [(number, each[0] if self._extra is not None else each) for number, each in found]

    def _inputs(self, step: Step, given: Given) -> Callable[[int], tuple[Any, ...]]:
        """Return what returns the network's inputs: those looked up here, or by the first of the ranks with slices."""

        def inputs(number: int) -> tuple[Any, ...]:
            dense, rows = given(number)
            extra = []
            if self._extra is not None:
                extra = [self._extra(rows) if self._ranks.leads else torch.zeros((), device=self._device)]
            if self._slices is None:
                return dense, rows, *extra
            like = self._like(step.sizes[number])[1]
            mine = [*tree_leaves({name: rows[name] for name in like}), *extra] if self._ranks.leads else None
            wanted = [*tree_leaves(like), *extra]
            flat = torch.zeros(sum(one.numel() for one in wanted))
            if mine is not None:
                torch.cat([one.detach().reshape(-1).cpu().float() for one in mine], out=flat)
            self._slices.broadcast(flat)
            self._sent += flat.nbytes * (self._slices.ranks - 1) * (mine is not None and torch.is_grad_enabled())
            if mine is not None:
                return dense, rows, *extra
            parts = [
                part.view(one.shape).to(self._device, one.dtype).requires_grad_()
                for part, one in zip(torch.split(flat, [one.numel() for one in wanted]), wanted, strict=True)
            ]
            looked_up = tree_unflatten(parts[: len(parts) - len(extra)], tree_structure(like))
            return dense, looked_up, *parts[len(parts) - len(extra) :]

        return inputs


def inputs_like(model: Model, sample: Batch, autocast: torch.dtype | None, samples: int) -> tuple[Any, ...]:
    """Return zeros in place of the network's inputs, for so many samples."""
    given, rows = model.ids(sample), {}
    for name, feature in model.features.items():
        ids = read_ids(name, feature, given[name])
        if feature.pooling is None and ids.shape is not None and ids.shape[0] != ids.samples:
            raise UserError(
                f"feature {name!r} has rows without pooling, so many as its samples have: parts of a network are to "
                "know sizes before; give it a pooling"
            )
        per_sample = [] if ids.shape is None else list(ids.shape[1:])
        tables = (feature.tables,) if feature.is_single else feature.tables
        values = tuple(
            torch.zeros([samples, *per_sample, model.tables[table].dim], requires_grad=True,
                        dtype=autocast if autocast is not None and model.tables[table].dim > 1 else torch.float32)
            for table in tables
        )  # fmt: skip
        rows[name] = values[0] if feature.is_single else values
    return torch.zeros(samples, sample.dense.shape[1]), rows
