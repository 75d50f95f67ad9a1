"""A preparation on a cluster that loses workers, the client or the scheduler, or gets workers that do not fit."""

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from hostdev.core.errors import TransientError, UserError
from hostdev.data.preprocess import build as build_module
from hostdev.data.preprocess import learning, runner
from hostdev.data.preprocess.build import Preparation
from hostdev.data.preprocess.cluster import job, prepare
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from tests.conftest import environment
from tests.data.preprocess.clusters import (
    OPTIONS,
    Processes,
    build_alone,
    files_of,
    kill,
    local_cluster,
    source,
    wait_for,
)

ROWS = 8000
# Dask may load a file of --preload twice.
REPLACED = (
    "import time\nfrom hostdev.data.preprocess.cluster import job\n_run = job._real = getattr(job, '_real', job.run)\n"
)
SLOW = REPLACED + "def run(*given):\n    time.sleep(0.2)\n    return _run(*given)\njob.run = run\n"


IS_SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rows.tsv"
    write_text(Synthetic(ROWS, 3), path)
    return path


@pytest.fixture(scope="module")
def expected(text):
    return build_alone(text, text.parent / "straight")


@pytest.fixture(scope="module")
def scheduler():
    with local_cluster() as address:
        yield address


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path / "dask") as found:
        found.start_scheduler()
        yield found


def pieces(out):
    """The pieces that are written."""
    return list((out.parent / f".{out.name}.partial" / "pieces").glob("*/pieces/*.arrow"))


def make(text, out, address):
    return prepare.prepare(source(text), out, OPTIONS, address)


def done(tmp_path, expected):
    """Assert that the data set is complete, and nothing is left beside it."""
    assert files_of(tmp_path / "out") == expected
    assert not (tmp_path / ".out.partial").exists()


class Stopped(runner.Runner):
    """Ends as by Ctrl-C after some results."""

    left = 0

    def _take(self, task, found):
        Stopped.left -= 1
        if Stopped.left < 0:
            raise KeyboardInterrupt
        return super()._take(task, found)


