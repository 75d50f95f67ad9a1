"""What is seen of progress: on a terminal, in a log, and the time that is left."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import types
import typing
from importlib.util import find_spec

import pytest

from hostdev.core import progress
from hostdev.core.progress import TimeLeft, bar
from tests.conftest import environment


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_lines_of_a_log(clock, capsys):
    """Nothing for ten seconds, then whole lines, and at the end that all is done: no bar that stands still at 68%."""
    with bar(91, "epoch 1/2", "step") as shown:
        for step in range(1, 92):
            clock.now += 0.35
            shown.set_postfix_str(f"loss 0.{step:02d}")
            shown.update()
    assert capsys.readouterr() == (
        "epoch 1/2: 29 of 91 steps, 2.9 steps/s, 00:21 left, loss 0.29\n"
        "epoch 1/2: 58 of 91 steps, 2.9 steps/s, 00:11 left, loss 0.58\n"
        "epoch 1/2: 87 of 91 steps, 2.9 steps/s, 00:01 left, loss 0.87\n"
        "epoch 1/2: 91 steps in 00:31\n",
        "",
    )


def test_nothing_for_work_that_is_quick(clock, capsys):
    with bar(10, "quick", "steps") as shown:
        for _ in range(10):
            clock.now += 0.9
            shown.update()
    assert capsys.readouterr() == ("", "")


def test_work_that_does_not_end(clock, capsys):
    """After an error, or a signal, nobody says that it was done."""
    with pytest.raises(RuntimeError), bar(10, "work", "step", left=lambda: None) as shown:
        for _ in range(9):
            clock.now += 12
            shown.update()
        raise RuntimeError
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "work: 1 of 10 steps, 12.0 s/step"
    assert lines[-1].startswith("work: 9 of 10 steps")


def test_slow_work_does_not_fill_the_log(clock, capsys):
    """A line each ten seconds, or where that is less than a fiftieth of the work, a minute."""
    with bar(10_000, "work", "step") as shown:
        for _ in range(600):
            clock.now += 1
            shown.update()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        "10",
        "70",
        "130",
        "190",
        "250",
        "310",
        "370",
        "430",
        "490",
        "550",
    ]


def test_a_part_of_more_work(clock, capsys):
    with bar(10, "epoch 1/2", "step", left=lambda: 61.2) as shown:
        clock.now += 11
        shown.update()
    assert capsys.readouterr().out == "epoch 1/2: 1 of 10 steps, 11.0 s/step, 01:01 left in all\n"


def test_large_numbers(clock, capsys):
    for unit in ("B", "row"):
        with bar(4_000_000, "reading", unit, unit_scale=True) as shown:
            clock.now += 11
            shown.update(1_230_000)
            clock.now += 20
            shown.update(2_770_000)
    with bar(4000, "writing", "rows") as shown:
        clock.now += 11
        shown.update(1500)
    assert capsys.readouterr().out.splitlines() == [
        "reading: 1.23MB of 4.00MB, 112kB/s, 00:24 left",
        "reading: 4.00MB in 00:31",
        "reading: 1.23M of 4.00M rows, 112k rows/s, 00:24 left",
        "reading: 4.00M rows in 00:31",
        "writing: 1,500 of 4,000 rows, 136.4 rows/s, 00:18 left",
    ]


def test_the_time_left_of_all_epochs(clock):
    left = TimeLeft(training=20, evaluation=6)
    assert left.seconds() is None
    left.begin()
    for _ in range(10):
        clock.now += 2
        left.step("training")
    assert left.seconds() == pytest.approx(10 * 2 + 6 * 2)  # nobody knows yet that an evaluation is quicker
    clock.now += 100  # of something else
    left.begin()
    for _ in range(3):
        clock.now += 0.5
        left.step("evaluation")
    assert left.seconds() == pytest.approx(10 * 2 + 3 * 0.5)
    left.begin()
    for _ in range(15):
        clock.now += 2
        left.step("training")
    assert left.seconds() == pytest.approx(3 * 0.5)  # never below nothing


def terminal(tmp_path, text, columns=100):
    """Run a script whose output is a terminal; return what that got."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", text]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment(tmp_path))
    os.close(theirs)
    got = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # so Linux says that the other end is closed
            break
        if not part:
            break
        got += part
    os.close(ours)
    return process.wait(), got.decode()


