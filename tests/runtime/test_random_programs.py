"""Random programs: what a loop's body may do, in any order, has the numbers of plain torch, at any depth and cache.

A program is a list of loops, each a list of batches with the actions of its body; `run` gives it to hostdev, and
`plain` to a table that is a parameter of torch's. Numbers are small and whole, and rates powers of two, so that every
sum is exact, and what both see is equal, not close.

To add an action: a class with `on_hostdev` and `on_torch`, each of which may return what it sees, and a strategy for
it in `ACTIONS`.
"""

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_value_

import hostdev
from tests.runtime.cases import BodyError

ROWS = 6
MODES = [(0, None), (2, None), (0, "40%"), (2, "40%"), (4, "100%"), (3, hostdev.CacheSpec(2, "lru", 3))]


@dataclass
class Hostdev:
    """A program's model on hostdev, while it runs."""

    table: Any
    other: Any
    runtime: Any
    d: nn.Parameter
    dense: Any
    at_table: bool
    rows: Any = None


@dataclass
class Torch:
    """The same in plain torch."""

    table: nn.Parameter
    other: nn.Parameter
    rates: dict
    d: nn.Parameter
    dense: Any
    rates_now: dict = field(default_factory=dict)  # of the step
    frozen: set = field(default_factory=set)
    frozen_now: set = field(default_factory=set)  # as they were when the step's first batch was given out
    came: bool = False  # gradients of rows, in this step
    ids: tuple = ()

    def parameters(self):
        return {"t": self.table, "u": self.other}


@dataclass(frozen=True)
class Backward:
    """A loss of the batch, several times in a body or never."""

    scale: int
    kind: str  # "rows", "unique", "other"

    def backward(self, rows, unique, other, d):
        """Do it; return whether gradients come to rows."""
        loss = {"rows": rows, "unique": unique, "other": other}[self.kind].sum()
        came = loss.requires_grad
        loss = self.scale * (loss if d is None else loss + d.sum())
        if loss.requires_grad:
            loss.backward()
        return came

    def on_hostdev(self, it):
        d = None if it.dense is None else it.d
        self.backward(it.rows["x"], it.rows.unique("t")[0], it.rows["y"], d)

    def on_torch(self, it):
        rows, other = it.table[list(it.ids)], it.other[list(it.ids)]
        unique = it.table[list(dict.fromkeys(it.ids))]
        if "t" in it.frozen_now:
            rows, unique = rows.detach(), unique.detach()
        if "u" in it.frozen_now:
            other = other.detach()
        if self.backward(rows, unique, other, None if it.dense is None else it.d):
            it.came = True
            it.rates_now = dict(it.rates)


@dataclass(frozen=True)
class Rate:
    """A rate of a table, set at the table or in its group of the tables' optimizer, as the program does."""

    power: int

    def on_hostdev(self, it):
        if it.at_table:
            it.table.optimizer.lr = 2.0**self.power
        else:
            it.runtime.optimizer.param_groups[0]["lr"] = 2.0**self.power

    def on_torch(self, it):
        it.rates["t"] = 2.0**self.power


@dataclass(frozen=True)
class Freeze:
    """From the next step's first batch on."""

    on: bool
    name: str

    def on_hostdev(self, it):
        (it.runtime.freeze if self.on else it.runtime.unfreeze)(self.name)

    def on_torch(self, it):
        (it.frozen.add if self.on else it.frozen.discard)(self.name)


@dataclass(frozen=True)
class Look:
    """What `lookup`, or a loop over `predict`, sees of all rows."""

    how: str

    def on_hostdev(self, it):
        every = {"x": list(range(ROWS)), "y": list(range(ROWS))}
        if self.how == "lookup":
            found = it.runtime.lookup(every)
        else:
            [found] = [{name: rows[name].clone() for name in rows} for _, rows in it.runtime.predict([every])]
        return [found[name][:, 0].tolist() for name in ("x", "y")]

    def on_torch(self, it):
        return [it.table[:, 0].tolist(), it.other[:, 0].tolist()]


@dataclass(frozen=True)
class Clip:
    """By value, of the rows' gradients and the dense one's, where some have come."""

    most: int

    def on_hostdev(self, it):
        rows = it.rows.parameters()
        if any(row.grad is not None for row in rows):
            clip_grad_value_([it.d, *rows], self.most)

    def on_torch(self, it):
        if it.came:
            clip_grad_value_([it.d, *it.parameters().values()], self.most)


@dataclass(frozen=True)
class Forget:
    """The gradients of the rows and of the dense side that have come so far."""

    def on_hostdev(self, it):
        it.runtime.optimizer.zero_grad()
        if it.dense is not None:
            it.dense.zero_grad()

    def on_torch(self, it):
        it.table.grad = it.other.grad = it.d.grad = None
        it.came = False


backward = st.builds(Backward, st.integers(1, 3), st.sampled_from(["rows", "rows", "unique", "other"]))
ACTIONS = [  # before the step, in any order
    backward,
    backward,
    st.builds(Rate, st.integers(-2, 1)),
    st.builds(Freeze, st.booleans(), st.sampled_from(["t", "u"])),
    st.builds(Clip, st.integers(1, 4)),
    st.builds(Forget),
]
AFTER = [  # and after it
    st.builds(Look, st.sampled_from(["lookup", "predict"])),
    st.builds(Rate, st.integers(-2, 1)),
    st.builds(Freeze, st.booleans(), st.sampled_from(["t", "u"])),
]


