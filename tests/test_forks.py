"""A forked process sees what one that Python starts does."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import forks
from tests.conftest import ROOT, environment

SEEN = """
import __main__, gc, json, os, random, signal, stat, sys, threading
import numpy, torch, hostdev.core.environment
from hostdev.kernels.pool import host_threads
streams = [sys.stdin, sys.stdout, sys.stderr]
print(json.dumps({
    "argv": sys.argv, "original": sys.orig_argv, "executable": sys.executable, "path": sys.path, "folder": os.getcwd(),
    "env": dict(os.environ), "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0) == os.getpid(), "file": getattr(__main__, "__file__", None), "name": __name__,
    "package": __package__, "spec": __spec__ and __spec__.name,
    "streams": [(s.name, s.mode, s.encoding, s.errors, s.newlines, s.line_buffering, s.isatty()) for s in streams],
    "kinds": [stat.S_IFMT(os.fstat(number).st_mode) for number in range(3)],
    "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), host_threads(), threading.active_count()],
    "affinity": sorted(os.sched_getaffinity(0)), "umask": os.umask(0o22), "warnings": sys.warnoptions,
    "main": threading.current_thread() is threading.main_thread(), "given": sys.stdin.read(),
    "gc": gc.isenabled(), "seeds": [random.random(), numpy.random.random(), torch.initial_seed()],
    "passed": [os.readlink(f"/proc/self/fd/{number}") for number in json.loads(os.environ.get("PASSED", "[]"))],
}))
"""  # fmt: skip


@pytest.fixture(autouse=True)
def _warm():
    """The first process of its kind is not forked."""
    if os.environ.get("HOSTDEV_TESTS_EXEC"):
        pytest.skip("no process is forked")
    forks.run([sys.executable, "-c", ""])


def both(command, **how):
    """Return what a process that Python starts comes to, and a forked one."""
    how = {"capture_output": True, "text": True, "check": False, **how}
    return [run(list(map(str, command)), **how) for run in (subprocess.run, forks.run)]


@pytest.mark.parametrize(
    ("kind", "how"), [("-c", {}), ("-m", {"start_new_session": True}), ("script", {}), ("script elsewhere", {})]
)
def test_the_same_is_seen(tmp_path, kind, how):
    (tmp_path / "inner").mkdir()
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / "seen.py").write_text(SEEN)
    program = {"-c": ["-c", SEEN], "-m": ["-m", "seen"], "script": ["seen.py"], "script elsewhere": ["inner/seen.py"]}
    env = {**environment(tmp_path), "OF_THIS_TEST": "ä \udcff"}
    real, forked = (
        json.loads(done.stdout)
        for done in both([sys.executable, *program[kind], "-m", "x y"], cwd=tmp_path, env=env, input="in\n", **how)
    )
    assert not {*forked.pop("seeds")} & {*real.pop("seeds")}
    assert forked == real
    assert forked["parent"] == os.getpid() and forked["given"] == "in\n"


def test_files_that_are_passed(tmp_path):
    with (tmp_path / "a").open("w") as first, (tmp_path / "b").open("w") as second:
        numbers = [first.fileno(), second.fileno()]
        env = {**environment(tmp_path), "PASSED": json.dumps(numbers)}
        real, forked = both([sys.executable, "-c", SEEN], env=env, pass_fds=numbers, input="")
    for done in (real, forked):
        assert json.loads(done.stdout)["passed"] == [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit",
        "raise SystemExit(3)",
        "raise SystemExit('why')",
        "import sys; print('out', end=''); print('error', end='', file=sys.stderr)",
        "import atexit; atexit.register(print, 'at the end')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
        "import os; os._exit(4)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "class A:\n  def __del__(self): print('deleted')\na = A()",
        "import sys; sys.stdout.close()",
    ],
)
def test_an_end(program):
    real, forked = both([sys.executable, "-c", program])
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)


@pytest.mark.parametrize("program", ["1 / 0", "raise KeyboardInterrupt", "import no_such_module", "("])
def test_an_exception(program):
    real, forked = both([sys.executable, "-c", program])
    assert forked.returncode == real.returncode
    assert forked.stderr.splitlines()[-1] == real.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal(number):
    code = "import time; print(flush=True); time.sleep(60)"
    for popen in (subprocess.Popen, forks.Popen):
        with popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.readline()
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait() == -number


def test_nobody_reads():
    command = [sys.executable, "-c", "print(1)"]
    ended = []
    for popen in (subprocess.Popen, forks.Popen):
        with popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            process.stdout.close()
            ended.append((process.stderr.read().splitlines()[-1:], process.wait()))
    assert ended[0] == ended[1]


def test_python_itself_starts_where_a_fork_would_differ(tmp_path):
    (tmp_path / "torch.py").write_text("")
    code = "import sys; print('torch' in sys.modules)"
    env = environment(tmp_path)
    for command, how in (
        ([sys.executable, "-W", "error", "-c", code], {}),
        ([sys.executable, "-c", code], {"env": {**env, "OMP_NUM_THREADS": "7"}}),
        ([sys.executable, "-c", code], {"env": {**env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}}),
        ([sys.executable, "-c", code], {"env": env, "preexec_fn": os.getpid}),
        ([sys.executable, "-c", code], {"env": {**env, forks.EXEC: "1"}}),
    ):
        assert forks.run(command, capture_output=True, text=True, **how).stdout == "False\n"
    assert forks.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout == "True\n"


def test_the_ranks_of_a_training_have_other_hashes(tmp_path):
    env = {**environment(tmp_path), "RANK": "0"}
    code = "import sys; print('torch' in sys.modules, hash('a'))"
    said = [forks.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout for _ in range(5)]
    assert [line.split()[0] for line in said[-2:]] == ["True", "True"]
    assert said[-1] != said[-2]


STARTING = """
import os, sys
from hostdev.distributed.rank_environment import start_processes, wait_for
code = "import os, sys; sys.exit(5 if os.getppid() == int(sys.argv[1]) and 'RANK' in os.environ else 6)"
started = start_processes(2, [sys.executable, "-c", code, str(os.getpid())])
assert wait_for(started) == 5
sys.exit([process.returncode for process in started] != [5, 5])
"""


def test_ranks_that_a_process_starts_are_its_children():
    for _ in range(2):  # at first, Python itself starts
        done = forks.run([sys.executable, "-c", STARTING, "--spawn"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
