"""A preparation that ends at any moment: the same command goes on to the same bytes."""

import errno
import io
import itertools
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev import UserError
from hostdev.core.checksums import HashedFile
from hostdev.core.errors import TransientError
from hostdev.data.preprocess import inputs, learning, runner, second_pass, words, work
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.scaling import Standard
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.preprocess.vocabulary import IntegerValues
from tests import forks
from tests.data.test_sources import contents

OPTIONS = Options(threshold=1, dense="standard", rows_per_shard=900)
ROWS, BLOCK = 8000, 100_000

# Kills itself at a random moment of the work.
KILLED = """
import os, random, signal, sys, threading, time
from pathlib import Path
from hostdev.data.preprocess import criteo
from tests.data import test_restart as test

after, text, out = float(sys.argv[1]), *map(Path, sys.argv[2:])
test.warm()
threading.Thread(target=lambda: (time.sleep(after), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
test.make(text, out)
"""


def make(text, out, **how):
    return build(CriteoText([text], block_bytes=BLOCK), out, OPTIONS, **how)


def warm():
    """Load what the work calls, so that moments lie within it."""
    import hostdev.kernels.columns  # noqa: F401


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rows.tsv"
    write_text(Synthetic(ROWS, 3), path)
    return path


def test_counting_stops_after_a_piece(text, tmp_path, monkeypatch):
    """Ctrl-C comes while the results are waited for; what is on its way ends, and no more is counted."""
    interrupted, counted = threading.Event(), []
    observe, count = Standard.observe, IntegerValues.count

    class Stop(threading.Event):
        def set(self):
            super().set()
            interrupted.set()

    def fail(self, numbers):
        observe(self, numbers)
        raise KeyboardInterrupt

    def note(self, keys, uses):
        counted.append(len(keys))
        assert interrupted.wait(10)
        count(self, keys, uses)

    monkeypatch.setattr(runner, "Event", Stop)
    monkeypatch.setattr(Standard, "observe", fail)
    monkeypatch.setattr(IntegerValues, "count", note)
    with pytest.raises(KeyboardInterrupt):
        make(text, tmp_path / "out", threads=3)
    assert interrupted.is_set()
    assert len(counted) <= 3  # a piece by each thread, of many


@pytest.fixture(scope="module")
def straight(text):
    """The data set that nobody disturbed, and the seconds that it took."""
    make(text, text.parent / "warm")
    start = time.monotonic()
    make(text, text.parent / "straight")
    return contents(text.parent / "straight"), time.monotonic() - start


