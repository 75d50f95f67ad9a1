"""All-reduce of a vector over all ranks, summed in the order of a tree or in an order that torch's backend chooses.

The tree's nodes are sums over micro-batches (`core.micro_batches`). Each rank owns a slice of the elements: it receives
every node's values in that slice, adds them, and sends the sum to all ranks. This moves as many bytes as a ring
all-reduce, and the order of the additions does not depend on the number of ranks.

The ranks of a `TwoLevelChannel` exchange within a host through shared memory, and between hosts through one rank per
host. A collective needs one message between each pair of hosts instead of each pair of ranks. The same bytes arrive at
the same places, so results do not change.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hostdev.core.micro_batches import Node, TreeSum
from hostdev.distributed.channel import Channel
from hostdev.distributed.host_memory import BufferLayout, Bytes, HostExchange, Links, Slices

_FREE = 2  # sys.getrefcount of unused memory: one reference from the attribute, one from getrefcount's argument
_LEAST_VALUES = 4096  # minimum length of a vector that is summed within hosts first
Nodes = Sequence[tuple[int, int]]


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


def _make_part(values: Tensor, counts: Sequence[int]) -> Slices:
    sizes = np.array(counts, np.int64) * values.element_size()
    flat = values.detach().as_strided(values.shape, (1,))  # a single value may have any stride
    return Slices(flat.view(torch.uint8).numpy(), np.cumsum(sizes) - sizes, sizes)


class Tree:
    """Sums the values of all ranks' nodes in the tree's order; the result is bit-identical on all ranks.

    Args:
        channel: Connects the ranks.
        nodes: For each rank, (start, size) of each of its nodes.
        n: Number of values of each node.
    """

    def __init__(self, channel: Channel, nodes: Sequence[Nodes], n: int) -> None:
        self._channel, self._nodes, self.n = channel, nodes, n
        own = len(nodes[channel.rank])
        self.flat = torch.empty(n if own == 1 else 0, device=channel.device)  # input of `sum` if this rank has one node
        self._send = torch.empty(0 if own == 1 else own * n, device=channel.device)
        self._memory = np.empty(n, np.float32)  # memory of the last result

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum, float32 [n].

        The next call overwrites the sum unless a view of it is still referenced.

        Args:
            parts: The values of each of this rank's nodes, float32 [n], on the device of the channel's buffers.
        """
        raise NotImplementedError

    def _join(self, parts: Sequence[Tensor], edges: Sequence[int]) -> Tensor:
        """Return one buffer with the nodes' values, slice by slice."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part[start:stop] for start, stop in pairwise(edges) for part in parts], out=self._send)

    def _free(self) -> Tensor:
        """Return memory for a sum: that of the last sum, unless it is still in use."""
        if self._channel.device.type != "cpu":
            return torch.empty(self.n, device=self._channel.device)  # torch caches device memory
        if sys.getrefcount(self._memory) > _FREE:  # still in use; otherwise reuse avoids page faults of new memory
            self._memory = np.empty(self.n, np.float32)
        return torch.from_numpy(self._memory)


class TreeAllReduce(Tree):
    """A `Tree` in which each rank exchanges slices with all others.

    If the channel's device is an accelerator, all work is queued on the device's current stream.
    """

    def __init__(self, channel: Channel, nodes: Sequence[Nodes], n: int) -> None:
        super().__init__(channel, nodes, n)
        W, mine = channel.ranks, channel.rank
        self._edges = [n * rank // W for rank in range(W + 1)]
        self._widths = [stop - start for start, stop in pairwise(self._edges)]
        # A rank does not send its own slice to itself if the other ranks' slices are contiguous.
        self._at_end = mine in (0, W - 1)
        self._received = [0 if rank == mine and self._at_end else len(each) for rank, each in enumerate(nodes)]
        self._receive_buffer = torch.empty(self._widths[mine] * sum(self._received), device=channel.device)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum: see `Tree.sum`."""
        mine, edges, widths, own = self._channel.rank, self._edges, self._widths, len(parts)
        width, begin, end = widths[mine], edges[mine], edges[mine + 1]
        send = self._join(parts, edges)
        counts = [width * own for width in widths]
        self._channel.all_to_all(
            *self._others(send, counts), [width * n for n in self._received], out=self._receive_buffer
        )
        tree: TreeSum[Tensor] = TreeSum(_add)
        here = [send[begin * own + number * width :][:width] for number in range(own)]
        received = iter(self._receive_buffer.view(-1, width) if width else [self._receive_buffer] * sum(self._received))
        for rank, nodes in enumerate(self._nodes):
            for number, (start, size) in enumerate(nodes):
                tree.put(Node(start, size, next(received) if self._received[rank] else here[number]))
        total = tree.total()
        assert total is not None
        found = self._free()
        torch.add(total, 0.0, out=found[begin:end])  # turns -0 into 0, as one process does
        self._spread(found, begin, end)
        return found

    def _others(self, values: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
        """Return a buffer and its counts without this rank's slice, or unchanged if other slices are not contiguous."""
        if not self._at_end:
            return values, counts
        mine = self._channel.rank
        rest = values[counts[0] :] if mine == 0 else values[: sum(counts[:mine])]
        return rest, [0 if rank == mine else count for rank, count in enumerate(counts)]

    def _spread(self, found: Tensor, begin: int, end: int) -> None:
        """Send the slice that this rank has summed to the other ranks, and receive their slices into `found`."""
        mine, W = self._channel.rank, self._channel.ranks
        give = [0 if rank == mine and self._at_end else end - begin for rank in range(W)]
        copies = W - 1 if self._at_end else W
        total = found[begin:end]
        rest, take = self._others(found, list(self._widths))
        self._channel.all_to_all(total if copies == 1 else total.repeat(copies), give, take, out=rest)


class AllReduce:
    """Sums like `Tree`, but in an order that depends on the number of ranks."""

    def __init__(self, channel: Channel, nodes: Sequence[Nodes], n: int) -> None:
        self._channel, self.flat = channel, torch.empty(0, device=channel.device)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum, float32 [n], in new memory; `parts` as in `Tree.sum`."""
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        self._channel.all_reduce(total)
        return total.add_(0.0)


class TwoLevelTree(Tree):
    """A `Tree` that first sums within each host, so that hosts exchange only sums.

    First, each of the L ranks of a host sums one of L slices of the elements over the host's nodes. Then the ranks with
    the same slice, one on each host, each sum a part of it over all hosts. A host therefore sends as many bytes to
    other hosts as one rank would. The tree's order is kept, because a host's ranks have neighbouring micro-batches.

    Args:
        channel: Connects the ranks; each host has the same number of ranks, numbered consecutively.
        nodes: For each rank, (start, size) of each of its nodes.
        n: Number of values of each node, at least the number of ranks.
    """

    def __init__(self, channel: TwoLevelChannel, nodes: Sequence[Nodes], n: int) -> None:
        super().__init__(channel, nodes, n)
        self._levels, self._mine = channel, channel.local.index(channel.rank)
        L, H = len(channel.local), len(channel.hosts)
        self._slices = [n * index // L for index in range(L + 1)]
        self._width = self._slices[self._mine + 1] - self._slices[self._mine]
        self._pieces = [self._width * host // H for host in range(H + 1)]
        self._of_hosts = [_join_nodes([nodes[rank] for rank in ranks]) for ranks in channel.hosts]
        own = self._pieces[channel.here + 1] - self._pieces[channel.here]
        self._from_ranks = [len(nodes[rank]) * self._width for rank in channel.local]
        self._from_hosts = [len(each) * own for each in self._of_hosts]
        self._receive_buffer = torch.empty(sum(self._from_ranks))
        self._second_buffer = torch.empty(sum(self._from_hosts))

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum: see `Tree.sum`."""
        channel, here = self._levels, self._levels.here
        send = self._join(parts, self._slices)
        counts = [len(parts) * (stop - start) for start, stop in pairwise(self._slices)]
        channel.exchange_within(send, counts, self._from_ranks, self._receive_buffer)
        tree: TreeSum[Tensor] = TreeSum(_add)
        received = iter(self._receive_buffer.view(-1, self._width))
        for rank in channel.local:
            for start, size in self._nodes[rank]:
                tree.put(Node(start, size, next(received)))
        mine = [node.value for node in tree.nodes if node.value is not None]
        widths = [stop - start for start, stop in pairwise(self._pieces)]
        send = mine[0]
        if len(mine) > 1:
            send = torch.cat([value[start:stop] for start, stop in pairwise(self._pieces) for value in mine])
        counts = [len(mine) * width for width in widths]
        channel.all_to_all(
            send, self._spread_hosts(counts), self._spread_hosts(self._from_hosts), out=self._second_buffer
        )
        tree = TreeSum(_add)
        received = iter(self._second_buffer.view(-1, widths[here]))
        for nodes in self._of_hosts:
            for start, size in nodes:
                tree.put(Node(start, size, next(received)))
        total = tree.total()
        assert total is not None
        total = torch.add(total, 0.0)  # turns -0 into 0, as one process does
        found, H, L = self._free(), len(widths), len(channel.local)
        piece = found[self._slices[self._mine] : self._slices[self._mine + 1]]
        channel.all_to_all(total.repeat(H), self._spread_hosts([len(total)] * H), self._spread_hosts(widths), out=piece)
        sizes = [stop - start for start, stop in pairwise(self._slices)]
        channel.exchange_within(piece.clone(), [self._width] * L, sizes, found, same=True)
        return found

    def _spread_hosts(self, counts: Sequence[int]) -> list[int]:
        """Return a count for each rank: `counts` for the ranks with this rank's index on their hosts, 0 for others."""
        all_counts = [0] * self._levels.ranks
        for ranks, count in zip(self._levels.hosts, counts, strict=True):
            all_counts[ranks[self._mine]] = count
        return all_counts


def make_tree(channel: Channel, nodes: Sequence[Nodes], n: int) -> Tree:
    """Return a `Tree` for the nodes of all ranks.

    It is a `TwoLevelTree` if the channel has two levels, each host has the same number of ranks, and n is large enough.
    """
    if isinstance(channel, TwoLevelChannel) and n >= max(channel.ranks, _LEAST_VALUES):
        each = len(channel.local)
        if channel.hosts == [list(range(first, first + each)) for first in range(0, channel.ranks, each)]:
            return TwoLevelTree(channel, nodes, n)
    return TreeAllReduce(channel, nodes, n)


def _join_nodes(nodes: Sequence[Nodes]) -> list[tuple[int, int]]:
    """Return the nodes that remain after a host's ranks have summed their nodes."""
    tree: TreeSum[None] = TreeSum(lambda left, right: None)
    for start, size in (node for each in nodes for node in each):
        tree.put(Node(start, size, None))
    return [(node.start, node.size) for node in tree.nodes]


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)
