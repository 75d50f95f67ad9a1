"""Checkpoints in a store are those on a disk, also when requests fail, a process is killed, or another one writes."""

import contextlib
import json
import shutil
import threading
import warnings
from pathlib import Path

import fsspec
import numpy as np
import pytest

import hostdev
from hostdev.checkpoint import uploads
from hostdev.core import stores
from hostdev.core.addresses import checkpoint_path
from hostdev.core.errors import StoreError, UserError
from tests.checkpoint.runs import small

ADDRESS = "memory://saved/run"


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Short pauses, a folder of the test's own, and a store that is empty at the end."""
    monkeypatch.setattr(stores, "_PAUSES", (0.001, 0.01))
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
    yield
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/saved", recursive=True)


def other_machine(monkeypatch, tmp_path, name="other"):
    """From here on, copies are in another folder, as on another machine."""
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / name))


def make(seed=1):
    table = hostdev.HostTable(1000, 4, hostdev.LazyAdam(lr=0.1), name="items", seed=seed)
    return hostdev.Runtime({"items": table}, device="cpu", depth=0)


def step(runtime, number):
    ids = np.arange(7 * number, 7 * number + 20) % 1000
    for _, found in runtime.train([{"items": ids}]):
        found["items"].sum().backward()


def rows(runtime):
    return runtime.tables["items"].lookup(np.arange(1000))


def there():
    return sorted(name.removeprefix("/saved/run/") for name in fsspec.filesystem("memory").find("/saved/run"))


def names():
    return sorted({name.partition("/")[0] for name in there() if name.startswith("step")})


def test_what_is_saved_is_loaded_elsewhere(monkeypatch, tmp_path):
    with make() as runtime:
        for number in range(5):
            step(runtime, number)
            runtime.save(ADDRESS, extra=number, keep=2)
        expected = rows(runtime)
    assert names() == [f"step-{number:010d}" for number in range(1, 6)]  # each builds on the one before
    other_machine(monkeypatch, tmp_path)
    with make(seed=2) as runtime:
        assert runtime.load(ADDRESS) == 4
        np.testing.assert_array_equal(rows(runtime), expected)
        copies = checkpoint_path(ADDRESS)
        assert sorted(each.name for each in copies.iterdir() if each.name[0] == "s") == names()
        runtime.tables["items"].stored.note_changes(anew=True)  # the next checkpoint is full
        step(runtime, 5)
        runtime.save(ADDRESS, extra=5, keep=1)
        expected = rows(runtime)
    assert names() == ["step-0000000006"]
    other_machine(monkeypatch, tmp_path, "third")
    model = hostdev.open(ADDRESS, verify=True)
    np.testing.assert_array_equal(model["items"].lookup(np.arange(1000)), expected)
    assert hostdev.open(f"{ADDRESS}/step-0000000006").step == 6


def test_saving_does_not_wait_for_the_store(monkeypatch):
    held, real = threading.Event(), stores.Store.put

    def put(self, path, name):
        if name != ".writer":
            held.wait(60)
        real(self, path, name)

    monkeypatch.setattr(stores.Store, "put", put)
    with make() as runtime:
        writers = []
        for number in range(4):
            step(runtime, number)
            runtime.tables["items"].stored.note_changes(anew=True)
            writers.append(runtime.save(ADDRESS, extra=number, keep=1, wait=False))
            writers[-1].join()
        assert there() == [".writer"]
        held.set()
        assert writers[-1].wait().manifest.step == 4
    assert names() == ["step-0000000004"]


def test_a_checkpoint_is_complete_for_readers(monkeypatch):
    """Whatever request was the last one, the newest checkpoint in the store can be loaded."""
    order, real = [], stores.Store.put

    def put(self, path, name):
        order.append(name)
        real(self, path, name)

    monkeypatch.setattr(stores.Store, "put", put)
    with make() as runtime:
        step(runtime, 0)
        runtime.save(ADDRESS)
    assert order[-1].endswith("checkpoint.json") and len(order) > 1


def test_an_upload_that_fails_is_told_and_tried_again(monkeypatch, tmp_path):
    real = stores.Store.put

    def put(self, path, name):
        if name != ".writer":
            raise StoreError("the store is full")
        real(self, path, name)

    monkeypatch.setattr(stores.Store, "put", put)
    with make() as runtime:
        step(runtime, 0)
        with pytest.raises(StoreError, match="the store is full"):
            runtime.save(ADDRESS)
        step(runtime, 1)
        runtime.save(ADDRESS, wait=False).join()
        with pytest.warns(UserWarning, match="of step 2 was not uploaded: the store is full"):
            runtime._checkpoints._managers[checkpoint_path(ADDRESS).resolve()].uploads.wait()
            step(runtime, 2)
            monkeypatch.setattr(stores.Store, "put", real)
            runtime.save(ADDRESS)
    assert names() == ["step-0000000001", "step-0000000002", "step-0000000003"]


