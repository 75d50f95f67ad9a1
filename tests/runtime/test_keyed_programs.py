"""Random programs around a table by key, which end with the rows of a dict in Python, at any depth, cache and policy.

A program is a list of actions. Batches have a step or none; between them, the program reads, predicts, erases keys,
leaves the loop, freezes the table, or saves, and resumes with another capacity, depth and cache.
"""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hostdev
from hostdev.core.errors import UserError
from hostdev.host.disk.tier import Tier
from hostdev.kernels import disk_records
from hostdev.kernels.counter import key64
from tests import naive
from tests.naive_keys import Naive, hash_of

DIM, SEED, CAPACITY = 3, 7, 10
CACHES = [(0, None), (2, None), (0, 4), (2, 4), (4, hostdev.CacheSpec(3, "lru")), (3, hostdev.CacheSpec(5, window=3))]
MODES = [(*mode, on_disk) for mode, on_disk in product(CACHES, (False, True))]
ADMISSIONS = [None, hostdev.MinCount(2), hostdev.MinCount(3, expires=4), hostdev.Probability(0.6)]
EVICTIONS = [
    None,
    hostdev.Unused(steps=4, every=2),
    hostdev.LeastRecent(every=3),
    hostdev.LeastFrequent(keep=0.5, every=2, decay=0.5),
    hostdev.SmallestNorm(keep=0.7, every=3),
]
OPTIMIZERS = [lambda: hostdev.SGD(lr=0.5), lambda: hostdev.LazyAdam(lr=0.25)]

KEY = st.integers(0, 14).map(lambda key: key * 0x9E3779B97F4A7C15 % 2**64 - 2**63)
BATCH = st.lists(st.tuples(KEY, KEY, KEY), min_size=1, max_size=3)  # for each sample, a key of a, and a bag of two of h
STEP = st.lists(BATCH, min_size=2, max_size=2)
ACTION = st.one_of(
    st.tuples(st.just("step"), STEP),
    st.tuples(st.just("step"), STEP),
    st.tuples(st.just("step"), STEP),
    st.tuples(st.just("skip"), STEP),
    st.tuples(st.just("predict"), BATCH),
    st.tuples(st.just("lookup"), BATCH),
    st.tuples(st.just("check"), st.none()),
    st.tuples(st.just("erase"), st.lists(KEY, max_size=3)),
    st.tuples(st.just("leave"), st.none()),
    st.tuples(st.just("freeze"), st.booleans()),
    st.tuples(st.just("save"), st.none()),
    st.tuples(st.just("resume"), st.tuples(st.sampled_from(MODES), st.sampled_from([0, 5]))),
)


@pytest.fixture(autouse=True)
def evict_all(monkeypatch):
    """Whenever rows of a table on disk are needed, let all others leave the memory, into small files."""
    pin = Tier.try_pin

    def try_pin(self, *args, **options):
        with self._changed:
            self._evict(self.count)
        return pin(self, *args, **options)

    monkeypatch.setattr(Tier, "try_pin", try_pin)
    monkeypatch.setattr(disk_records, "_CHUNK", disk_records.PAGE)
    monkeypatch.setattr("hostdev.host.disk.tier.SEGMENT_BYTES", 4 * disk_records.PAGE)


