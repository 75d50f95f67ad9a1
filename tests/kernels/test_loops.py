"""Kernels whose ranges are handed out in native code."""

import signal
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest

from hostdev.kernels.jit import kernel
from hostdev.kernels.loops import Flag, KernelLoop
from hostdev.kernels.pool import KernelTask, parallel_for, ranges, run_tasks, set_host_threads, timed, urgent


@kernel
def note(start, stop, done, starts, piece):
    for i in range(start, stop):
        done[i] += 1
    starts[piece] = start


def noted(n, grain):
    """Run it; return how often each item was done, and where each range began."""
    pieces = ranges(n, grain)
    done, starts = np.zeros(n, np.int64), np.full(len(pieces), -1)
    run_tasks([KernelTask(note, n, grain, len(pieces), (done, starts))])
    return done.tolist(), starts.tolist()


@pytest.mark.parametrize("threads", [1, 2, 7, 64])
def test_each_range_is_done_once_and_has_its_number(threads):
    set_host_threads(threads)
    for n in (0, 1, 99, 1000, 1001):
        for grain in (1, 10, 1000):
            assert noted(n, grain) == ([1] * n, [start for start, _ in ranges(n, grain)])


def test_several_callers_at_once():
    set_host_threads(5)
    wrong = []

    def call(n):
        for _ in range(100):
            if noted(n, 1) != ([1] * n, [start for start, _ in ranges(n, 1)]):
                wrong.append(n)

    callers = [threading.Thread(target=call, args=(n,)) for n in (7, 300, 1000, 1001)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_kernel_is_compiled_into_its_loop_only():
    set_host_threads(2)
    noted(10, 1)
    noted(2000, 1)
    assert not note.signatures
    assert len(note.loop.signatures) == 1


class Pair(NamedTuple):
    a: np.float32
    b: int


@kernel
def take(start, stop, nothing, flag, large, pair, at, scale, out):
    for i in range(start, stop):
        if nothing is None and flag and large == np.uint64(1 << 63):
            out[i] = pair.a * scale + at[i] + pair.b


def test_arguments_keep_their_types():
    set_host_threads(3)
    n, out = 40, np.zeros(40)
    at = np.arange(n, dtype=np.int32)
    parallel_for(take, n, None, True, np.uint64(1 << 63), Pair(np.float32(0.1), 3), at, np.float32(0.7), out)
    assert out.tolist() == [float(np.float32(0.1) * np.float32(0.7)) + i + 3 for i in range(n)]


@kernel
def append(start, stop, what, log):
    for _ in range(start, stop):
        log[0] += 1
        log[log[0]] = what


def test_tasks_begin_in_the_order_given():
    set_host_threads(1)
    log = np.zeros(30, np.int64)
    kernel_task = KernelTask(append, 5, 1, 5, (1, log))

    def call(start, stop):
        append(start, stop, 2, log)

    tasks = [kernel_task, (call, 0, 1, ()), (call, 1, 3, ()), kernel_task._replace(args=(3, log)), (call, 0, 2, ())]
    for _ in range(2):  # tasks can run again
        log[:] = 0
        run_tasks(tasks)
        assert log[1 : log[0] + 1].tolist() == [1] * 5 + [2] * 3 + [3] * 5 + [2] * 2


@kernel
def fail(start, stop, at, done):
    done[start] += 1
    if start == at:
        raise ValueError("this range")


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_an_error_reaches_the_caller_and_what_is_not_begun_is_dropped(threads):
    set_host_threads(threads)
    n, dropped = 300_000, 0
    for _ in range(5):
        done, other = np.zeros((2, n), np.int64)
        tasks = [KernelTask(fail, n, 1, n, (10, done)), KernelTask(fail, n, 1, n, (-1, other))]
        with pytest.raises(ValueError, match="this range"):
            run_tasks(tasks)
        seen = done.copy(), other.copy()
        assert seen[0].max() == 1
        dropped += 2 * n - seen[0].sum() - seen[1].sum()  # unless this thread was late to its error
        time.sleep(0.01)  # in which a helper that goes on would write
        assert np.array_equal(done, seen[0]) and np.array_equal(other, seen[1])  # no thread writes afterwards
    assert dropped > 0
    assert noted(1000, 1)[0] == [1] * 1000


@kernel
def halt_at(start, stop, at, flag, done):
    done[start] += 1
    if start == at:
        flag[0] = 1


def test_a_loop_comes_back_where_somebody_is_urgent():
    flag, done = Flag(), np.zeros(100, np.int64)
    loop = KernelLoop(KernelTask(halt_at, 100, 1, 100, (30, flag.value, done)))
    loop.work(flag)
    assert done.tolist() == [1] * 31 + [0] * 69
    assert loop.is_left()
    loop.work(flag)
    assert done.sum() == 31
    flag.value[0] = 0
    loop.work(flag)
    assert done.tolist() == [1] * 100
    assert not loop.is_left()


def test_a_dropped_loop_begins_nothing():
    flag, done = Flag(), np.zeros(100, np.int64)
    loop = KernelLoop(KernelTask(halt_at, 100, 1, 100, (30, flag.value, done)))
    loop.work(flag)
    flag.value[0] = 0
    loop.drop()
    loop.work(flag)
    assert done.sum() == 31


def test_a_kernel_that_a_finalizer_runs_first_takes_no_range_from_another(monkeypatch):
    """Python may run a finalizer or a signal's handler between any two of its instructions."""
    values, others = np.zeros((2, 10), np.int64)
    task = KernelTask(note, 10, 10, 1, (values, np.zeros(1, np.int64)))
    run_tasks([task])
    loop, interruptions = note.loop, [KernelTask(note, 10, 10, 1, (others, np.zeros(1, np.int64)))] * 2

    def interrupted(*args):
        if interruptions:
            run_tasks([interruptions.pop()])
        return loop(*args)

    monkeypatch.setattr(note, "loop", interrupted)
    run_tasks([task])
    assert values.tolist() == [2] * 10
    assert others.tolist() == [2] * 10


@kernel
def spin(start, stop, rounds, done):
    for i in range(start, stop):
        x = done[i]
        for _ in range(rounds):
            x = x * 0.5 + 0.1
        done[i] = 1 if x >= 0 else 2


def test_urgent_kernels_and_others_all_come_to_their_end():
    set_host_threads(3)
    n = 4000
    done = np.zeros((2, n))
    others = [threading.Thread(target=run_tasks, args=([KernelTask(spin, n, 1, n, (3000, mine))],)) for mine in done]
    for thread in others:
        thread.start()
    for _ in range(10):
        with urgent():
            hurried = np.zeros(50)
            run_tasks([KernelTask(spin, 50, 1, 50, (100, hurried))])
            assert hurried.sum() == 50
    for thread in others:
        thread.join()
    assert done.sum() == 2 * n


@pytest.mark.parametrize("threads", [1, 3])
def test_ctrl_c_in_the_midst_of_a_kernels_ranges(threads):
    """Ctrl-C in the main thread: neither it nor the helpers begin another range."""
    set_host_threads(threads)
    n = 20_000  # seconds
    done = np.zeros(n)
    run_tasks([KernelTask(spin, 1, 1, 1, (1, done))])  # compiled
    done[:] = 0

    def interrupt():
        while done.sum() < 20:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        run_tasks([KernelTask(spin, n, 1, n, (100_000, done))])
    seen = done.copy()
    other.join()
    assert 20 <= seen.sum() < n
    time.sleep(0.05)  # in which a helper that goes on would write
    assert np.array_equal(done, seen)


def test_tasks_are_timed_from_first_to_last():
    set_host_threads(3)
    times, done = [], np.zeros(64)
    before = time.perf_counter_ns()
    run_tasks(timed([KernelTask(spin, 64, 1, 64, (10, done)), (spin, 0, 1, (10, done))], times))
    assert len(times) >= 2
    assert before <= min(begin for begin, _ in times) <= max(end for _, end in times) <= time.perf_counter_ns()
