"""A model split over several ranks: rows enter at the first stage, and losses are computed at the last stage."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from hostdev.core.timeline import Timeline
from hostdev.data.batch import Batch
from hostdev.distributed.process_group import Ranks
from hostdev.ext.parallel.layout import Layout
from hostdev.ext.parallel.parts import Parts
from hostdev.models.model import Model
from hostdev.runtime.step import Step
from hostdev.train.network import inputs_like

Given = Callable[[int], tuple[Tensor, Any]]  # maps a micro-batch's number to its dense columns and rows


class Staged:
    """This rank's part of a model.

    Args:
        sample: A batch with the shapes of the model's inputs.
        extra: Called with the model's rows; returns an additional loss term, a scalar. None for no such term.
        timeline: Records the micro-batches' forward and backward passes.
        ops: Two functions that time the forward and the backward pass; each calls its first argument with its other
            arguments.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        ranks: Ranks,
        device: torch.device,
        autocast: torch.dtype | None,
        sample: Batch,
        extra: Callable[[Any], Tensor] | None,
        timeline: Timeline,
        ops: Sequence[Callable[..., Any]],
    ) -> None:
        self._ranks, self._extra, self._device = ranks, extra, device
        self._like = partial(inputs_like, model, sample, autocast)
        self._parts = Parts(
            model,
            layout,
            ranks,
            self._like,
            device,
            autocast=autocast,
            aside=extra is not None,
            timeline=timeline,
            ops=ops,
        )
        self.parameters, self.state, self.load = self._parts.parameters, self._parts.state, self._parts.load
        self._sent = 0  # bytes of rows sent to ranks with other slices
        self._slices = ranks.channel("model") if ranks.mesh.model > 1 else None

    def describe(self) -> str:
        """Return the model's stages and slices as text."""
        return self._parts.text

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent in training to ranks with other parts of the model."""
        return self._parts.sent_bytes + self._sent

    def step(
        self, step: Step, given: Given, loss: Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """Run a step's micro-batches forward and backward, and sum their gradients over all ranks.

        Args:
            given: Called with a micro-batch's number, on ranks of the first stage; returns its dense columns and rows.
            loss: Called with a micro-batch's number, its logits and the additional loss term or None; returns the loss
                to differentiate, and values for all ranks.

        Returns:
            The values that `loss` returned for all micro-batches, float32 [M, ...].
        """

        def compute_loss(number: int, output: Any) -> tuple[Tensor, Tensor]:
            return loss(number, *output) if self._extra is not None else loss(number, output, None)

        def report_gradients(number: int) -> None:
            if self._ranks.leads:
                step.came(number)

        ran = self._parts.step(step.number, step.sizes, self._inputs(step, given), compute_loss, report_gradients)
        found = step.reduce(*ran)
        self._parts.finish()
        return found

    def predict(self, step: Step, given: Given) -> list[tuple[int, Tensor]]:
        """Return (number, logits) of each micro-batch that has samples; [] if another rank has the logits."""
        found = self._parts.predict(step.number, step.sizes, self._inputs(step, given))
        return [(number, each[0] if self._extra is not None else each) for number, each in found]

    def _inputs(self, step: Step, given: Given) -> Callable[[int], tuple[Any, ...]]:
        """Return a function that maps a micro-batch's number to the network's inputs.

        This rank looks up the inputs' rows itself, or receives them from the leader of its slices.
        """

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
