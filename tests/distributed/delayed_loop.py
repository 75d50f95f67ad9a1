"""A user's own loop on several processes whose stages are delayed at random; many small trainings.

    python -m tests.distributed.delayed_loop FOLDER FIRST LAST [HOOK VALUE]

Writes what this rank has at the end of each training, by seed and depth, to FOLDER/rankN.pickle. With a hook of the
pipeline that makes it wrong only one depth is tried.
"""

import hostdev.core.environment  # noqa: F401  # isort: skip

import json
import os
import pickle
import sys
import time
from pathlib import Path
from random import Random

from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import find_rank_environment
from hostdev.pipeline.context import PipelineHooks
from tests.distributed import own_loop
from tests.runtime import cases

DEPTHS = 0, 2
SHORT, LONG = 0.003, 0.02  # seconds that a stage sleeps at most, and now and then
CACHES = None, None, "20%", {"items": "50%"}, {"users": 5, "words": "100%"}


class Delays:
    """Sleeps before a stage, drawn for each rank; each stage has a thread's share of its own."""

    def __init__(self, *seed):
        self._seed, self._drawn = seed, {}

    def __call__(self, stage, _):
        noise = self._drawn.setdefault(stage, Random(f"{self._seed} {stage}"))
        if noise.random() < 0.5:
            return
        time.sleep(LONG if noise.random() < 0.03 else noise.uniform(0, SHORT))


def drawn(seed):
    """Return a seed's steps, and options that must not matter; few samples, often none."""
    noise = Random(seed)
    sizes = []
    for _ in range(noise.randint(3, 6)):
        kind = noise.random()
        most = 1 if kind < 0.15 else 12
        step = [noise.randint(0, most) if noise.random() < 0.75 else 0 for _ in range(own_loop.M)]
        sizes.append([0] * own_loop.M if kind > 0.93 else step)
    sizes[0][noise.randrange(own_loop.M)] = 5
    steps = [
        [cases.batches_of(1, seed=1000 * seed + 10 * number + part, size=size)[0] for part, size in enumerate(step)]
        for number, step in enumerate(sizes)
    ]
    options = {"cache": noise.choice(CACHES)}
    if noise.random() < 0.3:
        options["leave_after"] = noise.randint(1, len(steps))
    return (steps, [sum(step) for step in sizes]), options


def alone(seed):
    """Return the result of one process, without delays, overlap or a cache."""
    made, _ = drawn(seed)
    return own_loop.train(None, {"depth": 0}, made=made, seed=seed)


def main(folder, first, last, *hook):
    place = find_rank_environment()
    ranks = Ranks(place, lambda rank, why: os._exit(3))
    wrong = {hook[0]: json.loads(hook[1])} if hook else {}
    found = {}
    for seed in range(int(first), int(last)):
        made, options = drawn(seed)
        for depth in DEPTHS[-1:] if wrong else DEPTHS:
            delays = Delays(seed, depth, place.rank)
            own = {**options, "depth": depth, "hooks": PipelineHooks(before_stage=delays, **wrong)}
            found[seed, depth] = own_loop.train(ranks, own, made=made, seed=seed)
    (Path(folder) / f"rank{place.rank}.pickle").write_bytes(pickle.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
