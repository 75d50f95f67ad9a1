"""A user's own loop over micro-batches, alone or as one of several processes.

    python -m tests.distributed.own_loop FOLDER [few]

Writes what this rank has at the end, of every choice of what must not matter, to FOLDER/rankN.pickle; with "few", of
`CHOICES` and of two loops at once.
"""

import hostdev.core.environment  # isort: skip

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import torch

import hostdev
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import find_rank_environment
from tests.runtime import cases

M = 6  # micro-batches of a step: of two ranks each has more than one node of the tree
CHOICES = {
    "serial": {"depth": 0},
    "overlapped": {"depth": 2},
    "cached": {"depth": 2, "cache": "20%"},
    "left in the middle": {"depth": 2, "leave_after": 3},
    "early": {"depth": 2, "reduce_early": True},
}
SCALED = {"serial": {"depth": 0, "factor": 0.3}, "cached": {"depth": 2, "cache": "20%", "factor": 0.3}}
DRAWN = {"serial": {"depth": 0, "draws": True}, "cached": {"depth": 2, "cache": "20%", "draws": True}}
SPOILT = 3, 4  # of "not finite" the step, from 1, and the micro-batch whose gradients are not


def made_steps():
    """Return each step's M micro-batches of different sizes, some empty; one step has a single sample."""
    sizes = [
        (12, 5, 0, 9, 2, 7),
        (3, 3, 3, 3, 3, 3),
        (6, 5, 4, 8, 6, 3),
        (1, 0, 0, 0, 0, 0),
        (0, 0, 0, 0, 8, 0),
        (0, 4, 0, 4, 5, 0),
        (7, 2, 2, 1, 12, 9),
    ]
    steps = [
        [cases.batches_of(1, seed=10 * number + part, size=size)[0] for part, size in enumerate(step)]
        for number, step in enumerate(sizes)
    ]
    return steps, [sum(step) for step in sizes]


def made_tables(part, seed=3):
    return {
        name: hostdev.HostTable(
            rows,
            cases.COLUMNS[name],
            cases.OPTIMIZERS[name](),
            name=name,
            seed=seed,
            init=hostdev.Normal(0.5),
            part=part,
        )
        for name, rows in cases.ROWS.items()
    }


