"""The keys of a table by key against a dict in Python: random programs of steps, commits, rollbacks and erased keys."""

import copy
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core.errors import UserError
from hostdev.core.key_rules import LeastFrequent, LeastRecent, MinCount, Probability, SmallestNorm, Unused
from hostdev.host.key_index import KeyIndex
from hostdev.host.key_plan import PlannedAheadError
from hostdev.kernels.key_directory import EMPTY
from tests.conftest import ROOT
from tests.naive_keys import Naive, hash_of, norm_of

CAPACITY, SEED = 12, 5
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
    found = zip(index._last[live].tolist(), index._uses[live].tolist(), strict=True)
    assert list(found) == expected
    assert index.waiting >= len(naive.waiting)  # expired keys are erased later


def check_committed(index, naive):
    found = index.committed()
    assert found.keys.tolist() == sorted(naive.rows, key=hash_of)
    pairs = zip(found.last.tolist(), found.uses.tolist(), strict=True)
    assert list(pairs) == [naive.rows[key] for key in found.keys.tolist()]
    np.testing.assert_array_equal(index.keys[found.rows], found.keys)
    np.testing.assert_array_equal(index.find_committed(found.keys), found.rows)
    keys = np.arange(-3, 30)
    assert (index.find_committed(keys) == EMPTY).sum() == len(keys) - len(naive.rows)
    assert len(found.waiting[0]) == found.waiting_count
    waiting = {key: (value >> 24, value & 0xFFFFFF) for key, value in zip(*found.waiting, strict=True)}
    assert waiting.items() >= naive.waiting.items()  # expired keys are erased later


@pytest.mark.parametrize("evict", EVICTIONS, ids=str)
@settings(deadline=None, max_examples=80)
@given(admit=st.sampled_from(ADMISSIONS), program=PROGRAM)
def test_random_programs(evict, admit, program):
    index, naive = KeyIndex("t", CAPACITY, admit, evict, seed=SEED), Naive(admit, evict, CAPACITY, SEED)
    before = []  # the naive table before each step that is not finished, and the rows that the step has evicted
    most = 0  # rows with a key, or with the values of an evicted one

    def norms(rows):
        return np.array([norm_of(key) for key in index.keys[rows].tolist()])

    for what, value in program:
        if what == "plan":
            step = index.step + len(before) + 1
            keys, uses = np.array(list(value), np.int64), np.array(list(value.values()), np.int32)
            saved = copy.deepcopy(naive)
            try:
                admitted, evicted = naive.plan(list(value), value, step, norm_of)
            except UserError:
                naive = saved
                with pytest.raises(UserError, match="table 't'"):
                    index.plan(keys, uses, norms)
            else:
                made = index.plan(keys, uses, norms)
                assert keys[made.new].tolist() == admitted
                assert set(made.evicted.tolist()) == set(evicted)
                np.testing.assert_array_equal(made.rows, index.find(keys))
                in_use = {row for _, rows in before for row in rows}  # nothing has overwritten their values
                assert not set(made.rows[made.new].tolist()) & in_use
                before.append((saved, made.evicted_rows.tolist()))
        elif what == "commit":
            while len(before) > value:
                index.release(index.commit()[0])
                before.pop(0)
        elif what == "rollback":
            kept = max(0, len(before) - value)
            index.rollback(kept)
            if before[kept:]:
                naive = before[kept][0]
                del before[kept:]
        else:
            while before:
                index.release(index.commit()[0])
                before.pop(0)
            index.release(index.erase(np.array(value, np.int64)))
            for key in value:
                naive.rows.pop(key, None)
                naive.waiting.pop(key, None)
        check(index, naive)
        assert index.unfinished == len(before)
        check_committed(index, before[0][0] if before else naive)
        most = max(most, len(index) + sum(len(rows) for _, rows in before))
        assert index.rows <= most


def plan(index, keys, uses, norms=None, *, finish=False):
    found = index.plan(np.asarray(keys), np.asarray(uses, np.int32), norms)
    if finish:
        index.release(index.commit()[0])
    return found


def test_keys_that_wait_late_in_a_run_are_erased():
    index = KeyIndex("t", 9, MinCount(2))
    index.step = 299
    for step in (300, 301):  # from step 128 on, the value of a waiting key does not fit in 31 bits
        assert index.waiting == step - 300
        plan(index, [5], [1])
    assert len(index) == 1 and index.waiting == 0
    index.rollback(1)
    assert len(index) == 0 and index.waiting == 1


def test_norms_that_are_not_numbers_count_as_the_largest():
    index = KeyIndex("t", 4, None, SmallestNorm(keep=1.0))
    plan(index, range(4), [1] * 4)
    with pytest.raises(PlannedAheadError):
        plan(index, [7, 8], [1, 1])
    assert len(index) == 4 and index.unfinished == 1
    plan(index, [7, 8], [1, 1], lambda rows: np.full(len(rows), np.nan))
    assert len(index) == 4


