"""Checkpoints of tables on disk hold their segments: the rows of one moment, for every reader."""

import errno
import os
import shutil
import threading

import numpy as np
import pytest

import hostdev
from hostdev import FTRL, Adam, Disk, HostTable, LazyAdam, RowWiseAdam, Unused, UserError
from hostdev.checkpoint import folder, remote
from hostdev.checkpoint import writer as writer_module
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import load_tables, verify
from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.checkpoint.state import state_digest
from hostdev.checkpoint.writer import Content
from hostdev.errors import DiskFullError
from hostdev.ext.checkpoints import cli as command
from hostdev.ext.checkpoints.compact import merge, rewrite
from hostdev.ext.checkpoints.diff import differences
from hostdev.host.disk import segments as segments_module
from hostdev.kernels import disk_records
from hostdev.kernels.shards import ids_of

ROWS, DIM = 3_000, 8
KINDS = {
    "rows": {},
    "Adam": {"optimizer": Adam},
    "bfloat16": {"optimizer": RowWiseAdam, "dtype": "bfloat16", "slots": "bfloat16"},
    "8bit": {"dtype": "bfloat16", "slots": "8bit"},
    "keys": {"rows": None, "capacity": ROWS},
    "evicted": {"rows": None, "capacity": ROWS, "evict": Unused(steps=8, every=2), "unknown": "initial"},
    "zeros": {"rows": None, "capacity": ROWS, "optimizer": FTRL, "unknown": "zeros"},
}
EVERY = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small chunks and segments, so that few rows fill, free and collect many of them."""
    monkeypatch.setattr(disk_records, "_CHUNK", 1 << 14)
    monkeypatch.setattr("hostdev.host.disk.tier.SEGMENT_BYTES", 1 << 16)


def make(kind, disk=None, **more):
    """Return a table of a kind, on disk with about 300 rows in memory, or in memory."""
    options = {"rows": ROWS, "optimizer": LazyAdam, "seed": 3, **KINDS[kind], **more}
    rows, optimizer = options.pop("rows"), options.pop("optimizer")
    storage = None if disk is None else Disk(disk, memory=4 * (1 << 14) + 300 * 140)
    return HostTable(rows, DIM, optimizer(), name="t", storage=storage, **options)


def train(table, steps, seed):
    random = np.random.default_rng(seed)
    for step in range(steps):
        ids = np.minimum(random.integers(0, 1_500, 150) + 20 * step, ROWS - 1)  # ids drift
        table.apply(ids, random.standard_normal((150, DIM)).astype(np.float32))


def change_all(table):
    for start in range(0, ROWS, 100):
        table.apply(np.arange(start, start + 100), np.ones((100, DIM), np.float32))


def save(manager, table, step=1):
    return manager.save([table], step, Content({}, {}, {}, [])).wait()


def load(checkpoint, table):
    load_tables(folder.read_chain(checkpoint.path), {"t": table}, check=True)
    return table


def contents(table):
    """Return all that a table has, as bytes by name."""
    found = {"weights": table.weights.tobytes()} | {name: values.tobytes() for name, values in table.slots.items()}
    if hasattr(table, "keys"):
        found["keys"] = table.keys.tobytes()
    return found | {"step": table.step}


def segments_of(checkpoint):
    return sorted(each for each in (checkpoint.path / "tables/0").iterdir() if each.suffix != ".arrow")


@pytest.mark.drawn
@EVERY
def test_a_checkpoint_has_the_rows_of_its_moment(kind, tmp_path):
    one, other = make(kind), make(kind, tmp_path / "disk")
    manager = CheckpointManager(tmp_path / "saved", keep=0)
    for turn in range(3):
        for table in (one, other):
            train(table, 12, turn)
        wanted = contents(one)
        writer = manager.save([other], turn, Content({}, {}, {}, []))
        train(other, 12, turn + 50)  # while the checkpoint is written
        saved = writer.wait()
        assert segments_of(saved)
        assert contents(load(saved, make(kind))) == wanted
        again = load(saved, make(kind, tmp_path / "disk"))
        assert again.storage.tier.store.written_bytes["rows"] == 0  # no row was read or written
        assert contents(again) == wanted
        again.close()
        train(one, 12, turn + 50)
        assert contents(other) == contents(one)
    manager.close()


@EVERY
def test_every_reader_sees_what_a_copied_checkpoint_has(kind, tmp_path, capsys):
    one, other = make(kind), make(kind, tmp_path / "disk")
    managers = [CheckpointManager(tmp_path / name, keep=0) for name in ("copied", "held")]
    for table in (one, other):
        train(table, 25, 0)
    copied, held = (save(manager, table) for manager, table in zip(managers, (one, other), strict=True))
    chains = [folder.read_chain(each.path) for each in (copied, held)]
    assert differences(*chains) == []
    digests = {state_digest(Layers(chain), [], {}) for chain in chains}
    assert len(digests) == 1
    ids = np.random.default_rng(0).integers(0, ROWS if one.rows == ROWS else 2 * ROWS, 700)
    models = [hostdev.open(each.path, verify=True)["t"] for each in (copied, held)]
    assert models[0].lookup(ids).tobytes() == models[1].lookup(ids).tobytes()
    for code in (command.main(["verify", str(held.path)]), command.main(["info", str(held.path)])):
        assert not code
    assert "shared with others by hard links" in capsys.readouterr().out
    out = tmp_path / "merged"
    out.mkdir()
    merged = folder.read_chain(merge(chains[1], out))
    assert segments_of(merged[-1])[0].stat().st_nlink > 1 and differences(chains[0], merged) == []
    rewrite(chains[1], tmp_path / "for two", 2)
    assert differences(chains[0], folder.read_chain(remote.candidates(tmp_path / "for two")[0])) == []
    for manager in managers:
        manager.close()


def test_segments_are_linked_and_unchanged_rows_are_not_written_again(tmp_path):
    table = make("rows", tmp_path / "disk")
    manager = CheckpointManager(tmp_path / "saved", keep=0)
    change_all(table)
    saved = save(manager, table, 1)
    assert all(each.stat().st_nlink == 2 for each in segments_of(saved))
    before = table.storage.tier.store.written_bytes["rows"]
    table.apply(np.arange(20), np.ones((20, DIM), np.float32))
    second = save(manager, table, 2)
    assert table.storage.tier.store.written_bytes["rows"] - before == 20 * table.storage.tier.store.format.record_bytes
    shared = {each.stat().st_ino for each in segments_of(saved)} & {each.stat().st_ino for each in segments_of(second)}
    assert len(shared) >= len(segments_of(second)) - 2
    manager.close()
    table.close()
    weights = hostdev.open(saved.path)["t"].lookup(np.arange(ROWS))
    assert (weights[:20] != hostdev.open(second.path)["t"].lookup(np.arange(20))).any()


def test_another_file_system_gets_copies_of_new_segments_only(tmp_path, monkeypatch):
    table = make("rows", tmp_path / "disk")
    manager = CheckpointManager(tmp_path / "saved", keep=0)
    link = os.link

    def refuse(source, target):
        if "disk" in str(source):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(source, target)

    monkeypatch.setattr(segments_module.os, "link", refuse)
    change_all(table)
    first = save(manager, table, 1)
    assert all(each.stat().st_nlink == 1 for each in segments_of(first))
    table.apply(np.arange(20), np.ones((20, DIM), np.float32))
    second = save(manager, table, 2)
    assert sum(each.stat().st_nlink == 2 for each in segments_of(second)) >= len(segments_of(second)) - 2
    assert contents(load(second, make("rows"))) == contents(table)
    manager.close()


@pytest.mark.parametrize("kind", ["rows", "keys"])
def test_erased_rows_are_in_no_file_that_is_written_later(kind, tmp_path):
    table = make(kind, tmp_path / "disk")
    manager = CheckpointManager(tmp_path / "saved", keep=0)
    key = 2_917 if kind == "rows" else 0x1234_5678_9ABC_DEF1
    for turn in range(6):
        train(table, 10, turn)
        table.apply(np.array([key]), np.full((1, DIM), 3.0 + turn, np.float32))
        row = table.lookup(np.array([key])).tobytes()
    first = save(manager, table, 1)
    assert any(row in each.read_bytes() for each in segments_of(first))
    table.erase(np.array([key]))
    train(table, 1, 99)
    second = save(manager, table, 2)
    files = [each.read_bytes() for each in second.path.rglob("*") if each.is_file()]
    assert not any(row in each for each in files)
    wanted = contents(table)
    assert contents(load(second, make(kind))) == wanted
    store = table.storage.tier.store
    with store.changed:
        assert store.changed.wait_for(lambda: not store.is_tainted, 30)
    third = save(manager, table, 3)
    assert segments_of(third)
    files = [each.read_bytes() for each in third.path.rglob("*") if each.is_file()]
    assert not any(row in each for each in files)
    if kind == "keys":
        assert not any(key.to_bytes(8, "little") in each for each in files)
    assert contents(load(third, make(kind))) == wanted == contents(table)
    manager.close()


def test_increments_follow_a_checkpoint_that_was_copied(tmp_path):
    """Checkpoints of a table alternate between segments and copies, which chains of checkpoints must keep apart."""
    one, other = make("rows"), make("rows", tmp_path / "disk")
    small = {name: HostTable(40, DIM, LazyAdam(), name="u", seed=1) for name in "ab"}
    manager = CheckpointManager(tmp_path / "saved", keep=0)
    for turn in range(6):
        for table, beside in ((one, small["a"]), (other, small["b"])):
            train(table, 4, turn)
            beside.apply(np.array([turn]), np.ones((1, DIM), np.float32))
            if turn in (2, 3):
                table.erase(np.array([turn]))
        saved = manager.save([other, small["b"]], turn, Content({}, {}, {}, [])).wait()
        chain = folder.read_chain(saved.path)
        fresh = make("rows"), HostTable(40, DIM, LazyAdam(), name="u")
        load_tables(chain, {"t": fresh[0], "u": fresh[1]}, check=True)
        assert contents(fresh[0]) == contents(one) and contents(fresh[1]) == contents(small["a"])
        ids = np.arange(ROWS)
        assert np.array_equal(hostdev.open(saved.path)["t"].lookup(ids), one.lookup(ids))
    assert len(chain) > 1
    manager.close()


def test_a_model_stays_open_when_its_checkpoint_is_removed(tmp_path):
    table = make("keys", tmp_path / "disk")
    train(table, 30, 0)
    manager = CheckpointManager(tmp_path / "saved")
    saved = save(manager, table)
    model = hostdev.open(saved.path)["t"]
    wanted = table.lookup(table.keys)
    table.close()
    shutil.rmtree(saved.path)
    assert np.array_equal(model.lookup(table.keys), wanted)
    manager.close()


def test_flipped_bytes_of_a_held_segment_are_found_and_named(tmp_path):
    table = make("rows", tmp_path / "disk")
    manager = CheckpointManager(tmp_path / "saved")
    change_all(table)
    saved = save(manager, table)
    table.close()
    path = segments_of(saved)[1]
    content = path.read_bytes()
    for at in (0, 9, 17, 100, 4095, 4096 * 3 + 50, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        begin = at // 4096 * 4096
        named = rf"{path.name} is broken \(bytes {begin:,} to {begin + 4096:,}"
        chain = folder.read_chain(saved.path)
        with pytest.raises(BrokenCheckpointError, match=named):
            verify(chain, segments=True)
        with pytest.raises(BrokenCheckpointError, match=named):
            hostdev.open(saved.path)["t"].lookup(np.arange(ROWS))
        with pytest.raises(BrokenCheckpointError, match=named):
            load_tables(chain, {"t": make("rows")}, check=True)
        with pytest.raises(UserError, match=rf"bytes {begin:,} to {begin + 4096:,} of .*adopted-.* are damaged"):
            load(saved, make("rows", tmp_path / "disk")).lookup(np.arange(ROWS))
    path.write_bytes(content[:-4096])
    with pytest.raises(BrokenCheckpointError, match="bytes, not"):
        folder.read_chain(saved.path)
    path.unlink()
    with pytest.raises(BrokenCheckpointError, match="is missing"):
        folder.read_chain(saved.path)
    manager.close()


def test_a_full_disk_fails_a_checkpoint_that_holds_segments_and_the_next_one_copies(tmp_path, monkeypatch):
    table = make("rows", tmp_path / "disk")
    manager = CheckpointManager(tmp_path / "saved")
    train(table, 20, 0)
    store = table.storage.tier.store
    before = contents(table)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(segments_module.os, "posix_fallocate", fail)
        with store.changed:
            store.close_segment()
            if store._spare >= 0:
                store.segments.free(store._spare)
                store._spare = -1
        here = np.unique(table.storage.tier._row_of[:50])
        table.apply(here[here >= 0], np.ones((int((here >= 0).sum()), DIM), np.float32))
        with pytest.raises(DiskFullError):
            save(manager, table, 1)
        saved = save(manager, table, 2)
        assert saved.manifest.table("t").segments is None
        assert contents(load(saved, make("rows"))) == contents(table) != before
    manager.close()


def test_rows_that_are_evicted_while_a_checkpoint_is_copied_keep_their_values(tmp_path, monkeypatch):
    """A table on disk forgets evicted rows at once, also those that a checkpoint has still to copy."""
    monkeypatch.setattr("hostdev.checkpoint.manager.can_locate", lambda table: False)
    one, other = make("evicted"), make("evicted", tmp_path / "disk")
    for table in (one, other):
        train(table, 12, 0)
    wanted, wanted_keys = contents(one), one.keys.tolist()
    manager = CheckpointManager(tmp_path / "saved")
    read, may_go_on = writer_module.read_rows, threading.Event()

    def wait(*arguments):
        assert may_go_on.wait(20)
        return read(*arguments)

    monkeypatch.setattr(writer_module, "read_rows", wait)
    writer = manager.save([other], 1, Content({}, {}, {}, []))
    train(other, 30, 5)
    assert set(wanted_keys) - set(other.keys.tolist())
    may_go_on.set()
    assert contents(load(writer.wait(), make("evicted"))) == wanted
    manager.close()


def test_the_bytes_of_a_manifest_that_lies_are_refused(tmp_path):
    table = make("rows", tmp_path / "disk")
    manager = CheckpointManager(tmp_path / "saved")
    train(table, 20, 0)
    saved = save(manager, table)
    layers = Layers(folder.read_chain(saved.path))
    rows = layers.open("t")._segments
    ids = np.arange(2)
    for location in (-5, (900 << 32) + 1, (1 << 31) + 7, 1 << 62):
        with pytest.raises(BrokenCheckpointError, match="in segments that do not have them"):
            rows.read(np.array([0, location]), ids)
    with pytest.raises(BrokenCheckpointError, match="rows of another place"):
        rows.read(np.array([1, 2]), ids_of(np.array([5, 9]), ROWS))
    manager.close()


def test_a_key_that_was_evicted_can_be_erased(tmp_path):
    """It has no row any more, but out-of-date records."""
    table = make("evicted", tmp_path / "disk")
    key, value = 0x1234_5678_9ABC_DEF1, np.full((1, DIM), 3.0, np.float32)
    train(table, 5, 0)
    for _ in range(3):
        table.apply(np.array([key]), value)
    train(table, 20, 1)
    assert key not in table.keys
    data = key.to_bytes(8, "little")
    with CheckpointManager(tmp_path / "saved", keep=0) as manager:
        save(manager, table, 1)
        table.erase(np.array([key]))
        second = save(manager, table, 2)
    assert not any(data in each.read_bytes() for each in second.path.rglob("*") if each.is_file())


def test_checkpoints_go_on_when_the_last_one_was_removed(tmp_path):
    table = make("rows", tmp_path / "disk")
    with CheckpointManager(tmp_path / "saved", keep=0) as manager:
        for turn in range(3):
            train(table, 5, turn)
            saved = save(manager, table, turn)
            assert contents(load(saved, make("rows"))) == contents(table)
            shutil.rmtree(saved.path)


def test_an_interrupted_copy_fails_the_checkpoint_and_nothing_waits(tmp_path, monkeypatch):
    """Ctrl-C in the training thread, while it locates rows that it is about to change."""
    table = make("rows", tmp_path / "disk")
    train(table, 10, 0)
    manager, may_go_on, read = CheckpointManager(tmp_path / "saved"), threading.Event(), writer_module.read_rows

    def wait(*arguments):
        assert may_go_on.wait(20)
        return read(*arguments)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer_module, "read_rows", wait)
    writer = manager.save([table], 1, Content({}, {}, {}, []))
    with monkeypatch.context() as patch:
        patch.setattr(table.storage.tier, "locate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(table, 1, 1)
    may_go_on.set()
    with pytest.raises(UserError, match="interrupted"):
        writer.wait()
    monkeypatch.setattr(writer_module, "read_rows", read)
    train(table, 5, 2)
    assert contents(load(save(manager, table, 2), make("rows"))) == contents(table)
    manager.close()
