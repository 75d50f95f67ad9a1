"""A checkpoint's digest: from its files, a by-product of writing them, and of what changed since."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hostdev import FTRL, HostTable, LazyAdam, RowWiseAdagrad, Runtime
from hostdev.checkpoint import folder
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.state import state_digest
from hostdev.core import digest
from hostdev.distributed.dense import DenseState
from hostdev.ext.checkpoints.cli import main as command
from hostdev.runtime.digest import state_sha256

VERSION_1 = Path(__file__).parent / "version1/c"


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    monkeypatch.setattr(digest, "RANGE_BYTES", 4 * 3 * 128)  # 128 rows of 3, 64 of 5, 2 of 192, and one of 300


def made():
    return [
        HostTable(1000, 3, LazyAdam(lr=0.25), name="adam", seed=1),
        HostTable(700, 5, FTRL(), name="ftrl", seed=1, dtype="bfloat16"),
        HostTable(129, 192, RowWiseAdagrad(lr=0.5), name="by_row", seed=1),
        HostTable(70, 300, RowWiseAdagrad(lr=0.5), name="wide", seed=1),
    ]


def update(table, ids):
    table.update(np.array(ids), np.full((len(ids), table.dim), 0.5, np.float32))


def fresh(tables):
    """Return the digest of the tables' rows, all of them read."""
    kept = [table.stored.changes.digests for table in tables]
    for table in tables:
        table.stored.changes.digests = None
    found = state_sha256(tables, nothing())
    for table, digests in zip(tables, kept, strict=True):
        table.stored.changes.digests = digests
    return found


def nothing():
    return DenseState({}, {"state": {}, "param_groups": []}, [], [])


def test_what_is_known_after_a_checkpoint(tmp_path):
    tables = made()
    runtime = Runtime({table.name: table for table in tables}, device="cpu", depth=0)
    first = runtime.save(tmp_path / "c").wait()
    noted = first.manifest.state_sha256
    assert noted == fresh(tables) == state_sha256(tables, nothing())
    assert noted == state_digest(Layers([first]), [], {})
    for table in tables:
        assert table.stored.changes.known_digests().known.all()
        update(table, [0, table.rows - 1])
        known = table.stored.changes.known_digests().known
        assert not known[0]
        assert not known[-1]
        assert known[1:-1].all()
    assert fresh(tables) == state_sha256(tables, nothing()) != noted
    second = runtime.save(tmp_path / "c").wait()  # an increment, whose rows are not all read
    assert second.manifest.parent is not None
    assert second.manifest.state_sha256 is None
    assert fresh(tables) == state_sha256(tables, nothing()) == state_digest(Layers([first, second]), [], {})
    for table in tables:
        assert not table.stored.changes.known_digests().known[0]
        update(table, [table.rows // 2])
    assert fresh(tables) == state_sha256(tables, nothing())
    for table in tables:
        table.erase(np.arange(5))
        with table.writing() as rows:
            rows.weights[3] = 2
    assert fresh(tables) == state_sha256(tables, nothing())


def test_rows_written_while_they_are_saved(tmp_path):
    """The checkpoint's digest is that of its moment; rows written since are read again."""
    tables = made()
    runtime = Runtime({table.name: table for table in tables}, device="cpu", depth=0)
    runtime.save(tmp_path / "c")
    before = fresh(tables)
    writer = runtime.save(tmp_path / "whole", wait=False)
    for table in tables:
        update(table, range(table.rows))
    assert writer.wait().manifest.state_sha256 == before
    assert fresh(tables) == state_sha256(tables, nothing()) != before


def test_a_failed_checkpoint_leaves_nothing_wrong(tmp_path, monkeypatch):
    tables = made()
    runtime = Runtime({table.name: table for table in tables}, device="cpu", depth=0)
    runtime.save(tmp_path / "c")
    for table in tables:
        update(table, [7])

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hostdev.checkpoint.writer.write_range", full)
        with pytest.raises(OSError, match="No space"):
            runtime.save(tmp_path / "c")
    assert fresh(tables) == state_sha256(tables, nothing())
    for table in tables:
        update(table, [8])
    assert fresh(tables) == state_sha256(tables, nothing())
    assert runtime.save(tmp_path / "c").wait().manifest.parent is not None
    assert fresh(tables) == state_sha256(tables, nothing())


def test_both_digests_of_an_old_checkpoint(tmp_path, capsys):
    """info prints the one in the manifest; verify compares it and computes that of today, which compact stores."""
    path = tmp_path / "c"
    shutil.copytree(VERSION_1, path)
    names = folder.names_in(path)
    shutil.rmtree(path / names[-1])  # an increment, without a digest
    noted = json.loads((path / names[0] / "checkpoint.json").read_text())["state_sha256"]
    assert command(["info", str(path)]) == 0
    assert f"state_sha256 {noted} (as version 1 defines it)" in capsys.readouterr().out
    assert command(["verify", str(path)]) == 0
    *_, new, old = capsys.readouterr().out.splitlines()
    assert old == f"state_sha256 as version 1 defines it: {noted}, as the manifest says"
    assert command(["merge", str(path), "--out", str(tmp_path / "new")]) == 0
    [made_anew] = folder.names_in(tmp_path / "new")
    content = json.loads((tmp_path / "new" / made_anew / "checkpoint.json").read_text())
    assert content["version"] == 2
    assert new == f"state_sha256 {content['state_sha256']}"
    assert content["state_sha256"] != noted
