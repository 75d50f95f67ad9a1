"""After the warm-up no step of a training waits for a kernel to be compiled, or loaded from numba's cache."""

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numba
import pytest

from hostdev.core.errors import UserError
from hostdev.ext.warm_up import kernels as command
from hostdev.host.warm_up import warm_up_feature
from hostdev.kernels.compiling import run_calls
from hostdev.kernels.jit import address_of
from tests.conftest import ROOT

COMPILED = """
import importlib, pkgutil, sys
import hostdev.kernels
from hostdev.cache import planning

names = [name for _, name, _ in pkgutil.iter_modules(hostdev.kernels.__path__, "hostdev.kernels.")]
modules = [planning, *map(importlib.import_module, names)]

def compiled():
    return {(one.__qualname__, signature) for module in modules
            for kernel in vars(module).values() if not isinstance(kernel, type)
            for one in (kernel, getattr(kernel, "loop", None)) for signature in getattr(one, "signatures", ())
            if one.targetoptions.get("inline", "never") == "never"}
"""
CODE = """
import numpy as np, torch
from hostdev.cache import planner
from hostdev.kernels.pool import set_host_threads
from hostdev.host.warm_up import warm_up_feature
from tests.compile_kernels import warm_up
from tests.fields import FieldsBatch, trainer_of

dtype, depth, cache, stored = np.dtype(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None, sys.argv[4]
slots = sys.argv[5]
set_host_threads(2)
warm_up(dtype, (stored, slots))
if cache:
    planner.warm_up(dtype)
    warm_up(np.dtype(np.int32), (stored, slots))
for dim in (1, 8):
    warm_up_feature(dim, weighted=True)
before, rng = compiled(), np.random.default_rng(0)
assert before
cache = {"capacity_rows": cache, "window": 2} if cache else None
trainer = trainer_of(300_000, 8, depth=depth, cache=cache, layers=(32, 16), dtype=stored, slots=slots)
batches = [FieldsBatch(np.zeros(2000, np.float32), (300_000 * rng.random((2000, 39)) ** 3).astype(dtype),
                 np.ones((2000, 39), np.float32)) for _ in range(6)]
for _ in trainer.train(batches):
    pass
print(*sorted(map(str, compiled() - before)), sep="\\n")
"""