@dataclass(frozen=True)
class Body:
    """What a body does with a batch."""

    ids: tuple
    before: tuple
    after: tuple


@dataclass(frozen=True)
class OneLoop:
    """A loop over batches, and how it is left: after so many bodies, by a break or an exception there."""

    bodies: tuple
    together: int
    leave_at: int
    how: str  # "break", "raise before", "raise after"; held: by a variable
    held: bool


@dataclass(frozen=True)
class Program:
    """Loops one after the other."""

    optimizer: str  # that steps: "dense", "tables", or "none", where the tables step as the loop goes on
    at_table: bool  # it sets rates there
    loops: tuple


@st.composite
def programs(draw):
    ids = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4).map(tuple)
    body = st.builds(
        Body,
        ids,
        st.lists(st.one_of(ACTIONS), max_size=4).map(tuple),
        st.lists(st.one_of(AFTER), max_size=2).map(tuple),
    )
    loop = st.builds(
        OneLoop,
        st.lists(body, min_size=1, max_size=6).map(tuple),
        st.sampled_from([1, 1, 2, 3]),
        st.integers(1, 9),
        st.sampled_from(["break", "break", "raise before", "raise after"]),
        st.booleans(),
    )
    optimizer = st.sampled_from(["dense", "dense", "tables", "none"])
    return Program(draw(optimizer), draw(st.booleans()), draw(st.lists(loop, min_size=1, max_size=3).map(tuple)))


def run(program, device, depth, cache):
    """Return what the program sees and leaves on hostdev."""
    tables = [hostdev.HostTable(ROWS, 1, hostdev.SGD(lr=1.0), name=name, init=hostdev.Constant(0.0)) for name in "tu"]
    runtime = hostdev.Runtime({"x": tables[0], "y": tables[1]}, device=device, depth=depth, cache=cache)
    d = nn.Parameter(torch.zeros(1, device=device))
    dense = torch.optim.SGD([d], lr=1.0) if program.optimizer == "dense" else None
    it = Hostdev(*tables, runtime, d, dense, program.at_table)
    seen, held = [], []

    def body(one, rows, ends):
        it.rows = rows
        seen.extend(action.on_hostdev(it) for action in one.before)
        if ends == "raise before":
            raise BodyError
        steps = rows.is_due
        if steps and program.optimizer == "tables":
            runtime.optimizer.step()
        elif steps and it.dense is not None:
            it.dense.step()
            it.dense.zero_grad()
        if steps:
            seen.extend(action.on_hostdev(it) for action in one.after)
        if ends == "raise after":
            raise BodyError
        return ends == "break"

    for one in program.loops:
        batches = [{"x": list(each.ids), "y": list(each.ids)} for each in one.bodies]
        loop = runtime.train(batches, accumulate=one.together)
        if one.held:
            held.append(loop)
        with contextlib.suppress(BodyError):
            for number, (_, rows) in enumerate(loop, 1):
                if body(one.bodies[number - 1], rows, one.how if number == one.leave_at else ""):
                    break
            del rows
        if one.held:
            held.pop().close()
        del loop
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen.append([table.lookup(np.arange(ROWS))[:, 0].tolist() for table in tables])
        seen.append(["gradients were left without a step" in str(one.message) for one in caught])
    return seen, d.item(), [table.step for table in tables]


def plain(program):
    """Return the same of torch, whose tables take their step with an optimizer's, or else as the loop goes on."""
    parameters = [nn.Parameter(torch.zeros(ROWS, 1)) for _ in range(2)]
    d = nn.Parameter(torch.zeros(1))
    dense = torch.optim.SGD([d], lr=1.0) if program.optimizer == "dense" else None
    it, seen, steps = Torch(*parameters, {"t": 1.0, "u": 1.0}, d, dense), [], {"t": 0, "u": 0}

    def take_step():
        for name, table in it.parameters().items():
            if table.grad is not None and name not in it.frozen_now:
                steps[name] += 1
                with torch.no_grad():
                    table -= it.rates_now[name] * table.grad
            table.grad = None
        it.came = False

    for one in program.loops:
        for number, each in enumerate(one.bodies, 1):
            first = (number - 1) // one.together * one.together  # of the bodies that make a step
            it.ids = each.ids
            if number - 1 == first:
                it.frozen_now, it.came = set(it.frozen), False
            ends = one.how if number == one.leave_at else ""
            seen.extend(action.on_torch(it) for action in each.before)
            due = (number % one.together == 0 or number == len(one.bodies)) and ends != "raise before"
            if due and program.optimizer != "none":
                it.rates_now = dict(it.rates)
                if dense is not None:
                    dense.step()
                    dense.zero_grad()
                take_step()
            seen.extend(action.on_torch(it) for action in (each.after if due else ()))
            if ends:
                break
            if due and it.came:
                take_step()
        seen.append([table[:, 0].tolist() for table in parameters])
        seen.append([True] * it.came)  # it was left without a step, which is told, and is dropped
        it.table.grad, it.other.grad, it.came = None, None, False
    return seen, d.item(), list(steps.values())


def check(program, device):
    wanted = plain(program)
    for depth, cache in MODES:
        assert run(program, device, depth, cache) == wanted, (depth, cache)


FAST = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # to shrink a program takes minutes, and its loops stay open meanwhile
)


@FAST
@given(program=programs())
def test_random_programs(program):
    check(program, torch.device("cpu"))


@pytest.mark.slow
@settings(FAST, max_examples=300, derandomize=False)
@given(program=programs())
def test_more_random_programs(program):
    check(program, torch.device("cpu"))
