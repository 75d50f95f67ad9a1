"""This rank's part of a network that is split over several ranks, in a training run."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hostdev.core.primitive import Primitive
from hostdev.data.batch import Batch
from hostdev.distributed.dense_state import DenseState
from hostdev.ext.parallel.layout import Layout
from hostdev.ext.training.staged import Staged
from hostdev.models.wide_deep.loss import deep_l2
from hostdev.pipeline.outcome import Outcome
from hostdev.runtime.rows import Rows
from hostdev.runtime.step import Step
from hostdev.train.network import DEEP, Network, Result, Scored, Setup


class StagedNetwork(Network):
    """The layers of this rank's stage and slice.

    Args:
        setup: The training run.
        reading: Arguments of `Runtime.train` and `predict` that define how to read batches.
        layout: Stages and slices of the model.
        sample: A batch with the shapes of the model's inputs.
    """

    def __init__(self, setup: Setup, reading: Mapping[str, Any], layout: Layout, sample: Batch) -> None:
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
