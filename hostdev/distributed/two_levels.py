"""A channel whose ranks exchange within a host through shared memory, and between hosts through one rank per host.

A collective needs one message between each pair of hosts instead of each pair of ranks. The same bytes arrive at the
same places, so results do not change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hostdev.distributed.channel import Channel
from hostdev.distributed.host_memory import BufferLayout, Bytes, HostExchange, Part
from hostdev.distributed.hosts import Links


class TwoLevelChannel(Channel):
    """A channel in host memory whose ranks are on several hosts, some with several ranks.

    Args:
        rank: This rank within the channel.
        hosts: For each host, its ranks; hosts are ordered by their lowest rank.
        group: The torch.distributed process group of each host's first rank; None on other ranks.
        lost: Called when a rank stops answering.
        links: Result of `connect_host` for this host's ranks.
    """

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], group: Any, lost: Callable[[], None], links: Links
    ) -> None:
        super().__init__(rank, sum(map(len, hosts)), group, lost, hosts=hosts)
        self.local = self.hosts[self.here]
        self._host = HostExchange(self.hosts, self.here, self.local.index(rank), links)

    @property
    def leads(self) -> bool:
        """Return whether this rank exchanges with other hosts."""
        return self.rank == self.local[0]

    def let_go(self) -> None:
        """Close the connections of this host, and release the destroyed group."""
        self._host.close()
        super().let_go()

    def _exchange(self, out: Tensor, values: Tensor, counts: Sequence[int], receive: Sequence[int]) -> None:
        self._run(out, values, counts, receive, self._exchange_hosts)

    def _exchange_hosts(self, memory: Bytes, layout: BufferLayout) -> None:
        whole = torch.from_numpy(memory)
        out, values = whole[layout.start : layout.size], whole[: sum(layout.give)]
        dist.all_to_all_single(out, values, layout.take, layout.give, group=self.group)

    def exchange_within(
        self, values: Tensor, counts: Sequence[int], receive: Sequence[int], out: Tensor, *, same: bool = False
    ) -> None:
        """Exchange with the ranks of this host only.

        Args:
            values: As in `all_to_all`. With `same`, each rank with a nonzero count gets all values.
            counts: Number of values to send to each rank of this host.
            receive: Number of values to receive from each rank of this host.
            out: The tensor into which received values are written.
            same: Whether to send the same values to several ranks.
        """
        self.sent_bytes += (sum(counts) - counts[self.local.index(self.rank)]) * values.element_size()
        with self.answering():
            self._run_within(out, values, counts, receive, same=same)

    def _run_within(
        self, out: Tensor, values: Tensor, counts: Sequence[int], receive: Sequence[int], *, same: bool = False
    ) -> None:
        self._run(out, values, self._spread(counts), self._spread(receive), None, same=same)

    def _spread(self, counts: Sequence[int]) -> list[int]:
        """Return a count for each rank of the channel: `counts` for this host's ranks, 0 for others."""
        all_counts = [0] * self.ranks
        for rank, count in zip(self.local, counts, strict=True):
            all_counts[rank] = count
        return all_counts

    def _run(
        self,
        out: Tensor,
        values: Tensor,
        counts: Sequence[int],
        receive: Sequence[int],
        between: Callable[[Bytes, BufferLayout], None] | None,
        *,
        same: bool = False,
    ) -> None:
        if len(values) != (max(counts) if same else sum(counts)) or len(out) != sum(receive):
            raise ValueError("the sizes of the buffers do not match the counts")
        given, taken = (_make_part(*each) for each in ((values, counts), (out, receive)))
        if same:
            given = given._replace(starts=np.zeros_like(given.starts))
        own = self.rank
        taken.buffer[taken.starts[own] :][: taken.sizes[own]] = given.buffer[given.starts[own] :][: given.sizes[own]]
        given.sizes[own] = taken.sizes[own] = 0
        self._host.run(given, taken, between, same=same)

    def all_reduce(self, values: Tensor) -> None:
        """Overwrite values with their sum over all ranks, added in an unspecified order."""
        flat, H = values.view(-1), len(self.hosts)
        n = len(flat)
        parts = torch.empty(n * len(self.local) * self.leads, dtype=values.dtype)
        self.sent_bytes += values.nbytes * (len(self.local) - 1 if self.leads else 1)
        with self.answering():
            self._run_within(parts, flat, self._to_first(n), [n * self.leads] * len(self.local))
            if self.leads:
                flat.copy_(parts.view(len(self.local), n).sum(0))
                sent = 2 * (H - 1) * values.nbytes // H
                self.sent_bytes += sent
                self.network_bytes += sent
                dist.all_reduce(flat, group=self.group)
            self._copy_first(flat)

    def broadcast(self, values: Tensor) -> None:
        """Overwrite values in host memory with those of the first rank."""
        flat = values.view(-1)
        with self.answering():
            if self.leads:
                dist.broadcast(flat, group_src=0, group=self.group)
            self._copy_first(flat)

    def _to_first(self, n: int) -> list[int]:
        return [n] + [0] * (len(self.local) - 1)

    def _copy_first(self, flat: Tensor) -> None:
        """Overwrite values with those of this host's first rank."""
        L, n = len(self.local), len(flat)
        if not self.leads:
            self._run_within(flat, flat[:0], [0] * L, self._to_first(n))
            return
        self._run_within(flat[:0], flat[: n * (L > 1)], [0, *[n] * (L - 1)], [0] * L, same=True)


def _make_part(values: Tensor, counts: Sequence[int]) -> Part:
    sizes = np.array(counts, np.int64) * values.element_size()
    flat = values.detach().as_strided(values.shape, (1,))  # a single value may have any stride
    return Part(flat.view(torch.uint8).numpy(), np.cumsum(sizes) - sizes, sizes)
