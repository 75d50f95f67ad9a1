"""Reading from a store: what fails for a while is tried again, and what comes is verified and kept within a limit."""

import contextlib
import errno
import itertools
import os
import threading
from hashlib import md5, sha256

import fsspec
import pytest

from hostdev.core import stores, sync
from hostdev.core.addresses import address_of, data_path, is_remote, without_secrets
from hostdev.core.errors import ChangedError, StoppedError, StoreError, UserError
from hostdev.core.stores import Store
from hostdev.core.sync import KeptFiles

SIZES = [0, 1, 7, 8, 9, 100]


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Small pieces, short pauses, and a folder of the test's own."""
    monkeypatch.setattr(stores, "_PIECE", 8)
    monkeypatch.setattr(stores, "_PAUSES", (0.001, 0.01))
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))


@pytest.fixture
def files():
    """A store in memory with a file of each size."""
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/set/{size}": os.urandom(size) for size in SIZES})
    yield memory
    memory.rm("/set", recursive=True)


def sums(files):
    return {str(size): sha256(files.cat_file(f"/set/{size}")).hexdigest() for size in SIZES}


class AnswerError(Exception):
    """An error of a library, with the state of HTTP."""

    def __init__(self, state):
        self.response = {"ResponseMetadata": {"HTTPStatusCode": state}}


@contextlib.contextmanager
def failing(opened, errors):
    """Let reads of a store raise errors in turn in a `with` block; None stands for success."""
    real, turns = opened.backend.files.cat_file, iter(errors)

    def read(*arguments, **options):
        if (error := next(turns)) is not None:
            raise error
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened.backend.files, "cat_file", read)
        yield


def test_files_come_whole(files, tmp_path):
    for name, expected in sums(files).items():
        assert Store("memory://set").fetch(name, tmp_path / name) == expected
        assert (tmp_path / name).read_bytes() == files.cat_file(f"/set/{name}") == Store("memory://set/").read(name)


def test_what_fails_for_a_while_is_tried_again(files, tmp_path, capfd):
    opened, expected = Store("memory://set"), sums(files)["100"]
    some = (
        ConnectionError("reset"),
        TimeoutError("slow"),
        OSError(errno.EIO, "an error"),
        AnswerError(503),
    )
    with failing(opened, itertools.chain.from_iterable((error, None) for error in itertools.cycle(some))):
        assert opened.fetch("100", tmp_path / "a") == expected
    assert capfd.readouterr().err == ""  # each failed once
    with failing(opened, [*some, *itertools.repeat(None, 100)]):
        assert opened.fetch("100", tmp_path / "a") == expected
    assert "memory://set/100: an error; trying again in 0 s" in capfd.readouterr().err


def test_an_answer_that_never_comes_holds_nobody_up(files, monkeypatch):
    opened, stop, ends, expected = Store("memory://set"), threading.Event(), threading.Event(), sums(files)["9"]
    with monkeypatch.context() as patch:
        patch.setattr(opened.backend.files, "cat_file", lambda *a, **o: ends.wait(60))
        threading.Timer(0.1, stop.set).start()
        with pytest.raises(StoppedError):
            KeptFiles().get(opened, "9", expected, stop)
    ends.set()


def test_an_answer_that_is_cut_short_is_tried_again(files, tmp_path, monkeypatch):
    opened, expected = Store("memory://set"), sums(files)["100"]
    real, cuts = opened.backend.files.cat_file, itertools.cycle([1, 0])
    with monkeypatch.context() as patch:
        patch.setattr(opened.backend.files, "cat_file", lambda *a, **o: real(*a, **o)[: 8 - next(cuts)])
        assert opened.fetch("100", tmp_path / "a") == expected


class FlexibleChecksumError(Exception):
    """What botocore raises for an answer that does not have the checksum of its header."""


def refused(code):
    """Return the error of s3fs for a request that S3 has refused with state 400."""
    error = OSError(errno.EINVAL, code)
    error.__cause__ = AnswerError(400)
    error.__cause__.response["Error"] = {"Code": code}
    return error


def test_an_answer_with_a_wrong_checksum_is_tried_again(files, tmp_path, monkeypatch):
    opened, expected = Store("memory://set"), sums(files)["100"]
    with failing(opened, [FlexibleChecksumError("not 1234"), refused("BadDigest"), *itertools.repeat(None, 100)]):
        assert opened.fetch("100", tmp_path / "a") == expected
    real, answers = opened.backend.files.cat_file, itertools.count()

    def read(*arguments, **options):
        content = real(*arguments, **options)
        return bytes([content[0] ^ next(answers) + 1]) + content[1:] if next(answers) < 150 else content

    with monkeypatch.context() as patch:
        patch.setattr(opened.backend.files, "cat_file", read)
        path = KeptFiles().get(opened, "100", expected)
    assert sha256(path.read_bytes()).hexdigest() == expected and next(answers) > 150


