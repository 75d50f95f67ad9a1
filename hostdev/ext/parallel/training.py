"""`hostdev train` with a network in parts: rows enter at the first stage, and losses are computed at the last stage.

The engine finds `StagedNetwork` as the network "parts" of its registry.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from hostdev.core.primitive import Primitive
from hostdev.data.batch import Batch
from hostdev.distributed.dense import DenseState
from hostdev.distributed.world import Layout, Mesh, World
from hostdev.ext.parallel.auto import choose
from hostdev.ext.parallel.network import Network as Trial
from hostdev.ext.parallel.parts import Parts
from hostdev.ext.parallel.pieces import cut, get_pieces
from hostdev.ext.parallel.plan import matched, resolve_layout
from hostdev.ext.parallel.single_stage import Ops, called
from hostdev.models.model import Model
from hostdev.models.wide_deep.network import deep_l2
from hostdev.pipeline.results import Outcome
from hostdev.runtime.body_batch import Step
from hostdev.runtime.rows import Rows
from hostdev.train.network import DEEP, DenseNetwork, Result, Scored, Setup, inputs_like

GetInputs = Callable[[int], tuple[Tensor, Any]]  # maps a micro-batch's number to its dense columns and rows


class StagedNetwork(DenseNetwork):
    """The layers of this rank's stage and slice.

    Args:
        setup: The training run.
        reading: Arguments of `Runtime.train` and `predict` that define how to read batches.
        layout: Stages and slices of the model.
        sample: A batch with the shapes of the model's inputs.
    """

    def __init__(self, setup: Setup, reading: Mapping[str, Any], layout: Layout, sample: Batch) -> None:
        self._world, self._reading = setup.world, reading
        self._has_l2 = setup.l2 != "none"
        self._like = partial(inputs_like, setup.model, sample, setup.autocast)
        passes = [Primitive(name, called, scope="network", log=setup.log) for name in ("DenseForward", "DenseBackward")]
        self._parts = Parts(
            setup.model,
            layout,
            setup.world,
            self._like,
            setup.runtime.device,
            autocast=setup.autocast,
            aside=self._has_l2,
            ops=Ops(setup.runtime.pipeline.timeline, *passes),
        )
        self.description = self._parts.text
        self._sent = 0  # bytes of rows sent to ranks with other slices
        self._slices = setup.world.channel("model") if setup.world.mesh.model > 1 else None
        none = [torch.nn.Parameter(torch.zeros(0, device=setup.runtime.device))]
        super().__init__(setup, self._parts.parameters or none)

    @classmethod
    def require(cls, model: Model, layout: Layout, mesh: Mesh | None, sample: Batch, *, searched: bool) -> None:
        """Raise UserError if the layout does not fit the model's layers; see `DenseNetwork.require`."""
        if mesh is None:
            matched(model, layout.plan)
            if layout.begins is not None:
                cut(get_pieces(model), layout.begins)
            return
        resolve_layout(model, layout, mesh, partial(inputs_like, model, sample, None), searched=searched)

    @classmethod
    def choose(
        cls, model: Model, layout: Layout, mesh: Mesh | None, sample: Batch, *, world: World, **options: Any
    ) -> tuple[Mesh, Layout, list[str]]:
        """Measure layouts on all ranks, and choose the fastest; see `DenseNetwork.choose`."""
        inputs = partial(inputs_like, model, sample, options["autocast"])
        chosen = choose(model, inputs, world, given=layout, mesh=mesh, looked_up=True, build=Trial, **options)
        return chosen.mesh, chosen.layout, chosen.lines()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent in training to ranks with other parts of the network."""
        return self._parts.sent_bytes + self._sent

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

        def get_inputs(number: int) -> tuple[Tensor, Any]:
            micro.seed_layers(number)
            dense, rows = _get_inputs(step, number)
            return dense, self.setup.detach(rows)

        def loss(number: int, output: Any) -> tuple[Tensor, Tensor]:
            logits, *terms = output if self._has_l2 else (output,)
            (batch, _, label, weight), _ = step.micro_batch(number)
            wide = self.setup.loss(logits, label, weight)
            objective = wide * (micro.weight(batch) or 1.0)
            for term in terms:
                objective = objective + term
            return objective, torch.stack([wide.detach(), objective.detach()])

        def report_gradients(number: int) -> None:
            if self._world.leads:
                step.came(number)

        inputs = self._make_inputs(step, get_inputs)
        losses = step.reduce(*self._parts.step(step.number, step.sizes, inputs, loss, report_gradients))
        self._parts.finish()
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
                inputs = self._make_inputs(step, partial(_get_inputs, step))
                outputs = dict(self._parts.predict(step.number, step.sizes, inputs))
                for number in range(len(step.sizes)):
                    (batch, *_), _ = step.micro_batch(number)
                    output = outputs.get(number)
                    if output is not None:
                        output = (output[0] if self._has_l2 else output).float().cpu().numpy()
                    yield output, batch

    def _make_inputs(self, step: Step, get_inputs: GetInputs) -> Callable[[int], tuple[Any, ...]]:
        """Return a function that maps a micro-batch's number to the network's inputs.

        This rank looks up the inputs' rows itself, or receives them from the leader of its slices. With --l2, the last
        input is the L2 term.
        """

        def inputs(number: int) -> tuple[Any, ...]:
            dense, rows = get_inputs(number)
            extra = []
            if self._has_l2:
                extra = [deep_l2(*rows.unique(DEEP)) if self._world.leads else torch.zeros((), device=self.device)]
            if self._slices is None:
                return dense, rows, *extra
            like = self._like(step.sizes[number])[1]
            mine = [*tree_leaves({name: rows[name] for name in like}), *extra] if self._world.leads else None
            wanted = [*tree_leaves(like), *extra]
            flat = torch.zeros(sum(one.numel() for one in wanted))
            if mine is not None:
                torch.cat([one.detach().reshape(-1).cpu().float() for one in mine], out=flat)
            self._slices.broadcast(flat)
            self._sent += flat.nbytes * (self._slices.ranks - 1) * (mine is not None and torch.is_grad_enabled())
            if mine is not None:
                return dense, rows, *extra
            parts = [
                part.view(one.shape).to(self.device, one.dtype).requires_grad_()
                for part, one in zip(torch.split(flat, [one.numel() for one in wanted]), wanted, strict=True)
            ]
            looked_up = tree_unflatten(parts[: len(parts) - len(extra)], tree_structure(like))
            return dense, looked_up, *parts[len(parts) - len(extra) :]

        return inputs

    def state(self) -> DenseState:
        """Return the state of the whole network and its optimizer on rank 0, and an empty state on other ranks."""
        return self._parts.state.whole(self.adam)

    def load(self, model: Any, optimizer: Any) -> None:
        """Load this rank's part of the layers' and the optimizer's state."""
        self._parts.state.load(model, self.adam, optimizer)


def _get_inputs(step: Step, number: int) -> tuple[Tensor, Rows]:
    (_, dense, *_), rows = step.micro_batch(number)
    return dense, rows
