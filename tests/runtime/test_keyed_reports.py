"""What users of other growing tables have reported: each check passes, and fails on a version that has the fault.

A report is a check, which takes a folder, and a fault: a function that changes the code as it was in the report.
"""

import threading

import numpy as np
import pytest

import hostdev
from hostdev.checkpoint import manager
from hostdev.core.key_rules import Probability
from hostdev.errors import UserError
from hostdev.host import key_table, table_keys
from hostdev.host.committed_keys import KeySnapshot
from hostdev.host.key_index import KeyIndex
from hostdev.host.key_plan import EvictionReports, PlannedKeys
from hostdev.host.key_table import KeyTable
from hostdev.host.rows import TableRows
from hostdev.host.snapshot import Snapshot
from hostdev.pipeline import keys as pipeline_keys
from tests.runtime.test_keyed_tables import MODES, POLICIES, Program, batches

FAST = {"evict": hostdev.Unused(steps=1, every=1)}


def saved(program, path, **options):
    return program.runtime.save(path, extra={"model": program.model.state_dict()}, **options)


def resumed(path, mode=(0, None), seed=99, **policy):
    program = Program(mode, seed=seed, **policy)
    program.model.load_state_dict(program.runtime.load(path)["model"])
    return program


def digest_of(mode=(0, None), steps=20, **policy):
    program = Program(mode, **policy).train(batches(steps))
    found = program.digest()
    program.runtime.close()
    return found


def check_reused_rows(folder):
    """recsys-examples #467, DeepRec #1023: reused rows began with the state of former keys, 1e38 after a restore."""
    found = []
    for policy in {}, FAST:
        table = hostdev.HostTable(None, 2, hostdev.LazyAdam(lr=1.0), name="t", init=hostdev.Constant(1), **policy)
        runtime, evicted = hostdev.Runtime({"t": table}, device="cpu"), {}
        table.on_evict(lambda keys, weights, to=evicted: to.update(zip(keys.tolist(), weights.tolist(), strict=True)))
        for _, rows in runtime.train([{"t": np.arange(5) + 10 * step} for step in range(50)]):
            assert (rows["t"] == 1).all()
            (rows["t"] * 1e15).sum().backward()
        found.append(evicted | dict(zip(table.keys.tolist(), table.weights.tolist(), strict=True)))
        assert (table.used_rows < 200) == bool(policy)
    assert found[0] == found[1] and len(evicted) == 240
    runtime.save(folder)
    runtime.load(folder)
    table.erase(table.keys)
    table.apply([7], np.zeros((1, 2), np.float32))
    assert table.slots["m"].tolist() == [[0, 0]] and table.slots["v"].tolist() == [[0, 0]]


def keep_the_state_of_reused_rows(patch):
    fill = TableRows.fill_unused

    def wrong(self, rows, step):
        block, row_slots = self.storage.block[rows].copy(), self.storage.row_slots[rows].copy()
        fill(self, rows, step)
        block[:, 0] = self.storage.block[rows][:, 0]
        self.write(rows, block, row_slots)

    patch.setattr(TableRows, "fill_unused", wrong)


def check_one_moment(folder):
    """DeepRec #1023, #999: a checkpoint had rows of several moments, as training went on while it was written."""
    program = Program((2, None), **POLICIES["count"])
    digests = []

    def save(step):
        if step == 10:
            digests.append(program.digest()[0])
            saved(program, folder, wait=False)

    program.train(batches(30), save)
    program.runtime.close()
    assert [resumed(folder, **POLICIES["count"]).digest()[0]] == digests


def write_late_without_copies(patch):
    read, may_read = KeySnapshot.read, threading.Event()
    close = hostdev.Runtime.close
    patch.setattr(hostdev.Runtime, "close", lambda self: (may_read.set(), close(self)))
    patch.setattr(KeySnapshot, "read", lambda self, *given: (may_read.wait(10), read(self, *given)))
    patch.setattr(Snapshot, "save_before_write", lambda self, ids: None)


