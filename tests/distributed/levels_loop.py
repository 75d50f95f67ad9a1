"""Collectives in two levels and in one, by processes that say which host they are on; run by test_two_levels.py.

    python -m tests.distributed.levels_loop FOLDER MEETING...

The processes meet once for each MEETING, such as 0011@29500: the host of each rank, and the port. Writes what each rank
has received to FOLDER/rankN.pickle: for each meeting, by the number of levels.
"""

import os
import pickle
import sys
import threading
from pathlib import Path

import numpy as np
import torch

from hostdev.core.micro_batches import get_nodes
from hostdev.distributed.all_reduce import make_tree
from hostdev.distributed.host_memory import HOST_VARIABLE
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import find_rank_environment

DTYPES = (torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16)
MOST = (0, 3, 700, 20_000)  # rows of a part: none, some parts empty, attached to a message, through memory
TREES = [(1, 1), (3, 2), (4096, 1), (5003, 2), (9001, 3), (9001, 5), (50_000, 4)]  # values, micro-batches of a rank


def exchanged(channel, seed):
    """Return the bytes received in exchanges of random sizes; each rank knows what all others send."""
    found = []
    W, mine = channel.ranks, channel.rank
    for number, dtype in enumerate(DTYPES * 2):
        rng = np.random.default_rng([seed, number])
        counts = rng.integers(0, MOST[number % len(MOST)] + 1, (W, W)) * rng.integers(0, 2, (W, W))
        row = int(rng.integers(1, 4))
        rows = int(counts[mine].sum()) * row
        values = torch.from_numpy(np.random.default_rng([seed, number, mine]).integers(0, 99, rows)).to(dtype)
        out = torch.empty(int(counts[:, mine].sum()) * row, dtype=dtype) if number % 2 else None
        received = channel.all_to_all(values, counts[mine].tolist(), counts[:, mine].tolist(), row=row, out=out)
        assert out is None or received is out
        found.append(received.view(torch.uint8).numpy().tobytes())
    return found


def summed(channel):
    """Return sums in the order of the tree, of vectors whose bits depend on the order."""
    found = []
    for n, each in TREES:
        nodes = [get_nodes(rank * each, (rank + 1) * each) for rank in range(channel.ranks)]
        rng = np.random.default_rng([n, each, channel.rank])
        tree = make_tree(channel, nodes, n)
        parts = [torch.from_numpy(rng.standard_normal(n, np.float32)) for _ in nodes[channel.rank]]
        first = tree.sum([part.clone() for part in parts])
        second = tree.sum([-part for part in parts])  # `first` is in use
        found += [first.numpy().tobytes(), second.numpy().tobytes()]
    return found


def collected(channel):
    """Return the results of the other collectives."""
    numbers = torch.arange(7) + channel.rank
    one = torch.tensor(5.0 + channel.rank)
    table = torch.full((3, 2), float(channel.rank))
    total = torch.arange(5000, dtype=torch.float32) * (channel.rank + 1)
    for values in (numbers, one, table):
        channel.broadcast(values)
    channel.all_reduce(total)
    channel.barrier()
    counts = channel.exchange_counts(np.arange(2 * channel.ranks).reshape(-1, 2) + 100 * channel.rank)
    gathered = channel.gather(np.arange(channel.rank, dtype=np.int32))
    return [
        *(values.tolist() for values in (numbers, one, table, total, counts)),
        *(each.tolist() for each in gathered),
        channel.share({"rank": channel.rank, "text": "x" * 1000 * channel.rank}),
    ]


def in_threads(channels):
    """Exchange by several channels at once, each in a thread of its own."""
    found = [None] * len(channels)

    def work(number):
        found[number] = [exchanged(channels[number], 10 * number + seed) for seed in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(channels))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def meet(hosts, port):
    """Return what this rank has received in one meeting, by the number of levels."""
    os.environ |= {HOST_VARIABLE: f"host{hosts[int(os.environ['RANK'])]}", "MASTER_PORT": port}
    ranks = Ranks(find_rank_environment(), lambda rank, why: os._exit(3))
    found = {}
    for levels in (2, 1):
        ranks.levels = levels
        channels = [ranks.channel() for _ in range(3)]
        results = [in_threads(channels), summed(channels[0]), collected(channels[0])]
        name, network = type(channels[0]).__name__, sum(channel.network_bytes for channel in channels)
        found[levels] = {"results": results, "name": name, "network": network, "hosts": channels[0].hosts}
    ranks.leave()
    return found


def main(folder, *meetings):
    found = [meet(*meeting.split("@")) for meeting in meetings]
    (Path(folder) / f"rank{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
