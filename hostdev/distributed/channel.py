"""Collective operations within a group of ranks, using torch.distributed."""

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from hostdev.core.errors import RankError
from hostdev.distributed.rendezvous import get_first_line as _short
from hostdev.distributed.world import LocalChannel

HOST_BACKEND = "gloo"


class PeerLostError(RankError):
    """Another rank stopped answering; the monitor reports which one, and why."""


class Channel(LocalChannel):
    """A process group. Its collectives must be called by one thread at a time, in the same order on every rank.

    Args:
        rank: This rank within the group.
        ranks: Number of ranks in the group.
        group: The group of torch.distributed.
        lost: Called when a rank stops answering.
        backend: Name of torch.distributed's backend.
        device: Device of the buffers of `all_to_all` and `all_reduce`; None for host memory. On an accelerator, these
            two are queued on the current stream, and the other collectives must not be called.
        hosts: For each host, its ranks; hosts are ordered by their lowest rank. None if all ranks are on one host.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        group: Any,
        lost: Callable[[], None],
        backend: str = HOST_BACKEND,
        device: torch.device | None = None,
        hosts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.rank, self.ranks, self.group, self._lost = rank, ranks, group, lost
        self.backend, self.device = backend, torch.device("cpu") if device is None else device
        self.hosts = [list(range(ranks))] if hosts is None else [list(each) for each in hosts]
        self.here = next(number for number, each in enumerate(self.hosts) if rank in each)
        self.sent_bytes = 0  # bytes sent to other ranks
        self.network_bytes = 0  # the part of sent_bytes that went to other hosts
        self._end = weakref.finalize(self, _close, group)
        self._end.atexit = False  # at exit, the operating system closes the sockets

    def let_go(self) -> None:
        """Release the destroyed group; return once its threads have ended."""
        self._end.detach()
        self.group = None  # the last reference

    def all_to_all(
        self, values: Tensor, counts: Sequence[int], receive: Sequence[int], row: int = 1, out: Tensor | None = None
    ) -> Tensor:
        """Send each rank its part of a flat buffer, and return the values received from all ranks, by rank.

        Args:
            values: A tensor of any dtype, 1-dimensional, C-contiguous.
            counts: Number of rows to send to each rank.
            receive: Number of rows to receive from each rank.
            row: Number of values per row.
            out: Receives the values; None for new memory.
        """
        if out is None:
            out = torch.empty(sum(receive) * row, dtype=values.dtype, device=self.device)
        size = row * values.element_size()
        self.sent_bytes += (sum(counts) - counts[self.rank]) * size
        self.network_bytes += (sum(counts) - sum(counts[rank] for rank in self.hosts[self.here])) * size
        with self.answering():
            self._exchange(out, values, [n * row for n in counts], [n * row for n in receive])
        return out

    def _exchange(self, out: Tensor, values: Tensor, counts: Sequence[int], receive: Sequence[int]) -> None:
        dist.all_to_all_single(out, values, list(receive), list(counts), group=self.group)

    def try_out(self) -> str:
        """Exchange one number with each rank, so that device memory is allocated; return an error message or ""."""
        try:
            one = torch.ones(self.ranks, device=self.device)
            received = torch.empty_like(one)
            dist.all_to_all_single(received, one, group=self.group)
            return "" if bool((received == 1).all()) else "it returns wrong values"
        except RuntimeError as error:
            return str(error).strip().replace("\n", " ")

    def all_reduce(self, values: Tensor) -> None:
        """Overwrite values with their sum over all ranks, added in an unspecified order."""
        sent = 2 * (self.ranks - 1) * values.nbytes // self.ranks
        self.sent_bytes += sent
        self.network_bytes += sent * (len(self.hosts) > 1)  # upper bound: the library chooses the order of the ranks
        with self.answering():
            dist.all_reduce(values, group=self.group)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A context that raises PeerLostError if another rank stops answering within it."""
        try:
            yield
        except RuntimeError as error:
            self._lost()
            raise PeerLostError(f"another rank stopped answering ({_short(error)})") from None

    def exchange_counts(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Send counts[rank] to each rank; return what each rank sent to this rank. Both are int64 [W, any]."""
        flat = torch.from_numpy(np.ascontiguousarray(counts)).view(-1)
        each = [counts.shape[1]] * self.ranks
        return self.all_to_all(flat, each, each).numpy().reshape(counts.shape)

    def gather(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the arrays of all ranks, by rank. They are 1-dimensional, with the same dtype and any lengths."""
        lengths = self.exchange_counts(np.full((self.ranks, 1), len(values), np.int64))[:, 0].tolist()
        flat = torch.from_numpy(np.tile(values, self.ranks))
        return np.split(self.all_to_all(flat, [len(values)] * self.ranks, lengths).numpy(), np.cumsum(lengths)[:-1])

    def gather_first(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the arrays of all ranks on the first rank, one rank after the other; an empty array on other ranks.

        `values` is of one dimension, and has the same dtype on all ranks.
        """
        counts = [int(count) for count in np.concatenate(self.gather(np.array([len(values)])))]
        give = [len(values) if rank == 0 else 0 for rank in range(self.ranks)]
        take = counts if self.rank == 0 else [0] * self.ranks
        flat = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8))
        found: npt.NDArray[Any] = self.all_to_all(flat, give, take, row=values.itemsize).numpy().view(values.dtype)
        return found

    def share(self, value: Any) -> list[Any]:
        """Return the values that the ranks passed, by rank. A value is sent as JSON."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        return [json.loads(each.tobytes()) for each in self.gather(text)]

    def broadcast(self, values: Tensor) -> None:
        """Overwrite values in host memory with those of the group's first rank."""
        with self.answering():
            dist.broadcast(values, group_src=0, group=self.group)

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        self.exchange_counts(np.zeros((self.ranks, 1), np.int64))


def _close(group: Any) -> None:
    if group is not None and dist.is_initialized():  # None would close all groups
        with contextlib.suppress(ValueError):  # raised if all groups are already closed
            dist.destroy_process_group(group)
