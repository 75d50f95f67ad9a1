"""The keys of a table by key against a dict in Python: random programs of steps, commits, rollbacks and erased keys."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core.admission import MinCount, Probability
from hostdev.core.errors import UserError
from hostdev.core.eviction import LeastFrequent, LeastRecent, SmallestNorm, Unused
from hostdev.host.key_index import KeyIndex
from hostdev.kernels.counter import mix64
from hostdev.kernels.key_directory import EMPTY

CAPACITY, SEED = 12, 5


class Naive:
    """The same rules: `rows` has the last step and the uses of each key, `waiting` those of keys without a row."""

    def __init__(self, admit, evict):
        self.admit, self.evict = admit, evict
        self.rows, self.waiting = {}, {}

    def plan(self, keys, uses, step, norm):
        evicted = []
        if self.evict is not None and step % self.evict.every == 0:
            evicted += self._evict(step, (), norm, None)
        unknown = [key for key in keys if key not in self.rows]
        admitted = self._admitted(unknown, uses, step)
        lacking = len(self.rows) + len(admitted) - CAPACITY
        if lacking > 0:
            if self.evict is None or isinstance(self.evict, Unused):
                raise UserError("full")
            evicted += self._evict(step, [key for key in keys if key in self.rows], norm, len(self.rows) - lacking)
        for key in keys:
            if key in self.rows:
                self.rows[key] = (step, self.rows[key][1] + uses[key])
        for key, total in admitted.items():
            self.rows[key] = (step, total)
        return list(admitted), evicted

    def _admitted(self, unknown, uses, step):
        if isinstance(self.admit, Probability):
            drawn = self.admit.draw(np.array(unknown, np.int64), SEED, "t", step)
            return {key: uses[key] for key, is_in in zip(unknown, drawn, strict=True) if is_in}
        if self.admit is None:
            return {key: uses[key] for key in unknown}
        if self.admit.expires is not None:
            first = step - self.admit.expires
            self.waiting = {key: value for key, value in self.waiting.items() if value[0] >= first}
        admitted = {}
        for key in unknown:
            total = self.waiting.get(key, (0, 0))[1] + uses[key]
            self.waiting[key] = step, total
            if total >= self.admit.n:
                admitted[key] = total
                del self.waiting[key]
        return admitted

    def _evict(self, step, kept, norm, most):
        if isinstance(self.evict, Unused):
            gone = [key for key, (last, _) in self.rows.items() if last < step - self.evict.steps]
        else:
            target = int(self.evict.keep * CAPACITY)
            excess = len(self.rows) - (target if most is None else min(target, most))
            if excess <= 0:
                return []
            if most is not None and len(kept) > most:
                raise UserError("too small")
            score = {
                LeastRecent: lambda key: self.rows[key][0],
                LeastFrequent: lambda key: self.rows[key][1],
                SmallestNorm: norm,
            }[type(self.evict)]
            others = [key for key in self.rows if key not in kept]
            gone = sorted(others, key=lambda key: (score(key), int(mix64(np.array([key]).view(np.uint64))[0])))[:excess]
        for key in gone:
            del self.rows[key]
        if isinstance(self.evict, LeastFrequent) and self.evict.decay < 1:
            self.rows = {key: (last, int(uses * self.evict.decay)) for key, (last, uses) in self.rows.items()}
        return gone


def norm_of(key):
    return float(mix64(np.array([key]).view(np.uint64))[0] % np.uint64(7))


ADMISSIONS = [None, MinCount(1), MinCount(3), MinCount(4, expires=2), Probability(0.4)]
EVICTIONS = [
    None,
    Unused(steps=2, every=1),
    Unused(steps=3, every=2),
    LeastRecent(every=3),
    LeastFrequent(keep=0.5, every=2, decay=0.5),
    LeastFrequent(every=4),
    SmallestNorm(keep=0.75, every=3),
]
BATCH = st.dictionaries(st.integers(0, 25), st.integers(1, 3), max_size=10)
PROGRAM = st.lists(
    st.one_of(
        st.tuples(st.just("plan"), BATCH),
        st.tuples(st.just("plan"), BATCH),
        st.tuples(st.just("commit"), st.integers(0, 4)),
        st.tuples(st.just("rollback"), st.integers(0, 4)),
        st.tuples(st.just("erase"), st.lists(st.integers(0, 25), max_size=4)),
    ),
    max_size=30,
)


def check(index, naive):
    keys = np.arange(-3, 30)
    rows = index.find(keys)
    live = rows[rows != EMPTY]
    assert {key for key, row in zip(keys.tolist(), rows.tolist(), strict=True) if row != EMPTY} == set(naive.rows)
    assert len(index) == len(naive.rows) == len(set(live.tolist()))
    assert sorted(index.live_rows().tolist()) == sorted(live.tolist())
    np.testing.assert_array_equal(index.keys[live], keys[rows != EMPTY])
    expected = [naive.rows[key] for key in keys[rows != EMPTY].tolist()]
    found = zip(index.last_steps(live).tolist(), index.uses(live).tolist(), strict=True)
    assert list(found) == expected
    assert index.waiting >= len(naive.waiting)  # expired keys are erased later


@pytest.mark.parametrize("evict", EVICTIONS, ids=str)
@settings(deadline=None, max_examples=80)
@given(admit=st.sampled_from(ADMISSIONS), program=PROGRAM)
def test_random_programs(evict, admit, program):
    index, naive = KeyIndex("t", CAPACITY, admit, evict, seed=SEED), Naive(admit, evict)
    step, done, before = 0, 0, {}  # the naive table before each step that is not committed
    most = 0  # rows with a key, or with the values of an evicted one
    in_use: dict[int, int] = {}  # rows that still have an evicted key's values, with the step that evicted it

    def norms(rows):
        return np.array([norm_of(key) for key in index.keys[rows].tolist()])

    for what, value in program:
        if what == "plan":
            step += 1
            keys, uses = np.array(list(value), np.int64), np.array(list(value.values()), np.int32)
            saved = copy.deepcopy(naive)
            try:
                admitted, evicted = naive.plan(list(value), value, step, norm_of)
            except UserError:
                naive = saved
                with pytest.raises(UserError, match="table 't'"):
                    index.plan(keys, uses, step, norms)
            else:
                before[step] = saved
                made = index.plan(keys, uses, step, norms)
                assert keys[made.new].tolist() == admitted
                assert set(made.evicted.tolist()) == set(evicted)
                np.testing.assert_array_equal(made.rows, index.find(keys))
                assert not set(made.rows[made.new].tolist()) & set(in_use)  # nothing has overwritten their values
                in_use |= dict.fromkeys(made.evicted_rows.tolist(), step)
        elif what == "commit":
            done = max(done, step - value)
            index.commit(done)
            before = {number: saved for number, saved in before.items() if number > done}
            in_use = {row: number for row, number in in_use.items() if number > done}
        elif what == "rollback":
            first = max(done, step - value) + 1
            index.rollback(first)
            if undone := [number for number in before if number >= first]:
                naive = before[min(undone)]
                before = {number: saved for number, saved in before.items() if number < first}
            in_use = {row: number for row, number in in_use.items() if number < first}
        else:
            index.commit(step)
            done, before, in_use = step, {}, {}
            index.erase(np.array(value, np.int64))
            for key in value:
                naive.rows.pop(key, None)
                naive.waiting.pop(key, None)
        check(index, naive)
        most = max(most, len(index) + len(in_use))
        assert index._rows <= most


def test_keys_that_wait_late_in_a_run_are_erased():
    index, key, one = KeyIndex("t", 9, MinCount(2)), np.array([5]), np.ones(1, np.int32)
    for step in (300, 301):  # from step 128 on, the value of a waiting key does not fit in 31 bits
        assert index.waiting == step - 300
        index.plan(key, one, step)
    assert len(index) == 1 and index.waiting == 0
    index.rollback(301)
    assert len(index) == 0 and index.waiting == 1


def test_norms_that_are_not_numbers_count_as_the_largest():
    index, one = KeyIndex("t", 4, None, SmallestNorm(keep=1.0)), np.ones(4, np.int32)
    index.plan(np.arange(4), one, 1)
    index.plan(np.array([7, 8]), one[:2], 2, lambda rows: np.full(len(rows), np.nan))
    assert len(index) == 4


def test_uses_decay_and_come_back():
    index, keys = KeyIndex("t", 4, None, LeastFrequent(keep=0.5, every=2, decay=0.5)), np.arange(4)
    index.plan(keys, np.array([9, 8, 3, 2], np.int32), 1)
    rows = index.find(keys)
    assert index.plan(keys[:1], np.array([1], np.int32), 2).evicted.tolist() in ([2, 3], [3, 2])
    assert index.uses(rows[:2]).tolist() == [5, 4]
    index.rollback(2)
    assert index.uses(rows).tolist() == [9, 8, 3, 2]
    index.plan(keys[:1], np.array([1], np.int32), 2)
    index.commit(2)
    index.plan(np.array([7, 8]), np.array([1, 1], np.int32), 3)
    assert set(index.find(np.array([7, 8])).tolist()) == set(rows[2:].tolist())


def test_a_sketch_counts_at_least_the_uses_and_is_undone():
    rng = np.random.default_rng(0)
    index, exact = (KeyIndex("t", 100_000, MinCount(5, sketch=sketch), None, seed=1) for sketch in ("1MiB", None))
    for step in range(1, 30):
        keys = np.unique(rng.zipf(1.2, 3_000) % 1_000_000)
        uses = rng.integers(1, 3, len(keys)).astype(np.int32)
        index.plan(keys, uses, step)
        if step % 3 == 0:
            state = index._sketch._counts.copy(), len(index)
            index.plan(keys + 7, uses, 100)
            index.rollback(100)
            np.testing.assert_array_equal(index._sketch._counts, state[0])
            assert len(index) == state[1]
        exact.plan(keys, uses, step)
    every = np.arange(1_000_000)
    have, should = index.find(every) != EMPTY, exact.find(every) != EMPTY
    assert (have | ~should).all() and have.sum() < 1.2 * should.sum()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: MinCount(0), "MinCount needs a number of uses from 1"),
        (lambda: MinCount(2.5), "MinCount needs a number of uses from 1"),
        (lambda: MinCount(2, sketch="1MiB", expires=3), "a sketch cannot forget single keys"),
        (lambda: MinCount(2, sketch=10), "a sketch needs at least 1 KiB"),
        (lambda: MinCount(2, expires=0), "expires must be at least 1 step"),
        (lambda: Probability(0), "a probability must be above 0 and at most 1"),
        (lambda: Probability(1.5), "a probability must be above 0 and at most 1"),
        (lambda: Unused(steps=0), "steps must be at least 1 step"),
        (lambda: LeastRecent(keep=0), "keep must be above 0 and at most 1"),
        (lambda: LeastRecent(every=0), "every must be at least 1 step"),
        (lambda: LeastFrequent(decay=0), "decay must be above 0 and at most 1"),
        (lambda: KeyIndex("t", 0), "the capacity must be at least 1 row"),
        (lambda: KeyIndex("t", 2**31), "the capacity must be at most 1,073,741,823 rows"),
        (lambda: MinCount(3, expires=True), "expires must be at least 1 step"),
        (lambda: MinCount(3, sketch=2048.5), "a sketch needs a size such as '64MiB'"),
        (lambda: LeastRecent(keep="a"), "keep must be above 0 and at most 1"),
    ],
)
def test_wrong_values(made, message):
    with pytest.raises(ValueError, match=message):
        made()