@pytest.mark.parametrize(
    ("dtype", "depth", "cache", "stored", "slots"),
    [
        ("int64", 2, "", "fp32", "fp32"),
        ("int32", 2, "5%", "fp32", "fp32"),
        pytest.param("int64", 2, "5%", "bf16", "bf16", marks=pytest.mark.slow),
        pytest.param("int32", 0, "", "fp32", "bf16", marks=pytest.mark.slow),
        pytest.param("int64", 2, "5%", "fp32", "8bit", marks=pytest.mark.slow),
        pytest.param("int64", 0, "5%", "fp32", "fp32", marks=pytest.mark.slow),
        pytest.param("int32", 2, "", "bf16", "fp32", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_in_training(dtype, depth, cache, stored, slots):
    given = [sys.executable, "-c", COMPILED + CODE, dtype, str(depth), cache, stored, slots]
    ran = subprocess.run(given, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout.strip()


FEATURES = """
import itertools
import numpy as np
from hostdev.host.warm_up import warm_up_feature
from hostdev.kernels.arrays import Strided
from hostdev.kernels import bags, lookup
from hostdev.kernels.pool import set_host_threads

kinds = list(itertools.product((1, 8), (False, True), (False, True), (False, True)))
for threads in (2, 4):
    set_host_threads(threads)
    for dim, *kind in kinds:
        warm_up_feature(dim, **dict(zip(("pooled", "weighted", "bfloat16"), kind)))
before = compiled()
assert before
for threads, mean, in_order in itertools.product((2, 4), (False, True), (False, True)):
    set_host_threads(threads)
    for dim, pooled, weighted, bfloat16 in kinds:
        rows, out = np.zeros((50, dim), np.float32), np.zeros((300, dim), np.uint16 if bfloat16 else np.float32)
        weights = np.ones(300, np.float32) if weighted else None
        offsets = np.arange(301, dtype=np.int32) if pooled else None
        feature = bags.FeatureOccurrences(np.sort(np.arange(300) % 50).astype(np.int32), offsets, weights, mean)
        if pooled:
            bags.pool(rows, feature, out)
        elif weighted:
            lookup.gather_scaled(rows, feature.inverse, weights, out)
        bags.Uses([feature], 50, in_order=in_order).sum([Strided(out)], rows)
print(*sorted(map(str, compiled() - before)), sep="\\n")
"""


def test_a_feature_that_was_warmed_up_compiles_nothing():
    ran = subprocess.run(
        [sys.executable, "-c", COMPILED + FEATURES], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout.strip()


TABLES = """
import sys
import time
from functools import partial
from pathlib import Path
from pathlib import Path
import numpy as np
import hostdev
from hostdev.core.optimizers import OPTIMIZERS, build_optimizer
from hostdev.host.warm_up import warm_up_ids, warm_up_table
from hostdev.kernels.pool import set_host_threads

set_host_threads(2)
warm_up_ids(sys.argv[1])
dtypes = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "8bit")]
for name in OPTIMIZERS:
    for stored in dtypes:
        warm_up_table(sys.argv[1], stored, build_optimizer(name), 8)
before = compiled()
assert before
for name in OPTIMIZERS:
    for stored, slots in dtypes:
        table = hostdev.HostTable(50_000, 8, build_optimizer(name), name="t", dtype=stored, slots=slots)
        table.stored.note_changes()
        ids = np.arange(0, 50_000, 3, dtype=sys.argv[1])
        grads = np.full((len(ids), 8), 0.5, np.float32)
        table.lookup(ids)
        table.update(ids, grads)
        table.apply(ids % 1000, grads)
print(*sorted(map(str, compiled() - before)), sep="\\n")
"""


@pytest.mark.parametrize("id_dtype", ["int32", pytest.param("int64", marks=pytest.mark.slow)])
def test_the_tables_of_every_optimizer_compile_nothing(id_dtype):
    ran = subprocess.run(
        [sys.executable, "-c", COMPILED + TABLES, id_dtype], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout.strip()


def test_the_command_compiles_what_was_not_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(command, "_tasks", lambda: [(warm_up_feature, (1,)), (warm_up_feature, (8,))])
    command.run(2)
    assert re.match(r"[1-9]\d* kernels compiled in \d+ s by 2 processes: ", capsys.readouterr().out)
    command.run(1)
    assert capsys.readouterr().out.startswith("all kernels are already compiled: ")


def compile_always():
    """Compile a function that numba does not keep, as on a full disk."""
    numba.njit(lambda x: x + 1)(1)


def test_kernels_that_are_not_kept_are_an_error(monkeypatch):
    monkeypatch.setattr(command, "_tasks", lambda: [(compile_always, ())])
    with pytest.raises(UserError, match=r"1 kernel could not be stored in .*NUMBA_CACHE_DIR to a writable folder"):
        command.run(1)
    monkeypatch.delattr(address_of, "_cache")
    with pytest.raises(UserError, match="compiled kernels cannot be stored: .* set NUMBA_CACHE_DIR"):
        command.run(1)


@pytest.mark.slow
def test_everything_is_compiled_at_once(capsys):
    command.run(2)
    capsys.readouterr()
    command.run(1)
    *_, last = capsys.readouterr().out.splitlines()  # where reading takes long, there is progress before
    assert last.startswith("all kernels are already compiled: ")


def meet_another(folder):
    """Leave a file with this process's number, and wait for that of another process."""
    (folder / str(os.getpid())).touch()
    until = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)  # between two looks for the other's file


def fail_elsewhere(number):
    """End each process but one."""
    if os.getpid() != number:
        os._exit(1)


def count_spread(folder, helpers_fail):
    """Run calls of which two can only end if two processes take them; print the compiled and the left kernels."""
    calls = [
        partial(warm_up_feature, 1),
        *(partial(meet_another, Path(folder)) for _ in range(2) if not helpers_fail),
        *(partial(fail_elsewhere, os.getpid()) for _ in range(2) if helpers_fail),
        *(partial(warm_up_feature, 8, bfloat16=one, weighted=True) for one in (False, True)),
    ]
    print(run_calls(calls, 2), run_calls(calls, 2))


@pytest.mark.parametrize("helpers_fail", [False, True])
def test_processes_share_the_compilation_of_a_run(tmp_path, helpers_fail):
    seen = tmp_path / "seen"
    seen.mkdir()
    code = f"from tests.test_warm_up import *; count_spread(sys.argv[1], {helpers_fail})"
    ran = subprocess.run(
        [sys.executable, "-c", code, seen],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")},
    )
    assert ran.returncode == 0, ran.stderr
    first, second = map(int, ran.stdout.split())
    assert first
    assert not second


def raise_value_error():
    raise ValueError("here")


def test_an_error_of_a_call_is_raised():
    with pytest.raises(ValueError, match="here"):
        run_calls([compile_always, raise_value_error, raise_value_error], 2)