def test_what_a_killed_process_did_not_upload(monkeypatch, tmp_path):
    monkeypatch.setattr(uploads.Uploads, "notify", lambda self: 0)
    with make() as runtime:
        step(runtime, 0)
        runtime.save(ADDRESS)
    assert names() == []
    monkeypatch.undo()
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
    with make() as runtime:
        runtime.load(ADDRESS)
        step(runtime, 1)
        runtime.save(ADDRESS)
    assert names() == ["step-0000000001", "step-0000000002"]


def test_a_second_writer(monkeypatch, tmp_path, capfd):
    with make() as first:
        step(first, 0)
        first.save(ADDRESS)
        with make() as same, pytest.raises(UserError, match="is in use: another process writes"):
            same.save(ADDRESS)
        other_machine(monkeypatch, tmp_path)
        with make() as second:
            second.load(ADDRESS)
            step(second, 1)
            second.save(ADDRESS)
        monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
        step(first, 5)
        with pytest.raises(StoreError, match="memory://saved/run is in use: another process has begun to write"):
            first.save(ADDRESS)
    assert names() == ["step-0000000001", "step-0000000002"]
    with make() as first:  # what it had not uploaded is set aside, and not lost
        first.load(ADDRESS)
        assert "does not have the checkpoint step-0000000002 of this machine, which is now in" in capfd.readouterr().err
        np.testing.assert_array_equal(rows(first), hostdev.open(ADDRESS)["items"].lookup(np.arange(1000)))
    assert len(list(checkpoint_path(ADDRESS).glob(".aside/*"))) == 1


def test_damage_in_the_store(monkeypatch, tmp_path, capfd):
    with make() as runtime:
        for number in range(2):
            step(runtime, number)
            runtime.tables["items"].stored.note_changes(anew=True)  # a full checkpoint
            runtime.save(ADDRESS, extra=number)
    files = fsspec.filesystem("memory")
    (name,) = files.glob("/saved/run/step-0000000002/tables/0/*.arrow")
    content = bytearray(files.cat_file(name))
    content[len(content) // 2] ^= 1
    files.pipe_file(name, bytes(content))
    other_machine(monkeypatch, tmp_path)
    with make() as runtime:
        assert runtime.load(ADDRESS) == 0
        assert "step-0000000002 is broken in the store" in capfd.readouterr().err
        step(runtime, 3)
        runtime.save(ADDRESS)
    assert hostdev.open(f"{ADDRESS}/step-0000000002", verify=True).step == 2
    files.rm("/saved/run/step-0000000001", recursive=True)
    other_machine(monkeypatch, tmp_path, "third")
    with pytest.raises(UserError, match="memory://saved/run has no checkpoint step-0000000001"):
        hostdev.open(f"{ADDRESS}/step-0000000001")
    with pytest.raises(UserError, match="memory://saved/nothing has no checkpoint"):
        hostdev.open("memory://saved/nothing")


def test_the_store_was_emptied(monkeypatch, tmp_path, capfd):
    with make() as runtime:
        step(runtime, 0)
        runtime.save(ADDRESS)
    fsspec.filesystem("memory").rm("/saved", recursive=True)
    with pytest.raises(UserError, match="has no checkpoint"):
        hostdev.open(ADDRESS)
    assert "which is now in" in capfd.readouterr().err
    assert len(list(checkpoint_path(ADDRESS).glob(".aside/*"))) == 1


def test_copies_follow_the_store(monkeypatch, tmp_path):
    with make() as runtime:
        step(runtime, 0)
        runtime.save(ADDRESS, keep=1)
        first = tmp_path / "copies"
        other_machine(monkeypatch, tmp_path)
        hostdev.open(ADDRESS)
        monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(first))
        for number in range(1, 3):
            step(runtime, number)
            runtime.tables["items"].stored.note_changes(anew=True)
            runtime.save(ADDRESS, keep=1)
    other_machine(monkeypatch, tmp_path)
    assert hostdev.open(ADDRESS).step == 3
    assert [each.name for each in checkpoint_path(ADDRESS).iterdir() if each.name[0] == "s"] == ["step-0000000003"]


@pytest.mark.parametrize("by_key", [False, True])
def test_tables_on_disk_upload_each_segment_once(monkeypatch, tmp_path, by_key):
    puts, real = [], stores.Store.put

    def put(self, path, name):
        puts.append((name, path.stat().st_size))
        real(self, path, name)

    monkeypatch.setattr(stores.Store, "put", put)

    def open_table(folder):
        storage = hostdev.Disk(tmp_path / folder, memory=8 << 20)
        how = {"capacity": 100_000, "seed": 1} if by_key else {"seed": 1}
        return hostdev.HostTable(
            None if by_key else 100_000, 64, hostdev.SGD(lr=0.1), name="items", storage=storage, **how
        )

    def train(runtime, begin):
        for number in range(begin, begin + 8):
            ids = np.arange(4_000 * number, 4_000 * number + 4_000) % 100_000
            for _, found in runtime.train([{"items": ids}]):
                found["items"].sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with hostdev.Runtime({"items": open_table("a")}, device="cpu", depth=0) as runtime:
            train(runtime, 0)
            runtime.save(ADDRESS)
            first = sum(size for _, size in puts)
            puts.clear()
            train(runtime, 8)
            runtime.save(ADDRESS)
            second = sum(size for _, size in puts)
            expected = runtime.state_sha256() if hasattr(runtime, "state_sha256") else None
        assert second < 2 * first
        other_machine(monkeypatch, tmp_path)
        shutil.rmtree(tmp_path / "copies")
        with hostdev.Runtime({"items": open_table("b")}, device="cpu", depth=0) as runtime:
            runtime.load(ADDRESS)
            if expected is not None:
                assert runtime.state_sha256() == expected


