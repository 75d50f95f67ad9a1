"""A loop over tables by key, alone or as one of several processes; many trainings.

    python -m tests.distributed.keyed_loop FOLDER [NAME ...]

Writes the digest and the losses of each training of `TRAININGS`, or of those named, to FOLDER/rankN.json.
"""

import hostdev.core.environment  # isort: skip

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

import hostdev
from hostdev.core.digest import StateDigest
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import find_rank_environment
from hostdev.pipeline.context import PipelineHooks
from hostdev.runtime.digest import add_table
from tests.distributed.delayed_loop import Delays
from tests.runtime.test_keyed_tables import batch_of, ids_of

DIM, STEPS, M, SIZE = 4, 24, 4, 12  # micro-batches of a step, and their samples
POLICIES = {
    "all": {},
    "count": {"admit": hostdev.MinCount(2), "evict": hostdev.Unused(steps=4, every=3)},
    "expires": {"admit": hostdev.MinCount(3, expires=5), "evict": hostdev.Unused(steps=5, every=2)},
    "sketch": {"admit": hostdev.MinCount(3, sketch="64KiB"), "evict": hostdev.LeastRecent(every=7), "capacity": 120},
    "probability": {
        "admit": hostdev.Probability(0.4),
        "evict": hostdev.LeastFrequent(every=4, decay=0.5),
        "capacity": 150,
    },
    "norm": {"evict": hostdev.SmallestNorm(keep=0.8, every=5), "capacity": 200, "optimizer": hostdev.Adam},
    "zeros": {"admit": hostdev.MinCount(3), "evict": hostdev.Unused(steps=6, every=3), "unknown": "zeros"},
    "initial": {
        "admit": hostdev.MinCount(3),
        "evict": hostdev.LeastRecent(every=9),
        "capacity": 150,
        "unknown": "initial",
    },
    "full": {"evict": hostdev.LeastRecent(keep=1.0, every=50), "capacity": 160, "dtype": "bfloat16"},
}
MODES = [(0, None), (2, None), (3, 60), (2, hostdev.CacheSpec(40, "lfu"))]
TRAININGS = {f"{policy} {mode}": (policy, mode) for policy in POLICIES for mode in range(len(MODES))}
SKIPPED = 2, 3, 15


def batches(seed=1):
    """Return each step's micro-batches; their keys drift, and some are empty."""
    rng = np.random.default_rng(seed)
    return [[batch_of(rng, 0 if (step + part) % 7 == 0 else SIZE, step) for part in range(M)] for step in range(STEPS)]


class Program:
    """Two tables, one of them by key, and a linear model."""

    def __init__(self, ranks, mode, *, optimizer=hostdev.LazyAdam, hooks=None, dtype="fp32", **policy):
        torch.set_num_threads(1)
        depth, cache = MODES[mode]
        self.ranks, part = ranks, ranks and ranks.part()
        self.each = M // (1 if ranks is None else ranks.size)
        own = {"part": part, "seed": 3}
        policy = {"capacity": 5_000, "dtype": dtype, **policy}
        self.keyed = hostdev.HostTable(None, DIM, optimizer(lr=0.05), name="keyed", **own, **policy)
        self.fixed = hostdev.HostTable(30, DIM, optimizer(lr=0.05), name="fixed", **own)
        history = hostdev.Feature(self.keyed, pooling="mean", unknown="history")
        self.runtime = hostdev.Runtime(
            {"item": self.keyed, "history": history, "fixed": self.fixed},
            device="cpu",
            depth=depth,
            cache=cache and {"keyed": cache},
            ranks=ranks,
            hooks=hooks,
        )
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3 * DIM, 1)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.losses, self.evicted = [], []
        self.keyed.on_evict(lambda keys, weights: self.evicted.append((keys.tolist(), weights.sum(1).tolist())))

    def mine(self, parts):
        """Return this rank's micro-batches of a step."""
        rank = 0 if self.ranks is None else self.ranks.rank
        return parts[rank * self.each : (rank + 1) * self.each]

    def output(self, rows):
        return self.model(torch.cat([rows["item"], rows["history"], rows["fixed"]], 1))[:, 0]

    def train(self, steps, first=0, stop=None, after=lambda step: None):
        """Train on steps from number `first` on, until step `stop` is done."""
        source = (batch for parts in steps[first:] for batch in self.mine(parts))
        step = first
        for batch, rows in self.runtime.train(source, ids=ids_of, micro_batches=self.each, read_ahead=True):
            values = None
            if step not in SKIPPED and len(batch["y"]):
                error = (self.output(rows) - torch.from_numpy(batch["y"])).square().sum() / (M * SIZE)
                error.backward()
                values = error.detach()
            found = rows.reduce(self.model.parameters(), values)
            if not rows.is_due:
                continue
            self.losses.append(None if found is None else found.tolist())
            if found is not None:
                self.dense.step()
            self.dense.zero_grad()
            after(step)
            step += 1
            if step == stop:
                break

    def evaluate(self, parts):
        for batch, rows in self.runtime.predict(self.mine(parts), ids=ids_of):
            with torch.no_grad():
                self.evicted.append(("predicted", len(batch["y"]), self.output(rows).sum().item()))

    def digest(self):
        digest = StateDigest(2)
        for table in (self.fixed, self.keyed):
            add_table(digest, table, self.runtime.world)
        return digest.hexdigest()


def train(ranks, policy, mode, folder=None, hooks=None):
    """Train with evaluations, an erasure, a break and, with a folder, checkpoints; return what must not differ."""
    steps, policy = batches(), POLICIES[policy]

    def after(step):
        if step in (4, 19):
            program.evaluate(steps[step])
        if folder is not None and step in (5, 9):
            program.runtime.save(folder, extra={"step": step, "model": program.model.state_dict()}, wait=step == 9)

    program = Program(ranks, mode, hooks=hooks, **policy)
    program.train(steps, 0, 12, after)
    program.keyed.erase(np.arange(0, 400, 3))
    middle = program.digest()
    program.train(steps, 12, None, after)
    found = {"middle": middle, "end": program.digest(), "losses": program.losses, "evicted": program.evicted}
    program.runtime.close()
    return found


def resume(ranks, policy, mode, folder):
    """Go on from the newest checkpoint in a folder; return as `train`."""
    steps = batches()
    program = Program(ranks, mode, **POLICIES[policy])
    extra = program.runtime.load(folder)
    program.model.load_state_dict(extra["model"])
    program.train(steps, extra["step"] + 1, 12)
    program.keyed.erase(np.arange(0, 400, 3))
    middle = program.digest()
    program.train(steps, 12)
    found = {"middle": middle, "end": program.digest(), "losses": program.losses}
    program.runtime.close()
    return found


def main(folder, *names):
    place, folder = find_rank_environment(), Path(folder)
    ranks = Ranks(place, lambda rank, why: os._exit(3))
    found = {}
    for name in names or TRAININGS:
        policy, mode = TRAININGS[name]
        delays = PipelineHooks(before_stage=Delays(name, place.rank)) if mode == 1 else None
        found[name] = train(ranks, policy, mode, folder / "saved" / name, delays)
        found[f"resumed {name}"] = resume(ranks, policy, mode, folder / "saved" / name)
        if (folder / "alone" / policy).is_dir():
            found[f"from one {name}"] = resume(ranks, policy, mode, folder / "alone" / policy)
    (folder / f"rank{place.rank}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