def on_screen(text):
    """The lines that stand on a terminal after this text: a carriage return goes back, ESC [ K clears."""
    lines = []
    for line in text.split("\n"):
        row = ""
        for part in line.split("\r"):
            part = part.removeprefix("\x1b[K") if (cleared := part.startswith("\x1b[K")) else part
            row = part if cleared else part + row[len(part) :]
        lines.append(row.rstrip())
    return [line for line in lines if line]


def test_a_bar_on_a_terminal_goes_when_the_work_ends(tmp_path):
    code, got = terminal(
        tmp_path,
        """
import time
from hostdev.core.progress import bar
with bar(5, "epoch 1/2", "step", left=lambda: 18) as shown:
    for step in range(5):
        time.sleep(0.15)
        shown.set_postfix_str("loss 0.5079", refresh=False)
        shown.update()
print("epoch 1: AUC 0.7446")
""",
    )
    assert code == 0
    assert re.search(r"epoch 1/2 \(00:18 left\):  \d0%\|\S.*\| [1-4]/5, \d\.\d steps/s, loss 0.5079 *\r", got)
    assert on_screen(got) == ["epoch 1: AUC 0.7446"]
    _, got = terminal(
        tmp_path,
        """
import time
from hostdev.core.progress import bar
try:
    with bar(5, "epoch 1/2", "step") as shown:
        for step in range(3):
            time.sleep(0.15)
            shown.update()
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("interrupted")
""",
    )
    assert re.search(r"epoch 1/2 \(00:0\d left\):  \d0%\|\S.*\| [1-3]/5, \d\.\d steps/s *\r", got)
    assert on_screen(got) == ["interrupted"]


def test_the_bar_of_a_step_that_goes_on_goes_too(tmp_path):
    """The main thread cannot take it away; the watching thread does."""
    code, got = terminal(
        tmp_path,
        """
import os, signal, time
from hostdev.core.progress import bar
from hostdev.train import interrupt
interrupt.DEADLINE_SECONDS = 0.2
with interrupt.GracefulStop(lambda: "interrupted in the middle of a step"), bar(9, "epoch 1/2", "step") as shown:
    time.sleep(0.2)
    shown.update(3)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
""",
    )
    assert code == 130
    assert "33%" in got
    assert on_screen(got) == ["interrupted in the middle of a step"]


@pytest.mark.parametrize(("n", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (1234, "1,234 files")])
def test_a_number_of_things(n, text):
    assert progress.counted(n, "file") == text


def test_a_notebook_shows_its_own_bar(monkeypatch, tmp_path, capsys):
    """In a kernel with ipywidgets; a shell without windows, and a kernel without ipywidgets, get lines."""

    class Widget(progress.tqdm):
        pass

    class Shell:
        config: typing.ClassVar = {"IPKernelApp": {}}

    module = types.ModuleType("tqdm.notebook")
    module.tqdm = Widget
    monkeypatch.setitem(sys.modules, "tqdm.notebook", module)
    kernel = types.ModuleType("IPython")
    kernel.get_ipython = Shell
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert find_spec("ipywidgets") is None, "ipywidgets is not a dependency of the tests"
    assert not isinstance(bar(9, "x", "step"), Widget)
    (tmp_path / "ipywidgets").mkdir()
    (tmp_path / "ipywidgets" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with bar(9, "epoch 1/2", "step") as shown:
        shown.update(3)
        assert isinstance(shown, Widget)
        assert "epoch 1/2 (" in str(shown) and "3/9" in str(shown) and "steps/s" in str(shown)
    kernel.get_ipython = lambda: None
    assert not isinstance(bar(9, "x", "step"), Widget)
    capsys.readouterr()
