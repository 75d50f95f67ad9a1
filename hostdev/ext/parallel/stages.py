"""Stages of a network on several ranks, scheduled by torch.distributed.pipelining.

GPipe (Huang et al., NeurIPS 2019): all forward passes, then all backward passes. 1F1B (Narayanan et al., SOSP 2019): a
backward pass as soon as possible after each forward pass, so that a stage holds the activations of only as many
micro-batches as there are stages from this one to the last. Interleaved (Narayanan et al., SC 2021): several stages per
rank.

Unlike torch's stages, these allow micro-batches of different sizes, and know all shapes before the first step. They
also pass on the state of torch's generator, so that dropout draws the same values as in one process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from hostdev.core.errors import UserError
from hostdev.core.pieces import Piece
from hostdev.core.timeline import Timeline
from hostdev.distributed.channel import Channel
from hostdev.ext.parallel.pieces import SampleShape, Stage, Traced
from hostdev.ext.parallel.single_stage import Ops

_EXAMPLE = 2  # samples of the example tensors, which only define dtypes


class Stages:
    """This rank's stages of a network.

    Args:
        stages: The pieces of all stages.
        traced: The tensors that each stage passes on.
        channel: Connects the ranks along the pipe axis; rank r of P has the stages r, r + P, r + 2 P, ...
        schedule: One of `world.SCHEDULES`.
        device: The device of this rank's stages.
        autocast: Dtype of autocast, or None.
        ops: Hooks around each pass.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Piece]],
        traced: Sequence[Traced],
        channel: Channel,
        schedule: str,
        device: torch.device,
        autocast: torch.dtype | None = None,
        ops: Ops | None = None,
    ) -> None:
        self._channel, self._schedule, self._device = channel, schedule, device
        self.count = len(stages)
        self.numbers = list(range(channel.rank, self.count, channel.ranks))
        self.modules = [Stage(stages[number]) for number in self.numbers]
        draws = any(each.draws for each in traced)
        self._stages = []
        for number, module in zip(self.numbers, self.modules, strict=True):
            before = traced[number - 1] if number else None
            after = traced[number] if number < self.count - 1 else None
            shape = SampleShape((0,), (len(random_state(device)),), torch.uint8, trained=False)
            state = [shape] if draws else []
            body = _StageBody(
                module,
                device,
                autocast,
                before,
                after,
                takes_state=draws and before is not None,
                gives_state=draws and after is not None,
            )
            self._stages.append(
                _SizedStage(
                    body,
                    number,
                    self.count,
                    device,
                    channel,
                    ops or Ops(Timeline()),
                    [] if before is None else [*before.shapes, *state],
                    [] if after is None else [*after.shapes, *state],
                )
            )
        self._made: dict[tuple[int, bool], Any] = {}  # schedules, by number of micro-batches and `backward`

    def train(
        self,
        batch: int,
        sizes: Sequence[int],
        inputs: Callable[[int], tuple[Any, ...]],
        loss: Callable[[int, Any], Tensor],
        on_gradients: Callable[[int, int], None],
    ) -> None:
        """Run micro-batches forward and backward.

        Args:
            batch: The batch's number, for the timeline.
            sizes: Number of samples in each micro-batch, at least 1.
            inputs: Called on the first stage with a micro-batch's number; returns the network's arguments.
            loss: Called on the last stage with a micro-batch's number and the network's output; returns the scalar to
                differentiate.
            on_gradients: Called with a stage's number and a micro-batch's number when this rank's stage has computed
                all its gradients for the micro-batch.
        """
        if not sizes:
            return
        schedule = self._get_schedule(len(sizes), backward=True)
        schedule._loss_fn = lambda output, number: _call_network(loss, number, output)
        losses = schedule._internal_losses

        def done(stage: int, number: int) -> None:
            if stage == self.count - 1:  # the schedule keeps losses, and therefore their graphs, until its end
                losses[number] = losses[number].detach()
            on_gradients(stage, number)

        for stage in self._stages:
            stage.begin(batch, sizes, inputs, done, backward=True)
        try:
            with self._answering():
                numbers = list(range(len(sizes)))
                schedule._step_microbatches([()] * len(sizes), None, numbers, None, return_outputs=False)
        finally:  # otherwise the cached schedule would keep the step alive
            schedule._loss_fn = _nothing
            for stage in self._stages:
                stage.end()

    def predict(self, batch: int, sizes: Sequence[int], inputs: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Run micro-batches forward; return the network's outputs on the last stage."""
        found: list[Any] = []
        if not sizes:
            return found
        schedule = self._get_schedule(len(sizes), backward=False)
        for stage in self._stages:
            stage.begin(batch, sizes, inputs, _nothing, backward=False)
        try:
            with self._answering(), torch.no_grad():
                schedule._step_microbatches([()] * len(sizes), None, None, None, return_outputs=True)
            found = list(self._stages[-1].output_chunks)
        finally:
            for stage in self._stages:
                stage.end()
        return found

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """A context that raises errors of the model's code unchanged, and PeerLostError if a rank stops answering."""
        try:
            with self._channel.answering():
                yield
        except _NetworkError as failed:
            raise failed.error from None

    def _get_schedule(self, count: int, *, backward: bool) -> Any:
        """Return the schedule for a number of micro-batches; all schedules give identical results."""
        found = self._made.get((count, backward))
        if found is None:
            loss = _nothing if backward else None
            if len(self._stages) > 1:
                rounds = max(1, count // self._channel.ranks)
                kind: Any = ScheduleLoopedBFS if count % rounds or not backward else ScheduleInterleaved1F1B
                found = kind(self._stages, count, loss_fn=loss, scale_grads=False)
            else:
                # A last batch may have fewer micro-batches than 1F1B needs.
                kind = Schedule1F1B if self._schedule == "1f1b" and backward and count >= self.count else ScheduleGPipe
                found = kind(self._stages[0], count, loss_fn=loss, scale_grads=False)
            self._made[count, backward] = found
        return found


class _NetworkError(BaseException):
    """An error in the model's own code. This is a BaseException because torch wraps every Exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


def _call_network(call: Callable[..., Any], *values: Any) -> Any:
    """Call the model's own code, and raise its errors as _NetworkError."""
    try:
        return call(*values)
    except Exception as error:
        raise _NetworkError(error) from None


class _StageBody(nn.Module):
    """A stage that takes and returns each distinct tensor once, and torch's generator state if any stage draws."""

    def __init__(
        self,
        stage: Stage,
        device: torch.device,
        autocast: torch.dtype | None,
        takes: Traced | None,
        gives: Traced | None,
        *,
        takes_state: bool,
        gives_state: bool,
    ) -> None:
        super().__init__()
        self._takes, self._gives = takes, gives
        self.stage, self._device, self._autocast = stage, device, autocast
        self._takes_state, self._gives_state = takes_state, gives_state
        self.inputs: tuple[Any, ...] = ()  # inputs of the next micro-batch, on the first stage

    def forward(self, *values: Any) -> Any:
        return _call_network(self._forward, *values)

    def _forward(self, *values: Any) -> Any:
        if self.inputs:
            values, self.inputs = self.inputs, ()
        if self._takes_state:
            *values, state = values  # type: ignore[assignment]
            set_random_state(self._device, state)
        with torch.autocast(self._device.type, self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            result = self.stage(*(values if self._takes is None else self._takes.all_of(values)))
        if self._gives is None:
            return result
        given = [
            value if shape.trained else value.detach()
            for value, shape in zip(self._gives.once(_as_tuple(result)), self._gives.shapes, strict=True)
        ]
        return (*given, random_state(self._device)) if self._gives_state else tuple(given)


class _SizedStage(PipelineStage):
    """A stage whose micro-batches may differ in size."""

    def __init__(
        self,
        body: _StageBody,
        number: int,
        count: int,
        device: torch.device,
        channel: Channel,
        ops: Ops,
        takes: Sequence[SampleShape],
        gives: Sequence[SampleShape],
    ) -> None:
        super().__init__(
            body,
            number,
            count,
            device,
            group=channel.group,
            input_args=tuple(_example(shape) for shape in takes),
            output_args=tuple(_example(shape) for shape in gives) or (torch.empty(0, device="meta"),),
        )
        self._runtime_validate = False  # torch's validation expects equal sizes
        self._takes, self._gives, self._channel, self._ops = takes, gives, channel, ops
        self._batch = 0
        self._sizes: Sequence[int] = ()
        self._inputs: Callable[[int], tuple[Any, ...]] = _no_inputs
        self._on_gradients: Callable[[int, int], None] = _nothing

    def begin(
        self,
        batch: int,
        sizes: Sequence[int],
        inputs: Callable[[int], tuple[Any, ...]],
        on_gradients: Callable[[int, int], None],
        *,
        backward: bool,
    ) -> None:
        """Prepare for a batch of micro-batches of these sizes."""
        self.has_backward = backward
        self.clear_runtime_states()
        self.chunks = len(sizes)  # otherwise, torch would keep the first schedule's number of micro-batches
        self._batch, self._sizes, self._inputs, self._on_gradients = batch, sizes, inputs, on_gradients

    def end(self) -> None:
        """Release the micro-batches."""
        self.clear_runtime_states()
        self._sizes, self._inputs, self._on_gradients = (), _no_inputs, _nothing
        for infos in [*self.args_recv_info.values(), *self.grad_recv_info.values()]:
            for info in infos:
                info.buffer = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        _call_network(self._fit, self.args_recv_info[fwd_chunk_id], self._takes, fwd_chunk_id, False)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            _call_network(self._fit, self.grad_recv_info[bwd_chunk_id], self._gives, bwd_chunk_id, True)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        return [] if self.is_last else self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, ops: Sequence[Any]) -> Sequence[Any]:
        if self.has_backward:  # count training only
            self._channel.sent_bytes += sum(op.tensor.nbytes for op in ops)
        return ops

    def _fit(self, infos: Sequence[Any], shapes: Sequence[SampleShape], chunk: int, only_trained: bool) -> None:
        """Allocate receive buffers of the micro-batch's size."""
        for info, shape in zip(infos, shapes, strict=True) if infos and not infos[0].is_root_arg else ():
            if shape.trained or not only_trained:
                info.buffer = torch.empty(shape.of(self._sizes[chunk]), dtype=shape.dtype, device=self.device)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        if self.is_first:  # torch would drop the gradients of inputs passed as `args`
            self.submod.inputs = _call_network(self._inputs, fwd_chunk_id)
        span = self._ops.timeline.span("forward", self._batch, at=self.stage_index, micro_batch=fwd_chunk_id)
        with span, self._ops.watching(fwd_chunk_id):
            output = self._ops.forward(
                _call_network, super().forward_one_chunk, fwd_chunk_id, (), kwargs, save_forward_output
            )
        if not self.is_last:
            _call_network(self._require_known, _as_tuple(output), self._sizes[fwd_chunk_id])
        return output

    def _require_known(self, values: Sequence[Tensor], samples: int) -> None:
        """Raise UserError if an output's shape, dtype or layout is not the traced one, which the next stage expects."""
        for value, shape in zip(values, self._gives, strict=True):
            if list(value.shape) != shape.of(samples) or value.dtype != shape.dtype or not value.is_contiguous():
                raise UserError(
                    f"stage {self.stage_index} returns {list(value.shape)} {value.dtype} for {samples} samples, but a "
                    f"contiguous {shape.of(samples)} {shape.dtype} was traced before the first step; shapes of values "
                    "that cross to another stage must depend on the number of samples alone"
                )

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.has_backward:
            return
        _, values = self.fwd_cache[bwd_chunk_id]
        try:
            with self._ops.timeline.span("backward", self._batch, at=self.stage_index, micro_batch=bwd_chunk_id):
                self._ops.backward(super().backward_one_chunk, bwd_chunk_id, *args, **kwargs)
        except Exception as error:  # torch wraps the cause in a message with a line for each tensor
            cause = error.__cause__
            raise _NetworkError(cause if isinstance(cause, Exception) else error) from None
        if not self.is_first:  # the previous stage waits for a gradient of each trained value
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(value) if grad is None and shape.trained else grad
                for grad, value, shape in zip(self.bwd_cache[bwd_chunk_id], values, self._takes, strict=True)
            )
        for infos in (self.args_recv_info.get(bwd_chunk_id, ()), self.grad_recv_info.get(bwd_chunk_id, ())):
            for info in infos:
                info.buffer = None  # frees the received tensors
        _call_network(self._on_gradients, self.stage_index, bwd_chunk_id)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _no_inputs(number: int) -> tuple[Any, ...]:
    raise AssertionError("no micro-batch has begun")


def _nothing(*_: Any) -> Any:
    return None


def _example(shape: SampleShape) -> Tensor:
    return torch.empty(shape.of(_EXAMPLE), dtype=shape.dtype, device="meta", requires_grad=shape.trained)


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator on a device, uint8 [any], on that device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state.to(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of torch's generator on a device."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state.cpu(), device)