@pytest.mark.parametrize(
    "results", [101, *(pytest.param(n, marks=IS_SLOW) for n in (0, 3, 25, 43, 46, 72, 74, 125, 140, 154))]
)
def test_interrupted_after_some_results(text, tmp_path, expected, scheduler, monkeypatch, results, capsys):
    monkeypatch.setattr(learning, "SURVEYS", 4)
    noted = []

    def note(self, task, result, real=runner.Runner.note):
        noted.append(task.key)
        real(self, task, result)

    monkeypatch.setattr(runner.Runner, "note", note)
    with monkeypatch.context() as patched:
        patched.setattr(build_module, "Runner", Stopped)
        Stopped.left = results
        with pytest.raises(KeyboardInterrupt):
            make(text, tmp_path / "out", scheduler)
    assert ("finished work is kept" in capsys.readouterr().err) == (results > 0)
    make(text, tmp_path / "out", scheduler)
    done(tmp_path, expected)
    assert len(noted) == len(set(noted))  # what was finished is not made again
    assert len(noted) > 154


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "pieces/*-*.arrow",
        *(
            pytest.param(name, marks=IS_SLOW)
            for name in ("pieces/*.ids", "result/vocabulary.arrow", "result/train/*.arrow")
        ),
        pytest.param("", marks=IS_SLOW),
    ],
)
def test_damaged_files_are_made_again(text, tmp_path, expected, scheduler, monkeypatch, name):
    """Also pieces whose parsed rows were removed, and files that are missing."""
    with monkeypatch.context() as patched:
        patched.setattr(Preparation, "_collect", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(text, tmp_path / "out", scheduler)
    [folder] = (tmp_path / ".out.partial" / "pieces").iterdir()
    if name:
        found = sorted(folder.glob(name))
        damage(found[0])
        found[-1].unlink()
    else:
        shutil.rmtree(folder)
    make(text, tmp_path / "out", scheduler)
    done(tmp_path, expected)


def test_a_journal_of_nonsense_is_left_alone(text, tmp_path, expected, scheduler, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(build_module, "Runner", Stopped)
        Stopped.left = 30
        with pytest.raises(KeyboardInterrupt):
            make(text, tmp_path / "out", scheduler)
    from hostdev.data.preprocess import work

    begin = work.WorkFolder.begin

    def nonsense(self, recipe):
        entries = begin(self, recipe)
        others = [{"task": 5, "arguments": 1, "result": {"files": {}}}, {"piece": {}}, {"task": "x"}, {}]
        for entry in entries[::3]:
            others.append({**entry, "result": {**entry["result"], "files": {"pieces/x": 3}}})
            others.append({**entry, "arguments": 5})
        return others + entries[1::3]

    monkeypatch.setattr(work.WorkFolder, "begin", nonsense)
    make(text, tmp_path / "out", scheduler)
    done(tmp_path, expected)


def test_work_of_one_machine_is_not_continued(text, tmp_path, expected, scheduler, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patched.setattr(learning.Learning, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_alone(text, tmp_path / "out")
    make(text, tmp_path / "out", scheduler)
    assert "unfinished work of another command" in capsys.readouterr().err
    done(tmp_path, expected)


def test_a_full_disk_on_a_worker(text, tmp_path, expected, scheduler, monkeypatch):

    with monkeypatch.context() as patched:

        def full(*_, real=job.write_rows, count=[]):  # noqa: B006
            count.append(1)
            if len(count) > 10:
                raise OSError(errno.ENOSPC, "No space left on device", "/share/x")
            return real(*_)

        patched.setattr(job, "write_rows", full)
        with pytest.raises(TransientError, match=r"^/share/x: No space left on device \(worker tcp://127"):
            make(text, tmp_path / "out", scheduler)
    make(text, tmp_path / "out", scheduler)
    done(tmp_path, expected)


def test_a_bug_in_a_task_is_raised(text, tmp_path, scheduler, monkeypatch):
    monkeypatch.setattr(job, "_TASKS", {**job._TASKS, "spread": None, "count": None})
    with pytest.raises(TypeError):
        make(text, tmp_path / "out", scheduler)


def test_a_worker_that_sees_other_files(text, tmp_path, scheduler, monkeypatch):
    stamps = prepare.stamps
    monkeypatch.setattr(prepare, "stamps", lambda of: [(size + 1, time) for size, time in stamps(of)])
    with pytest.raises(TransientError, match=r"rows.tsv has another size or time of change on worker tcp://127"):
        make(text, tmp_path / "out", scheduler)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("preload", "said"),
    [
        (
            "import hostdev\nhostdev.__version__ = '0.0.1'\n",
            r"^worker tcp://\S+ \(.*\) has hostdev 0\.0\.1, and this command",
        ),
        pytest.param(
            "import pyarrow\npyarrow.__version__ = '3.0'\n",
            r"^worker tcp://\S+ \(.*\) has pyarrow 3, and this",
            marks=IS_SLOW,
        ),
        (
            "import pathlib\n"
            "def missing(path):\n    if path.name == 'job.pickle': raise FileNotFoundError(2, 'No such file')\n"
            "    return path.open('rb').read()\npathlib.Path.read_bytes = missing\n",
            r"^worker tcp://\S+ \(.*\) does not see the work folder /.*/pieces/\w+ of .* \(No such file\); --out",
        ),
        pytest.param(
            "import pathlib\n"
            "def other(path):\n    return path.open('rb').read() + b' ' * (path.name == 'job.pickle')\n"
            "pathlib.Path.read_bytes = other\n",
            r"^worker tcp://\S+ \(.*\) has another folder at /.*partial/pieces/\w+ than ",
            marks=IS_SLOW,
        ),
        pytest.param(
            "import sys\nsys.modules['hostdev'] = None\n",
            r"^worker tcp://\S+ cannot run hostdev's tasks \(.*hostdev",
            marks=IS_SLOW,
        ),
    ],
    ids=["version", "pyarrow", "missing", "other", "no hostdev"],
)
def test_workers_that_do_not_fit_are_refused_by_name(text, tmp_path, processes, preload, said):
    processes.start_worker(preload=preload)
    with pytest.raises(TransientError, match=said):
        make(text, tmp_path / "out", processes.address)
    assert [path.name for path in tmp_path.iterdir()] == ["dask"]


def test_a_worker_is_killed_while_it_is_checked(text, tmp_path, expected, processes):
    """It is lost, not wrong: the other one does the work."""
    processes.start_worker(
        preload=REPLACED + "def check(*_, **__):\n    import os\n    os._exit(9)\njob.check = check\n"
    )
    processes.start_worker()
    from distributed import Client

    with Client(processes.address) as client:
        client.wait_for_workers(2, timeout=60)
    make(text, tmp_path / "out", processes.address)
    assert files_of(tmp_path / "out") == expected


class Answers:
    """A client of workers that give these answers, one after the other."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def wait_for_workers(self, n, timeout):
        if self.answers[0] is None:
            raise TimeoutError

    def run(self, *_, on_error):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


LOST, FINE = OSError("in <TCP (closed)>"), {"error": None, "memory": 7}


def test_answers_of_workers_that_are_checked(monkeypatch):
    monkeypatch.setattr(prepare, "_CHECK_AGAIN_SECONDS", 0)
    for answers in (
        [{"a": LOST, "b": FINE}],
        [{"a": LOST}, {"b": FINE}],
        [{}, {"b": {**FINE, "memory": 9}, "c": FINE}],
    ):
        made = prepare.DaskWorkers(Answers(*answers), "here")
        made.check(("job", "sum"))
        assert made.memory == 7
    for answers, said in (
        ([{"a": ImportError("no hostdev"), "b": FINE}], "worker a .*install"),
        (
            [{"a": {"error": {"kind": "TransientError", "message": "Permission denied (a)"}, "memory": 0}}],
            "^Permission",
        ),
        ([{"a": LOST}, None], "here has no worker"),
        ([{"a": LOST}, LOST], "scheduler at here"),
    ):
        with pytest.raises(TransientError, match=said):
            prepare.DaskWorkers(Answers(*answers), "here").check(("job", "sum"))


def test_a_worker_is_killed(text, tmp_path, expected, processes):
    """Without a nanny, which would start another."""
    workers = [processes.start_worker(preload=SLOW) for _ in range(2)]
    client = processes.client(text, tmp_path / "out")
    wait_for(lambda: len(pieces(tmp_path / "out")) > 3, client)
    kill(workers[0])
    _, said = client.communicate(timeout=300)
    assert (client.returncode, said) == (0, "")
    assert files_of(tmp_path / "out") == expected


def test_the_client_is_killed_then_the_scheduler(text, tmp_path, expected, processes):
    """The workers' tasks go on for a while; the repeated command keeps what is finished."""
    processes.start_worker(preload=SLOW)
    client = processes.client(text, tmp_path / "out")
    wait_for(lambda: len(pieces(tmp_path / "out")) > 6, client)
    kill(client)  # the journal may lack the last pieces
    kept = {path: path.stat().st_mtime_ns for path in pieces(tmp_path / "out")}
    kept = dict(sorted(kept.items(), key=lambda one: one[1])[:3])
    client = processes.client(text, tmp_path / "out")
    wait_for(lambda: len(pieces(tmp_path / "out")) > 12, client)
    kill(processes.scheduler)
    _, said = client.communicate(timeout=120)
    assert client.returncode == 2
    first, second = said.splitlines()
    assert "of finished work is kept in" in first
    assert second.startswith(f"client: error: the scheduler at {processes.address} no longer answers")
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    processes.start_scheduler()
    processes.start_worker()
    client = processes.client(text, tmp_path / "out")
    _, said = client.communicate(timeout=300)
    assert (client.returncode, said) == (0, "")
    assert files_of(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_task_that_ends_its_workers(text, tmp_path, expected):
    dies = "def run(*given):\n    import os\n    if given[1] == 'count': os._exit(1)\n    return _run(*given)\n"
    with Processes(tmp_path / "dask") as processes:
        processes.start_scheduler(DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES="0")
        processes.start_worker(preload=REPLACED + dies + "job.run = run\n")
        with pytest.raises(TransientError, match=r"^the task (count-\S+|scale) ended 1 worker in turn; they probably "):
            make(text, tmp_path / "out", processes.address)
        processes.start_worker()
        make(text, tmp_path / "out", processes.address)
    done(tmp_path, expected)


def test_no_scheduler_and_no_worker(text, tmp_path, processes, monkeypatch):
    monkeypatch.setattr(prepare, "_FIRST_WORKER_SECONDS", 1)
    with pytest.raises(TransientError, match=r"has no worker, and none came within 1 s; start one with dask"):
        make(text, tmp_path / "out", processes.address)
    kill(processes.scheduler)
    monkeypatch.setattr(prepare, "_CONNECT_SECONDS", 1)
    with pytest.raises(UserError, match=r"^--scheduler tcp://127.*: no scheduler answers there"):
        make(text, tmp_path / "out", processes.address)
    assert [path.name for path in tmp_path.iterdir()] == ["dask"]


def test_without_the_package(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match=r"^--scheduler needs Dask.*; pip install 'hostdev\[dask\]'$"):
        make(text, tmp_path / "out", "local:1")


def test_nothing_of_dask_is_imported_without_the_flag(tmp_path):
    code = (
        "import sys; sys.modules['dask'] = sys.modules['distributed'] = None\n"
        "from hostdev.data.preprocess import cli as preprocess\n"
        "preprocess.main(['synthetic', '--rows', '500', '--out', 'out', '--threshold', '1'])\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment(tmp_path), capture_output=True
    )


def one_kill(processes, text, out, moments, what):
    """Run a client, and kill something at a random moment; return whether the data set is there."""
    client = processes.client(text, out)
    time.sleep(moments.uniform(0, 12))
    if what == "worker":
        worker = moments.choice(processes.workers)
        kill(worker)
        processes.workers.remove(worker)
        processes.start_worker()
    elif what == "client":
        kill(client)
    else:
        kill(processes.scheduler)
        processes.start_scheduler()
        for worker in processes.workers:
            kill(worker)
        processes.workers.clear()
        for _ in range(2):
            processes.start_worker()
    client.communicate(timeout=300)
    assert client.returncode in (0, 2, -9)
    return client.returncode == 0 or out.exists()  # a client may be killed after it has finished the data set


@pytest.mark.slow
def test_20_kills_at_random_moments(text, tmp_path, expected, processes):
    moments, out = random.Random(time.time_ns()), tmp_path / "out"
    for _ in range(2):
        processes.start_worker()
    for number in range(20):
        if one_kill(processes, text, out, moments, ("worker", "client", "scheduler")[number % 3]):
            assert files_of(out) == expected
            shutil.rmtree(out)
    make(text, out, processes.address)
    done(tmp_path, expected)


def ip(*arguments):
    """Run Linux's ip."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def hosts(count):
    """Make network namespaces, each with a link of its own to this one; yield their names and both ends' addresses."""
    found = []
    try:
        for i in range(count):
            name, here, there = f"hostdev-{os.getpid()}-{i}", f"10.213.{i}.1", f"10.213.{i}.2"
            mine, own = f"hd{os.getpid() % 10**6}a{i}", f"hd{os.getpid() % 10**6}b{i}"
            ip("netns", "add", name)
            found.append((name, here, there))
            ip("link", "add", mine, "type", "veth", "peer", "name", own, "netns", name)
            ip("addr", "add", f"{here}/30", "dev", mine)
            ip("link", "set", mine, "up")
            ip("-n", name, "addr", "add", f"{there}/30", "dev", own)
            ip("-n", name, "link", "set", own, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield found
    finally:
        for name, _, _ in found:
            ip("netns", "del", name)  # the links go with it


@pytest.mark.slow
def test_workers_with_addresses_of_their_own(text, tmp_path, expected):
    """Two network namespaces stand for two hosts; workers reach only the scheduler, and share the folder."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and Linux's ip")
    with hosts(2) as found, Processes(tmp_path / "dask") as processes:
        processes.start_scheduler(host="0.0.0.0")
        port = processes.address.rpartition(":")[2]
        for name, here, there in found:
            processes.address = f"tcp://{here}:{port}"
            processes.start_worker("ip", "netns", "exec", name, host=there)
        processes.address = f"tcp://127.0.0.1:{port}"
        client = processes.client(text, tmp_path / "out")
        _, said = client.communicate(timeout=300)
        assert (client.returncode, said) == (0, "")
    done(tmp_path, expected)
