"""python -m hostdev.warm_up: compile all kernels, in several processes, so that no command has to wait for them."""

import itertools
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numba.core import event

from hostdev.cache import planner
from hostdev.core.errors import UserError
from hostdev.core.optimizers import OPTIMIZERS, SGD, SparseOptimizer, build_optimizer
from hostdev.core.progress import bar, counted
from hostdev.core.table_dtypes import SLOT_DTYPES, TABLE_DTYPES
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.shards import ShardReader
from hostdev.ext.serving import json_structure
from hostdev.host.table import HostTable
from hostdev.host.warm_up import warm_up_disk, warm_up_feature, warm_up_ids, warm_up_keys, warm_up_table
from hostdev.kernels.compiling import Compiled
from hostdev.kernels.jit import address_of
from hostdev.kernels.pool import set_host_threads

_ID_DTYPES = ("int32", "int64")
_THREADS = 2  # more than 1, so that kernels are also called with several threads

Task = tuple[Callable[..., object], tuple[Any, ...]]


def run(processes: int) -> None:
    """Compile all kernels in this many processes, and print how many there are, and the folder that stores them.

    Raises:
        UserError: Compiled kernels cannot be stored on this machine.
    """
    folder = _require_folder()
    start = time.perf_counter()
    tasks = _tasks()
    compiled = _run_all(tasks, processes, "compiling")
    left = _run_all(tasks, 1, "checking") if compiled else 0  # a new process has to load them, and compile none
    if left:
        raise UserError(
            f"{counted(left, 'kernel')} could not be stored in {folder}; free disk space there, or set NUMBA_CACHE_DIR "
            "to a writable folder"
        )
    seconds = time.perf_counter() - start
    if compiled:
        by = f"{processes} process{'es' * (processes > 1)}"
        print(f"{counted(compiled, 'kernel')} compiled in {seconds:.0f} s by {by}: {folder}")
    else:
        print(f"all kernels are already compiled: {folder}")


def _run_all(tasks: Sequence[Task], processes: int, what: str) -> int:
    """Run tasks in new processes; return the number of kernels that were compiled."""
    compiled = 0
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin)
    try:
        with bar(len(tasks), what, "parts") as progress:
            for done in as_completed([pool.submit(_run, *task) for task in tasks]):
                compiled += done.result()
                progress.update()
    except BaseException:
        for process in (pool._processes or {}).values():  # so that Ctrl-C need not wait for a kernel
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return compiled


def _tasks() -> list[Task]:
    """Return calls that together compile all kernels, the slowest first."""
    optimizers = [build_optimizer(name) for name in OPTIMIZERS] + [SGD(clip_norm=1.0)]
    dtypes = list(itertools.product(TABLE_DTYPES, SLOT_DTYPES))  # of weights and optimizer state
    tables = itertools.product(_ID_DTYPES, dtypes, optimizers)
    features = itertools.product((1, 32), (False, True), (False, True), (False, True))
    return [
        (_prepare, ()),
        (warm_up_keys, ()),
        (json_structure.warm_up, ()),
        *((planner.warm_up, (dtype,)) for dtype in _ID_DTYPES),
        *((warm_up_disk, (dtype,)) for dtype in _ID_DTYPES),
        *((warm_up_ids, (dtype,)) for dtype in _ID_DTYPES),
        *((_warm_up_table, (ids, stored, optimizer, 32)) for ids, stored, optimizer in tables),
        *((_warm_up_feature, kind) for kind in features),
    ]


def _warm_up_table(id_dtype: str, dtypes: tuple[str, str], optimizer: SparseOptimizer, dim: int) -> None:
    warm_up_table(id_dtype, dtypes, optimizer, dim)
    dtype, slots = dtypes
    HostTable(1, dim, optimizer, name="warm-up", dtype=dtype, slots=slots).erase(np.zeros(1, id_dtype))


def _warm_up_feature(dim: int, pooled: bool, weighted: bool, bfloat16: bool) -> None:
    warm_up_feature(dim, pooled=pooled, weighted=weighted, bfloat16=bfloat16)


def _prepare() -> None:
    """Prepare small data sets and read one, which compiles the kernels of `hostdev.data`."""
    roles = TableOptions(label="label", numeric=("price",), categorical=("user", "item"), bags=(("tags", "|"),))
    with tempfile.TemporaryDirectory(prefix="hostdev-warm-up-") as name:
        folder = Path(name)
        rows = [f"{i % 2},u{i % 7},{i % 5},{i / 3},a|b" for i in range(200)]
        (folder / "t.csv").write_text("\n".join(["label,user,item,price,tags", *rows]) + "\n")
        write_text(Synthetic(200, 0), folder / "criteo.txt")
        sources: list[Source] = [
            TableSource([folder / "t.csv"], roles),
            CriteoText([folder / "criteo.txt"]),
            Synthetic(200, 0),
        ]
        ways = [Options(threshold=0), Options(threshold=None, hash_buckets=50)]
        for number, (source, way) in enumerate(itertools.product(sources, ways)):
            found = build(source, folder / str(number), way)
            for _ in ShardReader(folder / str(number), found, "train").batches(50, seed=0):
                pass


def _require_folder() -> Path:
    """Return the folder where numba stores compiled kernels; raise UserError if there is none."""
    cache = getattr(address_of, "_cache", None)
    path = getattr(cache, "cache_path", None)
    if path is None:
        raise UserError(
            "compiled kernels cannot be stored: neither the package's folder nor the user's cache folder is writable; "
            "set NUMBA_CACHE_DIR to a writable folder"
        )
    return Path(path).parent


def _begin() -> None:
    """Set up a process of the pool. It ignores Ctrl-C, because its parent process ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_host_threads(_THREADS)


def _run(call: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    """Run a task; return the number of kernels that were compiled."""
    compiled = Compiled()
    with event.install_listener("numba:compile", compiled):
        call(*arguments)
    return compiled.count
