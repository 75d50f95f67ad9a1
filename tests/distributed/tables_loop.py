"""Tables that are read and written in the body of a loop, by one process or several; run by test_tables.py."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np

from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import find_rank_environment
from tests.distributed import own_loop


class Body:
    """Reads all tables after each step; writes some rows by their ids, each rank its own."""

    def __init__(self, *, writes):
        self._writes, self.seen, self.refused = writes, [], []

    def begin(self, runtime, model, adam):
        return 0

    def after(self, step, runtime, model, adam):
        for name, table in runtime.tables.items():
            ids = table.ids(0, table.rows)
            self.seen.append((step, name, table.step, ids, table.weights.copy(), table.lookup(np.arange(table.rows))))
            if not self._writes:
                continue
            here = np.flatnonzero(ids % 3 == step % 3)
            try:
                with table.writing(here) as w:
                    w.weights *= 0.5
            except ValueError as error:
                self.refused.append(str(error))


def main(folder):
    place = find_rank_environment()
    ranks = None if place.alone else Ranks(place, lambda rank, why: os._exit(3))
    found = {}
    for name, options, writes in (
        ("serial", {"depth": 0}, False),
        ("overlapped", {"depth": 2, "cache": "20%"}, False),
        ("serial, written", {"depth": 0}, True),
        ("with a cache, written", {"depth": 0, "cache": "20%"}, True),
        ("overlapped, written", {"depth": 2}, True),
    ):
        body = Body(writes=writes)
        found[name] = own_loop.train(ranks, options, saved=body) | {"seen": body.seen, "refused": body.refused}
    (Path(folder) / f"rank{place.rank}.pickle").write_bytes(pickle.dumps(found))
    if ranks is not None:
        ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1])