def check_deletions_reach_readers(folder):
    """recsys-examples #454, #450, TorchEasyRec #638: keys that were deleted in training were served for ever."""
    program = Program(evict=hostdev.LeastRecent(keep=1.0, every=1), capacity=3_100)
    keys, parents = np.arange(10_000, 13_000), []
    for _ in range(2):
        program.keyed.apply(keys, np.zeros((len(keys), 4), np.float32))
    for part in range(8):
        program.train(batches(16)[2 * part : 2 * part + 2])
        parents.append(saved(program, folder).checkpoint.manifest.parent)
        table, rows = hostdev.open(folder)["keyed"], program.keyed.key_rows.find_rows(keys)
        assert len(table) == len(program.keyed)
        np.testing.assert_array_equal(table.lookup(keys), program.keyed.lookup(keys))
    assert (rows < 0).any() and sum(parent is not None for parent in parents) > 3  # most of these are increments


def lose_the_deletions(patch):
    patch.setattr(table_keys, "gone_since", lambda keys: np.zeros(0, np.int64))


def check_capacity_may_grow(folder):
    """TorchEasyRec #600, recsys-examples #243, torchrec #1591: the capacity was a guess, and fixed for good."""
    data = batches(30)
    program = Program(capacity=300).train(data[:6])
    saved(program, folder)
    program = resumed(folder, capacity=100_000)
    program.train(data[6:])
    assert len(program.keyed) > 300 and program.keyed.used_rows < 1_000  # memory is not taken before it is needed
    assert program.digest()[0] == digest_of(steps=30)[0]


def keep_the_first_capacity(patch):
    restore = KeyTable.restore_keys

    def wrong(self, *given):
        restore(self, *given)
        self.key_rows.index.capacity = 300

    patch.setattr(KeyTable, "restore_keys", wrong)


def check_eviction_waits_for_updates(folder):
    """FBGEMM #5954, #5807, DeepRec #808: rows were given to new keys while updates of the former keys still ran."""
    assert len({digest_of(mode, 40, **FAST) for mode in ((0, None), (4, None), (4, 60))}) == 1


def release_at_once(patch):
    plan, commit = KeyIndex.plan, KeyIndex.commit

    def wrong(self, *given):
        planned = plan(self, *given)
        self.release(planned.evicted_rows)
        return planned

    patch.setattr(KeyIndex, "plan", wrong)
    patch.setattr(KeyIndex, "commit", lambda self: (np.zeros(0, np.int32), *commit(self)[1:]))


def check_scores_are_saved(folder):
    """recsys-examples #272: the scores by which keys are evicted began anew when a checkpoint was loaded."""
    policy = {"evict": hostdev.LeastFrequent(every=4), "capacity": 200}
    data = batches(30)
    saved(Program(**policy).train(data[:15]), folder)
    program = resumed(folder, **policy)
    program.train(data[15:])
    assert program.digest()[0] == digest_of(steps=30, **policy)[0]


def forget_the_scores(patch):
    patch.setattr(KeyIndex, "set_uses", lambda self, rows, last, uses: None)
    add = KeyIndex.add
    patch.setattr(KeyIndex, "add", lambda self, keys, last, uses: add(self, keys, last, np.ones_like(uses)))


def check_a_large_batch(folder):
    """recsys-examples #12: a batch with more keys than the table has room for gave wrong values."""
    for evict in (hostdev.LeastRecent(), hostdev.SmallestNorm(), None, hostdev.Unused(steps=1)):
        program = Program((2, 20), evict=evict, capacity=20)
        before = program.digest()[0]
        with pytest.raises(UserError, match=r"table 'keyed' has .*capacity"):
            program.train(batches(3))
        assert program.digest()[0] == before  # nothing of the batch is left


def share_a_row(patch):
    plan = KeyIndex.plan

    def wrong(self, keys, uses, *given):
        try:
            return plan(self, keys, uses, *given)
        except UserError:
            plan(self, keys[:0], uses[:0], *given)
            none = np.zeros(0, np.int64)
            return PlannedKeys(np.zeros(len(keys), np.int32), none, none, np.zeros(0, np.int32))

    patch.setattr(KeyIndex, "plan", wrong)


def check_reports_have_no_holes(folder):
    """HKV #242: the keys that an eviction returned had holes."""
    for mode in MODES:
        program, before, reported = Program(mode, **POLICIES["count"]), set(), []
        program.keyed.on_evict(lambda keys, weights, reported=reported: reported.append((keys, weights)))
        program.train(batches(30), lambda step, program=program, before=before: before.update(program.keyed.keys))
        keys = {key for keys, _ in reported for key in keys.tolist()}
        assert keys <= before and before - set(program.keyed.keys.tolist()) <= keys
        assert all(len(keys) == len(weights) and weights.any(1).all() for keys, weights in reported)
        program.runtime.close()


