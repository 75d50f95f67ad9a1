"""Untrusted checkpoints with correct checksums: nothing is written elsewhere, and no values are made up."""

import json
import os
import shutil

import numpy as np
import pytest

import hostdev
from hostdev.checkpoint import folder, manifest
from hostdev.checkpoint.layers import SavedRows
from hostdev.checkpoint.loading import load_tables
from hostdev.checkpoint.manifest import FILE_NAME, BrokenCheckpointError
from hostdev.checkpoint.ranges import RowChunk, parse_range, write_range
from hostdev.core import cli
from hostdev.core.optimizers import SGD, LazyAdam
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.host.table import HostTable
from tests.fuzz import checkpoints as made

WAYS = ["../evil.pth", "data/../../../evil.pth", "data/../../evil.pth", "data/./x", "data//x", "{outside}/evil.pth"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("untrusted")
    made.make(path)
    return path / "run/checkpoints"


@pytest.fixture
def saved(base, tmp_path):
    """A copy of a full checkpoint and two increments."""
    (tmp_path / "in").mkdir()
    shutil.copytree(base, tmp_path / "in/c")
    return tmp_path / "in/c"


def change(path, name, edit):
    """Change a checkpoint's manifest with `edit`, and correct the checksums."""
    content = json.loads((path / name / FILE_NAME).read_text())
    edit(content)
    made.write(path / name, content)
    made.fix_parents(path, folder.names_in(path))


def run(*arguments):
    return cli.run(checkpoint.PROG, checkpoint.main, list(map(str, arguments)))


def _tree(path):
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "command", [["merge", "--out"], ["reshard", "--ranks", 2, "--out"], ["compact"], ["export", "--out"]]
)
def test_names_that_lead_outside(saved, tmp_path, capsys, command, way):
    """Once, files were written wherever a name led: a .pth in site-packages is code at the next start."""
    first = folder.names_in(saved)[0]
    name = way.format(outside=tmp_path)
    source = saved / first / name
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("import evil")
    try:
        change(saved, first, lambda content: content["others"].append({"file": name, "bytes": 11, "sha256": "0" * 64}))
        before = _tree(tmp_path)
        out = [tmp_path / "out"] if command[-1] == "--out" else []
        assert run(command[0], saved, *command[1:], *out) == 2
        error = capsys.readouterr().err
        assert "is broken (the name " in error
        assert len(error) < 500
        assert _tree(tmp_path) == before
    finally:
        source.unlink()


def test_names_of_tables_files_and_parents(saved, capsys):
    names = folder.names_in(saved)
    change(saved, names[0], lambda content: content["tables"][0]["files"][0].update(file="../../x"))
    change(saved, names[-1], lambda content: content["parent"].update(name="../c/" + names[0]))
    for name in (names[0], names[-1]):
        assert run("info", saved / name) == 2
        assert "is broken (the" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_files_that_are_links_or_pipes(saved, tmp_path, capsys, what):
    first = saved / folder.names_in(saved)[0]
    (tmp_path / "secret").write_bytes((first / "data/vocabulary.arrow").read_bytes())
    if what == "folder":
        shutil.move(first / "data", tmp_path / "data")
        (first / "data").symlink_to(tmp_path / "data")
    else:
        (first / "data/vocabulary.arrow").unlink()
        if what == "link":
            (first / "data/vocabulary.arrow").symlink_to(tmp_path / "secret")
        else:
            os.mkfifo(first / "data/vocabulary.arrow")
    for command in (["verify", first], ["merge", first, "--out", tmp_path / "out"]):
        assert run(*command) == 2
        said = capsys.readouterr()
        assert (
            "is not a regular file" if what == "pipe" else "is a link that leads outside its folder"
        ) in said.err + said.out
    assert not (tmp_path / "out").exists()


def test_a_folder_of_checkpoints_may_be_a_link(saved, tmp_path, capsys):
    (tmp_path / "here").symlink_to(saved)
    assert run("verify", tmp_path / "here") == 0


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda table: table.update(dim=3), "differs in dim"),
        (lambda table: table.update(rows=table["rows"] + 1), "differs in rows"),
        (lambda table: table.update(order="spread"), "differs in order"),
        (lambda table: table.update(slots=[]), "differs in slots"),
        (lambda table: table.update(name="renamed"), "its tables differ"),
    ],
)
def test_one_that_adds_to_tables_of_another_shape(saved, edit, told):
    """Once, an increment with another `dim` was looked up in uninitialized memory."""
    newest = folder.names_in(saved)[-1]
    change(saved, newest, lambda content: edit(content["tables"][0]))
    with pytest.raises(BrokenCheckpointError, match=told):
        folder.read_chain(saved / newest)


