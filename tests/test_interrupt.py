"""How a run ends after a signal: who ends the process, and what lives on where nobody does."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from hostdev.core import cli
from hostdev.train import interrupt
from hostdev.train.interrupt import GracefulStop
from tests import forks
from tests.conftest import ROOT, environment


class Model:
    """What a run holds."""


@pytest.mark.parametrize("signalled", [False, True])
def test_nothing_outlives_the_context(signalled):
    """A thread that frees a tensor while the interpreter ends aborts the process."""
    model = Model()
    held = weakref.ref(model)
    with GracefulStop(lambda model=model: str(model)) as stop:
        if signalled:
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested == (signal.SIGINT if signalled else None)
    assert "hostdev-interrupt" not in {thread.name for thread in threading.enumerate()}
    gc.disable()
    try:
        del model, stop
        assert held() is None
    finally:
        gc.enable()
    with pytest.raises(KeyboardInterrupt):  # the signal's meaning is what it was
        os.kill(os.getpid(), signal.SIGINT)


def script(tmp_path, text):
    process = forks.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return process.returncode, process.stdout, process.stderr


def test_the_main_thread_gets_no_further_when_the_deadline_has_passed(tmp_path):
    """It would finish, and end the interpreter, while the watching thread completes the logs."""
    code, out, err = script(
        tmp_path,
        """
import os, signal, threading, time
from hostdev.train import interrupt
interrupt.DEADLINE_SECONDS = 0.1
begun = threading.Event()

def complete():
    begun.set()
    time.sleep(0.5)
    print("complete", flush=True)
    return "the logs are complete"

with interrupt.GracefulStop(complete):
    os.kill(os.getpid(), signal.SIGTERM)
    begun.wait()
print("further", flush=True)
""",
    )
    assert (code, out, err) == (128 + signal.SIGTERM, "complete\n", "the logs are complete\n")


def test_an_error_while_the_logs_are_completed_ends_the_process_too(tmp_path):
    code, _, _ = script(
        tmp_path,
        """
import os, signal, time
from hostdev.train import interrupt
interrupt.DEADLINE_SECONDS = 0.1
with interrupt.GracefulStop(lambda: 1 / 0):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
""",
    )
    assert code == 130


def test_a_command_that_is_interrupted_does_not_end_the_interpreter(tmp_path):
    """That takes seconds with torch on a busy machine, and threads at work may abort it: exit functions do not run."""
    code, out, err = script(
        tmp_path,
        """
import atexit
from hostdev.core import cli

def main(argv):
    print("not flushed yet", end="")
    raise KeyboardInterrupt

atexit.register(print, "the interpreter ends")
cli.run("x", main)
""",
    )
    assert (code, out, err) == (130, "not flushed yet", "x: interrupted\n")


def test_a_caller_that_gives_arguments_gets_the_exit_code(capsys):
    def main(argv):
        raise interrupt.Interrupted(signal.SIGTERM, "3 steps")

    assert cli.run("x", main, []) == 143
    assert capsys.readouterr().err == "x: interrupted; 3 steps\n"


def test_another_signal_of_the_process_is_none_of_ours():
    """The wakeup file gets every signal's number."""
    seen = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.set())
    try:
        with GracefulStop(lambda: "") as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen.wait(5)
        assert stop.requested is None
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "module",
    ["train", "train.quickstart", "verify", "advise", "predict", "checkpoint", "data.preprocess", "warm_up", "launch"],
)
def test_ctrl_c_during_the_imports_is_one_line(tmp_path, module):
    # Short sleeps: a signal between a check of the interpreter's and a call that blocks is seen after that call.
    (tmp_path / "numpy.py").write_text(
        "import time\nprint('importing', flush=True)\nfor _ in range(6000):\n    time.sleep(0.01)\n"
    )
    found = environment(tmp_path)
    found["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{found['PYTHONPATH']}"
    process = subprocess.Popen(
        [sys.executable, "-m", f"hostdev.{module}"],
        cwd=tmp_path,
        env=found,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
    finally:
        timer = threading.Timer(30, process.kill)
        timer.start()
        out, err = process.communicate()
        timer.cancel()
    assert (process.returncode, out, err) == (130, "", f"hostdev.{module}: interrupted\n")


@pytest.mark.parametrize("own", [True, False])
def test_no_garbage_is_collected_while_modules_are_imported(own):
    """Only in a process that runs nothing but a command; a program's own settings stay."""
    code = (
        "import gc\nfrom hostdev.core import cli\n"
        f"cli._is_own = {own}\n"
        f"with cli.importing('hostdev'):\n    assert gc.isenabled() is {not own}\n"
        f"assert gc.isenabled()\nassert bool(gc.get_freeze_count()) is {own}\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