def leave_holes(patch):
    add = EvictionReports.add

    def wrong(self, keys, weights):
        add(self, np.where(np.arange(len(keys)) % 3 == 1, 0, keys), weights)

    patch.setattr(EvictionReports, "add", wrong)


def check_an_unknown_key_has_one_value(folder):
    """TFRA #136, #102: one unknown id had two vectors, which depended on its place in the batch."""
    program = Program(admit=hostdev.MinCount(100)).train(batches(3))
    keys = np.array([10**12, 5, 10**12, 10**13])
    assert len(np.unique(program.keyed.lookup(keys), axis=0)) == 1
    batch = {"item": keys, "history": keys[:, None], "fixed": np.zeros(4, int)}
    found = [program.runtime.lookup(batch)]
    for _, rows in program.runtime.predict([batch]):
        found.append({name: rows[name].clone() for name in ("item", "history")})
    for each in found:
        for name in ("item", "history"):
            assert len(np.unique(each[name].numpy(), axis=0)) == 1
        assert not np.array_equal(each["item"][0], each["history"][0])


def depend_on_the_place(patch):
    number = pipeline_keys.number_rows

    def wrong(rows, inverse, features, unknown):
        every = [row for each in unknown for row in each]
        return number(rows, inverse, features, [every] * len(unknown))

    patch.setattr(pipeline_keys, "number_rows", wrong)


def check_reloads_take_no_memory(folder):
    """DeepRec #252: memory grew with each reload."""
    program = Program(**POLICIES["count"]).train(batches(20))
    saved(program, folder)
    sizes = set()
    for _ in range(4):
        program.runtime.load(folder)
        sizes.add((program.keyed.key_rows.index.nbytes, program.keyed.used_rows))
        program.train(batches(3))
    assert len(sizes) == 1


def leak_rows(patch):
    patch.setattr(KeyTable, "reset", lambda self: self.erase(self.keys))
    patch.setattr(key_table.KeyIndex, "release", lambda self, rows: None)


def check_saving_does_not_block(folder):
    """DeepRec #125: training stood still while the table was written."""
    program, steps = Program(), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        read, waited = KeySnapshot.read, []
        patch.setattr(KeySnapshot, "read", lambda self, *given: (waited.append(steps.wait(5)), read(self, *given)))

        def after(step):
            if step == 3:
                saved(program, folder, wait=False)
            if step == 8:
                steps.set()

        program.train(batches(12), after)
        program.runtime.close()
    assert all(waited) and waited


def wait_for_the_writer(patch):
    save = manager.CheckpointManager.save

    def wrong(self, *given, **options):
        writer = save(self, *given, **options)
        writer.join()
        return writer

    patch.setattr(manager.CheckpointManager, "save", wrong)


def check_one_seed_one_result(folder):
    """DeepRec #427: five runs with the same seed had five results."""
    policy = POLICIES["probability"]
    found = {digest_of(mode, 25, **policy) for mode in MODES}
    assert len(found) == 1 and found != {digest_of(steps=25, **policy, seed=4)}


def draw_from_a_global_generator(patch):
    patch.setattr(Probability, "admit", lambda self, keys, *given, **names: np.random.random(len(keys)) < self.p)


REPORTS = [
    (check_reused_rows, keep_the_state_of_reused_rows),
    (check_one_moment, write_late_without_copies),
    (check_deletions_reach_readers, lose_the_deletions),
    (check_capacity_may_grow, keep_the_first_capacity),
    (check_eviction_waits_for_updates, release_at_once),
    (check_scores_are_saved, forget_the_scores),
    (check_a_large_batch, share_a_row),
    (check_reports_have_no_holes, leave_holes),
    (check_an_unknown_key_has_one_value, depend_on_the_place),
    (check_reloads_take_no_memory, leak_rows),
    (check_saving_does_not_block, wait_for_the_writer),
    (check_one_seed_one_result, draw_from_a_global_generator),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("check", "fault"), REPORTS, ids=[check.__name__ for check, _ in REPORTS])
def test_a_report(check, fault, tmp_path, monkeypatch):
    (tmp_path / "right").mkdir()
    check(tmp_path / "right")
    fault(monkeypatch)
    (tmp_path / "wrong").mkdir()
    with pytest.raises((AssertionError, UserError, pytest.fail.Exception)):
        check(tmp_path / "wrong")