def test_the_summary_tells_uploads_that_failed(monkeypatch, trained, small_data):
    real = stores.Store.put

    def put(self, path, name):
        if not name.startswith((".writer", "step-0000000003")):
            raise StoreError("the store is full")
        return real(self, path, name)

    monkeypatch.setattr(stores.Store, "put", put)
    options = ["--max-steps", 6, "--checkpoint-every", 3, "--checkpoint-dir", ADDRESS]
    code, out, error = trained(*small(small_data, "run", *options))
    assert code == 3 and "the store is full" in error
    saved = json.loads(Path("run/summary.json").read_text())["checkpoints"]
    (line,) = [each for each in out.splitlines() if each.startswith("checkpoints")]
    assert saved["uploaded"] < saved["saved"] and saved["failed_uploads"] > 0
    assert f"{saved['uploaded']} uploaded to {ADDRESS}" in line and f"saved in {ADDRESS}" not in line


def test_damage_in_the_store_is_replaced_by_the_run(monkeypatch, tmp_path, capfd):
    """Before an increment is uploaded, what it builds on is compared if the store says that it has changed."""
    files = fsspec.filesystem("memory")
    with make() as runtime:
        step(runtime, 0)
        runtime.save(ADDRESS)
        (name,) = files.glob("/saved/run/step-0000000001/tables/0/*.arrow")
        content = bytearray(files.cat_file(name))
        content[-200] ^= 1
        files.pipe_file(name, bytes(content))
        step(runtime, 1)
        runtime.save(ADDRESS)
        expected = rows(runtime)
        assert f"memory:/{name} is damaged; it is replaced from" in capfd.readouterr().err
    other_machine(monkeypatch, tmp_path)
    model = hostdev.open(ADDRESS, verify=True)
    assert model.step == 2
    np.testing.assert_array_equal(model["items"].lookup(np.arange(1000)), expected)


def test_a_damaged_manifest_in_the_store_costs_no_checkpoint(monkeypatch, tmp_path):
    with make() as runtime:
        step(runtime, 0)
        runtime.save(ADDRESS)
    files, name = fsspec.filesystem("memory"), "/saved/run/step-0000000001/checkpoint.json"
    files.pipe_file(name, files.cat_file(name).replace(b'"sha256"', b'"sha356"'))
    with make() as runtime:
        runtime.load(ADDRESS)
        step(runtime, 1)
        runtime.save(ADDRESS)
        expected = rows(runtime)
    assert names() == ["step-0000000001", "step-0000000002"]
    other_machine(monkeypatch, tmp_path)
    for number in (1, 2):
        model = hostdev.open(f"{ADDRESS}/step-{number:010d}", verify=True)
    np.testing.assert_array_equal(model["items"].lookup(np.arange(1000)), expected)


def test_a_damaged_copy_is_fetched_again(capfd):
    with make() as runtime:
        for number in range(2):
            step(runtime, number)
            runtime.save(ADDRESS)
        expected = rows(runtime)
    for file in checkpoint_path(ADDRESS).glob("step-*/tables/0/*.arrow"):
        with file.open("r+b") as opened:
            opened.seek(-200, 2)
            opened.write(b"?")
    model = hostdev.open(ADDRESS, verify=True)
    assert model.step == 2
    np.testing.assert_array_equal(model["items"].lookup(np.arange(1000)), expected)
    assert capfd.readouterr().err.count("it is replaced from memory://saved/run") == 2


def test_a_damaged_parent_is_no_parent(tmp_path):
    """An increment on a damaged checkpoint could never be loaded; all rows are saved in its place."""
    with make() as runtime:
        step(runtime, 0)
        runtime.save(tmp_path / "run")
        (file,) = (tmp_path / "run").glob("step-*/tables/0/*.arrow")
        with file.open("r+b") as opened:
            opened.seek(-200, 2)
            opened.write(b"?")
        step(runtime, 1)
        with pytest.warns(UserWarning, match="000000.arrow is broken"):
            runtime.save(tmp_path / "run")
        expected = rows(runtime)
    model = hostdev.open(tmp_path / "run", verify=True)
    assert model.step == 2
    np.testing.assert_array_equal(model["items"].lookup(np.arange(1000)), expected)
