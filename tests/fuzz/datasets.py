"""Changed data sets with corrected checksums: shards, manifest and vocabulary."""

import json
import shutil
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from random import Random

from hostdev.core import cli
from hostdev.core.checksums import json_checksum
from hostdev.data import manifest
from hostdev.data.preprocess import check
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.shards import ShardReader
from tests.fuzz.mutations import change_bytes, change_json


def csv(rows: int, users: int) -> str:
    """Return a table with a label, a number, three columns of values and a bag."""
    lines = (
        f"{i % 2},{i % 7 if i % 5 else ''},u{i % users},i{i % 3},{i % 2},{'|'.join(f'g{k}' for k in range(i % 4))}\n"
        for i in range(rows)
    )
    return "liked,age,user,item,kind,genres\n" + "".join(lines)


TABLE = [
    "--label",
    "liked",
    "--numeric",
    "age",
    "--categorical",
    "user,item,kind",
    "--bag",
    "genres=|",
    "--threshold",
    1,
]


def make(folder: Path) -> None:
    """Write two data sets: one with Criteo's columns, one from a table with a bag."""
    (folder / "rows.csv").write_text(csv(60, 4))
    table = ["table", folder / "rows.csv", "--out", folder / "table", "--rows-per-shard", 30, *TABLE]
    synthetic = ["synthetic", "--rows", 60, "--threshold", 0, "--out", folder / "criteo", "--rows-per-shard", 30]
    for command in (table, synthetic):
        assert cli.run("preprocess", preprocess.main, list(map(str, command))) in (0, None)


def load(base: Path) -> None:
    """Read both data sets once."""
    for name in ("table", "criteo"):
        _read(base / name)
        check.run(base / name)


def run(base: Path, case: Path, draw: Random) -> None:
    """Change one file of a data set, correct the checksums, and read everything."""
    folder = case / "data"
    shutil.copytree(base / draw.choice(["table", "criteo"]), folder)
    content = json.loads((folder / manifest.FILE_NAME).read_text())
    kind = draw.choice(["manifest", "shard", "shard", "vocabulary", "vocabulary"])
    if kind == "manifest":
        content = change_json(content, draw)
    else:
        name = content["vocabulary"] if kind == "vocabulary" else draw.choice(content["train"])["file"]
        (folder / name).write_bytes(change_bytes((folder / name).read_bytes(), draw))
    write(folder, content)
    if draw.random() < 0.3:
        cli.run(preprocess.PROG, preprocess.main, ["check", str(folder)])
    else:
        _read(folder)


def write(folder: Path, content: object) -> None:
    """Write a manifest with the files' current checksums."""
    if isinstance(content, dict):
        for shard in [each for split in ("train", "test") for each in _list(content.get(split))]:
            if (
                isinstance(shard, dict)
                and isinstance(shard.get("file"), str)
                and (digest := _digest(folder, shard["file"]))
            ):
                shard["sha256"] = digest
        if isinstance(content.get("vocabulary"), str) and (digest := _digest(folder, content["vocabulary"])):
            content["vocabulary_sha256"] = digest
        content.pop("sha256", None)
        content["sha256"] = json_checksum(content)
    (folder / manifest.FILE_NAME).write_text(json.dumps(content))


def _list(content: object) -> list:
    return content if isinstance(content, list) else []


def _digest(folder: Path, name: str) -> str | None:
    try:
        return sha256((folder / name).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None


def _read(folder: Path) -> None:
    found = manifest.read(folder)
    for split in ("train", "test"):
        with closing(ShardReader(folder, found, split).batches(16, seed=1)) as batches:
            for batch in batches:
                assert len(batch)
    if found.vocabulary is not None:
        manifest.read_counts(folder, found)
        Encoding(found, folder / found.vocabulary).prepare()
