"""Compiled kernels on disk: a damaged file is compiled again, and a full disk is reported with the folder's name."""

import importlib.util
import sys

import numba
import pytest

from hostdev.kernels import cached

MODULE = """
from hostdev.kernels.jit import kernel

@kernel
def twice(x):
    return 2 * x
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call a kernel like a new process; return its result, and the number of cache hits."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(cached, "_reported", set())

    def call():
        spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
        mine = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "mine", mine)
        spec.loader.exec_module(mine)
        return mine.twice(21), mine.twice(0.5), sum(mine.twice.stats.cache_hits.values())

    return call


@pytest.mark.parametrize("kind", [".nbi", ".nbc"])
@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "another program's"])
def test_a_damaged_file_is_compiled_again(tmp_path, run, kind, how):
    """Earlier, every later command ended in a traceback, or ran the damaged code."""
    assert run() == (42, 1.0, 0)
    assert run() == (42, 1.0, 2)
    damaged = [path for path in (tmp_path / "numba").rglob("*twice*") if path.suffix == kind]
    assert damaged
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x55
        half = bytes(content[: len(content) // 2])
        path.write_bytes({"flipped": bytes(content), "cut": half, "empty": b""}.get(how, b"cos\nsystem\n(S'x'\ntR."))
    assert run() == (42, 1.0, 0)
    assert run() == (42, 1.0, 2)


def test_a_full_disk_ends_nothing(tmp_path, run, monkeypatch, capsys):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cached._CheckedFile, "_write", fail)
    assert run() == (42, 1.0, 0)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hostdev: warning: compiled kernels cannot be cached in {tmp_path / 'numba'}")
    assert "(No space left on device)" in line and "each process compiles them" in line