class Expected:
    """The table as a dict: for each key, and each out-of-vocabulary row, [1 + S, D]."""

    def __init__(self, admit, evict, optimizer, policy="shared"):
        self.policy = policy
        self.rules = Naive(admit, evict, CAPACITY, SEED)
        self.optimizer, self.values, self.frozen, self.steps, self.key_steps = optimizer, {}, False, 0, 0
        unknown = np.array([key64(0, "out of vocabulary", name) for name in ("", "h")], np.uint64).view(np.int64)
        self.unknown = {name: self.initial(key) for name, key in zip(("", "h"), unknown.tolist(), strict=True)}

    def initial(self, key):
        block = np.empty((1, 1 + len(self.optimizer.slots), DIM), np.float32)
        slots = np.array(list(self.optimizer.slots.values()), np.float32)
        hostdev.Normal(0.01).fill(block, SEED, "t", slots, ids=np.array([key], np.int64))
        return block[0]

    def norm(self, key):
        return float(sum(float(weight) * float(weight) for weight in self.values[key][0].astype(np.float64)))

    def row(self, key, feature):
        if key in self.values:
            return self.values[key]
        if self.policy == "shared":
            return self.unknown["h" if feature == "h" else ""]
        row = self.initial(key)  # changes to it are lost
        return row if self.policy == "initial" else np.zeros_like(row)

    def read(self, batch):
        first = [self.row(a, "a")[0].copy() for a, _, _ in batch]
        bags = [self.row(b, "h")[0] + self.row(c, "h")[0] for _, b, c in batch]
        return np.array(first), np.array(bags)

    def plan(self, step):
        """Change keys before a step; `gone` then has the evicted ones with their weights."""
        self.gone = ()
        if self.frozen:
            return
        uses = {}
        for batch in step:
            for key in [sample[0] for sample in batch] + [key for sample in batch for key in sample[1:]]:
                uses[key] = uses.get(key, 0) + 1
        admitted, gone = self.rules.plan(list(uses), uses, self.key_steps + 1, self.norm)
        if gone := sorted(set(gone), key=hash_of):
            self.gone = gone, [self.values[key][0].tolist() for key in gone]
        for key in gone:
            del self.values[key]
        for key in admitted:
            self.values[key] = self.initial(key)

    def step(self, batches, grads):
        if self.frozen:
            return
        self.steps, self.key_steps = self.steps + 1, self.key_steps + 1
        order, terms = {}, []
        for batch, (ga, gh) in zip(batches, grads, strict=True):
            pairs = [(a, "a", ga[i]) for i, (a, _, _) in enumerate(batch)]
            pairs += [(key, "h", gh[i]) for i, sample in enumerate(batch) for key in sample[1:]]
            for key, feature, grad in pairs:
                row = self.row(key, feature)
                terms.append((order.setdefault(id(row), (len(order), row))[0], grad))
        inverse = np.array([number for number, _ in terms])
        sums = naive.sum_uses(np.array([grad for _, grad in terms]), inverse, len(order))
        for number, row in order.values():
            self.update(row, sums[number : number + 1])

    def update(self, row, grad):
        if isinstance(self.optimizer, hostdev.SGD):
            row[0] -= np.float32(self.optimizer.lr) * grad[0]
            return
        w, slots = row[:1], {"m": row[1:2], "v": row[2:3]}
        naive.lazy_adam(w, slots, np.array([0]), grad, self.optimizer, self.steps)

    def erase(self, keys):
        for key in keys:
            self.values.pop(key, None)
            self.rules.rows.pop(key, None)
            self.rules.waiting.pop(key, None)


