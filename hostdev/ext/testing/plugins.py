"""Checks of the classes of plugins: formats of `checkpoint export`, sources of rows, stores and trackers."""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)
import argparse
import contextlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hostdev.checkpoint.remote import newest
from hostdev.core.optimizers import LazyAdam
from hostdev.core.stores import Store, StoreBackend
from hostdev.data.preprocess.row_source import RecordBatches
from hostdev.ext.checkpoints.exporter import Exporter
from hostdev.ext.tracking.tracker import CheckpointInfo, EndInfo, EpochInfo, RunInfo, StepInfo, Tracker
from hostdev.host.table import HostTable
from hostdev.runtime.runtime import Runtime

_STEPS = 50
_MOST_ROWS = 100_000


def check_tracker(make: Callable[[], Tracker], folder: Path) -> None:
    """Check a tracker with the events of runs that finish, resume, are interrupted, fail, or end before the first step.

    Args:
        make: Returns a new tracker, such as the tracker's class.
        folder: An empty folder for the run directories.

    Raises:
        AssertionError: A promise is broken. Exceptions of the tracker are raised unchanged.
    """
    for number, (status, resumed) in enumerate([("finished", 0), ("finished", 20), ("interrupted", 0), ("failed", 0)]):
        tracker = make()
        assert isinstance(tracker, Tracker), f"{tracker!r} must be a hostdev.tracking.Tracker"
        assert tracker.name, f"{tracker!r} has no name"
        run_dir = folder / f"run{number}"
        run_dir.mkdir(parents=True)
        _run(tracker, run_dir, status, resumed)
    unstarted = make()
    unstarted.close()
    unstarted = make()
    run_dir = folder / "abandoned"
    run_dir.mkdir()
    unstarted.take_again(None)
    unstarted.on_start(_describe(run_dir, 0))
    unstarted.abandon("failed")
    unstarted.close()


def _describe(run_dir: Path, first: int) -> RunInfo:
    config = {"epochs": 2, "lr": 1e-3, "name": "a \u00e9 b", "nothing": None, "versions": {"torch": "2"}}
    return RunInfo(
        run_dir=run_dir, config=config, rows={"train": 1000, "test": 100}, steps=_STEPS, first_step=first, processes=1
    )


def _run(tracker: Tracker, run_dir: Path, status: str, first: int) -> None:
    state = random.getstate()
    losses = {"wide_loss": 0.5, "deep_loss": 0.25}
    tracker.take_again(StepInfo(step=first, epoch=1, losses=losses, samples=100) if first else None)
    tracker.on_start(_describe(run_dir, first))
    for step in range(first + 1, _STEPS + 1):
        tracker.check()
        values = {**losses, "wide_loss": float("nan")} if step == 30 else losses
        tracker.on_step(StepInfo(step=step, epoch=1, losses=values, samples=100))
        if step % 20 == 0:
            tracker.write({"speed/samples per second": 1e5}, {"rows/user": np.ones(5, np.float32)}, step)
    metrics = {"validation": {"auc": float("nan"), "logloss": 0.4, "rows": 100.0}}
    tracker.on_epoch(EpochInfo(epoch=1, step=_STEPS, metrics=metrics))
    tracker.on_epoch(EpochInfo(epoch=2, step=_STEPS, metrics={}, file="a.parquet"))
    tracker.on_checkpoint(CheckpointInfo(step=_STEPS, path=run_dir / "checkpoints", seconds=0.5))
    tracker.on_end(EndInfo(status=status, steps=_STEPS, summary={"auc": 0.7, "ops": {}, "state_sha256": "0"}))
    tracker.close()
    assert random.getstate() == state, f"{tracker.name}: the tracker draws from Python's global generator"


