"""Ranks that are threads of one process: what exchanges want of them, without sockets."""

import itertools
import queue
import threading

import torch

from hostdev.distributed.channel import Channel
from hostdev.distributed.world import Mesh


class _Threads:
    """Ranks that are threads of this process: what `Exchange` wants of them."""

    def __init__(self, rank, ways):
        self.rank, self.size, self._ways, self._made = rank, len(ways), ways, itertools.count()
        self.mesh = Mesh(data=self.size)

    def part(self):
        return self.rank, self.size

    def channel(self):
        return _ThreadChannel(self.rank, self.size, next(self._made), self._ways)


class _ThreadChannel(Channel):
    def __init__(self, rank, ranks, name, ways):
        super().__init__(rank, ranks, None, lambda: None)
        self._name, self._ways = name, ways

    def all_to_all(self, values, counts, receive, row=1, out=None):
        for rank, part in enumerate(torch.split(values, [n * row for n in counts])):
            self._ways[rank][self.rank].put((self._name, part.clone()))
        come = [self._ways[self.rank][rank].get(timeout=20) for rank in range(self.ranks)]
        assert {name for name, _ in come} == {self._name}
        assert [len(part) for _, part in come] == [n * row for n in receive]
        found = torch.cat([part for _, part in come])
        return found if out is None else out.copy_(found)


def with_ranks(count, work):
    """Do something in a thread for each rank; what each returns, or the error that it raises."""
    ways = [[queue.SimpleQueue() for _ in range(count)] for _ in range(count)]
    found = [None] * count

    def run(rank):
        try:
            found[rank] = work(_Threads(rank, ways))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
