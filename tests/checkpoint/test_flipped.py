"""A flipped bit, in what is copied or in what is there already, never becomes a checkpoint that counts as saved."""

import contextlib
import multiprocessing
import time
import warnings
from pathlib import Path

import fsspec
import numpy as np
import pytest

import hostdev
from hostdev.checkpoint import folder, loading, remote
from hostdev.checkpoint.loading import find_newest_valid, verify
from hostdev.checkpoint.manifest import FILE_NAME
from hostdev.core import stores
from hostdev.core.addresses import checkpoint_path
from hostdev.core.errors import HostdevError
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.checkpoints import compact, deliver
from hostdev.kernels import disk_records
from tests.checkpoint import killed
from tests.stores.conftest import Server

ROWS = 2000
ADDRESS = "memory://flipped/model"


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Small segments, short pauses, and a store that is empty at the end."""
    monkeypatch.setattr(disk_records, "_CHUNK", 1 << 14)
    monkeypatch.setattr("hostdev.host.disk.tier.SEGMENT_BYTES", 1 << 16)
    monkeypatch.setattr(stores, "_PAUSES", (0.001, 0.01))
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
    yield
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/flipped", recursive=True)


class Run:
    """A training that saves to a folder or a store; with `disk`, of a table on disk."""

    def __init__(self, root, where, disk):
        storage = hostdev.Disk(root / "rows", memory=6 << 14) if disk else None
        table = hostdev.HostTable(ROWS, 8, hostdev.LazyAdam(lr=0.1), name="items", seed=1, storage=storage)
        self.runtime, self.where, self.number = hostdev.Runtime({"items": table}, device="cpu", depth=0), where, 0
        for start in range(0, ROWS, 200):
            table.apply(np.arange(start, start + 200), np.ones((200, 8), np.float32))

    def save(self, keep=3):
        self.number += 1
        for _, found in self.runtime.train([{"items": (np.arange(50) + 37 * self.number) % ROWS}]):
            found["items"].sum().backward()
        self.runtime.save(self.where, extra={"values": np.arange(99)}, keep=keep)


def files_in(place):
    """Return the files of the checkpoints in a folder or a store."""
    if "://" in str(place):
        names = fsspec.filesystem("memory").find(str(place).removeprefix("memory:/"))
        return sorted(name for name in names if "/step-" in name)
    return sorted(each for each in Path(place).glob("step-*/**/*") if each.is_file() and each.name[0] != ".")


def flip(place, random, which=None):
    """Flip a bit of one of the files in a folder or a store."""
    found = files_in(place)
    if which is not None:
        found = [each for each in found if which in str(each)]
    file = found[random.integers(len(found))]
    memory = fsspec.filesystem("memory")
    content = bytearray(file.read_bytes() if isinstance(file, Path) else memory.cat_file(file))
    content[random.integers(len(content))] ^= 1 << int(random.integers(8))
    if isinstance(file, Path):
        with file.open("r+b") as opened:  # in place, so that all its names have it
            opened.write(content)
    else:
        memory.pipe_file(file, bytes(content))
    return str(file)


def verify_all(place, tmp_path, monkeypatch):
    """Read every checkpoint that a folder or a store has, on another machine; raise for a damaged one."""
    with monkeypatch.context() as patch:
        patch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / f"machine-{time.time_ns()}"))
        found = remote.candidates(checkpoint_path(place), everything=True)
        if "://" in str(place):
            complete = f"/{FILE_NAME}"  # written last: others are what a killed delivery has left
            stored = {name.partition("/")[0] for name in stores.Store(place).list() if name.endswith(complete)}
            assert {each.name for each in found} == stored
        for each in found:
            verify(folder.read_chain(each), segments=True)
    return [each.name for each in found]


def newest_step(place, tmp_path, monkeypatch):
    """Return the step of the newest checkpoint that is intact, as another machine finds it."""
    with monkeypatch.context() as patch:
        patch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / f"machine-{time.time_ns()}"))
        return (
            find_newest_valid(checkpoint_path(place), lambda chain: verify(chain, segments=True))
            .chain[-1]
            .manifest.step
        )


def try_deliver(target, disk, random, tmp_path, monkeypatch):
    run = Run(tmp_path, tmp_path / "run", disk)

    def send():
        deliver.deliver(remote.newest(tmp_path / "run").chain, checkpoint_path(target), 2)

    with run.runtime:
        run.save()
        send()
        run.save()
        side = ["source", "target"][random.integers(2)]
        before = newest_step(target, tmp_path, monkeypatch)
        where = flip(tmp_path / "run" if side == "source" else target, random)
        try:
            send()
        except HostdevError:
            assert side == "source", where
            assert newest_step(target, tmp_path, monkeypatch) == before, where
            verify_all(target, tmp_path, monkeypatch)
            return "refused"
        names = verify_all(target, tmp_path, monkeypatch)
        newest = remote.newest(tmp_path / "run").chain[-1].name
        assert names[0] == newest, where
        if side == "target":
            run.save()  # and the next one is as good
            send()
            assert len(verify_all(target, tmp_path, monkeypatch)) >= 2
    return "mended"


def try_save(place, disk, random, tmp_path, monkeypatch):
    """Increments, in a folder or uploaded to a store, of which one side is damaged."""
    run = Run(tmp_path, place, disk)
    with run.runtime:
        run.save()
        run.save()
        side = "folder"
        if "://" in str(place):
            side = ["here", "store"][random.integers(2)]
        before = newest_step(place, tmp_path, monkeypatch)
        where = flip(checkpoint_path(place) if side != "store" else place, random)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.save()
        except HostdevError:
            assert disk and side != "store", where  # the table's own segment
            if side != "folder":
                assert newest_step(place, tmp_path, monkeypatch) == before, where
            return "refused"
        assert newest_step(place, tmp_path, monkeypatch) == 3, where
        if side != "folder":
            assert f"step-{3:010d}" in verify_all(place, tmp_path, monkeypatch), where
    return "saved"


def try_merge(how, disk, random, tmp_path, monkeypatch):
    """Compaction, exports, merges and resharding of a folder with a damaged file."""
    run = Run(tmp_path, tmp_path / "run", disk)
    with run.runtime:
        run.save()
        run.save()
    where = flip(tmp_path / "run", random)
    try:
        if how == "compact":
            found = find_newest_valid(tmp_path / "run", lambda chain: verify(chain, segments=True))
            compact.compact(found.chain, 1)
            step = found.chain[-1].manifest.step
        else:
            more = {"export": ["--format", "npy", "--slots"], "reshard": ["--ranks", 2], "merge": []}[how]
            checkpoint.main(list(map(str, [how, tmp_path / "run", "--out", tmp_path / "out", *more])))
    except HostdevError:
        assert not (tmp_path / "out").exists(), where
        return "refused"
    if how == "compact":
        assert newest_step(tmp_path / "run", tmp_path, monkeypatch) == step, where
    elif how == "export":  # an older one, or the newest whose damaged file is not part of it
        verify(remote.newest(tmp_path / "run").chain, segments=True)
    else:
        verify(remote.newest(tmp_path / "out").chain, segments=True)
    return "made"


def try_fetch(place, disk, random, tmp_path, monkeypatch):
    """A reader of a store, whose copies or whose store are damaged."""
    run = Run(tmp_path, ADDRESS, disk)
    with run.runtime:
        run.save()
        run.save()
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "reader"))
    hostdev.open(ADDRESS)
    where = flip(checkpoint_path(ADDRESS), random)
    hostdev.open(ADDRESS)
    verify(remote.newest(checkpoint_path(ADDRESS)).chain, segments=True)
    assert remote.newest(checkpoint_path(ADDRESS)).chain[-1].manifest.step == 2, where
    flip(ADDRESS, random)
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "another"))
    try:
        chain = remote.newest(checkpoint_path(ADDRESS)).chain
    except HostdevError:
        return "refused"
    verify(chain, segments=True)
    return "mended"


KINDS = {
    "folder": lambda *rest: try_deliver(rest[2] / "served", *rest),
    "store": lambda *rest: try_deliver(ADDRESS, *rest),
    "increments": lambda *rest: try_save(rest[2] / "run", *rest),
    "uploads": lambda *rest: try_save(ADDRESS, *rest),
    "compact": lambda *rest: try_merge("compact", *rest),
    "export": lambda *rest: try_merge("export", *rest),
    "merge": lambda *rest: try_merge("merge", *rest),
    "reshard": lambda *rest: try_merge("reshard", *rest),
    "fetch": lambda *rest: try_fetch(ADDRESS, *rest),
}


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("folder", 1), ("store", 2), ("uploads", 3), ("increments", 4), ("compact", 5), ("merge", 6), ("reshard", 7)]
    + [pytest.param(list(KINDS)[seed % len(KINDS)], seed, marks=pytest.mark.slow) for seed in range(63)],
)
def test_no_damage_is_published(kind, seed, tmp_path, monkeypatch):
    random = np.random.default_rng(seed)
    disk = bool(random.integers(2))
    outcome = KINDS[kind](disk, random, tmp_path, monkeypatch)
    print(f"flip {seed}: {kind}{' (disk)' if disk else ''}: {outcome}")


def test_files_are_read_in_turn(monkeypatch, tmp_path):
    """Where a checkpoint builds on more than it reads again, the next ones read the rest."""
    run, read, real = Run(tmp_path, tmp_path / "run", disk=False), set(), loading.check_entry
    with run.runtime:
        for _ in range(3):
            run.save()
        names = {each for each in files_in(tmp_path / "run") if each.name != "checkpoint.json"}
        size = sum(each.stat().st_size for each in names)
        monkeypatch.setattr(loading, "SOME_BYTES", size // 3)
        monkeypatch.setattr(
            loading, "check_entry", lambda root, *rest: read.add(root / rest[0].file) or real(root, *rest)
        )
        for number in range(6):
            before = len(read)
            run.save(keep=9)
            assert number or len(read) - before < len(names)
    assert names <= read


def kill_at_random(place, target, seconds, environment):
    """Start `killed.run`, and kill it a while after its first checkpoint; return the last step that it told."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.checkpoint.killed"])
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=killed.run, args=(place, target, environment, there))
    child.start()
    there.close()
    steps = [here.recv()]
    time.sleep(seconds)  # the moment of the kill is what is tested
    child.kill()
    child.join()
    with contextlib.suppress(EOFError, OSError):
        while True:
            steps.append(here.recv())
    return max(steps)


