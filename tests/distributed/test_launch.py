"""python -m hostdev.launch: the processes of a rank table, their exit codes, and invalid options."""

import json

import pytest

from hostdev.distributed.rank_environment import find_rank_environment
from hostdev.ext.launch import cli as launch

SHOW = "import os; print(os.environ['RANK_ID'], os.environ['DEVICE_ID'], os.environ['RANK_TABLE_FILE'])"


def server(name, ranks, **more):
    return {"server_id": name, "device": [{"device_id": str(r + 4), "rank_id": str(r)} for r in ranks], **more}


@pytest.fixture
def table(tmp_path):
    """Write a rank table of these servers."""

    def write(*servers):
        path = tmp_path / "table.json"
        path.write_text(json.dumps({"server_count": str(len(servers)), "server_list": servers, "status": "completed"}))
        return path

    return write


def test_the_processes_of_a_server(command, table, tmp_path):
    path, logs = table(server("10.9.9.2", [2]), server("10.9.9.1", [0, 1])), tmp_path / "logs"
    options = ("--rank-table", path, "--server", "10.9.9.1", "--log-dir", logs)
    done = command("hostdev.launch", *options, "--", "-c", SHOW)
    assert (done.returncode, done.stderr) == (0, "")
    first, shown, last = done.stdout.splitlines()
    assert first == f"2 of 3 ranks on this host (10.9.9.1): 0, 1; logs in {logs}"
    assert (shown, last) == (f"0 4 {path}", "training succeeded")
    assert [(logs / f"rank{rank}" / "output.log").read_text() for rank in (0, 1)] == [f"0 4 {path}\n", f"1 5 {path}\n"]
    for rank in (0, 1):
        lines = (logs / f"rank{rank}" / "environment.txt").read_text().splitlines()
        assert find_rank_environment(dict(line.split("=", 1) for line in lines))[:4] == (rank, 3, rank, 2)


def test_this_host_is_found_by_its_address(in_process, table, tmp_path):
    path = table(server("elsewhere", [0]), server("here", [1], host_nic_ip="127.0.0.1"))
    code, out, _ = in_process(launch, "--rank-table", path, "--log-dir", tmp_path / "logs", "--", "-c", SHOW)
    assert code == 0
    assert out.startswith("1 of 2 ranks on this host (here): 1; logs in")
    assert (tmp_path / "logs" / "rank1" / "output.log").read_text() == f"1 5 {path}\n"


def test_a_process_that_fails(in_process, table, tmp_path, monkeypatch):
    """The others are ended, which would wait for it."""
    monkeypatch.setattr("hostdev.distributed.rank_environment._END_SECONDS", 0.3)
    program = "import os, sys, time; os.environ['RANK_ID'] == '1' and sys.exit('why'); time.sleep(200)"
    path, logs = table(server("a", [0]), server("b", [1, 2])), tmp_path / "logs"
    code, _, err = in_process(launch, "--rank-table", path, "--server", "b", "--log-dir", logs, "--", "-c", program)
    assert code == 1
    assert err == f"training failed: rank 1 exited with 1, rank 2 exited with -9; see {logs}/rank1/output.log\n"
    assert (logs / "rank1" / "output.log").read_text() == "why\n"


def test_processes_that_reach_each_other(processes):
    processes.start_ranks(2, "-m", "hostdev.launch", "--check")
    first, second = processes.ended()
    assert (first.code, second.code, second.out) == (0, 0, ""), (first, second)
    assert "c10d" not in first.err + second.err  # torch's warnings where an address has no name
    met, *each = first.out.splitlines()
    assert met.startswith("2 processes connected at 127.0.0.1:")
    assert [line.split(":")[0] for line in each] == ["rank 0", "rank 1"]
    assert [f"pid {process.pid}," in line for process, line in zip(processes.started, each, strict=True)] == [True] * 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give --rank-table FILE -- PROGRAM OPTIONS, or --check to test connections"),
        (["--check", "--", "-m", "x"], "--check starts no program; leave out -- and everything after it"),
        (["--check"], "--check needs several processes"),
        (["--check", "--server", "a"], "--server has no effect without --rank-table; leave out --server"),
        (["--log-dir", "x", "--check"], "--log-dir has no effect without --rank-table; leave out --log-dir"),
        (["--rank-table", "TABLE"], "missing command after --"),
        (["--rank-table", "none.json", "--", "x"], "rank table none.json: No such file or directory"),
        (["--rank-table", "TABLE", "--", "x"], "has the servers a, b; give --server ID"),
        (["--rank-table", "TABLE", "--server", "c", "--", "x"], "--server c: "),
        (["--rank-table", "TABLE", "--server", "a", "--log-dir", ".", "--", "x"], "--log-dir . exists already"),
        (["--rank-table", "TABLE", "--server", "a", "--", "no-such-program"], "no-such-program cannot be started"),
        (["--rank-table", "TABLE", "--server", "a", "--port", "1", "--", "x"], "unrecognized arguments: --port"),
    ],
    ids=lambda value: None if isinstance(value, list) else value,
)
def test_wrong_options(in_process, table, flags, words):
    path = table(server("a", [0]), server("b", [1]))
    code, _, err = in_process(launch, *(path if flag == "TABLE" else flag for flag in flags))
    assert code == 2
    assert words in err
    assert err.startswith("hostdev.launch: error: ")
    assert err.count("\n") == 1