def test_uses_decay_and_come_back():
    index = KeyIndex("t", 4, None, LeastFrequent(keep=0.5, every=2, decay=0.5))
    plan(index, range(4), [9, 8, 3, 2])
    rows = index.find(np.arange(4))
    assert plan(index, [0], [1]).evicted.tolist() in ([2, 3], [3, 2])
    assert index._uses[rows[:2]].tolist() == [5, 4]
    assert index.committed().keys.tolist() == []
    index.rollback(1)
    assert index._uses[rows].tolist() == [9, 8, 3, 2]
    plan(index, [0], [1])
    for _ in range(2):
        index.release(index.commit()[0])
    plan(index, [7, 8], [1, 1])
    assert set(index.find(np.array([7, 8])).tolist()) == set(rows[2:].tolist())


def test_rows_that_wait_for_their_release_are_not_used():
    index = KeyIndex("t", 1, None, LeastRecent(keep=1.0))
    for key in range(70_000):
        try:
            plan(index, [key], [1])
        except PlannedAheadError:
            break
    assert len(index) == 1 and index.unfinished == key == index.row_space
    evicted = [index.commit()[0] for _ in range(index.unfinished)]
    with pytest.raises(PlannedAheadError):  # nothing has released them
        plan(index, [key], [1])
    with pytest.raises(UserError, match="capacity"):  # and nothing will, since all earlier steps are finished
        plan(index, [key], [1], norms=lambda rows: np.zeros(len(rows)))
    index.release(np.concatenate(evicted))
    plan(index, [key], [1])


def test_a_sketch_counts_at_least_the_uses_and_is_undone():
    rng = np.random.default_rng(0)
    index, exact = (KeyIndex("t", 100_000, MinCount(5, sketch=sketch), None, seed=1) for sketch in ("1MiB", None))
    for step in range(1, 30):
        keys = np.unique(rng.zipf(1.2, 3_000) % 1_000_000)
        uses = rng.integers(1, 3, len(keys)).astype(np.int32)
        plan(index, keys, uses, finish=True)
        if step % 3 == 0:
            counts, size = index.committed().sketch, len(index)
            plan(index, keys + 7, uses)
            np.testing.assert_array_equal(index.committed().sketch, counts)
            index.rollback()
            np.testing.assert_array_equal(index._sketch._counts.reshape(-1), counts)
            assert len(index) == size
        plan(exact, keys, uses, finish=True)
    every = np.arange(1_000_000)
    have, should = index.find(every) != EMPTY, exact.find(every) != EMPTY
    assert (have | ~should).all() and have.sum() < 1.2 * should.sum()


@pytest.mark.parametrize(
    ("evict", "advice"),
    [(None, "give evict="), (Unused(9), "fewer steps"), (LeastRecent(keep=1.0), "raise capacity")],
)
def test_a_full_table_advises_what_is_not_given(evict, advice):
    index = KeyIndex("t", 4, evict=evict)
    with pytest.raises(UserError, match=r"table 't' has .*capacity") as raised:
        for start in (0, 3):
            index.plan(np.arange(start, start + 5), np.ones(5, np.int32), lambda rows: np.zeros(len(rows)))
    assert advice in str(raised.value)
    assert ("give evict=" in str(raised.value)) == (evict is None)


LIMITED = """
import re, resource, psutil, numpy as np
import hostdev
from hostdev.host import key_options
key_options.available_bytes = lambda: 1 << 40
memory = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (memory + (3 << 30),) * 2)
for disk in (None, hostdev.Disk(FOLDER, memory="8MiB")):
    rows, dim = (20_000_000, 64) if disk is None else (200_000_000, 64)
    for unknown in ("shared", "zeros"):
        try:
            hostdev.HostTable(None, dim, hostdev.LazyAdam(), name="t", capacity=rows, storage=disk, unknown=unknown)
        except hostdev.UserError as error:
            print(error)
            advised = int(re.findall(r"capacity=(\\d+)", str(error))[0])
        table = hostdev.HostTable(None, dim, hostdev.LazyAdam(), name="t", capacity=advised, storage=disk)
        table.apply(np.arange(99), np.ones((99, dim), np.float32))
        del table
"""


def test_a_limit_of_addresses_is_told_with_what_to_type(tmp_path):
    program = LIMITED.replace("\\\\", "\\").replace("FOLDER", repr(str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert not done.returncode, done.stderr
    for line, rows in zip(done.stdout.splitlines(), [20_000_000] * 2 + [200_000_000] * 2, strict=True):
        assert "table 't'" in line and f"{rows:,} keys" in line and "ulimit -v" in line and "--capacity" in line