@pytest.mark.parametrize("kills", [1, pytest.param(14, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["folder", "store", "uploads"])
def test_a_kill_loses_no_checkpoint(kind, kills, tmp_path, monkeypatch):
    """What was told to be delivered or saved is there, intact, and so is the next delivery."""
    if kind != "folder" and kills == 1:
        pytest.skip("a process and a server are started: with the slow tests")
    random = np.random.default_rng(kills)
    with contextlib.ExitStack() as stack:
        target, env = tmp_path / "served", {"HOSTDEV_STORE_CACHE": str(tmp_path / "cache")}
        if kind != "folder":
            (tmp_path / "s3").mkdir()
            server = Server(tmp_path / "s3")
            stack.callback(server.end)
            server.put(tmp_path / "s3", "s3://bucket/other")
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another test's server
            target, env = "s3://bucket/served", env | server.environment
        places = (target, None) if kind == "uploads" else (tmp_path / "run", target)
        told = 0
        for number in range(kills):
            step = kill_at_random(*places, random.uniform(0, 0.5), env)
            assert step > told
            told = step
            assert newest_step(target, tmp_path, monkeypatch) >= told
            if kind != "uploads":
                verify_all(target, tmp_path, monkeypatch)
            print(f"kill {number}: {kind}: step {told}", flush=True)
