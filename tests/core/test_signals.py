"""Ctrl-C waits for work that must not be interrupted."""

import signal
import threading

import pytest

from hostdev.core.signals import deferred, uninterruptible


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_one_waits_for_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred():
        interrupt()
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_does_not():
    with pytest.raises(KeyboardInterrupt), deferred():
        interrupt()
        interrupt()
        raise AssertionError("it did not come")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_between_is_still_to_be_seen():
    with pytest.raises(KeyboardInterrupt) as caught, deferred():
        interrupt()
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_are_as_they_are():
    seen = []

    def work():
        with deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_call_is_made_until_it_has_come_to_its_end():
    tries = []

    def call():
        tries.append(1)
        if len(tries) < 3:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        uninterruptible(call)
    assert len(tries) == 3
