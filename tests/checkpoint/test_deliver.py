"""Delivery of checkpoints to a folder or a store: complete ones only, and only what is not there."""

import contextlib

import fsspec
import numpy as np
import pytest

import hostdev
from hostdev.checkpoint import folder, remote
from hostdev.checkpoint.loading import verify
from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.writer import Content
from hostdev.core.addresses import checkpoint_path
from hostdev.core.errors import StoreError, UserError
from hostdev.core.stores import Store
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.checkpoints import deliver
from hostdev.kernels import disk_records

ADDRESS = "memory://served/model"
ROWS = 5000


@pytest.fixture
def store(monkeypatch, tmp_path):
    """The address of an empty store."""
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
    yield ADDRESS
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/served", recursive=True)


@pytest.fixture(params=["folder", "store"])
def target(request, store, tmp_path):
    """Where to deliver to, as the command line gives it."""
    return str(tmp_path / "served") if request.param == "folder" else store


def make(seed=1, **options):
    table = hostdev.HostTable(ROWS, 8, hostdev.LazyAdam(lr=0.1), name="items", seed=seed, **options)
    return hostdev.Runtime({"items": table}, device="cpu", depth=0)


def step(runtime, number):
    ids = np.arange(7 * number, 7 * number + 20) % ROWS
    for _, found in runtime.train([{"items": ids}]):
        found["items"].sum().backward()


def step_all(runtime):
    for _, found in runtime.train([{"items": np.arange(ROWS)}]):
        found["items"].sum().backward()


def rows_of(place):
    """Return the rows that a server reads."""
    return hostdev.open(place)["items"].lookup(np.arange(ROWS))


def rows(runtime):
    return runtime.tables["items"].lookup(np.arange(ROWS))


def names(place):
    return (
        folder.names_in(checkpoint_path(place))
        if "://" not in place
        else sorted(
            {name.split("/")[3] for name in fsspec.filesystem("memory").find("/served/model") if "/step" in name}
        )
    )


def send(source, place, keep=2):
    chain = remote.newest(source).chain
    return deliver.deliver(chain, checkpoint_path(place), keep)


def test_only_new_files_are_copied(tmp_path, target):
    source = tmp_path / "run"
    with make() as runtime:
        for number in range(1, 5):
            step(runtime, number)
            runtime.save(source)
            found = send(source, target)
            np.testing.assert_array_equal(rows_of(target), rows(runtime))
            assert found.checkpoints == 1
            assert (found.copied > ROWS * 8 * 4) == (number == 1)
            assert send(source, target) == (0, 0, found.copied + found.there)
    assert names(target) == folder.names_in(source)


def test_old_ones_are_removed(tmp_path, target):
    with make() as runtime:
        for _ in range(3):
            step_all(runtime)
            runtime.save(tmp_path / "run", keep=1)
            send(tmp_path / "run", target, keep=2)
        np.testing.assert_array_equal(rows_of(target), rows(runtime))
    assert names(target) == [folder.name_of(step) for step in (2, 3)]


def save_two(source, target):
    """Save two checkpoints and deliver the first; return the rows of both, and the second."""
    with make() as runtime:
        step(runtime, 1)
        runtime.save(source)
        send(source, target)
        before = rows(runtime)
        step(runtime, 2)
        return before, rows(runtime), runtime.save(source).wait()


class Limit:
    """Lets functions be called a number of times together, and then ends the program."""

    def __init__(self, calls):
        self._left = calls

    def __call__(self, real):
        def call(*arguments):
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
            return real(*arguments)

        return call


def test_readers_find_whole_checkpoints_only(tmp_path, target, monkeypatch):
    """A delivery that ends at any file, as if killed, and is repeated."""
    source = tmp_path / "run"
    before, after, _ = save_two(source, target)
    work = deliver._link_or_copy, Store.put, Store.write, folder.commit
    for number in range(20):
        limit = Limit(number)
        with monkeypatch.context() as patch:
            patch.setattr(deliver, "_link_or_copy", limit(work[0]))
            patch.setattr(Store, "put", limit(work[1]))
            patch.setattr(Store, "write", limit(work[2]))
            patch.setattr(folder, "commit", limit(work[3]))
            try:
                send(source, target)
            except KeyboardInterrupt:
                np.testing.assert_array_equal(rows_of(target), before)
                continue
        break
    assert number > 1
    np.testing.assert_array_equal(rows_of(target), after)
    verify(remote.newest(checkpoint_path(target)).chain)
    if "://" not in target:
        assert not list(checkpoint_path(target).glob(".partial*"))


def test_damage_is_not_delivered(tmp_path, target):
    source = tmp_path / "run"
    before, _, newest = save_two(source, target)
    file = newest.path / newest.manifest.files[0].file
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="checksum is wrong"):
        send(source, target)
    np.testing.assert_array_equal(rows_of(target), before)


def test_a_damaged_copy_is_replaced(tmp_path):
    with make() as runtime:
        step(runtime, 1)
        newest, saved = runtime.save(tmp_path / "run").wait(), rows(runtime)
    send(tmp_path / "run", str(tmp_path / "served"))
    (tmp_path / "served" / newest.name / newest.manifest.files[0].file).unlink()
    assert send(tmp_path / "run", str(tmp_path / "served")).checkpoints == 1
    np.testing.assert_array_equal(rows_of(tmp_path / "served"), saved)


