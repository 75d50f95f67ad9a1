"""A data set in a store: what is copied of it, and what a run keeps when the store gets another."""

import hashlib
import shutil
import threading

import fsspec
import pytest

from hostdev.core import stores
from hostdev.core.addresses import data_path
from hostdev.core.errors import StoreError, UserError
from hostdev.data import manifest
from hostdev.data.folder import pin
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.data.shards import ShardReader
from hostdev.train.checkpointing import data_files

ADDRESS = "memory://sets/one"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
    monkeypatch.setattr(stores, "_PAUSES", (0.001, 0.01))
    publish(tmp_path, 2)
    yield data_path(ADDRESS)
    fsspec.filesystem("memory").rm("/sets", recursive=True)


def publish(tmp_path, seed):
    """Put a data set into the store, in place of what is there."""
    folder, files = tmp_path / f"set-{seed}", fsspec.filesystem("memory")
    build(Synthetic(900, seed), folder, Options(threshold=1, rows_per_shard=300))
    if files.exists("/sets"):
        files.rm("/sets", recursive=True)
    files.put(str(folder), "/sets/one", recursive=True)
    return folder


def labels(root, found):
    return [batch.label.tolist() for batch in ShardReader(root, found, "train").batches(100)]


def test_rows_are_those_of_local_data(root, tmp_path):
    local, found = tmp_path / "set-2", manifest.read(root)
    assert found == manifest.read(local)
    assert labels(root, found) == labels(local, found)
    assert manifest.read_counts(root, found).tolist() == manifest.read_counts(local, found).tolist()


def test_a_run_keeps_what_it_began_with(root, tmp_path):
    """Its checkpoints have the vocabulary that its rows belong to, though another command has read the new one."""
    found = manifest.read(root)
    mine = data_files(root, found)
    before = {name: path.read_bytes() for name, path in mine.items()}
    publish(tmp_path, 3)
    other = manifest.read(root)
    assert other != found
    assert {name: path.read_bytes() for name, path in mine.items()} == before
    assert pin(root) != mine["data/manifest.json"].parent
    with pytest.raises(UserError, match=f"{ADDRESS} has changed while the run began; repeat the command"):
        data_files(root, found)
    assert hashlib.sha256(mine[f"data/{found.vocabulary}"].read_bytes()).hexdigest() == found.vocabulary_sha256


def test_a_vocabulary_that_cannot_be_had_is_said(root):
    files = fsspec.filesystem("memory")
    files.rm("/sets/one/vocabulary.arrow")
    with pytest.raises(StoreError, match=f"{ADDRESS}/vocabulary.arrow: there is no such file"):
        manifest.read(root)
    files.pipe("/sets/one/vocabulary.arrow", b"something else")
    with pytest.raises(StoreError, match=f"{ADDRESS}/vocabulary.arrow has a wrong checksum"):
        manifest.read(root)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"[" * 100_000, b"", b'{"vocabulary": "../x"}'])
def test_a_manifest_that_is_broken_is_said(root, tmp_path, content):
    fsspec.filesystem("memory").pipe("/sets/one/manifest.json", content)
    with pytest.raises(UserError, match="manifest.json is broken"):
        manifest.read(root)
    assert not (tmp_path / "x").exists()


def test_a_damaged_copy_is_fetched_again(root, tmp_path):
    found = manifest.read(root)
    expected = labels(root, found)
    copy = tmp_path / "copies/files" / found.train[0].sha256
    copy.write_bytes(copy.read_bytes()[:100])
    assert labels(root, found) == expected
    fsspec.filesystem("memory").pipe(f"/sets/one/{found.train[0].file}", b"damaged")
    copy.write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"{ADDRESS}/{found.train[0].file} has a wrong checksum"):
        labels(root, found)


def test_a_damaged_vocabulary_is_fetched_again(root, tmp_path):
    found = manifest.read(root)
    for copy in (root / found.vocabulary, tmp_path / "copies/files" / found.vocabulary_sha256):
        content = bytearray(copy.read_bytes())
        content[-9] ^= 1
        with copy.open("r+b") as file:  # both have one file, by a hard link
            file.write(content)
        assert manifest.read_counts(root, manifest.read(root)).tolist()
        assert hashlib.sha256((root / found.vocabulary).read_bytes()).hexdigest() == found.vocabulary_sha256


def test_copies_that_others_remove_are_fetched_again(root, tmp_path):
    found = manifest.read(root)
    expected, ends = labels(root, found), threading.Event()

    def remove():
        while not ends.is_set():
            for path in (tmp_path / "copies/files").glob("*"):
                if not path.suffix:
                    path.unlink(missing_ok=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(5):
            assert labels(root, found) == expected
    except UserError as error:  # it was removed each time
        assert "has no room for the files that are in use" in str(error)
    finally:
        ends.set()
        thread.join()
    shutil.rmtree(tmp_path / "copies/files")
    assert labels(root, found) == expected