def drawn_ids(batch):
    """Users that are drawn from global generators while the batch is read."""
    count = len(batch["user"])
    users = torch.randint(0, cases.ROWS["users"], (count,)).numpy()
    return {**cases.ids(batch), "user": (users + np.random.randint(0, cases.ROWS["users"], count)) // 2}


def train(ranks, options, *, spoilt=None, made=None, seed=None, saved=None):
    """Train on all steps; return this rank's tables, the parameters and the losses.

    options  of the runtime and of the loop, after how many steps the loop is left, and another one goes on, by what
             each micro-batch's dense gradients are multiplied before they are added up, and whether ids are drawn
    made     the steps, in place of those of `made_steps`
    seed     of the initial values, in place of the usual ones
    saved    begins with a step, and is called after each: `saved_loop`
    """
    torch.set_num_threads(1)
    options = dict(options)
    leave_after, factor = options.pop("leave_after", None), options.pop("factor", None)
    early, draws = options.pop("reduce_early", False), options.pop("draws", False)
    rank, size = (0, 1) if ranks is None else ranks.part()
    seeds = () if seed is None else (seed,)
    tables = made_tables(ranks and ranks.part(), *seeds)
    runtime = hostdev.Runtime(cases.features_of(tables), device="cpu", ranks=ranks, **options)
    model = cases.Model(*seeds)
    torch.manual_seed(11)
    np.random.seed(11)
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    each = M // size
    steps, samples = made or made_steps()
    first = 0 if saved is None else saved.begin(runtime, model, adam)
    numbers = [(step, part) for step in range(first, len(steps)) for part in range(rank * each, (rank + 1) * each)]
    source = iter([steps[step][part] for step, part in numbers])
    losses, wrong, to_come, goes_on = [], None, iter(numbers), True
    while goes_on:
        goes_on = False
        try:
            how = {"micro_batches": each, "reduce_early": early}
            ids = drawn_ids if draws else cases.ids
            for label, rows in runtime.train(source, ids=ids, send=cases.send, **how):
                step, part = next(to_come)
                values = None
                if len(label):
                    loss = cases.loss_of(model, rows, label) * (len(label) / samples[step])
                    (loss * (float("inf") if (step + 1, part) == spoilt else 1.0)).backward()
                    values = loss.detach()
                    for parameter in model.parameters() if factor is not None else ():
                        parameter.grad.mul_(factor)
                found = rows.reduce(model.parameters(), values)
                assert (found is None) != (rows.is_due and samples[step] > 0)
                if rows.is_due:
                    adam.step()
                    adam.zero_grad()
                    losses.append(None if found is None else found.tolist())
                    if saved is not None:
                        saved.after(step + 1, runtime, model, adam)
                    if len(losses) == leave_after:
                        goes_on = True
                        break
        except hostdev.NonFiniteError as error:
            wrong = str(error)
    predicted = {}
    if wrong is None:
        mine = [steps[step][part] for step, part in numbers]
        for number, (_, rows) in enumerate(runtime.predict(mine, ids=cases.ids)):
            predicted[numbers[number]] = model(rows).tolist()
    runtime.write_back()
    return {
        "wrong": wrong,
        "losses": losses,
        "predicted": predicted,
        "dense": cases.dense_state(model, adam),
        "tables": {
            name: (table.step, table.ids(0, table.rows), table.storage.block.copy(), table.storage.row_slots.copy())
            for name, table in tables.items()
        },
    }


class Beside:
    """Another training, in the middle of one: two loops are open at once."""

    def __init__(self, ranks):
        self._ranks, self.found = ranks, None

    def begin(self, runtime, model, adam):
        return 0

    def after(self, step, runtime, model, adam):
        if step == 2:
            self.found = train(self._ranks, CHOICES["overlapped"])


def misused(ranks):
    """Return this rank's error message for a request that ranks cannot fulfil."""

    def scaled(rows, model, loss):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss).backward()
        rows.reduce(model.parameters())
        scaler.step(torch.optim.Adam(model.parameters()))

    def clipped(rows, model, loss):
        loss.backward()
        rows.reduce(model.parameters())
        rows.parameters()

    def double(rows, model, loss):
        rows.reduce([torch.zeros(3, dtype=torch.float64, requires_grad=True)])

    def table(rows, model, loss):
        rows.reduce([], torch.zeros(2, 2))

    said = {}
    for use in (scaled, clipped, double, table):
        runtime = hostdev.Runtime(cases.features_of(made_tables(ranks.part())), device="cpu", ranks=ranks)
        model = cases.Model()
        try:
            for label, rows in runtime.train(cases.batches_of(1), ids=cases.ids, send=cases.send, micro_batches=1):
                use(rows, model, cases.loss_of(model, rows, label))
        except ValueError as error:
            said[use.__name__] = str(error)
    return said


def main(folder, few=""):
    place = find_rank_environment()
    ranks = None if place.alone else Ranks(place, lambda rank, why: os._exit(3))
    found = {name: train(ranks, options) for name, options in CHOICES.items()}
    beside = Beside(ranks)
    found["with another"] = train(ranks, CHOICES["overlapped"], saved=beside)
    found["beside"] = beside.found
    if not few:
        found["all-reduce"] = train(ranks, {"depth": 2, "dense_exchange": "all-reduce"})
        found |= {f"{name}, scaled": train(ranks, options) for name, options in SCALED.items()}
        found |= {f"{name}, drawn": train(ranks, options) for name, options in DRAWN.items()}
        found["misused"] = ranks and misused(ranks)
        found["not finite"] = train(ranks, CHOICES["overlapped"], spoilt=SPOILT)
    (Path(folder) / f"rank{place.rank}.pickle").write_bytes(pickle.dumps(found))
    if ranks is not None:
        ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