@pytest.mark.parametrize("keeps", ["nothing", "MD5", "MD5 of parts"])
def test_what_a_store_says_of_content_saves_reading_it(files, tmp_path, monkeypatch, keeps):
    opened, path = Store("memory://set"), tmp_path / "a"
    opened.fetch("100", path)
    real, part = opened.backend.files.info, 1 << 20
    monkeypatch.setattr(stores, "_PART_SIZES", (1,))
    monkeypatch.setattr(stores, "_PIECE", 1 << 18)
    content = os.urandom(part + 5)
    path.write_bytes(content)
    files.pipe_file("/set/100", content)
    etag = {
        "nothing": None,
        "MD5": f'"{md5(content).hexdigest()}"',
        "MD5 of parts": f'"{md5(md5(content[:part]).digest() + md5(content[part:]).digest()).hexdigest()}-2"',
    }[keeps]
    monkeypatch.setattr(opened.backend.files, "info", lambda name: {**real(name), "ETag": etag})
    reads = []
    monkeypatch.setattr(Store, "read_range", lambda *a, real=Store.read_range: reads.append(a) or real(*a))
    assert opened.compare("100", path).size == len(content)
    assert bool(reads) == (keeps == "nothing")
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert opened.compare("100", path) is None
    assert opened.compare("1", path) is None and opened.compare("none", path) is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "no key"), "there is no such file or bucket"),
        (PermissionError("Access Denied"), r"no permission \(Access Denied\)"),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate"), r"no credentials \(Unable to locate\)"),
        (OSError("Forbidden: you cannot"), "Forbidden"),
        (OSError(errno.EINVAL, "Bad Request"), "Bad Request"),
        (ValueError("no such profile"), "no such profile"),
        (AnswerError(403), ""),
    ],
)
def test_what_lasts_is_said_at_once(files, tmp_path, error, words):
    opened = Store("memory://set")
    with failing(opened, [error]), pytest.raises(StoreError, match=f"memory://set/9: {words}"):
        opened.fetch("9", tmp_path / "a")


