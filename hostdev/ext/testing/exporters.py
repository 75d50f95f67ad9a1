"""Check of a format of `checkpoint export`."""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hostdev.checkpoint.remote import newest
from hostdev.core.optimizers import LazyAdam
from hostdev.ext.checkpoints.exporter import Exporter
from hostdev.host.table import HostTable
from hostdev.runtime.runtime import Runtime


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
