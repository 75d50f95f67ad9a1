"""Changed checkpoints with corrected checksums: manifests, rows, dense layers and vocabulary."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np

from hostdev.checkpoint import folder, manifest, remote
from hostdev.checkpoint.layers import SavedRows
from hostdev.checkpoint.loading import load_tables, require_tables, values_of, verify
from hostdev.checkpoint.manifest import FILE_NAME
from hostdev.core import cli
from hostdev.core.checksums import json_checksum
from hostdev.core.optimizers import FTRL, SGD, Adagrad, LazyAdam, Momentum, RowWiseAdagrad, RowWiseAdam
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.training import cli as train
from hostdev.host.table import HostTable
from tests.fuzz.datasets import TABLE, csv
from tests.fuzz.mutations import change_bytes, change_json

COMMANDS = [
    ["info"],
    ["verify"],
    ["compact"],
    ["merge", "--out", "out"],
    ["reshard", "--ranks", "2", "--out", "out"],
    ["export", "--out", "out"],
    ["export", "--out", "out", "--format", "npy", "--slots"],
]
OPTIMIZERS = {each.__name__: each for each in (FTRL, SGD, Adagrad, LazyAdam, RowWiseAdagrad, RowWiseAdam, Momentum)}


def make(base: Path) -> None:
    """Train a model with three tables and a bag; save a full checkpoint and two incremental ones."""
    (base / "rows.csv").write_text(csv(500, 150))
    table = ["table", base / "rows.csv", "--out", base / "data", "--dense", "log", *TABLE]
    assert cli.run("preprocess", preprocess.main, list(map(str, table))) in (0, None)
    options = ["--data", base / "data", "--batch-size", 2, "--emb-dim", 2, "--epochs", 1, "--device", "cpu"]
    options += ["--model", "tests.own_models:ThreeTables", "--host-device-mix", "--run-dir", base / "run"]
    options += ["--checkpoint-every", 1, "--max-steps", 3]
    assert cli.run("train", train.main, list(map(str, options))) == 0
    assert len(remote.newest(base / "run").chain) > 1


def load(base: Path) -> None:
    """Run every action of the cases once."""
    case = base.parent / "load"
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    for number in range(len(COMMANDS) + 1):
        shutil.copytree(base / "run/checkpoints", case / f"{number}/c")
        _read(case / f"{number}", number)
    shutil.rmtree(case)


def run(base: Path, case: Path, draw: Random) -> None:
    """Change one file of a chain, correct the checksums, and run one action on it."""
    shutil.copytree(base / "run/checkpoints", case / "c")
    names = folder.names_in(case / "c")
    name = draw.choice(names)
    at = case / "c" / name
    content = json.loads((at / FILE_NAME).read_text())
    if draw.random() < 0.4:
        content = change_json(content, draw)
    else:
        file = draw.choice([each for each in at.rglob("*") if each.is_file() and each.name != FILE_NAME])
        file.write_bytes(change_bytes(file.read_bytes(), draw))
    write(at, content)
    fix_parents(case / "c", names)
    _read(case, draw.randrange(len(COMMANDS) + 2))


def write(at: Path, content: object) -> None:
    """Write checkpoint.json with the files' current checksums and sizes."""
    if isinstance(content, dict):
        tables = content.get("tables") if isinstance(content.get("tables"), list) else []
        tables = [table for table in tables if isinstance(table, dict)]
        states = [table.get("segments") for table in tables if isinstance(table.get("segments"), dict)]
        _fix(at, [*(table.get("files") for table in tables), content.get("others")], lambda found: found)
        _fix(at, [state.get("files") for state in states], _get_headers)
        content.pop("sha256", None)
        content["sha256"] = json_checksum(content)
    (at / FILE_NAME).write_text(json.dumps(content))


def _fix(at: Path, lists: list, hashed: Callable[[bytes], bytes]) -> None:
    for file in [each for files in lists if isinstance(files, list) for each in files]:
        if isinstance(file, dict) and isinstance(file.get("file"), str):
            try:
                found = (at / file["file"]).read_bytes()
            except (OSError, ValueError):
                continue
            file["bytes"], file["sha256"] = len(found), sha256(hashed(found)).hexdigest()


def _get_headers(segment: bytes) -> bytes:
    return b"".join(segment[at : at + 16] for at in range(0, len(segment), 4096))


def fix_parents(path: Path, names: list[str]) -> None:
    """Update the parent's checksum in the checkpoints that add to a changed one."""
    for name in names:
        content = json.loads((path / name / FILE_NAME).read_text())
        parent = content.get("parent") if isinstance(content, dict) else None
        if isinstance(parent, dict) and isinstance(parent.get("name"), str):
            try:
                parent["sha256"] = manifest.checksum_of(path / parent["name"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            write(path / name, content)


def run_command(case: Path, command: list[str]) -> None:
    """Run `checkpoint COMMAND` on the checkpoints of a case; "out" stands for a folder of the case."""
    name, *options = command
    options = [str(case / each) if each == "out" else each for each in options]
    cli.run(checkpoint.PROG, checkpoint.main, [name, str(case / "c"), *options])


def _read(case: Path, number: int) -> None:
    path = case / "c"
    if number < len(COMMANDS):
        run_command(case, COMMANDS[number])
        return
    chain = remote.newest(path).chain
    verify(chain)
    values_of(chain)
    if number == len(COMMANDS):
        tables = {}
        for about in chain[-1].manifest.tables:
            if about.rows * about.dim > 1 << 20 or about.optimizer not in OPTIMIZERS:
                continue
            tables[about.name] = HostTable(
                about.rows, about.dim, OPTIMIZERS[about.optimizer](), name=about.name, dtype=about.dtype
            )
        require_tables(chain, tables)
        load_tables(chain, tables, check=True)
    else:
        for about in chain[-1].manifest.tables:
            table = SavedRows(chain, about.name, current=False)
            last, columns = table.rows - 1, ("weights", *about.slots, *about.row_slots)
            found = table.read(table.find(np.array([0, last, last // 2])), columns)
            for column in columns:
                assert found[column].shape == (3, 1 if column in about.row_slots else table.dim)
