"""A process's place among many, from the environment that launchers leave it; wrong ones get a line."""

import json
import subprocess
import sys

import pytest

from hostdev import UserError
from hostdev.distributed.rank_environment import ALONE, DEFAULT_PORT, RankEnvironment, find_rank_environment
from tests.conftest import ROOT

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
LOOP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


def test_nobody_says_anything():
    assert find_rank_environment({"PATH": "/bin", "MASTER_ADDR": "x"}) == ALONE
    assert ALONE.alone


def test_torchrun():
    assert find_rank_environment(TORCHRUN) == RankEnvironment(
        3, 4, 1, 2, "node0", 29511, "RANK and WORLD_SIZE", hosted=True, attempt=2
    )


def test_open_mpi_on_one_host():
    """All processes of a job choose the same port, those of another one most likely another."""
    place = find_rank_environment(OPEN_MPI)
    assert place[:5] == (1, 4, 1, 4, "127.0.0.1")
    assert (place.launcher, place.hosted) == ("Open MPI", False)
    first = find_rank_environment(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert (first.rank, first.port) == (0, place.port)
    assert 1024 < place.port < 32768
    assert find_rank_environment(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-18@1"}).port != place.port


def test_open_mpi_on_several_hosts():
    there = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert find_rank_environment(there | {"MASTER_ADDR": "node0"})[:6] == (1, 4, 1, 2, "node0", DEFAULT_PORT)
    assert find_rank_environment(there | {"MASTER_ADDR": "node0", "MASTER_PORT": "77"}).port == 77
    with pytest.raises(UserError, match="Open MPI has started ranks on several hosts, but MASTER_ADDR is not set"):
        find_rank_environment(there)


def test_mpich():
    place = find_rank_environment(MPICH | {"MASTER_PORT": "5005"})
    assert place[:6] == (1, 2, 1, 2, "127.0.0.1", 5005)
    assert place.launcher == "MPICH"
    assert (
        find_rank_environment(MPICH).port
        == find_rank_environment(MPICH | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}).port
    )


def test_mpich_with_a_script_between(tmp_path):
    """Each rank's parent is a script of its own then; the port is that of the job nevertheless."""
    lines = [
        "from hostdev.distributed.rank_environment import find_rank_environment",
        "place = find_rank_environment()",
        "print(*place[:2], place.port)",
    ]
    program = "\n".join(lines)
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, program]
    told = [
        subprocess.run(
            command,
            env={"PYTHONPATH": str(ROOT), **MPICH, "PMI_RANK": rank, "MPI_LOCALRANKID": rank},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for rank in ("0", "1")
    ]
    assert [one[:2] for one in told] == [["0", "2"], ["1", "2"]]
    assert told[0][2] == told[1][2]


def test_a_plain_loop():
    assert find_rank_environment(LOOP) == RankEnvironment(1, 2, 1, 2, "127.0.0.1", 4000, "RANK and WORLD_SIZE")
    assert find_rank_environment(without(LOOP, "MASTER_PORT")).port == DEFAULT_PORT
    several_hosts = find_rank_environment(
        {**LOOP, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    )
    assert several_hosts[:4] == (2, 4, 0, 2)


def test_one_process_of_a_launcher_is_alone():
    for env in (
        {"RANK": "0", "WORLD_SIZE": "1"},
        OPEN_MPI
        | {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        },
    ):
        assert find_rank_environment(env).alone


def test_two_launchers_that_agree():
    """mpirun may start a script that sets RANK and WORLD_SIZE from it."""
    both = OPEN_MPI | {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "6"}
    assert find_rank_environment(both)[:6] == (1, 4, 1, 4, "node0", 6)


WRONG = [
    (without(LOOP, "MASTER_ADDR"), "MASTER_ADDR is not: where is rank 0"),
    (without(LOOP, "RANK"), "(RANK and WORLD_SIZE): RANK is not set; set RANK"),
    (without(LOOP, "WORLD_SIZE"), "WORLD_SIZE is not set"),
    (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "(Open MPI): OMPI_COMM_WORLD_SIZE is not set"),
    (without(MPICH, "PMI_RANK"), "(MPICH): PMI_RANK is not set"),
    (
        {"PMI_PORT": "a:1", "PMI_ID": "0", "MPI_LOCALNRANKS": "2"},
        "MPICH does not set ranks with -pmi-port; omit -pmi-port",
    ),
    (LOOP | {"RANK": "one"}, "RANK is 'one', not a number"),
    (LOOP | {"RANK": ""}, "RANK is '', not a number"),
    (LOOP | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE is '2.0', not a number"),
    (LOOP | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a number"),
    (LOOP | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; a port must be a number in 1..65535"),
    (LOOP | {"MASTER_PORT": "0"}, "MASTER_PORT is 0; a port must be a number in 1..65535"),
    (MPICH | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; a port must be a number in 1..65535"),
    (LOOP | {"MASTER_ADDR": " "}, "MASTER_ADDR is empty; set it to the host of rank 0"),
    (LOOP | {"RANK": "-1"}, "RANK is -1; it must be at least 0"),
    (LOOP | {"WORLD_SIZE": "-2"}, "WORLD_SIZE is -2; it must be at least 0"),
    (LOOP | {"LOCAL_RANK": "-1"}, "LOCAL_RANK is -1; it must be at least 0"),
    (LOOP | {"RANK": "2"}, "RANK is 2, but it must be below WORLD_SIZE (2): ranks are numbered from 0"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0, but it must be below WORLD_SIZE (0)"),
    (MPICH | {"PMI_RANK": "7"}, "PMI_RANK is 7, but it must be below PMI_SIZE (2)"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but it must be below LOCAL_WORLD_SIZE (2)"),
    (
        OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x"},
        "Open MPI says rank 1 of 4, but RANK and WORLD_SIZE says rank 0 of 4; unset the variables of one launcher",
    ),
    (
        OPEN_MPI | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x"},
        "Open MPI says rank 1 of 4, but RANK and WORLD_SIZE says rank 1 of 2",
    ),
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "Slurm has started 4 processes without a rendezvous address"),
    ({"RANK_ID": "0"}, "RANK_ID is set, but RANK_TABLE_FILE is not"),
    ({"RANK_TABLE_FILE": "/nowhere/hccl.json", "RANK_ID": "0"}, "rank table /nowhere/hccl.json: No such file"),
]


def refused(env):
    with pytest.raises(UserError) as caught:
        find_rank_environment(env)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(("env", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_environments(env, words):
    assert words in refused(env)


def server(name, ranks, **more):
    devices = [{"device_id": str(i), "device_ip": f"192.1.0.{i}", "rank_id": str(rank)} for i, rank in enumerate(ranks)]
    return {"server_id": name, "device": devices, **more}


def table(*servers, **more):
    return {
        "version": "1.0",
        "server_count": str(len(servers)),
        "server_list": list(servers),
        "status": "completed",
        **more,
    }


ONE = table(server("10.0.0.9", [0, 1], host_nic_ip="reserve"))
# Ranks count over the servers in the order of their ids, wherever they stand in the file.
TWO = table(server("10.0.0.9", [2, 3], host_nic_ip="reserve"), server("10.0.0.8", [0, 1], host_nic_ip="reserve"))


@pytest.fixture
def written(tmp_path):
    """Write a rank table; return the environment of a rank of it."""

    def write(content, rank, **more):
        path = tmp_path / "table.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return {"RANK_TABLE_FILE": str(path), "RANK_ID": str(rank), **more}

    return write


def test_a_rank_table_of_one_server(written):
    for rank in (0, 1):
        place = find_rank_environment(written(ONE, rank, DEVICE_ID=str(rank)))
        assert place == RankEnvironment(rank, 2, rank, 2, "127.0.0.1", DEFAULT_PORT, "RANK_TABLE_FILE", device=rank)
    assert find_rank_environment(written(ONE, 1, MASTER_PORT="31000")).port == 31000


def test_a_rank_table_of_several_servers(written):
    places = [find_rank_environment(written(TWO, rank)) for rank in range(4)]
    assert [place.local_rank for place in places] == [0, 1, 0, 1]
    assert {place[1:2] + place[3:6] for place in places} == {(4, 2, "10.0.0.8", DEFAULT_PORT)}


def test_the_address_of_a_server_in_a_rank_table(written):
    """host_nic_ip, where it is one."""
    given = table(server("b", [1]), server("a", [0], host_nic_ip="172.16.0.5"))
    assert {find_rank_environment(written(given, rank)).address for rank in (0, 1)} == {"172.16.0.5"}
    assert find_rank_environment(written(table(server("b", [1]), server("a", [0])), 1)).address == "a"


def test_a_rank_table_with_the_devices_of_a_server_in_another_order(written):
    """A rank's place is where it stands, whatever the device's number."""
    devices = [{"device_id": "7", "rank_id": "0"}, {"device_id": "2", "rank_id": "1"}]
    given = table({"server_id": "a", "device": devices})
    place = find_rank_environment(written(given, 1, DEVICE_ID="2"))
    assert (place[:4], place.device) == ((1, 2, 1, 2), 2)


def test_a_rank_table_of_one_device_is_alone(written):
    assert find_rank_environment(written(table(server("a", [0])), 0)).alone


def test_a_rank_table_goes_with_a_launcher_that_agrees(written):
    assert find_rank_environment(LOOP | written(ONE, 1)).launcher == "RANK_TABLE_FILE"
    assert "RANK and WORLD_SIZE says rank 1 of 2, but RANK_TABLE_FILE says rank 0 of 2" in refused(
        LOOP | written(ONE, 0)
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is invalid: JSONDecodeError"),
        ("[]", "is invalid: TypeError"),
        ('{"server_list": 3}', "is invalid: TypeError"),
        ({"status": "completed"}, "is invalid: KeyError 'server_list'"),
        (table({"device": []}), "is invalid: KeyError 'server_id'"),
        (table({"server_id": "a"}), "is invalid: KeyError 'device'"),
        (table({"server_id": "a", "device": [{"device_id": "0"}]}), "is invalid: KeyError 'rank_id'"),
        (table({"server_id": "a", "device": [{"rank_id": "x"}]}), "is invalid: ValueError"),
        (table(server("a", [0, 1]), server_count="2"), "server_count is 2, but server_list has 1 "),
        (table(server("a", [0, 1]), status="initializing"), "has the status 'initializing', not 'completed'"),
        (
            table({"server_id": "a", "device": [{"device_id": "x", "rank_id": "0"}]}),
            "has the device_id 'x', not a number",
        ),
        (table(server("a", [0, 2])), "the rank_ids, in the order of the server_ids, are [0, 2], not 0, 1, 2, ..."),
        (table(server("a", [1, 0])), "are [1, 0], not 0, 1, 2"),
        (table(server("b", [0]), server("a", [1])), "are [1, 0], not 0, 1, 2"),
        (table(server("a", [0, 0])), "are [0, 0], not 0, 1, 2"),
        (table(server("a", [])), "are [], not 0, 1, 2"),
        (table(), "are [], not 0, 1, 2"),
    ],
)
def test_wrong_rank_tables(written, content, words):
    env = written(content, 0)
    text = refused(env)
    assert words in text
    assert env["RANK_TABLE_FILE"] in text


@pytest.mark.parametrize(
    ("rank", "more", "words"),
    [
        (2, {}, "RANK_ID is 2, but the rank table"),
        (-1, {}, "RANK_ID is -1; it must be at least 0"),
        ("first", {}, "RANK_ID is 'first', not a number"),
        (0, {"DEVICE_ID": "1"}, "DEVICE_ID is 1, but rank 0 of the rank table has device 0"),
        (0, {"MASTER_PORT": "no"}, "MASTER_PORT is 'no', not a number"),
    ],
)
def test_wrong_places_in_a_rank_table(written, rank, more, words):
    assert words in refused(written(ONE, rank, **more))


def test_a_rank_table_without_a_rank(written):
    env = written(ONE, 0)
    del env["RANK_ID"]
    assert "(RANK_TABLE_FILE): RANK_ID is not set; set RANK_ID" in refused(env)
