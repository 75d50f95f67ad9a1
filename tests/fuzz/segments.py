"""Changed checkpoints of tables on disk, with corrected checksums: manifests, locations and segments."""

import json
import shutil
from pathlib import Path
from random import Random

import numpy as np

import hostdev
from hostdev.checkpoint import folder, remote
from hostdev.checkpoint.loading import load_tables, require_tables
from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.manifest import FILE_NAME
from hostdev.checkpoint.writer import Content
from hostdev.host.table import HostTable
from hostdev.kernels import disk_records
from hostdev.kernels.disk_records import Format
from tests.fuzz.checkpoints import run_command, write
from tests.fuzz.mutations import change_bytes, change_json

COMMANDS = [["info"], ["verify"], ["merge", "--out", "out"], ["export", "--out", "out", "--format", "npy", "--slots"]]
MEMORY = 4 * (1 << 20) + (1 << 16)


def _tables(folder_: Path) -> dict[str, HostTable]:
    def make(rows: int | None, name: str, **options) -> HostTable:
        return HostTable(
            rows, 4, hostdev.LazyAdam(), name=name, seed=1, storage=hostdev.Disk(folder_, MEMORY), **options
        )

    return {"rows": make(300, "rows"), "keys": make(None, "keys", capacity=500)}


def make(base: Path) -> None:
    """Save a table by row and one by key."""
    tables = _tables(base / "disk")
    random = np.random.default_rng(0)
    for table in tables.values():
        for _ in range(4):
            table.apply(random.integers(0, 300, 60), random.standard_normal((60, 4)).astype(np.float32))
    with CheckpointManager(base / "c") as manager:
        manager.save(tables.values(), 1, Content({}, {}, {}, [])).wait()
    for table in tables.values():
        table.close()


def load(base: Path) -> None:
    """Run every action of the cases once."""
    for number in range(len(COMMANDS) + 2):
        case = base.parent / f"load-{number}"
        shutil.copytree(base / "c", case / "c")
        _read(case, number)
        shutil.rmtree(case)


def run(base: Path, case: Path, draw: Random) -> None:
    """Change one file, correct the checksums, and run one action on the checkpoint."""
    shutil.copytree(base / "c", case / "c")
    at = case / "c" / folder.names_in(case / "c")[0]
    content = json.loads((at / FILE_NAME).read_text())
    if draw.random() < 0.5:
        content = change_json(content, draw)
    else:
        file = draw.choice([each for each in at.rglob("*") if each.is_file() and each.name != FILE_NAME])
        place = draw.randrange(1 << 14)  # of a segment, only the first blocks have records
        data = file.read_bytes()
        data = change_bytes(data, draw) if len(data) < 1 << 16 else _change_record(data, place, draw)
        file.write_bytes(data)
    write(at, content)
    _read(case, draw.randrange(len(COMMANDS) + 2))


def _change_record(data: bytes, place: int, draw: Random) -> bytes:
    """Change a byte of a block or cut the file, and correct the block's checksum in most cases."""
    if draw.random() < 0.1:
        return data[: draw.randrange(len(data))]
    words = np.frombuffer(bytearray(data), np.uint64).copy()
    words.view(np.uint8)[place] ^= np.uint8(1 << draw.randrange(8))
    if draw.random() < 0.8:
        tag = words[place >> 12 << 9 | 1]
        disk_records.seal(0, 1, words[place >> 12 << 9 :][:512], int(tag), Format(8, 4096, 1, 1, 1))
    return words.tobytes()


def _read(case: Path, number: int) -> None:
    path = case / "c"
    if number < len(COMMANDS):
        run_command(case, COMMANDS[number])
        return
    ids = np.arange(300)
    if number == len(COMMANDS):
        model = hostdev.open(path)
        for table in model.values():
            assert table.lookup(ids[: table.rows]).shape[1:] == (table.dim,)
        return
    tables = _tables(case / "disk")
    try:
        chain = remote.newest(path).chain
        require_tables(chain, tables)
        load_tables(chain, tables, check=True)
        for table in tables.values():
            assert table.lookup(ids).shape == (300, 4)
    finally:
        for table in tables.values():
            table.close()
