"""Tables on disk: the same bits as in memory, at any memory; files come and go as they should."""

import copy
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from hostdev import FTRL, SGD, Adam, Disk, HostTable, LazyAdam, RowWiseAdam, Unused, UserError
from hostdev.host.disk.frame_pool import MemorySize, count_most
from hostdev.host.disk.readers import Read
from hostdev.host.disk.segments import TableFolder
from hostdev.kernels import disk_records
from hostdev.kernels.disk_records import Format
from tests.conftest import ROOT
from tests.host.disk_tables import FORMATS, ROWS, filled, on_disk, pair, require_equal


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("optimizer", "formats"),
    [(LazyAdam, 0), (LazyAdam, 2), (Adam, 0), (Adam, 1), (FTRL, 0), (RowWiseAdam, 0), (SGD, 1)],
)
def test_a_table_on_disk_has_the_bits_of_one_in_memory(optimizer, formats, tmp_path, small):
    random = np.random.default_rng(0)
    one, other = pair(tmp_path, optimizer=optimizer, **FORMATS[formats])
    assert other.storage.tier.count < 400
    for step in range(60):
        ids = random.integers(0, ROWS, 150)
        grads = random.standard_normal((150, 8)).astype(np.float32)
        for table in (one, other):
            table.apply(ids, grads)
        if step % 10 == 3:
            ids = random.integers(0, ROWS, 2_000)
            assert np.array_equal(one.lookup(ids), other.lookup(ids))
            out = np.zeros((4_000, 8), np.float32), np.zeros((4_000, 8), np.float32)
            at = random.permutation(4_000)[:2_000].astype(np.int32)
            for table, to in zip((one, other), out, strict=True):
                table.lookup(ids, to, at)
            assert np.array_equal(*out)
        if step % 10 == 7:
            erased = random.integers(0, ROWS, 40)
            for table in (one, other):
                table.erase(erased)
                with table.writing(np.arange(500, 1_500)) as edit:
                    edit.weights[::7] = 0.5
    require_equal(one, other)
    assert other.storage.tier.store.read_records
    for table in (one, other):
        table.reset()
    require_equal(one, other)


def test_tables_by_key_evict_erase_and_reset_on_disk(tmp_path, small):
    random = np.random.default_rng(1)
    options = {"capacity": ROWS, "evict": Unused(steps=6, every=2)}
    one, other = pair(tmp_path, rows=None, dtype="bfloat16", slots="bfloat16", **options)
    for step in range(80):
        keys = random.integers(0, 1_500, 120) + 40 * step
        grads = random.standard_normal((120, 8)).astype(np.float32)
        for table in (one, other):
            table.apply(keys, grads)
        if step % 9 == 5:
            for table in (one, other):
                table.erase(keys[:50])
    require_equal(one, other)
    used = int((other.storage.tier.where != 0).sum())
    assert used <= len(other) + 200  # rows of evicted keys take no space
    for table in (one, other):
        table.reset()
        table.apply(np.arange(5), np.ones((5, 8), np.float32))
    require_equal(one, other)


def test_rows_larger_than_a_page_are_stored_too(tmp_path, small):
    random = np.random.default_rng(2)
    one, other = pair(tmp_path, rows=400, dim=700, kept=120)
    for _ in range(20):
        ids, grads = random.integers(0, 400, 60), random.standard_normal((60, 700)).astype(np.float32)
        for table in (one, other):
            table.apply(ids, grads)
    require_equal(one, other)
    assert other.storage.tier.store.format.block_bytes > disk_records.PAGE


def test_space_of_dead_records_is_collected(tmp_path, small):
    random = np.random.default_rng(3)
    _, table = pair(tmp_path)
    store = table.storage.tier.store
    for _ in range(400):
        ids = random.integers(0, ROWS, 200)
        table.apply(ids, np.ones((200, 8), np.float32))
    live = ROWS * store.format.record_bytes
    assert store.written_bytes["rows"] > 10 * live
    assert len(store.segments) * store.format.segment_bytes < 3 * live + 4 * store.format.segment_bytes
    assert store.written_bytes["collected"] <= 1.5 * store.written_bytes["rows"]