def flip(file):
    """Change a bit of a file in place, as a disk might, or of a file in the store."""
    memory = fsspec.filesystem("memory")
    content = bytearray(memory.cat_file(file) if isinstance(file, str) else file.read_bytes())
    content[len(content) // 2] ^= 1
    if isinstance(file, str):
        memory.pipe_file(file, bytes(content))
    else:
        with file.open("r+b") as opened:
            opened.write(content)


def test_damage_in_the_target_does_not_spread(tmp_path, target, capfd):
    """A file that all checkpoints share, such as the vocabulary, is replaced before another one gets it."""
    source, words = tmp_path / "run", tmp_path / "vocabulary"
    words.write_bytes(b"words" * 1000)
    manager = CheckpointManager(source, keep=0)
    chains, held = [], []
    with make() as runtime:
        for number in range(1, 4):
            step(runtime, number)
            tables = list(runtime.tables.values())
            tables[0].stored.note_changes(anew=True)  # each is full
            content = Content({}, {}, {"data/vocabulary.arrow": words}, [])
            chains.append(folder.read_chain(manager.save(tables, number, content).wait().path))
            if number == 2:
                deliver.deliver(chains[0], checkpoint_path(target), 3)
                root = checkpoint_path(target) if "://" not in target else "/served/model"
                name = f"{folder.name_of(1)}/data/vocabulary.arrow"
                file = root / name if "://" not in target else f"{root}/{name}"
                if "://" not in target:
                    held.append(file.open("rb"))  # a server has it mapped
                flip(file)
                damaged = file.read_bytes() if "://" not in target else b""
            if number > 1:
                deliver.deliver(chains[-1], checkpoint_path(target), 3)
    manager.close()
    error = capfd.readouterr().err
    assert error.count("is damaged; it is replaced from") == 1 and "vocabulary.arrow" in error
    found = remote.candidates(checkpoint_path(target), everything=True)
    assert len(found) == 3
    for each in found:
        verify(folder.read_chain(each), segments=True)
    for opened in held:
        assert opened.read() == damaged  # the old file was not written to
        opened.close()
    flip(file)
    found = deliver.deliver(chains[-1], checkpoint_path(target), 3)
    assert found.checkpoints == (1 if "://" in target else 3) and found.copied == words.stat().st_size


def test_an_older_one_that_cannot_be_mended_is_removed(tmp_path, target, capfd):
    with make() as runtime:
        for _ in range(2):
            step_all(runtime)
            runtime.save(tmp_path / "run", keep=1)
            send(tmp_path / "run", target)
        older = folder.name_of(1)
        if "://" in target:
            flip(fsspec.filesystem("memory").glob(f"/served/model/{older}/tables/0/*.arrow")[0])
        else:
            flip(next((checkpoint_path(target) / older).glob("tables/0/*.arrow")))
        send(tmp_path / "run", target)
    assert names(target) == [folder.name_of(2)]
    assert f"{older} is removed there" in capfd.readouterr().err


def test_another_run_is_refused(tmp_path, target):
    for seed, name in ((1, "a"), (2, "b")):
        with make(seed) as runtime:
            step(runtime, 1)
            runtime.save(tmp_path / name)
    send(tmp_path / "a", target)
    with pytest.raises(UserError, match="has another checkpoint step-0000000001"):
        send(tmp_path / "b", target)
    with make(3) as runtime:
        for number in range(2):
            step(runtime, number)
        runtime.save(tmp_path / "c")
    with pytest.raises(UserError, match=r"newer than .* or of another run"):
        send(tmp_path / "c", target)


def test_a_folder_in_use_is_refused(tmp_path):
    with make() as runtime:
        step(runtime, 1)
        runtime.save(tmp_path / "run")
    (tmp_path / "served").mkdir()
    with folder.locked(tmp_path / "served"), pytest.raises(UserError, match="in use"):
        send(tmp_path / "run", str(tmp_path / "served"))


def test_a_store_in_use_is_noticed(tmp_path, store, monkeypatch):
    with make() as runtime:
        step(runtime, 1)
        runtime.save(tmp_path / "run")

    def put(self, *arguments, real=Store.put):
        fsspec.filesystem("memory").pipe_file("/served/model/.writer", b"another")
        return real(self, *arguments)

    monkeypatch.setattr(Store, "put", put)
    with pytest.raises(StoreError, match="another process has begun to write"):
        send(tmp_path / "run", store)
    assert not [name for name in fsspec.filesystem("memory").find("/served/model") if name.endswith("checkpoint.json")]


def test_segments_of_tables_on_disk(tmp_path, target, monkeypatch):
    monkeypatch.setattr(disk_records, "_CHUNK", 1 << 14)
    monkeypatch.setattr("hostdev.host.disk.tier.SEGMENT_BYTES", 1 << 16)
    with make(storage=hostdev.Disk(tmp_path / "rows", memory=6 << 14)) as runtime:
        copied = []
        for start in range(0, ROWS, 200):
            next(iter(runtime.tables.values())).apply(np.arange(start, start + 200), np.ones((200, 8), np.float32))
        for number in range(1, 4):
            step(runtime, number)
            runtime.save(tmp_path / "run")
            copied.append(send(tmp_path / "run", target).copied)
            np.testing.assert_array_equal(rows_of(target), rows(runtime))
    assert max(copied[1:]) < copied[0]


def test_command(tmp_path, target, in_process):
    with make() as runtime:
        step(runtime, 1)
        runtime.save(tmp_path / "run")
    code, out, _ = in_process(checkpoint, "deliver", tmp_path / "run", target)
    assert code == 0 and "step 1 delivered to" in out and "KiB copied" in out
    code, out, _ = in_process(checkpoint, "deliver", tmp_path / "run", target)
    assert code == 0 and "has step 1 already" in out
    code, _, error = in_process(checkpoint, "deliver", tmp_path / "run", tmp_path / "run")
    assert code == 2 and "name another folder" in error
    code, _, error = in_process(checkpoint, "deliver", tmp_path / "nothing", target)
    assert code == 2 and "does not exist" in error
