"""New files and folders of commands: by one process each, complete or absent, and never overwriting."""

import os
import subprocess
import sys

import pytest

from hostdev.core import locks, outputs
from hostdev.core.errors import UserError
from tests.conftest import ROOT

HOLD = """
import sys
from pathlib import Path
from hostdev.core import outputs
with getattr(outputs, sys.argv[1])(Path(sys.argv[2])) as partial:
    print(partial, flush=True)
    sys.stdin.readline()
    (partial / "x" if partial.is_dir() else partial).write_text("theirs")
"""


@pytest.fixture
def other():
    """Start another process that writes a file or folder until it is asked to finish."""
    started = []

    def start(kind, out):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, kind, str(out)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        process.partial = process.stdout.readline().strip()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _content(out):
    return (out / "x" if out.is_dir() else out).read_text()


@pytest.mark.parametrize("kind", ["new_file", "new_folder"])
def test_one_process_writes(tmp_path, other, kind):
    out = tmp_path / "out"
    process = other(kind, out)
    with pytest.raises(UserError, match="is being written by another process"), getattr(outputs, kind)(out):
        pass
    process.communicate("\n")
    assert process.returncode == 0
    assert _content(out) == "theirs"
    with pytest.raises(UserError, match="exists"), getattr(outputs, kind)(out):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["new_file", "new_folder"])
def test_what_a_killed_process_left_is_removed(tmp_path, other, kind):
    out = tmp_path / "out"
    process = other(kind, out)
    process.kill()
    process.wait()
    assert os.path.lexists(process.partial)
    with getattr(outputs, kind)(out) as partial:
        (partial / "x" if kind == "new_folder" else partial).write_text("mine")
    assert _content(out) == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("has_locks", [True, False])
@pytest.mark.parametrize("kind", ["new_file", "new_folder"])
def test_what_appears_meanwhile_stays(tmp_path, monkeypatch, kind, has_locks):
    if not has_locks:
        monkeypatch.setattr(locks, "lock_state", lambda number, wait=False: "none")
    out = tmp_path / "out"
    with (
        pytest.raises(UserError, match="out exists"),
        getattr(outputs, kind)(out),
        getattr(outputs, kind)(out if not has_locks else tmp_path / "else"),
    ):
        if kind == "new_folder":
            out.mkdir()
        else:
            out.write_text("theirs")
    assert (list(out.iterdir()) == []) if kind == "new_folder" else (out.read_text() == "theirs")
    assert {each.name for each in tmp_path.iterdir()} <= {"out", "else"}


def test_without_hard_links(tmp_path, monkeypatch):
    def fail(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    for number, name in enumerate(["a", "b"]):
        with outputs.new_file(tmp_path / name) as partial:
            partial.write_text(str(number))
    with pytest.raises(UserError, match="--out .*a exists"), outputs.new_file(tmp_path / "a") as partial:
        pass
    assert [(tmp_path / name).read_text() for name in "ab"] == ["0", "1"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]


def test_a_second_name_of_a_finished_file_is_not_written_to(tmp_path):
    """A process killed between giving the name and removing the hidden one leaves two names of one file."""
    (tmp_path / "kept").write_text("kept")
    os.link(tmp_path / "kept", tmp_path / ".out.partial")
    with outputs.new_file(tmp_path / "out") as partial:
        partial.write_text("other")
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.parametrize("kind", ["new_file", "new_folder"])
def test_links_are_not_followed(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    hidden = {"new_file": ".out.partial", "new_folder": ".out.unfinished"}[kind]
    (tmp_path / hidden).symlink_to(tmp_path / "elsewhere" / "x")
    with pytest.raises(UserError, match="which already exists; remove it"), getattr(outputs, kind)(tmp_path / "out"):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_long_names(tmp_path):
    out = tmp_path / ("n" * 255)
    with outputs.new_file(out) as partial:
        partial.write_text("x")
    assert out.read_text() == "x"


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    out.write_text("old")
    with pytest.raises(KeyError), outputs.replacing(out) as partial:
        partial.write_text("half")
        raise KeyError
    assert out.read_text() == "old" and sorted(tmp_path.iterdir()) == [elsewhere, out]
    with outputs.replacing(out) as first, outputs.replacing(out, elsewhere) as second:
        assert first.parent == tmp_path and second.parent == elsewhere
        assert outputs.is_partial(first) and outputs.is_partial(second) and not outputs.is_partial(out)
        first.write_text("first")
        second.write_text("second")
        assert out.read_text() == "old"
    assert out.read_text() == "first"  # the inner one came before
    assert sorted(tmp_path.rglob("*")) == [elsewhere, out]


@pytest.mark.parametrize("name", [".out.partial-0123abcd", ".out.partial", "out.partial", "out.12-34.part"])
def test_hidden_files_of_killed_processes(tmp_path, name):
    """The first kind, and those of earlier versions."""
    (tmp_path / name).write_text("half")
    outputs.write_json(tmp_path / "out", [1])
    assert (tmp_path / name).exists()  # its process may be writing
    os.utime(tmp_path / name, (0, 0))
    outputs.write_json(tmp_path / "ut", [1])  # another file, whose name is a part of this one's
    assert (tmp_path / name).exists()
    (tmp_path / "ut").unlink()
    outputs.write_json(tmp_path / "out", [2])
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "[\n  2\n]\n"
    (tmp_path / "sub").mkdir()
    for left in (name, f"sub/{name}", "sub/other.csv"):
        (tmp_path / left).write_text("half")
    outputs.remove_partials(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["other.csv", "out", "sub"]
