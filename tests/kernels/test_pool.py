import gc
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

from hostdev.core.optimizers import LazyAdam
from hostdev.host.table import HostTable
from hostdev.kernels import pool
from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import host_threads, parallel_for, run_tasks, set_host_threads, urgent


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("grain", [1, 10, 1000])
@pytest.mark.parametrize("n", [0, 1, 99, 1000, 1001])
def test_every_item_is_done_once(n, grain, threads):
    set_host_threads(threads)
    done = np.zeros(n, np.int64)
    starts = []

    def work(start, stop):
        starts.append(start)
        done[start:stop] += 1

    parallel_for(work, n, grain=grain)
    assert done.tolist() == [1] * n
    assert all(start % grain == 0 for start in starts)


def test_an_error_reaches_the_caller_and_the_pool_lives_on():
    set_host_threads(3)

    def fail(start, stop):
        raise RuntimeError(f"at {start}")

    for _ in range(5):
        with pytest.raises(RuntimeError, match="at "):
            parallel_for(fail, 100)
    test_every_item_is_done_once(1000, 1, 3)


class Busy:
    """Keeps a helper from its next job until `leave` is set."""

    def __init__(self):
        self.begun, self.leave = threading.Event(), threading.Event()

    def help(self):
        self.begun.set()
        assert self.leave.wait(20)


@kernel
def add_one(start, stop, values):
    for at in range(start, stop):
        values[at] += 1


def fail(start, stop, values):
    raise RuntimeError(f"at {start}")


@pytest.mark.parametrize("work", [add_one, fail])
def test_a_helper_that_comes_late_holds_nothing(work):
    """Otherwise it would free an array at any later time."""
    set_host_threads(2)
    parallel_for(lambda start, stop: None, 1000)
    busy = [Busy() for _ in pool._workers]
    for each in busy:
        pool._queue.put(each)
    try:
        assert all(each.begun.wait(20) for each in busy)
        values = np.zeros(1000)
        freed = weakref.ref(values)

        with pytest.raises(RuntimeError, match="at 0") if work is fail else nullcontext():
            parallel_for(work, len(values), values)
        assert pool._queue.qsize() >= 1
        gc.disable()  # no cycle holds it either
        del values
        assert freed() is None
    finally:
        gc.enable()
        for each in busy:
            each.leave.set()


LATE = """
import threading, time, torch
from hostdev.kernels import pool

begun = threading.Event()

class Late:
    def help(self):
        begun.set()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            torch.empty(100)

pool.set_host_threads(2)
pool.parallel_for(lambda start, stop: None, 1000)
pool._queue.put(Late())
begun.wait()
"""


def test_helpers_end_before_the_interpreter():
    """Tensors are freed without the interpreter's lock; taking it again during exit kills the process."""
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_kernels_called_from_several_python_threads():
    set_host_threads(3)
    rng = np.random.default_rng(0)
    ids, grads = rng.integers(0, 2000, 8000), rng.standard_normal((8000, 40), dtype=np.float32)
    tables = [HostTable(2000, 40, LazyAdam(), name="t") for _ in range(6)]

    def use(table):
        for _ in range(10):
            table.apply(ids, grads + table.lookup(ids))

    workers = [threading.Thread(target=use, args=(table,)) for table in tables]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(np.array_equal(tables[0].block, table.block) for table in tables)


@pytest.mark.parametrize("callers", [1, 2])
def test_urgent_kernels_go_before_others(callers):
    """While a thread is in an urgent section, other threads only help with urgent work."""
    set_host_threads(3)
    begun, helpers, stop = [], set(), threading.Event()

    def usual(start, stop):
        begun.append(time.perf_counter())
        time.sleep(0.001)

    def hurry(start, stop):
        helpers.add(threading.get_ident())
        time.sleep(0.002)

    def work():
        while not stop.is_set():
            parallel_for(usual, 30)

    others = [threading.Thread(target=work) for _ in range(2)]
    for thread in others:
        thread.start()
    sections = []

    def section():
        with urgent():
            time.sleep(0.01)  # begun tasks end
            start = time.perf_counter()
            for _ in range(5):
                parallel_for(hurry, 12)
                time.sleep(0.002)
            sections.append((start, time.perf_counter()))

    for _ in range(4):
        hurried = [threading.Thread(target=section) for _ in range(callers)]
        for thread in hurried:
            thread.start()
        for thread in hurried:
            thread.join()
        count = len(begun)
        while len(begun) < count + 10:  # they continue
            time.sleep(0.001)
    stop.set()
    for thread in others:
        thread.join()
    assert len(sections) == 4 * callers
    assert not [moment for moment in begun for start, end in sections if start < moment < end]
    assert len(helpers) > 1 + callers


def test_an_error_ends_an_urgent_section():
    set_host_threads(2)
    with pytest.raises(RuntimeError, match="inside"), urgent():
        raise RuntimeError("inside")
    test_every_item_is_done_once(1000, 1, 2)


def _use_the_pool_in_a_child():
    table = HostTable(5000, 80, LazyAdam(), name="t")
    table.lookup(np.arange(5000))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own():
    set_host_threads(2)
    _use_the_pool_in_a_child()
    child = multiprocessing.get_context("fork").Process(target=_use_the_pool_in_a_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_the_number_of_threads():
    set_host_threads(4)
    assert host_threads() == 4
    with pytest.raises(ValueError, match="at least 1, not 0"):
        set_host_threads(0)


def test_an_interruption_drops_what_is_not_begun():
    set_host_threads(1)
    done = []

    def work(start, stop):
        done.append(start)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    set_host_threads(2)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):  # the main thread gets a range sooner or later
            parallel_for(work, 10_000_000)
    before = len(done)
    test_every_item_is_done_once(1000, 1, 2)
    assert len(done) == before


def test_after_an_interruption_nobody_writes():
    """Ctrl-C, twice, while the caller waits for helpers in the middle of a range."""
    set_host_threads(3)
    written, begun = np.zeros(3), threading.Barrier(4)

    def work(start, stop):
        if not begun.broken and threading.current_thread() is not threading.main_thread():
            begun.wait(10)
            time.sleep(0.3)
            written[start:stop] += 1
        elif threading.current_thread() is threading.main_thread():
            begun.wait(10)

    def interrupt():
        begun.wait(10)
        for _ in range(3):
            time.sleep(0.05)
            signal.raise_signal(signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        run_tasks([(work, at, at + 1, ()) for at in range(3)])
    seen = written.copy()
    assert seen.sum() == 2
    time.sleep(0.5)
    np.testing.assert_array_equal(written, seen)
    other.join()
    test_every_item_is_done_once(1000, 1, 3)
