"""A network that is not cut into stages, with the interface of `stages.Stages`: runs micro-batches in turn."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hostdev.core.timeline import Timeline
from hostdev.distributed.world import LocalChannel


def called(call: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Call the first argument with the remaining arguments."""
    return call(*values, **named)


class Ops(NamedTuple):
    """Hooks around a micro-batch's passes through a stage.

    Attributes:
        timeline: Records a span for each pass.
        forward: Calls its first argument, a forward pass, with the remaining arguments, and times the call.
        backward: Calls its first argument, a backward pass, with the remaining arguments, and times the call.
        watching: Called with a micro-batch's number; returns a context manager for its forward pass.
    """

    timeline: Timeline
    forward: Callable[..., Any] = called
    backward: Callable[..., Any] = called
    watching: Callable[[int], AbstractContextManager[None]] = nullcontext  # type: ignore[assignment]


class SingleStage:
    """A network of which each rank has all layers, whole or sliced.

    Args:
        network: The network.
        channel: Connects the ranks that have slices of the same layers.
        device: The network's device.
        autocast: Dtype of autocast, or None.
        ops: Hooks around the micro-batches' forward and backward passes.
        aside: Whether the last input bypasses the network and is returned with its output.
    """

    numbers = (0,)

    def __init__(
        self,
        network: nn.Module,
        channel: LocalChannel,
        device: torch.device,
        autocast: torch.dtype | None,
        ops: Ops,
        *,
        aside: bool = False,
    ) -> None:
        self.modules = [network]
        self._channel, self._device, self._autocast = channel, device, autocast
        self._ops, self._aside = ops, aside

    def train(
        self,
        batch: int,
        sizes: Sequence[int],
        inputs: Callable[[int], tuple[Any, ...]],
        loss: Callable[[int, Any], Tensor],
        on_gradients: Callable[[int, int], None],
    ) -> None:
        """Run micro-batches forward and backward; see `stages.Stages.train`."""
        for number in range(len(sizes)):
            given = inputs(number)
            with self._answering():
                with self._ops.timeline.span("forward", batch, micro_batch=number), self._ops.watching(number):
                    objective = self._ops.forward(self._objective, number, given, loss)
                with self._ops.timeline.span("backward", batch, micro_batch=number):
                    self._ops.backward(Tensor.backward, objective)
            on_gradients(0, number)

    def predict(self, batch: int, sizes: Sequence[int], inputs: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Run micro-batches forward; return the network's outputs."""
        found = []
        with torch.no_grad():
            for number in range(len(sizes)):
                given = inputs(number)
                with self._answering():
                    found.append(self._output(given))
        return found

    def _objective(self, number: int, given: tuple[Any, ...], loss: Callable[[int, Any], Tensor]) -> Tensor:
        return loss(number, self._output(given))

    def _output(self, given: tuple[Any, ...]) -> Any:
        enabled = self._autocast is not None
        with torch.autocast(self._device.type, self._autocast or torch.bfloat16, enabled=enabled):
            return (self.modules[0](*given[:-1]), given[-1]) if self._aside else self.modules[0](*given)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """A context that raises PeerLostError if a rank with other slices stops answering."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            with self._channel.answering():
                raise
