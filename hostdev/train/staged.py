"""A model whose stages are on several ranks: a step through them, and its state as a whole."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hostdev.core.errors import UserError
from hostdev.core.micro_batches import Node, TreeSum
from hostdev.core.pieces import Piece
from hostdev.core.timeline import Timeline
from hostdev.data.batch import Batch
from hostdev.models.model import Model
from hostdev.parallel.dense import Grads, add_lists
from hostdev.parallel.pieces import balanced, costs_of, cut, pieces_of, trace
from hostdev.parallel.ranks import Ranks
from hostdev.parallel.tied import Tied
from hostdev.runtime.digest import DenseState, buffers_of
from hostdev.runtime.features import read_ids
from hostdev.runtime.step import Step


class Layout(NamedTuple):
    """How a model is cut.

    schedule  in which order micro-batches go through the stages
    begins    pieces with which the second and later stages begin; None: so that all cost the same
    """

    schedule: str
    begins: Sequence[str] | None = None


def begins_of(pieces: Sequence[Piece], layout: Layout, pipe: int, inputs: Callable[[], tuple[Any, ...]]) -> list[str]:
    """Return the pieces with which the second and later stages begin; UserError where the layout does not fit.

    pipe    ranks along the pipe axis
    inputs  returns zeros in place of the network's inputs
    """
    several = layout.schedule == "interleaved"
    if layout.begins is None:
        return balanced(pieces, costs_of(pieces, inputs()), pipe * (1 + several))
    cut(pieces, layout.begins)
    stages = len(layout.begins) + 1
    if several and (stages % pipe or stages == pipe):
        raise UserError(
            f"--stage-cut {','.join(layout.begins)} makes {stages} stages, and --schedule interleaved has two or more "
            f"on each of {pipe} processes; give {2 * pipe - 1} names, or {3 * pipe - 1}, ..."
        )
    if not several and stages != pipe:
        raise UserError(
            f"--stage-cut {','.join(layout.begins)} makes {stages} stages, and --mesh pipe={pipe} has a process for "
            f"each of {pipe}; give {pipe - 1} name{'s' * (pipe > 2)}"
        )
    return list(layout.begins)


class Staged:
    """The stages of a model that are on this rank.

    extra     returns a further term of the loss, [], of the network's inputs; None: there is none
    timeline  where the forward and backward passes of micro-batches go
    ops       time these: each calls its first argument
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
        from hostdev.parallel.stages import Ops, Stages  # what it stands on takes seconds to load

        self._ranks, self._has_extra = ranks, extra is not None
        pieces = pieces_of(model)
        self.begins = begins_of(pieces, layout, ranks.mesh.pipe, lambda: inputs_like(model, sample, 2, None))
        alike = pieces
        if extra is not None:
            alike = _with_extra(pieces, lambda rows: torch.zeros((), requires_grad=True))
            pieces = _with_extra(pieces, extra)
        stages = cut(pieces, self.begins)
        self._cut = [(stage[0].name, stage[-1].name) for stage in stages]
        self._schedule = layout.schedule
        traced = trace(
            cut(alike, self.begins),
            lambda samples: inputs_like(model, sample, samples, autocast),
            device=device.type,
            autocast=autocast,
        )
        self.channel = ranks.device_channel(device, "pipe")
        if self.channel.device.type != device.type:
            raise UserError(
                f"--mesh pipe={ranks.mesh.pipe} gives values from device to device, for which each process is to have "
                "one of its own, and torch a backend for them; use --device cpu, or no stages"
            )
        self.stages = Stages(stages, traced, self.channel, layout.schedule, device, autocast, Ops(timeline, *ops))
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._order = [name for name, _ in model.named_parameters()]
        every = dict(model.named_parameters(remove_duplicate=False))
        self._keys = {key: self.names[id(every[key])] if key in every else key for key in model.state_dict()}
        self._tied_channel = ranks.channel("pipe")
        self._tied = Tied(stages, self.names, self._tied_channel)
        self._owners = _owners(stages, ranks, model)
        self._model, self._buffers = model, buffers_of(model)
        if any(key not in every and key not in self._buffers for key in self._keys):
            raise UserError(
                "the network has state that is no tensor (get_extra_state), which stages do not bring together"
            )
        held = {id(one): one for module in self.stages.modules for one in module.parameters()}
        self.parameters = list(held.values())
        for module in model.modules():  # what other ranks have takes no memory here
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in held:
                    setattr(module, name, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
        for module in self.stages.modules:
            module.to(device)
        for module in model.modules():  # those that no piece can name, too
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))

    def describe(self) -> str:
        """Return how the network is cut, as text."""
        parts = [first if first == last else f"{first} to {last}" for first, last in self._cut]
        return f"{len(parts)} by {self._schedule}: {', '.join(parts)}"

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other stages in training."""
        return self.channel.sent_bytes + self._tied_channel.sent_bytes

    def step(
        self,
        step: Step,
        inputs: Callable[[int], tuple[Any, ...]],
        loss: Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor]],
    ) -> Tensor | None:
        """Take a step's micro-batches forward and back, and add their gradients up on all ranks.

        inputs   returns the network's arguments of a micro-batch
        loss     returns what to differentiate of a micro-batch, and values to be known everywhere, of its number, its
                 logits and the further term
        returns  the values of all micro-batches, float32 [M, any]
        """
        count = len(step.sizes)
        numbers = [number for number, size in enumerate(step.sizes) if size]
        values: list[Tensor | None] = [None] * count
        own = [
            [one for one in module.parameters() if one.requires_grad and one not in self._tied]
            for module in self.stages.modules
        ]
        tied = [
            [one for one in module.parameters() if one.requires_grad and one in self._tied]
            for module in self.stages.modules
        ]
        first = self._ranks.share()[0] * count
        sums = [_InOrder(first, count, numbers, len(each)) for each in own]

        def differentiate(number: int, output: Any) -> Tensor:
            logits, extra = output if self._has_extra else (output, None)
            objective, values[numbers[number]] = loss(numbers[number], logits, extra)
            return objective

        def came(stage: int, number: int) -> None:
            at = self.stages.numbers.index(stage)
            sums[at].put(numbers[number], _taken(own[at]))
            for one in tied[at]:
                self._tied.came(stage, numbers[number], one)
            if stage == 0 and self._ranks.leads:
                step.came(numbers[number])

        self.stages.train(
            step.number, [step.sizes[number] for number in numbers], lambda number: inputs(numbers[number]),
            differentiate, came,
        )  # fmt: skip
        parameters = [one for each in own for one in each] + self._tied.owned()
        shared = _InOrder(first, count, range(count), len(self._tied.owned()))
        for number, grads in enumerate(zip(*self._tied.gathered(count), strict=True)):
            shared.put(number, list(grads))
        sums += [shared] if self._tied.owned() else []
        joined = [
            Node(nodes[0].start, nodes[0].size, [grad for node in nodes for grad in node.value or []])
            for nodes in zip(*(each.nodes() for each in sums), strict=True)
        ]
        found = step.reduce(parameters, joined, values)
        self._tied.spread()
        return found

    def predict(self, step: Step, inputs: Callable[[int], tuple[Any, ...]]) -> list[tuple[int, Tensor]]:
        """Return the logits of the micro-batches that have samples, with their numbers, where the network ends."""
        numbers = [number for number, size in enumerate(step.sizes) if size]
        found = self.stages.predict(
            step.number, [step.sizes[number] for number in numbers], lambda number: inputs(numbers[number])
        )
        return [(number, each[0] if self._has_extra else each) for number, each in zip(numbers, found, strict=False)]

    def state(self, optimizer: torch.optim.Optimizer) -> DenseState:
        """Return the whole dense side's state in host memory, on rank 0, and nothing on others; all call it."""
        mine = {self.names[id(one)]: (number, one) for number, one in enumerate(self.parameters)}
        state = optimizer.state_dict()
        model: dict[str, Any] = {}
        slots: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(self._order):
            own: dict[str, Any] = {}
            if self._owners[name] == self._ranks.rank:
                at, parameter = mine[name]
                own = {"": parameter.detach(), **state["state"].get(at, {})}
            slots[number] = self._to_first(self._owners[name], own)
            model[name] = slots[number].pop("", None)
        for name in self._buffers:
            model[name] = self._to_first(self._owners.get(name, 0), {"": self._buffer(name)}).get("")
        if self._ranks.rank:
            return DenseState({}, {"state": {}, "param_groups": []}, [], [])
        model = {key: model[name] for key, name in self._keys.items() if name in model}
        groups = [{**state["param_groups"][0], "params": list(range(len(self._order)))}]
        return DenseState(model, {"state": slots, "param_groups": groups}, self._order, self._buffers)

    def _buffer(self, name: str) -> Tensor:
        """Return a buffer as it is now: a module may have put another tensor there."""
        return dict(self._model.named_buffers(remove_duplicate=False))[name]

    def _to_first(self, owner: int, values: dict[str, Any]) -> dict[str, Any]:
        """Return what the owner has, on rank 0; nothing on others."""
        control = self._ranks.control
        about = {key: [str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in values.items()}
        about = control.share(about if owner == self._ranks.rank else None)[owner]
        found = {}
        for key, (dtype, shape) in about.items():
            empty = torch.empty(0, dtype=getattr(torch, dtype))
            flat = values[key].detach().cpu().contiguous().view(-1) if owner == self._ranks.rank else empty
            count = torch.Size(shape).numel()
            give = [count if rank == 0 and owner == self._ranks.rank else 0 for rank in range(self._ranks.size)]
            take = [count if rank == owner and self._ranks.rank == 0 else 0 for rank in range(self._ranks.size)]
            come = control.all_to_all(flat, give, take)
            if self._ranks.rank == 0:
                found[key] = come.view(shape)
        return found

    def load(self, model: dict[str, Any], optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take what is here of the whole dense side's state; UserError where it is of another model."""
        numbers = {name: number for number, name in enumerate(self._order)}
        unknown = sorted(set(model) ^ set(self._keys))
        if unknown:
            raise UserError(f"it {'has' if unknown[0] in model else 'lacks'} {unknown[0]}")
        here = {
            **{self.names[id(one)]: one for one in self.parameters},
            **{name: self._buffer(name) for name in self._buffers},
        }
        for name, value in here.items():  # before any changes
            if model[name].shape != value.shape:
                raise UserError(f"{name} has the shape {list(model[name].shape)}, not {list(value.shape)}")
        slots = {}
        for name in self._buffers:
            self._buffer(name).copy_(model[name])
        for at, parameter in enumerate(self.parameters):
            name = self.names[id(parameter)]
            with torch.no_grad():
                parameter.copy_(model[name])
            if numbers[name] in state["state"]:
                slots[at] = state["state"][numbers[name]]
        if self.parameters:
            groups = [{**state["param_groups"][0], "params": list(range(len(self.parameters)))}]
            optimizer.load_state_dict({"state": slots, "param_groups": groups})


class _InOrder:
    """The tree's sum of a stage's gradients, of micro-batches that may come in an order of their own."""

    def __init__(self, first: int, count: int, numbers: Sequence[int], parameters: int) -> None:
        self._first = first  # the number in the step of the first one here: the tree's nodes go by it
        self._tree: TreeSum[Grads] = TreeSum(add_lists)
        self._waiting: dict[int, Grads] = {
            number: [None] * parameters for number in range(count) if number not in numbers
        }
        self._next = 0

    def put(self, number: int, grads: Grads) -> None:
        self._waiting[number] = grads
        self._go_on()

    def _go_on(self) -> None:
        while self._next in self._waiting:
            self._tree.put(Node(self._first + self._next, 1, self._waiting.pop(self._next)))
            self._next += 1

    def nodes(self) -> list[Node[Grads]]:
        self._go_on()
        return self._tree.nodes


def _taken(parameters: Sequence[Tensor]) -> Grads:
    grads = [one.grad for one in parameters]
    for one in parameters:
        one.grad = None
    return grads


def _with_extra(pieces: Sequence[Piece], extra: Callable[[Any], Tensor]) -> list[Piece]:
    """Return the pieces with a further value that goes by, from the first to the last."""

    def first(*inputs: Any) -> tuple[Any, ...]:
        return (*_tuple(pieces[0].call(*inputs)), extra(inputs[1]))

    def other(call: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        return lambda *values: (*_tuple(call(*values[:-1])), values[-1])

    return [pieces[0]._replace(call=first), *(piece._replace(call=other(piece.call)) for piece in pieces[1:])]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _owners(stages: Sequence[Sequence[Piece]], ranks: Ranks, model: Model) -> dict[str, int]:
    """Return of each parameter the rank that saves it: the first one that has it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, int] = {}
    for number, stage in enumerate(stages):
        rank = ranks.mesh.rank(ranks.at._replace(data=0, model=0, pipe=number % ranks.mesh.pipe))
        for piece in stage:
            for parameter in piece.parameters:
                found.setdefault(names[id(parameter)], rank)
        held = {id(value) for piece in stage for one in piece.holds if isinstance(one, nn.Module)
                for value in one.buffers()}  # fmt: skip
        found |= {name: rank for name, value in model.named_buffers() if id(value) in held and name not in found}
    return found


def inputs_like(model: Model, sample: Batch, samples: int, autocast: torch.dtype | None) -> tuple[Any, ...]:
    """Return zeros in place of the network's inputs, for so many samples."""
    given, rows = model.ids(sample), {}
    for name, feature in model.features.items():
        ids = read_ids(name, feature, given[name])
        if feature.pooling is None and ids.shape is not None and ids.shape[0] != ids.samples:
            raise UserError(
                f"feature {name!r} has rows without pooling, so many as its samples have: stages are to know sizes "
                "before; give it a pooling"
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