def test_patience_ends(files, tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTDEV_STORE_PATIENCE", "0.2")
    opened, error = Store("memory://set"), ConnectionError("s3://me:secret@host/x?signature=abc is away")
    said = pytest.raises(StoreError, match="is away; this went on for .* repeat the command")
    with failing(opened, itertools.repeat(error)), said as caught:
        opened.fetch("9", tmp_path / "a")
    assert "secret" not in str(caught.value) and "signature" not in str(caught.value)
    monkeypatch.setenv("HOSTDEV_STORE_PATIENCE", "long")
    said = pytest.raises(UserError, match="HOSTDEV_STORE_PATIENCE must be a number of seconds, not 'long'")
    with failing(opened, itertools.repeat(error)), said:
        opened.fetch("9", tmp_path / "a")


def test_waiting_ends_when_nobody_needs_the_file(files, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_PAUSES", (60.0, 60.0))
    opened, stop, expected = Store("memory://set"), threading.Event(), sums(files)["9"]
    threading.Timer(0.1, stop.set).start()
    with failing(opened, itertools.repeat(ConnectionError("away"))), pytest.raises(StoppedError):
        KeptFiles().get(opened, "9", expected, stop)
    assert list(KeptFiles().folder.glob("*.part*")) == []


def test_a_file_is_fetched_once_by_all_who_need_it(files, monkeypatch):
    kept, each, fetched, fetch = [KeptFiles() for _ in range(8)], [], [], Store.fetch
    monkeypatch.setattr(Store, "fetch", lambda *arguments: fetched.append(arguments[1]) or fetch(*arguments))
    threads = [
        threading.Thread(target=lambda one=one: each.append(one.get(Store("memory://set"), "100", sums(files)["100"])))
        for one in kept
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(each)) == 1 and len(each) == 8 and fetched == ["100"]
    assert each[0].read_bytes() == files.cat_file("/set/100")
    assert [path.name for path in kept[0].folder.iterdir()] == [each[0].name]


def test_the_copies_used_longest_ago_make_room(files, monkeypatch):
    monkeypatch.setenv("HOSTDEV_STORE_CACHE_SIZE", "20")
    kept, opened, expected = KeptFiles(), Store("memory://set"), sums(files)
    for now, name in enumerate(["7", "8", "7", "9", "100", "1"]):
        path = kept.get(opened, name, expected[name])
        os.utime(path, ns=(now, now))
        there = {each.name for each in kept.folder.iterdir()}
        assert path.name in there
        if name == "9":
            assert there == {expected["7"], expected["9"]}
    assert there == {expected["1"]}  # 100 bytes were more than all may take
    monkeypatch.setenv("HOSTDEV_STORE_CACHE_SIZE", "much")
    with pytest.raises(UserError, match="HOSTDEV_STORE_CACHE_SIZE: a size must be"):
        KeptFiles()


def test_a_wrong_file_is_refused_and_not_kept(files):
    kept = KeptFiles()
    with pytest.raises(StoreError, match="memory://set/9 has a wrong checksum"):
        kept.get(Store("memory://set"), "9", "0" * 64)
    assert [path for path in kept.folder.iterdir() if path.suffix != ".lock"] == []


def test_a_copy_that_is_gone_or_damaged_is_fetched_again(files, monkeypatch):
    kept, opened, expected, fetched = KeptFiles(), Store("memory://set"), sums(files)["9"], []
    monkeypatch.setattr(Store, "fetch", lambda *a, fetch=Store.fetch: fetched.append(a[1]) or fetch(*a))

    def use_after(*errors):
        turns = iter(errors)

        def use(path):
            if (error := next(turns, None)) is None:
                return path.read_bytes()
            if isinstance(error, FileNotFoundError):
                path.unlink()  # as another process that makes room
            raise error

        return kept.use(opened, "9", expected, use)

    assert use_after(FileNotFoundError(), ChangedError("damaged"), FileNotFoundError()) == files.cat_file("/set/9")
    assert fetched == ["9"] * 4
    with pytest.raises(ChangedError, match="damaged"):
        use_after(*[ChangedError("damaged")] * 3)
    with pytest.raises(UserError, match="has no room for the files that are in use; set HOSTDEV_STORE_CACHE_SIZE"):
        use_after(*itertools.repeat(FileNotFoundError(), 20))


@pytest.mark.parametrize("sha256", ["", "../../x", "/x", "0" * 63, "G" * 64])
def test_what_is_not_a_sum_is_no_name(files, sha256):
    kept = KeptFiles()
    with pytest.raises(StoreError, match="memory://set: the manifest has no SHA-256 for 9"):
        kept.get(Store("memory://set"), "9", sha256)
    assert list(kept.folder.parent.rglob("*")) == [kept.folder]


def test_the_copy_of_another_user_is_used(files, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EPERM, "not yours")

    kept, expected = KeptFiles(), sums(files)["9"]
    kept.get(Store("memory://set"), "9", expected)
    monkeypatch.setattr(sync.os, "utime", refuse)
    monkeypatch.delattr(Store, "fetch")
    assert kept.get(Store("memory://set"), "9", expected).is_file()


def test_a_full_disk_is_said(files, monkeypatch):
    def fetch(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Store, "fetch", fetch)
    with pytest.raises(
        UserError, match=r"memory://set/9 cannot be kept in .*No space left.*set HOSTDEV_STORE_CACHE to a"
    ):
        KeptFiles().get(Store("memory://set"), "9", sums(files)["9"])


@pytest.mark.parametrize("name", ["{}.1-2.part", ".{}.partial-0123abcd"])  # the first one: of version 0.1
def test_what_a_killed_process_left_is_removed(files, monkeypatch, name):
    kept = KeptFiles()
    old, new = (kept.folder / name.format(file) for file in "ab")
    for path in old, new:
        path.write_bytes(bytes(1_000))
    os.utime(old, (0, 0))
    monkeypatch.setattr(kept, "limit", 50)
    kept.get(Store("memory://set"), "9", sums(files)["9"])
    assert not old.exists() and new.exists()  # the other may be another process's


@pytest.mark.parametrize("address", ["s3://bucket/a/b", "abfs://c@account.dfs.core.windows.net/x", "hdfs://h:90/x"])
def test_addresses_and_paths_are_inverse(address):
    path = data_path(address)
    assert address_of(path) == address == address_of(data_path(f"{address}/")) == address_of(data_path(str(path)))
    assert address_of(path.parent.parent.parent.parent.parent) is None


def test_what_is_an_address():
    assert is_remote("s3://b") and is_remote("memory://x") and not is_remote("file:///x") and not is_remote("a/s3:/b")
    assert data_path("some/folder").parts == ("some", "folder") and address_of(data_path("some/folder")) is None
    for wrong in "s3://me:secret@bucket/x", "s3://bucket/x?secret=1", "https://secret@host/x":
        with pytest.raises(UserError, match="leave out passwords") as caught:
            data_path(wrong)
        assert "secret" not in str(caught.value)
    for wrong in "s3://bucket/../x", "hdfs:///x", "s3://bucket//x", "s3://":
        with pytest.raises(UserError, match="is not the address of a folder"):
            data_path(wrong)
    assert without_secrets("see https://u:p@h/x?sig=1 for it") == "see https://h/x for it"


def test_folders_are_absolute(monkeypatch):
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", "here")
    with pytest.raises(UserError, match="HOSTDEV_STORE_CACHE must be an absolute path, not here"):
        data_path("s3://bucket/x")
    monkeypatch.delenv("HOSTDEV_STORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert address_of(data_path("s3://bucket/x")) == "s3://bucket/x"


def test_kinds_of_stores_that_are_not_there():
    with pytest.raises(StoreError, match="other://bucket"):
        Store("other://bucket")


def test_the_limit_is_a_share_of_the_disk(monkeypatch):
    monkeypatch.setattr(sync.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1_000})())
    assert KeptFiles().limit == 250