def test_threads_read_while_others_update(tmp_path, small):
    _, table = pair(tmp_path, kept=600)
    expected = HostTable(ROWS, 8, LazyAdam(), name="t", seed=3).weights[2_000:]
    wrong, stop = [], threading.Event()

    def read():
        random = np.random.default_rng(threading.get_ident() % 1_000)
        while not stop.is_set():
            ids = random.integers(2_000, ROWS, 300)
            if not np.array_equal(table.lookup_of(ids), expected[ids - 2_000]):
                wrong.append(ids)

    def lookup_of(ids):
        out = np.empty((len(ids), 8), np.float32)
        table.lookup_now(ids, out)
        return out

    table.lookup_of = lookup_of
    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    random = np.random.default_rng(4)
    for _ in range(150):
        table.apply(random.integers(0, 2_000, 150), np.ones((150, 8), np.float32))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("source", ["initial values", "disk"])
def test_rows_that_another_thread_brings_are_awaited(source, tmp_path, small, monkeypatch):
    """Two loops, or a loop and a call, may need a row at once that is nowhere or on disk."""
    table = filled(tmp_path) if source == "disk" else pair(tmp_path)[1]
    tier, begun, may_end, done = table.storage.tier, threading.Event(), threading.Event(), []
    rows = on_disk(table)[:20] if source == "disk" else np.arange(20)

    def slowly(call):
        def run(*arguments):
            begun.set()
            may_end.wait(20)
            call(*arguments)
            done.append(1)

        return run

    if source == "disk":
        monkeypatch.setattr("hostdev.host.disk.readers.Read.work", slowly(Read.work))
    else:
        monkeypatch.setattr(tier, "_fill", slowly(tier._fill))
    first = threading.Thread(target=lambda: table.apply(rows, np.zeros((20, 8), np.float32)))
    first.start()
    assert begun.wait(20)
    pinned = tier.try_pin(rows, change=False)
    threading.Timer(0.1, may_end.set).start()
    tier.await_rows(pinned)
    assert done
    tier.unpin(pinned)
    first.join()


