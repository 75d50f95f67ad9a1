"""This rank's part of a network that is split over several ranks, in a training run."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from hostdev.core.primitive import Primitive
from hostdev.core.timeline import Timeline
from hostdev.data.batch import Batch
from hostdev.distributed.dense_state import DenseState
from hostdev.distributed.process_group import Ranks
from hostdev.ext.parallel.layout import Layout
from hostdev.ext.parallel.parts import Parts
from hostdev.models.model import Model
from hostdev.models.wide_deep.loss import deep_l2
from hostdev.pipeline.outcome import Outcome
from hostdev.runtime.rows import Rows
from hostdev.runtime.step import Step
from hostdev.train.network import DEEP, Network, Result, Scored, Setup, inputs_like

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


class StagedNetwork(Network):
    """The layers of this rank's stage and slice.

    Args:
        setup: The training run.
        reading: Arguments of `Runtime.train` and `predict` that define how to read batches.
        sample: A batch with the shapes of the model's inputs.
        layout: Stages and slices of the model.
    """

    def __init__(self, setup: Setup, reading: Mapping[str, Any], sample: Batch, layout: Layout) -> None:
        assert setup.ranks is not None
        ops = [Primitive(name, _call, scope="network", log=setup.log) for name in ("DenseForward", "DenseBackward")]
        self._staged = Staged(
            setup.model,
            layout,
            setup.ranks,
            setup.runtime.device,
            setup.autocast,
            sample,
            _l2_term if setup.l2 != "none" else None,
            setup.runtime.pipeline.timeline,
            ops,
        )
        none = [torch.nn.Parameter(torch.zeros(0, device=setup.runtime.device))]
        super().__init__(setup, self._staged.parameters or none)
        self._reading = reading

    @property
    def description(self) -> str:
        """The stages and slices as text."""
        return self._staged.describe()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent in training to ranks with other parts of the network."""
        return self._staged.sent_bytes

    def train(self, parts: Iterable[Batch]) -> Generator[Result, None, None]:
        """Take a step per batch; see `Trainer.train`."""
        here = self.setup.micro_batches.here
        loop = self.setup.runtime.train(parts, **self._reading, micro_batches=here, by_step=True)
        with loop:
            for step in loop:
                outcome, rows = self._step(step)
                yield Result(rows, outcome)
                del step, outcome

    def _step(self, step: Step) -> tuple[Outcome, int]:
        """Queue a step; return its outcome with the losses, and its number of samples."""
        micro = self.setup.micro_batches
        self.adam.zero_grad()

        def given(number: int) -> tuple[Tensor, Any]:
            micro.seed_layers(number)
            dense, rows = _given(step, number)
            return dense, self.setup.frozen.detach(rows)

        def loss(number: int, logits: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
            (batch, _, label, weight), _ = step.micro_batch(number)
            wide = self.setup.loss(logits, label, weight)
            objective = wide * (micro.weight(batch) or 1.0)
            objective = objective if extra is None else objective + extra
            return objective, torch.stack([wide.detach(), objective.detach()])

        losses = self._staged.step(step, given, loss)
        micro.begin(micro.here)
        assert losses is not None
        [batch, *_], rows = step.micro_batch(len(step.sizes) - 1)
        return self.finish(rows, batch, losses), batch.step_rows

    def score(self, parts: Iterable[Batch]) -> Scored:
        """Yield the logits of each of this rank's micro-batches, and the micro-batch.

        The logits are None if the micro-batch has no samples, or if another rank has the logits.
        """
        loop = self.setup.runtime.predict(parts, **self._reading, micro_batches=self.setup.micro_batches.here)
        with closing(loop):
            for step in loop:
                found = dict(self._staged.predict(step, partial(_given, step)))
                for number in range(len(step.sizes)):
                    (batch, *_), _ = step.micro_batch(number)
                    scores = found.get(number)
                    yield None if scores is None else scores.float().cpu().numpy(), batch

    def state(self) -> DenseState:
        """Return the state of the whole network and its optimizer on rank 0, and an empty state on other ranks."""
        return self._staged.state(self.adam)

    def load(self, model: Any, optimizer: Any) -> None:
        """Load this rank's part of the layers' and the optimizer's state."""
        self._staged.load(model, self.adam, optimizer)


def _l2_term(rows: Rows) -> Tensor:
    """Return the L2 term of a micro-batch."""
    return deep_l2(*rows.unique(DEEP))


def _call(call: Callable[..., Any], *values: Any, **named: Any) -> Any:
    return call(*values, **named)


def _given(step: Step, number: int) -> tuple[Tensor, Rows]:
    (_, dense, *_), rows = step.micro_batch(number)
    return dense, rows