def check_source(rows: RecordBatches) -> None:
    """Check what `RowSource.open` returns.

    Each reading must give the same rows, from any first row on, and with any of the columns. The manifest's entries
    must be plain JSON values.

    Raises:
        AssertionError: A promise is broken.
    """
    import json

    assert isinstance(rows, RecordBatches), f"{rows!r} must be a RecordBatches of hostdev.data.preprocess.row_source"
    assert rows.names and len(set(rows.names)) == len(rows.names), f"{rows.name}: names occur twice: {rows.names}"
    json.dumps(rows.describe()), json.dumps(rows.fingerprint())
    whole = _read(rows, rows.names, 0)
    assert len(whole), f"{rows.name} has no rows"
    assert whole.schema.equals(rows.schema), f"{rows.name}: batches have the schema {whole.schema}, not {rows.schema}"
    for first in sorted({0, 1, len(whole) // 2, len(whole) - 1, len(whole)}):
        rest = _read(rows, rows.names, first)
        assert rest.equals(whole.slice(first)), f"{rows.name}: batches from row {first} on differ from those of before"
    for names in (rows.names[:1], rows.names[::-1]):
        some = _read(rows, names, 0)
        assert some.equals(whole.select(list(names))), f"{rows.name}: batches of the columns {names} have other values"
    again = rows.fingerprint()
    assert again == rows.fingerprint(), f"{rows.name}: the fingerprint changes though the rows do not"


def _read(rows: RecordBatches, names: tuple[str, ...], first: int) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    for batch in itertools.islice(rows.batches(names, first), _MOST_ROWS):
        assert isinstance(batch, pa.RecordBatch), f"{rows.name}: batches must yield pyarrow.RecordBatch, not {batch!r}"
        assert tuple(batch.schema.names) == tuple(names), f"{rows.name}: a batch has {batch.schema.names}, not {names}"
        batches.append(batch)
        if sum(map(len, batches)) > _MOST_ROWS:
            break
    return pa.Table.from_batches(batches, pa.schema([rows.schema.field(name) for name in names])).slice(0, _MOST_ROWS)


def check_store(address: str) -> None:
    """Check a kind of store: files are written, replaced, listed, read, compared, copied and removed.

    Args:
        address: The address of an empty folder, such as "mystore://BUCKET/FOLDER"; the check leaves it empty.

    Raises:
        AssertionError: A promise is broken. Exceptions of the store are raised unchanged.
    """
    store = Store(address)
    backend = store.backend
    assert backend.list("") == {} and backend.list("b") == {}, f"{address} must be empty: its list must be {{}}"
    with tempfile.TemporaryDirectory() as folder:
        path, versions = Path(folder) / "file", set()
        for content in (b"", b"content", os.urandom(1 << 16)):
            path.write_bytes(content)
            for name in ("a", "b/c"):
                backend.put(path, name)
                about = backend.about(name)
                assert about is not None, f"about({name!r}) must not be None once the file was put"
                assert about.size == len(content), f"about({name!r}).size is {about.size}, not {len(content)}"
                assert backend.read(name) == content, f"read({name!r}) is not what was put"
                assert not content or backend.read(name, 2, 5) == content[2:5], f"read({name!r}, 2, 5) has other bytes"
                assert store.compare(name, path) is not None, f"about({name!r}).md5 is that of other bytes"
                versions.add((name, about.version))
        assert len(versions) == 6, "about(NAME).version must be another once a file is replaced"
        backend.copy("b/c", "d")
        assert backend.read("d") == content, "copy makes a file with other bytes"
    sizes = {name: about.size for name, about in backend.list("").items()}
    assert sizes == dict.fromkeys(["a", "b/c", "d"], len(content)), f"list('') has {sizes}"
    assert list(backend.list("b")) == ["c"], f"list('b') has {list(backend.list('b'))}, not 'c', its name in the folder"
    for name in sizes:
        backend.remove(name)
        assert backend.about(name) is None, f"about({name!r}) must be None once the file is removed"
        with contextlib.suppress(FileNotFoundError):
            backend.read(name)
            raise AssertionError(f"read({name!r}) must raise FileNotFoundError once the file is removed")
    _check_errors(backend)


def _check_errors(backend: StoreBackend) -> None:
    for error, is_transient in ((ConnectionError("reset"), True), (FileNotFoundError("none"), False)):
        assert backend.is_transient(error) is is_transient, f"is_transient({error!r}) must be {is_transient}"
        assert str(error) in backend.describe(error), f"describe({error!r}) must contain its text"


def check_exporter(make: type[Exporter], *options: str) -> dict[str, bytes]:
    """Check a format of `hostdev checkpoint export` on a small checkpoint, and return its files by name.

    Args:
        make: The format's class.
        options: Options of the command line, such as "--slots".

    Raises:
        AssertionError: A promise is broken. Exceptions of the exporter are raised unchanged.
    """
    parser = argparse.ArgumentParser()
    exporter = make()
    exporter.add_options(parser)
    required = [action.dest for action in parser._actions if action.required]
    assert not required, f"{make.__name__}: options must not be required: {required}"
    known = {action.dest for action in parser._actions} | {"slots", "dtype", "table", "column", "metric", "model"}
    wrong = set(make.options) - known
    assert not wrong, f"{make.__name__}: options names {sorted(wrong)}, which are no options"
    arguments = argparse.Namespace(**dict.fromkeys(known))
    parser.parse_args(list(options), arguments)
    files = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save(folder / "checkpoints")
        for number in range(2):
            out = folder / f"out{number}"
            out.mkdir()
            exporter = make()
            exporter.check(arguments)
            lines = exporter.write(newest(folder / "checkpoints").chain, out, arguments)
            assert all(isinstance(line, str) for line in lines), f"{make.__name__}: write must return lines of text"
            files.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert files[0], f"{make.__name__}: no file was written"
    assert files[0] == files[1], f"{make.__name__}: the same checkpoint was written differently"
    return files[0]


def _save(folder: Path) -> None:
    """Save a checkpoint of two tables after two steps."""
    tables = {name: HostTable(7, 3, LazyAdam(lr=0.1), name=name, seed=1) for name in ("user", "item")}
    runtime = Runtime(dict(tables), device="cpu", depth=0)
    batches = [{name: torch.tensor([number, 2, 3]) for name in tables} for number in range(2)]
    for _, rows in runtime.train(batches, ids=dict):
        loss: Any = sum(torch.as_tensor(rows[name]).square().sum() for name in tables)
        loss.backward()
    runtime.save(folder, extra={"note": "checked"})
    runtime.close()
    assert all(np.isfinite(table.weights).all() for table in tables.values())
