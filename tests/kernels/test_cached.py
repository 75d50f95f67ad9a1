"""Compiled kernels on disk: a damaged file is compiled again, and a full disk is reported with the folder's name."""

import importlib.util
import os
import subprocess
import sys
import threading
import time

import numba
import pytest
from llvmlite.binding.ffi import _LLVMLock
from numba.core.compiler_lock import _CompilerLock

from hostdev.kernels import cached
from tests.conftest import ROOT

MODULE = """
from hostdev.kernels.jit import kernel

@kernel
def twice(x):
    return 2 * x
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call a kernel with some values like a new process; return the results, and the number of cache hits."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(cached, "_reported", set())

    def call(*values):
        spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
        mine = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "mine", mine)
        spec.loader.exec_module(mine)
        return *map(mine.twice, values or (21, 0.5)), sum(mine.twice.stats.cache_hits.values())

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


def test_code_of_other_types_does_not_run(tmp_path, run):
    """Two processes that compiled a kernel for different types at once could leave an index that names wrong code."""
    run(21)
    [index] = (tmp_path / "numba").rglob("*twice*.nbi")
    of_integers = index.read_bytes()
    index.unlink()
    run(0.5)  # another process, which did not see the index
    index.write_bytes(of_integers)
    assert run(21) == (42, 0)
    assert run(21) == (42, 1)


COMPILING = """
import sys, time
import mine
until = float(sys.argv[1])
time.sleep(max(0, until - time.time()))  # so that all processes compile at the same moment
for value in map(eval, sys.argv[2:]):
    mine.twice(value)
print(sum(mine.twice.stats.cache_hits.values()))
"""


def test_processes_that_compile_at_once_lose_nothing(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    values = ["1", "0.5", "True", "1j"]

    def started(*given):
        command = [sys.executable, "-c", COMPILING, str(time.time() + 3), *given]
        return subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    def hits(processes):
        return [int(process.communicate(timeout=120)[0]) for process in processes]

    assert hits([started(value) for value in values]) == [0] * len(values)
    assert hits([started(*values)]) == [len(values)]


HELPERS = """
from numba.extending import overload
from hostdev.kernels.jit import inline

FACTOR = 2

@inline
def scale(x):
    return 2 * x

def shift(x):
    raise NotImplementedError

@overload(shift, inline="always")
def _shift(x):
    def add(x):
        return x + 0
    return add
"""
USER = """
from hostdev_helpers import FACTOR, scale, shift
from hostdev.kernels.jit import kernel

@kernel
def twice(x):
    return shift(scale(x)) * FACTOR // 2
"""


@pytest.mark.parametrize(
    ("was", "now", "result"), [("2 * x", "3 * x", 63), ("x + 0", "x + 1", 43), ("FACTOR = 2", "FACTOR = 4", 84)]
)
def test_a_changed_helper_is_compiled_again(tmp_path, monkeypatch, was, now, result):
    """numba itself looks at the kernel's file only, so that an upgrade ran the old helpers."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(cached, "_PACKAGE", "hostdev_helpers")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be that of the first source, for a second

    def call():
        cached._hash_file.cache_clear()
        found = {}
        for name in ("hostdev_helpers", "mine"):
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            found[name] = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, found[name])
            spec.loader.exec_module(found[name])
        twice = found["mine"].twice
        return twice(21), sum(twice.stats.cache_hits.values())

    (tmp_path / "mine.py").write_text(USER)
    (tmp_path / "hostdev_helpers.py").write_text(HELPERS)
    assert call() == (42, 0)
    assert call() == (42, 1)
    (tmp_path / "hostdev_helpers.py").write_text(HELPERS.replace(was, now))
    assert call() == (result, 0)
    assert call() == (result, 1)


def test_a_full_disk_ends_nothing(tmp_path, run, monkeypatch, capsys):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cached._CheckedFile, "_write", fail)
    assert run() == (42, 1.0, 0)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hostdev: warning: compiled kernels cannot be cached in {tmp_path / 'numba'}")
    assert "(No space left on device)" in line and "each process compiles them" in line


@pytest.mark.parametrize("kind", [_CompilerLock, _LLVMLock])
def test_an_interruption_while_a_lock_of_the_compiler_is_acquired(run, monkeypatch, kind):
    """Ctrl-C of `advise` once left it locked: a helper waited for it, and the main thread for the helper, forever."""
    enter = kind.__enter__

    def interrupted(lock):
        enter(lock)
        raise KeyboardInterrupt  # before `with` has registered the lock's exit

    with monkeypatch.context() as patched:
        patched.setattr(kind, "__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    found = []
    helper = threading.Thread(target=lambda: found.append(run()[0]), daemon=True)
    helper.start()
    helper.join(60)
    assert found == [42]