def kill_and_go_on(tmp_path, text, straight, kills, seed):
    expected, seconds = straight
    moments = random.Random(seed)
    out, killed = tmp_path / "out", 0
    for _ in range(kills):
        after = str(moments.uniform(0, 1.2) * seconds)
        done = forks.run([sys.executable, "-c", KILLED, after, text, out], capture_output=True, text=True, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        killed += done.returncode != 0
        if out.exists():  # it was done before
            assert contents(out) == expected
            for path in (out, out.with_name(f".{out.name}.partial")):
                shutil.rmtree(path, ignore_errors=True)
    if not out.exists():
        make(text, out)
    assert contents(out) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    return killed


def test_killed_at_random_moments(tmp_path, text, straight):
    kill_and_go_on(tmp_path, text, straight, 3, time.time_ns())


@pytest.mark.slow
def test_killed_at_20_random_moments(tmp_path, text, straight):
    assert kill_and_go_on(tmp_path, text, straight, 30, time.time_ns()) >= 20


def fail_at(monkeypatch, owner, name, at, error):
    """Let a function raise in its call of this number, from 0."""
    calls, real = itertools.count(), getattr(owner, name)

    def failing(*args, **kwargs):
        if next(calls) == at:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (HashedFile, "write", 0),
        (HashedFile, "write", 200),
        ("work", "note", 5),
        (words, "write_values", 0),
        (runner, "write_lists", 2),
        (second_pass, "write_shard", 3),
        ("manifest", "write", 0),
    ],
)
def test_a_full_disk_in_any_stage(tmp_path, text, straight, monkeypatch, owner, name, at, capsys):
    from hostdev.data import manifest

    named = {
        "work": work.WorkFolder,
        "manifest": manifest.Manifest,
    }
    with monkeypatch.context() as patched:
        fail_at(patched, named.get(owner, owner), name, at, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            make(text, tmp_path / "out", threads=2)
    assert not (tmp_path / "out").exists()
    make(text, tmp_path / "out")
    assert contents(tmp_path / "out") == straight[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def read_error(monkeypatch):
    """Let the reading of text fail after some blocks."""

    def fail(source, size, real=inputs.Stream.read):
        if source.taken() > 5 * BLOCK:
            source._source = Unreadable()
        return real(source, size)

    monkeypatch.setattr(inputs.Stream, "read", fail)
    return "rows.tsv: the file cannot be read (Input/output error)"


class Unreadable:
    def read(self, size):
        raise OSError(errno.EIO, "Input/output error")


def no_memory(monkeypatch):
    """Let the memory be taken by others once some pieces are there."""
    free = itertools.chain([1 << 40] * 3, itertools.repeat(100))
    monkeypatch.setattr("hostdev.core.memory.available_bytes", lambda: next(free))
    monkeypatch.setattr(second_pass, "_CHECKED_AT_ONCE", 1)
    return "but 100 bytes of host memory are free; hash them"


@pytest.mark.parametrize("content", [b"\xff\xfe not text", b"[1, null]"])  # the last of another version
def test_a_recipe_that_is_damaged_or_an_older_version_s(tmp_path, text, straight, monkeypatch, capsys, content):
    with monkeypatch.context() as patched:
        fail_at(patched, second_pass, "build_shard", 0, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make(text, tmp_path / "out")
    (tmp_path / ".out.partial/recipe.json").write_bytes(content)
    make(text, tmp_path / "out")
    assert "unfinished work of another command" in capsys.readouterr().err
    assert contents(tmp_path / "out") == straight[0]


@pytest.mark.parametrize("others", [True, False])
def test_who_has_finished_stays_so_while_another_clears_up(tmp_path, text, straight, monkeypatch, capsys, others):
    """Another process that wants the same data set may remove what is left, file by file, at the same time."""

    def remove(self):
        self._close()
        if others:
            shutil.rmtree(self.folder)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    with monkeypatch.context() as patched:
        patched.setattr(work.WorkFolder, "_remove", remove)
        make(text, tmp_path / "out")
    left = f"{tmp_path / 'out'} is complete; the leftovers in {tmp_path / '.out.partial'} can be removed\n"
    assert capsys.readouterr().err.endswith(left) != others
    assert contents(tmp_path / "out") == straight[0]


@pytest.mark.parametrize("fail", [read_error, no_memory])
def test_what_may_pass_keeps_the_work(tmp_path, text, straight, monkeypatch, capsys, fail):
    with monkeypatch.context() as patched:
        message = fail(patched)
        with pytest.raises(TransientError, match=re.escape(message)):
            make(text, tmp_path / "out", threads=1)
    assert f"of finished work is kept in {tmp_path / '.out.partial'}; the same command" in capsys.readouterr().err
    pieces = tmp_path / ".out.partial" / "pieces"
    kept = {path: path.stat().st_mtime_ns for path in (pieces / f"{i:06d}-000000.arrow" for i in range(3))}
    with monkeypatch.context() as patched:
        fail_at(patched, second_pass, "build_shard", 0, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make(text, tmp_path / "out", threads=1)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    make(text, tmp_path / "out")
    assert contents(tmp_path / "out") == straight[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_parquet_file_on_a_medium_that_fails(tmp_path, monkeypatch):
    pq.write_table(pa.table({"y": [0, 1], "c": ["a", "b"]}), tmp_path / "t.parquet")
    source = TableSource([tmp_path / "t.parquet"], TableOptions(label="y", categorical=("c",)))

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    with pytest.raises(TransientError, match=r"t.parquet: the file cannot be read \(Input/output error\)"):
        list(source.blocks())


def test_damaged_pieces_are_made_again(tmp_path, text, straight, monkeypatch):
    for damaged in ("000001-000000.arrow", "000000-000000.ids"):
        with monkeypatch.context() as patched:
            fail_at(patched, second_pass, "build_shard", 2, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                make(text, tmp_path / "out", threads=1)
        path = tmp_path / ".out.partial" / "pieces" / damaged
        content = bytearray(path.read_bytes())
        content[len(content) // 4 : -len(content) // 4 : 40] = b"\1" * len(
            content[len(content) // 4 : -len(content) // 4 : 40]
        )
        path.write_bytes(content)
        make(text, tmp_path / "out")
        assert contents(tmp_path / "out") == straight[0]
        shutil.rmtree(tmp_path / "out")


def test_two_at_once_share_the_work(tmp_path, text, straight, capfd):
    found = []

    def run():
        try:
            make(text, tmp_path / "out", threads=1)
        except UserError as error:
            found.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [f"{tmp_path / 'out'} exists already; remove it or choose another --out"]
    assert contents(tmp_path / "out") == straight[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (HashedFile, "write", 60),
        (HashedFile, "write", 250),
        (learning.Learning, "run", 0),
        (second_pass, "build_shard", 1),
    ],
)
def test_tables_go_on_too(tmp_path, monkeypatch, owner, name, at):
    """With quotes over several lines, bags and shared ids."""
    monkeypatch.setattr("hostdev.data.preprocess.delimited.BLOCK_BYTES", 2000)
    rows = [f'{i % 2},{i % 17},"v{i % 23}\n{i % 3}","{i % 5}|{i % 11}"' for i in range(600)]
    (tmp_path / "t.csv").write_text("y,x,c,g\n" + "\n".join(rows) + "\n")
    columns = TableOptions(label="y", numeric=("x",), categorical=("c",), bags=(("g", "|"),), share=(("g", "c"),))
    options = Options(threshold=1, dense="standard")
    build(TableSource([tmp_path / "t.csv"], columns), tmp_path / "straight", options)
    fail_at(monkeypatch, owner, name, at, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build(TableSource([tmp_path / "t.csv"], columns), tmp_path / "out", options, threads=1)
    build(TableSource([tmp_path / "t.csv"], columns), tmp_path / "out", options, threads=3)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_the_result_is_on_the_disk_before_the_pieces_go(tmp_path, text, straight, monkeypatch):
    synced, named = set(), []
    out, pieces = tmp_path / "out", tmp_path / ".out.partial" / "pieces"

    def fsync(number, real=os.fsync):
        synced.add(os.fstat(number).st_ino)
        if out.exists():
            assert len(list(pieces.iterdir())) >= 3
            named.append(os.fstat(number).st_ino)
        real(number)

    def rename(path, to, real=Path.rename):
        if path.name != "result":  # work that is removed
            return real(path, to)
        assert {one.stat().st_ino for one in (path, *path.rglob("*"))} <= synced
        return real(path, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    make(text, out)
    assert named == [tmp_path.stat().st_ino]
    assert contents(out) == straight[0]


def test_an_interruption_while_the_pieces_are_removed(tmp_path, text, straight, monkeypatch, capsys):
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        fail_at(patched, shutil, "rmtree", 0, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make(text, out)
    assert (
        capsys.readouterr().err == f"{out} is complete; the leftovers in {tmp_path / '.out.partial'} can be removed\n"
    )
    assert contents(out) == straight[0]
    with pytest.raises(UserError, match="exists already"):
        make(text, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_is_kept_of_what_is_read_once(tmp_path, text, monkeypatch, capsys, error):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    fail_at(monkeypatch, second_pass, "build_shard", 1, error)
    with pytest.raises(type(error)):
        make(Path("-"), tmp_path / "out")
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"the finished work \(.* MiB\) is not kept: standard input and pipes can be read only once, .*\n", said
    )
    assert list(tmp_path.iterdir()) == []


def test_more_threads_than_there_may_be(tmp_path, text, straight, monkeypatch):
    with monkeypatch.context() as patched:
        fail_at(patched, second_pass, "build_shard", 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make(text, tmp_path / "out")
    with monkeypatch.context() as patched:
        fail_at(patched, threading.Thread, "start", 2, RuntimeError("can't start new thread"))
        message = r"^only 2 of 7 threads could be started \(can't start new thread\); use fewer, for example with"
        with pytest.raises(TransientError, match=message):
            make(text, tmp_path / "out", threads=7)
    assert (tmp_path / ".out.partial" / "pieces" / "000000-000000.arrow").exists()
    make(text, tmp_path / "out")
    assert contents(tmp_path / "out") == straight[0]
