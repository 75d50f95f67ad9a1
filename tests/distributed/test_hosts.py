"""Trainings on two hosts, each with an address of its own: by every launcher, and where the network is cut."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hostdev.distributed.monitor import HUNG_SECONDS
from tests.conftest import ROOT
from tests.distributed.conftest import Trained, flags_of
from tests.distributed.processes import wait_until
from tests.distributed.test_faults import MANY, SOON, TRAIN, begun, one_line

pytestmark = pytest.mark.slow

SMALL = ("--emb-dim", 4)
PORT = 29500  # a host's ports are its own
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
PASSED_ON = ("PATH", "PYTHONPATH", "XDG_CACHE_HOME")  # a new login has none of these


def example(processes, hosts, number, name, *flags, **more):
    """Run a script of examples/launch on a host, which finds this Python's commands."""
    processes.start(*hosts.on(number), "bash", ROOT / "examples" / "launch" / name, *flags, PATH=PATH, **more)


def rank_table(processes, hosts, each):
    """Return a rank table of these hosts, with as many processes on each."""
    servers = [
        {
            "server_id": address,
            "device": [{"device_id": str(i), "rank_id": str(number * each + i)} for i in range(each)],
        }
        for number, address in enumerate(hosts.addresses)
    ]
    path = processes.folder / "table.json"
    path.write_text(json.dumps({"server_count": "2", "server_list": servers, "status": "completed"}))
    return path


def by_torchrun(processes, hosts, flags, each):
    for number in (0, 1):
        example(
            processes,
            hosts,
            number,
            "torchrun_two_hosts.sh",
            *flags,
            PROCESSES=each,
            NODE_RANK=number,
            MASTER_ADDR=hosts.names[0],
        )


def by_rank_table(processes, hosts, flags, each):
    """The second host starts some seconds after the first."""
    path = rank_table(processes, hosts, each)
    for number in (0, 1):
        example(processes, hosts, number, "rank_table.sh", *flags, RANK_TABLE=path)
        time.sleep(5 * (1 - number))


def by_mpirun(processes, hosts, flags, each):
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed")
    passed_on = " ".join(f"-x {name}" for name in PASSED_ON)
    example(
        processes,
        hosts,
        0,
        "mpirun_two_hosts.sh",
        *flags,
        PROCESSES=2 * each,
        HOSTS=",".join(f"{name}:{each}" for name in hosts.names),
        MPIRUN_OPTIONS=f"--allow-run-as-root --mca plm_rsh_agent {hosts.remote_shell()} {passed_on}",
    )


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("start", [by_torchrun, by_rank_table, by_mpirun])
def test_two_hosts_come_to_the_bits_of_one_process(alone, processes, hosts, small_data, start, each):
    folder = processes.folder / "run"
    start(processes, hosts, flags_of(small_data, folder, *SMALL, M=4), each)
    for process in processes.ended():
        assert process.code == 0, process
    first = Trained(folder)
    assert first == alone(small_data, *SMALL, M=4)
    ranks = json.loads((folder / "summary.json").read_text())["ranks"]
    assert (ranks["hosts"], ranks["exchange_levels"]) == (2, each)  # two levels if ranks share a host
    for rank in range(1, 2 * each):
        assert Trained(folder / f"rank{rank}").losses == first.losses


def test_two_hosts_reach_each_other(processes, hosts):
    path = rank_table(processes, hosts, 1)
    for number in (0, 1):
        options = ("--rank-table", path, "--check", "--log-dir", processes.folder / f"logs{number}")
        processes.start(*hosts.on(number), sys.executable, "-m", "hostdev.launch", *options)
    first, second = processes.ended()
    assert (first.code, second.code) == (0, 0), (first, second)
    started, met, *each = first.out.splitlines()
    assert started.startswith(f"1 of 2 ranks on this host ({hosts.addresses[0]}): 0; logs in")
    assert met == f"2 processes connected at {hosts.addresses[0]}:{PORT}, and each reached all others"
    assert [line.split(" pid")[0] for line in each] == ["rank 0: host0", "rank 1: host1"]
    assert second.out.startswith(f"1 of 2 ranks on this host ({hosts.addresses[1]}): 1; logs in")


CONNECT = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=3).close()
        print("reached", port)
    except OSError as error:
        print("refused", port)
"""


def ports_of(pid):
    """At which any process listens in the network of this one."""
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        return {int(line[1].partition(":")[2], 16) for line in lines if line[3] == "0A"}
    return set()


@pytest.mark.parametrize("by", ["spawn", "loop"])
def test_two_hosts_do_not_disturb_each_other(alone, processes, hosts, small_data, by):
    """Each has a run of its own, at the same port where it is said; none reaches what the other listens at."""
    folders = [processes.folder / f"run{number}" for number in (0, 1)]
    for number, folder in enumerate(folders):
        command = [*hosts.on(number), sys.executable, *TRAIN, *flags_of(small_data, folder, *SMALL, M=4)]
        if by == "spawn":
            processes.start(*command, "--spawn", 2)
        else:
            for rank in (0, 1):
                processes.start(*command, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    seen, tried = set(), 0

    def look():
        nonlocal tried
        time.sleep(0.3)  # between two looks at what listens
        here = set().union(*(ports_of(process.pid) for process in processes.started)) - seen
        if here:
            seen.update(here)
            for number in (0, 1):
                command = [*hosts.on(number), sys.executable, "-c", CONNECT, hosts.addresses[1 - number]]
                said = subprocess.run([*command, *map(str, here)], capture_output=True, text=True, check=True).stdout
                assert "reached" not in said
                tried += said.count("refused")
        return all(process.poll() is not None for process in processes.started)

    wait_until(look)
    for process in processes.ended():
        assert process.code == 0, process
    assert tried >= 4
    for folder in folders:
        assert Trained(folder) == alone(small_data, *SMALL, M=4)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_whose_network_is_cut(processes, hosts, small_data, gone):
    """The hosts lose their connection: each reports it, and ends."""
    folder = processes.folder / "run"
    meeting = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": hosts.addresses[0]}
    flags = flags_of(small_data, folder, *MANY)
    for rank in (0, 1):
        processes.start(*hosts.on(rank), sys.executable, *TRAIN, *flags, RANK=rank, MASTER_PORT=PORT, **meeting)
    begun(processes, folder)
    since = time.monotonic()
    hosts.cut(gone)
    wait_until(lambda: all(process.poll() is not None for process in processes.started), 60)
    assert time.monotonic() - since < SOON
    for rank, done in enumerate(processes.ended()):
        assert done.code == 2
        words = f"hostdev.train: error: rank {1 - rank} of 2: has sent no heartbeat for {HUNG_SECONDS:g} s; it hangs"
        assert one_line(done.err) == words
        assert "Traceback" not in done.err
    assert (folder / "summary.json").is_file()  # the logs are complete