class Real:
    """The same with hostdev."""

    def __init__(self, expected, admit, evict, mode, folder):
        self.expected, self.admit, self.evict, self.folder = expected, admit, evict, folder
        self.capacity, self.mode = CAPACITY, mode
        self.rng = np.random.default_rng(0)
        self.saved = False
        self.evicted, self.gone = [], []  # by step: keys with their weights, as reported and as expected
        self.begin(SEED)

    def begin(self, seed):
        depth, cache, on_disk = self.mode
        rules = {"admit": self.admit, "evict": self.evict, "unknown": self.expected.policy}
        disk = hostdev.Disk(self.folder / "disk", memory=1 << 18) if on_disk else None
        options = {**rules, "capacity": self.capacity, "storage": disk}
        optimizer = type(self.expected.optimizer)(lr=self.expected.optimizer.lr)
        self.table = hostdev.HostTable(None, DIM, optimizer, name="t", seed=seed, **options)
        features = {"a": self.table, "h": hostdev.Feature(self.table, pooling="sum", unknown="h")}
        self.runtime = hostdev.Runtime(features, device="cpu", depth=depth, cache=cache)
        self.table.on_evict(lambda keys, weights: self.evicted.append((keys.tolist(), weights.tolist())))
        if self.expected.frozen:
            self.runtime.freeze("t")

    def close(self):
        self.runtime.close()
        self.table.close()

    def check(self):
        table, values = self.table, self.expected.values
        keys = table.keys
        assert sorted(keys.tolist()) == sorted(values)
        found = [table.weights, *table.slots.values()]
        for number, array in enumerate(found):
            np.testing.assert_array_equal(array, [values[key][number] for key in keys.tolist()] or array)
        assert (table.step, len(table)) == (self.expected.steps, len(values))
        one = [(2**63 - 1, 2**63 - 1, 2**62 - 5)]  # keys that no batch has
        self.compare(one, self.runtime.lookup(ids_of(one)))
        read = self.expected.row(2**62 - 5, "a")[0]
        np.testing.assert_array_equal(table.lookup([2**62 - 5, *keys, 2**62 - 5]), [read, *table.weights, read])
        if self.saved:
            saved = hostdev.open(self.folder)["t"].lookup([2**62 - 5])[0]
            if self.expected.policy != "shared":  # that row may have been trained since
                np.testing.assert_array_equal(saved, read)

    def act(self, what, value, *, in_step=False):
        expected, table, runtime = self.expected, self.table, self.runtime
        if what == "predict":
            for batch, rows in runtime.predict([value, value[:1]], ids=ids_of):
                self.compare(batch, rows)
        elif what == "lookup":
            self.compare(value, runtime.lookup(ids_of(value)))
        elif what == "check":
            self.check()
        elif what == "erase" and in_step:
            with pytest.raises(ValueError, match="only after the batch's step"):
                table.erase(np.array(value, np.int64))
        elif what == "erase":
            table.erase(np.array(value, np.int64))
            expected.erase(value)
        elif what == "freeze":
            (runtime.freeze if value else runtime.unfreeze)("t")
            expected.frozen = value
        elif what == "save":
            runtime.save(self.folder, wait=len(table.keys) % 2 == 0)
            self.saved |= len(table.keys) % 2 == 0

    def compare(self, batch, rows):
        for name, value in zip("ah", self.expected.read(batch), strict=True):
            np.testing.assert_array_equal(rows[name].detach().numpy(), value)

    def resume(self, mode, more):
        self.runtime.save(self.folder)
        self.saved = True
        self.close()
        self.capacity, self.mode = self.capacity + more, mode
        self.expected.rules.capacity = self.capacity
        self.begin(99)
        self.runtime.load(self.folder)
        self.check()

    def loop(self, steps, actions):
        """Run a loop over `steps`, (kind, batches); actions[i] come before step i, in the body of the step before."""
        expected, batches = self.expected, [batch for _, step in steps for batch in step]
        loop = iter(self.runtime.train(batches, ids=ids_of, accumulate=2))
        stepped = False
        for number, (kind, step) in enumerate(steps):
            for action in actions[number] if number else ():
                self.act(*action, in_step=not stepped)
            stepped = kind == "step" and not expected.frozen
            before = expected.rules.rows.copy(), expected.rules.waiting.copy(), expected.values.copy()
            refused = False
            try:
                expected.plan(step)
            except UserError:
                refused = True
            if refused:
                with pytest.raises(UserError, match="table 't'"):
                    next(loop)
                return False
            grads = []
            for _ in step:
                batch, rows = next(loop)
                self.compare(batch, rows)
                ga, gh = (self.rng.integers(-4, 5, (len(batch), DIM)).astype(np.float32) for _ in range(2))
                grads.append((ga, gh))
                if stepped:
                    loss = (rows["a"] * torch.from_numpy(ga)).sum() + (rows["h"] * torch.from_numpy(gh)).sum()
                    loss.backward()
            if stepped:
                self.runtime.optimizer.step()
            if kind == "step":
                if expected.gone:
                    self.gone.append(expected.gone)
                expected.step(step, grads)
            elif not expected.frozen:
                expected.rules.rows, expected.rules.waiting, expected.values = before
        for action in actions[len(steps)]:
            self.act(*action, in_step=not stepped)
        loop.close()
        assert self.evicted == self.gone
        return True


def ids_of(batch):
    return {"a": np.array([a for a, _, _ in batch]), "h": np.array([sample[1:] for sample in batch])}


def run(program, admit, evict, optimizer, policy, mode, folder):
    expected = Expected(admit, evict, optimizer, policy)
    real = Real(expected, admit, evict, mode, folder)
    steps, actions, more = [], [[]], True
    for what, value in [*program, ("leave", None)]:
        if what in ("step", "skip"):
            steps.append((what, value))
            actions.append([])
        elif what in ("leave", "resume"):
            for action in actions[0] if steps else actions[-1]:
                real.act(*action)
            more = real.loop(steps, actions) if steps else True
            steps, actions = [], [[]]
            if not more:  # the table is full, or a batch is larger than it
                break
            if what == "resume":
                real.resume(*value)
        else:
            actions[-1].append((what, value))
    real.check()
    real.close()


COMBINATIONS = st.sampled_from(list(product(ADMISSIONS, EVICTIONS, OPTIMIZERS, ["shared", "zeros", "initial"])))
PROGRAMS = {"program": st.lists(ACTION, max_size=20), "chosen": COMBINATIONS, "mode": st.sampled_from(MODES)}
OPTIONS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}


def run_in_new_folder(program, chosen, mode, factory):
    admit, evict, optimizer, policy = chosen
    run(program, admit, evict, optimizer(), policy, mode, factory.mktemp("programs"))


@settings(max_examples=30, **OPTIONS)
@given(**PROGRAMS)
def test_random_programs(program, chosen, mode, tmp_path_factory):
    run_in_new_folder(program, chosen, mode, tmp_path_factory)


@pytest.mark.slow
@settings(max_examples=500, **OPTIONS)
@given(**PROGRAMS)
def test_many_random_programs(program, chosen, mode, tmp_path_factory):
    run_in_new_folder(program, chosen, mode, tmp_path_factory)