def test_the_folder_is_empty_at_the_end(tmp_path, small):
    table = filled(tmp_path)
    assert len(list((tmp_path / "disk").glob("*/segment-*"))) > 1
    del table
    gc.collect()
    assert list((tmp_path / "disk").iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_what_runs_is_not(tmp_path):
    program = (
        "import hostdev, os, numpy as np, sys\n"
        "t = hostdev.HostTable(1000, 8, hostdev.SGD(), name='x', storage=hostdev.Disk(sys.argv[1], memory='8MiB'))\n"
        "print('made', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as one:
        assert one.stdout.readline() == b"made\n"
        alive = set(tmp_path.iterdir())
        assert len(alive) == 1
        other = TableFolder(tmp_path, "y")
        assert alive < set(tmp_path.iterdir())  # another run's folder stays
        other.remove()
        one.kill()
    assert set(tmp_path.iterdir()) == alive
    other = TableFolder(tmp_path, "z")
    assert set(tmp_path.iterdir()) == {other.path}
    other.remove()


@pytest.mark.parametrize(("optimizer", "formats"), [(LazyAdam, 0), (LazyAdam, 2), (Adam, 1)])
def test_rows_that_do_not_fit_have_memory_of_their_own_for_a_while(optimizer, formats, tmp_path, small, capsys):
    random = np.random.default_rng(5)
    one, other = pair(tmp_path, kept=300, optimizer=optimizer, **FORMATS[formats])
    tier = other.storage.tier
    for count in (2_000, 100, ROWS, 250, 1_200, 300, 40, 40):
        ids = random.permutation(ROWS)[:count]
        grads = random.standard_normal((count, 8)).astype(np.float32)
        for table in (one, other):
            table.apply(ids, grads)
            with table.writing(ids[:700]) as edit:
                edit.weights[::7] = 0.5
    require_equal(one, other)
    assert tier.nbytes == tier.count * tier.size.frame_bytes + tier.store.nbytes  # what it had more, it has given back
    found = other.storage.summary()
    assert found["exceeded"] == 3 and found["exceeded_bytes"] == (ROWS - tier.count) * tier.size.frame_bytes
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "'t'" in error and "2,000" in error and f"{tier.count:,}" in error
    disk = Disk(tmp_path / "disk", memory=found["needed_bytes"])
    assert HostTable(ROWS, 8, optimizer(), name="t", storage=disk, **FORMATS[formats]).storage.tier.count == ROWS


def test_the_advised_memory_has_room_as_has_any_larger_one(small):
    size = MemorySize(1_000_000, 96, Format.of(96, 1 << 16))
    for batch in (1, 7, 100, 4_321, 200_000, 999_999, 1_000_000):
        least = size.get_bytes(batch)
        for nbytes in [*range(least, least + 1_000), *range(least, 3 * least + (1 << 22), 5_003)]:
            assert count_most(size.count_frames(nbytes), size.rows) >= batch


def test_rows_that_the_host_has_no_memory_for_are_refused(tmp_path, small, monkeypatch):
    _, table = pair(tmp_path, kept=300)
    step, apply = table.step, lambda: table.apply(np.arange(2_000), np.ones((2_000, 8), np.float32))
    with monkeypatch.context() as patch:
        patch.setattr("hostdev.host.disk.frame_pool.available_bytes", lambda: 100_000)
        with pytest.raises(UserError, match=r"table 't': 2,000 rows .* 97.7 KiB are free"):
            apply()
    assert table.step == step
    apply()  # the memory is there now
    monkeypatch.setattr("hostdev.host.disk.frame_pool.free_addresses", lambda: 200_000)
    _, table = pair(tmp_path, kept=300)
    with pytest.raises(UserError, match=r"table 't': 2,000 rows .*ulimit -v"):
        apply()
    table.apply(np.arange(600), np.ones((600, 8), np.float32))  # for these, there are addresses


def test_too_little_memory_for_any_rows_is_refused(tmp_path, small):
    with pytest.raises(UserError, match="has 1,000 bytes of memory, but needs at least"):
        HostTable(ROWS, 8, SGD(), name="t", storage=Disk(tmp_path, memory=1_000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "0"}, "must be more than"),
        ({"memory": "many"}, "a size must be a number of bytes"),
        ({"memory": 1.5}, "must be a number of bytes or a size"),
        ({"memory": 1 << 20, "window": 1025}, r"the window of Disk must be in 0\.\.1024 batches, not 1025"),
        ({"memory": 1 << 20, "window": True}, "the window of Disk must be in"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Disk("folder", **options)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        HostTable(ROWS, 8, SGD(), name="t", storage=Disk(tmp_path / "file", memory="8MiB"))


def test_a_table_on_disk_is_not_copied(tmp_path):
    table = HostTable(ROWS, 8, SGD(), name="t", storage=Disk(tmp_path, memory="8MiB"))
    with pytest.raises(TypeError, match="table 't' is on disk and cannot be copied; save a checkpoint and load it"):
        copy.deepcopy(table)
    with pytest.raises(TypeError, match="table 't' has rows on disk; use read_rows instead of block"):
        table.block  # noqa: B018


def test_a_file_system_without_locks_works_and_nothing_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("hostdev.host.disk.segments.lock_state", lambda number: "none")
    one, other = TableFolder(tmp_path, "t"), TableFolder(tmp_path, "t")
    assert one.path != other.path and set(tmp_path.iterdir()) == {one.path, other.path}
    for folder in (one, other):
        folder.remove()


def test_a_file_system_that_keeps_open_files_under_other_names_is_cleared_up(tmp_path, monkeypatch):
    """As NFS does."""
    folder, unlink = TableFolder(tmp_path, "t"), os.unlink

    def unlink_later(name, *, dir_fd=None):
        if folder._lock.closed:
            unlink(name, dir_fd=dir_fd)
        elif not name.startswith(".nfs"):
            os.rename(name, f".nfs-{name}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_later)
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_fork_leaves_the_files_alone(tmp_path, small):
    table = filled(tmp_path)
    files = set((tmp_path / "disk").rglob("*"))
    child = os.fork()
    if not child:
        table.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert set((tmp_path / "disk").rglob("*")) == files
    assert np.isfinite(table.lookup(np.arange(ROWS))).all()


def test_an_interrupt_while_new_rows_are_filled_leaves_nobody_waiting(tmp_path, monkeypatch):
    table = HostTable(ROWS, 8, SGD(), name="t", storage=Disk(tmp_path, memory="8MiB"))

    def interrupt(frames, keys):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(table.storage.tier, "_fill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.apply(np.arange(5), np.ones((5, 8), np.float32))
    for call in (table.lookup, lambda ids: table.apply(ids, np.ones((5, 8), np.float32))):
        with pytest.raises(UserError, match="table 't': new rows were not filled; load a checkpoint again"):
            call(np.arange(5))


def test_a_table_that_is_freed_in_one_of_its_own_threads_is_closed(tmp_path, small, monkeypatch):
    """Python collects garbage in whichever thread allocates."""
    table = filled(tmp_path)
    finalizer, store = table.storage.tier._at_end, table.storage.tier.store
    written = store.segments.note_written

    def collect(*arguments):
        written(*arguments)
        finalizer()

    monkeypatch.setattr(store.segments, "note_written", collect)
    with store.changed:
        store.close_segment()
    for thread in store._threads:
        thread.join(20)
        assert not thread.is_alive()
    for thread in threading.enumerate():
        if thread.name == "hostdev-close":
            thread.join(20)
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_row_that_stays_in_memory_is_written_under_its_new_key(tmp_path, small):
    """A batch that is not stepped leaves its rows in memory; the next key that gets such a row is recorded with it."""
    _, table = pair(tmp_path, rows=None, capacity=ROWS)
    table.stored.note_changes()  # as after a checkpoint: rows are then read before they are written
    first = table.key_rows.plan(np.arange(100), np.ones(100, np.int32), may_read=True)
    table.key_rows.rollback()
    keys = np.arange(1_000, 1_100)
    table.apply(keys, np.ones((100, 8), np.float32))
    assert set(table.key_rows.find_rows(keys)) & set(first.rows)
    weights = table.lookup(keys)
    for start in range(0, ROWS - 200, 100):
        table.apply(np.arange(start, start + 100) + 5_000, np.ones((100, 8), np.float32))
    assert table.storage.tier.where[table.key_rows.find_rows(keys)].max() > 0
    assert np.array_equal(table.lookup(keys), weights)


@pytest.mark.parametrize("how", ["rolled back", "guests"])
def test_a_row_that_left_memory_under_another_key_is_taken(how, tmp_path, small):
    """Rows of batches that are not stepped, and of keys that are only read, may be on disk by then."""
    options = {"capacity": ROWS, "unknown": "initial"} if how == "guests" else {"capacity": ROWS}
    one, other = pair(tmp_path, rows=None, **options)
    for table in (one, other):
        table.stored.note_changes()
        for turn in range(6):
            strangers = np.arange(100) + 10_000 * (turn + 1)
            if how == "guests":
                table.lookup(strangers)
            else:
                table.key_rows.plan(strangers, np.ones(100, np.int32), may_read=True)
                table.key_rows.rollback()
            keys = np.arange(150) + 150 * turn
            table.apply(keys, np.ones((150, 8), np.float32))
            for start in range(0, 150 * turn, 100):
                table.apply(np.arange(start, start + 100), np.ones((100, 8), np.float32))
    require_equal(one, other)


def test_values_of_a_failed_read_are_given_to_nobody(tmp_path, small):
    """A row whose read has failed is in memory without values; nobody has waited for it yet."""
    table = filled(tmp_path)
    tier, row = table.storage.tier, on_disk(table)[0]
    segment = (int(tier.where[row]) - 1) // tier.store.format.per_segment
    os.truncate(tier.store.segments.path(segment), 0)
    pinned = tier.try_pin(np.array([row]), change=True)
    pinned.read.wait()
    for use in (tier.locate, table.lookup):
        with pytest.raises(UserError, match=r"cannot be read|only 0 bytes"):
            use(np.array([row]))
    tier.unpin(pinned)