def _rewritten(path, table, ids):
    """Replace the rows of the first table's file in a full checkpoint by these, in this order."""
    about = next(each for each in manifest.read(path).tables if each.name == table)
    file = path / about.files[0].file
    rows = parse_range(file, file.read_bytes(), about, about.files[0])
    file.unlink()
    taken = np.clip(np.asarray(ids), 0, about.rows - 1)
    columns = {name: values[taken] for name, values in rows.columns.items()}
    row_columns = {name: values[taken] for name, values in rows.row_columns.items()}
    said = write_range(
        path, about.files[0].file, about, 0, about.rows, RowChunk(0, np.array(ids), columns, row_columns)
    )

    def edit(content):
        [mine] = [each for each in content["tables"] if each["name"] == table]
        mine["files"][0].update(rows=said.rows)

    return edit


@pytest.mark.parametrize("kind", ["missing", "twice", "negative", "outside", "wrapped"])
def test_a_whole_one_without_all_rows(saved, kind):
    """Once, rows that no file has were uninitialized memory."""
    first = folder.names_in(saved)[0]
    rows = manifest.read(saved / first).table("second").rows
    ids = list(range(rows))
    if kind == "missing":
        ids = ids[:5] + ids[6:]
    elif kind == "wrapped":  # each follows the one before by int64's arithmetic alone
        ids[-3:] = [-(2**63), -1, rows - 1]
    else:
        ids[7] = {"twice": 6, "negative": -1, "outside": rows}[kind]
    change(saved, first, _rewritten(saved / first, "second", ids))
    with pytest.raises(BrokenCheckpointError, match="rows of table .* are missing|its rows do not match the range"):
        SavedRows(folder.read_chain(saved / first), "second")
    about = manifest.read(saved / first).table("second")
    table = HostTable(about.rows, about.dim, LazyAdam(lr=1e-2), name="second")
    tables = {
        each.name: HostTable(
            each.rows, each.dim, SGD(lr=1.0) if each.optimizer == "SGD" else LazyAdam(lr=1e-2), name=each.name
        )
        for each in manifest.read(saved / first).tables
    }
    with pytest.raises(BrokenCheckpointError, match="rows of table .* are missing|its rows do not match the range"):
        load_tables(folder.read_chain(saved / first), {**tables, "second": table}, check=True)


def test_a_whole_one_with_the_numbers_of_all_rows_is_one(saved):
    first = folder.names_in(saved)[0]
    before = SavedRows(folder.read_chain(saved / first), "second")
    ids = np.arange(before.rows)
    expected = before.lookup(ids)
    del before
    change(saved, first, _rewritten(saved / first, "second", ids))
    assert SavedRows(folder.read_chain(saved / first), "second").lookup(ids).tobytes() == expected.tobytes()


def test_long_and_unprintable_names_are_printed_safely(saved, capsys):
    newest = folder.names_in(saved)[-1]

    def edit(content):
        content["created"] = "\x1b]0;x\x07" + "y" * 1000
        content["versions"] = {"other": "z"}
        content["tables"][0]["optimizer"] = "o" * 10_000

    change(saved, newest, edit)
    assert run("info", saved / newest) == 0
    shown = capsys.readouterr().out
    assert "hostdev unknown, torch unknown" in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 500


def test_lines_of_damage_are_short(saved, capsys):
    for name in folder.names_in(saved):
        change(saved, name, lambda content: content["tables"][0].update(name="t" * 10_000))
    assert run("verify", saved) == 2
    said = capsys.readouterr()
    assert max(map(len, (said.out + said.err).splitlines())) <= 500


@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_state_without_its_tensors(saved, tmp_path, capsys, where):
    newest = folder.names_in(saved)[-1]
    change(saved, newest, lambda content: content["state"]["dense"].update({where: {"v": {"$tensor": "gone"}}}))
    assert run("export", saved, "--out", tmp_path / "out", "--slots") == 2
    error = capsys.readouterr().err
    assert "is broken (its state: tensor 'gone' is missing)" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_table_by_key_in_version_1(tmp_path, capsys):
    keys = HostTable(None, 2, SGD(lr=0.1), name="k", capacity=10)
    hostdev.Runtime({"k": keys}, device="cpu").save(tmp_path / "c")
    [name] = folder.names_in(tmp_path / "c")
    change(tmp_path / "c", name, lambda content: content.update(version=1))
    assert run("verify", tmp_path / "c") != 0
    assert "table 'k' is of a later format than version 1" in capsys.readouterr().err
