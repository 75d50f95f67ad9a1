"""A user's own loop by several processes, which save checkpoints in its middle, and go on from those of others.

    python -m tests.distributed.saved_loop FOLDER

Saves to FOLDER/together, and goes on from there and from FOLDER/alone. Writes what this rank has at the end of each
training to FOLDER/rankN.pickle.
"""

import hostdev.core.environment  # noqa: F401  # isort: skip

import os
import pickle
import sys
from pathlib import Path

from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import find_rank_environment
from tests.distributed import own_loop

FIRST, LAST = 2, 5  # steps after which a checkpoint is saved


class Saves:
    """Saves two checkpoints, the second one of which has only the rows that have changed; waits for none but the last.

    looks  one has looked at the memory of a table in between, so that all of its rows are saved
    """

    def __init__(self, folder, *, looks=False):
        self.folder, self.looks = folder, looks

    def begin(self, *_):
        return 0

    def after(self, done, runtime, model, adam):
        if done in (FIRST, LAST):
            extra = {"model": model.state_dict(), "adam": adam.state_dict(), "steps": done}
            runtime.save(self.folder, extra=extra, wait=done == LAST)
        if done == FIRST and self.looks:
            assert runtime.tables["items"].weights.size


class Loads:
    """Goes on from a checkpoint."""

    def __init__(self, path):
        self.path = path

    def begin(self, runtime, model, adam):
        extra = runtime.load(self.path)
        model.load_state_dict(extra["model"])
        adam.load_state_dict(extra["adam"])
        return extra["steps"]

    def after(self, *_):
        pass


def checkpoints(folder):
    """Return the first of two checkpoints, and the folder, which means the last."""
    return {"first": min(Path(folder).glob("step-*")), "last": Path(folder)}


def main(folder):
    place, folder = find_rank_environment(), Path(folder)
    ranks = Ranks(place, lambda rank, why: os._exit(3))
    together, options = folder / "together", {"depth": 2, "cache": "20%"}
    found = {"saved": own_loop.train(ranks, {"depth": 2}, saved=Saves(together, looks=place.rank == 0))}
    for by in ("together", "alone"):
        for which, path in checkpoints(folder / by).items():
            found[by, which] = own_loop.train(ranks, options, saved=Loads(path))
    (folder / f"rank{place.rank}.pickle").write_bytes(pickle.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1])
