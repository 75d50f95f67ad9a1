import threading
import time

import pytest

from hostdev.core.workers import Worker, run_in_thread


def test_a_call_that_is_asked_for_begins_after_that():
    begun, go, calls = threading.Event(), threading.Event(), []

    def call():
        calls.append(len(calls))
        begun.set()
        go.wait(30)

    worker = Worker("test", call)
    first = worker.ask()
    begun.wait(30)
    second = worker.ask()
    assert worker.ask() == second == first + 1 and not worker.wait(first, 0.01)
    go.set()
    assert worker.wait(second, 30) and calls == [0, 1]
    assert worker.close(30) and calls == [0, 1]


def test_a_call_is_repeated():
    calls = []
    worker = Worker("test", lambda: calls.append(None), seconds=0.001).start()
    assert worker.wait_for(lambda: len(calls) > 3, 30) and worker.close(30)


@pytest.mark.parametrize("drains", [False, True])
def test_what_still_waits_at_the_end(drains):
    done = []
    worker = Worker("test", lambda: done.append("call"), drains=drains)
    worker.wait(worker.ask(), 30)
    assert worker.close(30, lambda: done.append("last"))
    assert done == ["call"] * (1 + drains) + ["last"]


def test_an_error_is_raised_for_whoever_waits_or_closes():
    def call():
        raise OSError("no disk")

    worker = Worker("test", call)
    number = worker.ask()
    for use in (lambda: worker.wait(number, 30), worker.check, lambda: worker.close(30)):
        with pytest.raises(OSError, match="no disk"):
            use()
    assert worker.stop(30)


def test_a_call_that_hangs_does_not_hold_the_end_up():
    begun, go = threading.Event(), threading.Event()
    worker = Worker("test", lambda: begun.set() or go.wait())
    worker.ask()
    assert begun.wait(30)
    start = time.monotonic()
    assert not worker.stop(0.05) and time.monotonic() - start < 10
    go.set()
    assert worker.stop(30)


def test_a_worker_that_was_never_asked_has_no_thread():
    threads = threading.active_count()
    assert Worker("test", lambda: None).close() and threading.active_count() == threads


def test_a_call_in_a_thread_of_its_own():
    assert run_in_thread("test", lambda: threading.current_thread().name).result(30) == "test"
    with pytest.raises(ZeroDivisionError):
        run_in_thread("test", lambda: 1 / 0).result(30)
