"""The rank environment: this process's rank and the rendezvous address, from the variables that launchers set."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hostdev.core import json_files
from hostdev.core.errors import UserError
from hostdev.core.launched import LAUNCHERS, RANK_TABLE, SLURM

DEFAULT_PORT = 29500
# Variables that `start` sets: a secret that all processes share and, for rank 0, the descriptor of a listening socket.
TOKEN_VARIABLE = "HOSTDEV_TOKEN"
LISTEN_VARIABLE = "HOSTDEV_LISTEN_FD"


class RankEnvironment(NamedTuple):
    """The rank of a process, and the rendezvous address.

    Attributes:
        rank: The process's number among all ranks.
        ranks: Number of ranks.
        local_rank: The process's number among the ranks of this host.
        local_ranks: Number of ranks of this host.
        address: Name or address of the host of rank 0.
        port: Port of the rendezvous.
        launcher: Name of the launcher that set the variables.
        hosted: Whether the launcher itself serves the rendezvous store.
        attempt: Number of restarts by the launcher.
        device: Index of the device assigned to this rank; None if the launcher assigns no device.
        token: Secret that all ranks of a run share.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int
    launcher: str
    hosted: bool = False
    attempt: int = 0
    device: int | None = None
    token: str = ""

    @property
    def alone(self) -> bool:
        """Return whether there is only one rank."""
        return self.ranks == 1

    @property
    def all_here(self) -> bool:
        """Return whether all ranks run on this host."""
        return self.local_ranks == self.ranks


ALONE = RankEnvironment(0, 1, 0, 1, "127.0.0.1", 0, "none")

_TABLE = RANK_TABLE


def find_rank_environment(environment: Mapping[str, str] | None = None) -> RankEnvironment:
    """Return this process's rank environment, or `ALONE` if no launcher has set variables.

    Raises:
        UserError: Variables are missing, are not numbers, or contradict each other.
    """
    env = os.environ if environment is None else environment
    found: list[RankEnvironment] = []
    for launcher, (rank, ranks, local_rank, local_ranks) in LAUNCHERS:
        if rank in env or ranks in env:
            found.append(_read_launcher(env, launcher, rank, ranks, local_rank, local_ranks))
    if "PMI_PORT" in env and "PMI_RANK" not in env:
        raise UserError("MPICH does not set ranks with -pmi-port; omit -pmi-port")
    if _TABLE[0] in env:
        found.append(_read_rank_table(env))
    elif _TABLE[1] in env:
        raise UserError("RANK_ID is set, but RANK_TABLE_FILE is not; set both variables or neither")
    if not found:
        _require_no_other(env)
        return ALONE
    first = found[0]
    for other in found[1:]:
        if (first.rank, first.ranks) != (other.rank, other.ranks):
            raise UserError(
                f"{first.launcher} says rank {first.rank} of {first.ranks}, but {other.launcher} says rank "
                f"{other.rank} of {other.ranks}; unset the variables of one launcher"
            )
    return found[-1] if found[-1].launcher == _TABLE[0] else first


def _require_no_other(env: Mapping[str, str]) -> None:
    """Raise UserError if Slurm has started several processes without a rendezvous address."""
    ranks = env.get(SLURM[1], "1")
    if ranks != "1" and SLURM[0] in env:
        raise UserError(
            f"Slurm has started {ranks} processes without a rendezvous address: for srun's tasks, set "
            "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR (the host of rank 0) "
            "and MASTER_PORT; or RANK=0 WORLD_SIZE=1 for independent processes"
        )


def _number(env: Mapping[str, str], name: str, launcher: str) -> int:
    if name not in env:
        raise UserError(
            f"rank variables are incomplete ({launcher}): {name} is not set; set {name}, or unset the others"
        )
    try:
        value = int(env[name])
    except ValueError:
        raise UserError(f"{name} is {env[name]!r}, not a number") from None
    if value < 0:
        raise UserError(f"{name} is {value}; it must be at least 0")
    return value


def _read_launcher(
    env: Mapping[str, str], launcher: str, rank: str, ranks: str, local_rank: str, local_ranks: str
) -> RankEnvironment:
    mine, all_ranks = _number(env, rank, launcher), _number(env, ranks, launcher)
    if mine >= all_ranks:
        raise UserError(f"{rank} is {mine}, but it must be below {ranks} ({all_ranks}): ranks are numbered from 0")
    # A shell loop that starts processes may omit the number of ranks on this host; then all ranks are on this host.
    mine_here = _number(env, local_rank, launcher) if local_rank in env else mine
    here = _number(env, local_ranks, launcher) if local_ranks in env else None
    if here is None:
        here = all_ranks if mine_here == mine else max(mine_here + 1, 1)
    if mine_here >= here:
        raise UserError(
            f"{local_rank} is {mine_here}, but it must be below {local_ranks} ({here}): ranks are numbered from 0"
        )
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true" and "MASTER_PORT" in env
    attempt = _number(env, "TORCHELASTIC_RESTART_COUNT", launcher) if "TORCHELASTIC_RESTART_COUNT" in env else 0
    if all_ranks == 1:
        return RankEnvironment(0, 1, 0, 1, "127.0.0.1", 0, launcher)
    address, port = _find_rendezvous(env, launcher, all_here=here == all_ranks)
    return RankEnvironment(
        mine, all_ranks, mine_here, here, address, port, launcher, hosted, attempt, token=_token(env)
    )


def _token(env: Mapping[str, str]) -> str:
    return env.get(TOKEN_VARIABLE) or env.get("TORCHELASTIC_RUN_ID", "")


def _port(env: Mapping[str, str], launcher: str) -> int:
    """Return MASTER_PORT, or the default."""
    port = _number(env, "MASTER_PORT", launcher) if "MASTER_PORT" in env else DEFAULT_PORT
    if not 1 <= port <= 65535:
        raise UserError(f"MASTER_PORT is {port}; a port must be a number in 1..65535")
    return port


def _find_rendezvous(env: Mapping[str, str], launcher: str, *, all_here: bool) -> tuple[str, int]:
    if "MASTER_ADDR" in env:
        if not env["MASTER_ADDR"].strip():
            raise UserError("MASTER_ADDR is empty; set it to the host of rank 0")
        return env["MASTER_ADDR"], _port(env, launcher)
    if launcher == "RANK and WORLD_SIZE":
        raise UserError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR is not: where is rank 0? Set MASTER_ADDR and MASTER_PORT"
        )
    if not all_here:
        raise UserError(
            f"{launcher} has started ranks on several hosts, but MASTER_ADDR is not set: where is rank 0? Give mpirun "
            "-x MASTER_ADDR=HOST (MPICH: -genv MASTER_ADDR HOST) with the first host of mpirun's list"
        )
    if "MASTER_PORT" in env:
        return "127.0.0.1", _port(env, launcher)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or _starter()
    return "127.0.0.1", _derive_port(job)


def _starter() -> str:
    """Return the process id of the MPICH launcher, which all ranks of this host share."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            if "PMI_RANK" not in process.environ():
                return str(process.pid)
    return str(os.getppid())


def _derive_port(job: str) -> int:
    """Return a port derived from a job's id, the same in all processes of the job and below the ephemeral range."""
    import hashlib

    return 10_000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "little") % 20_000


class RankTable(NamedTuple):
    """The servers of a rank table, in the order of their ids, with their devices."""

    servers: list[dict[str, Any]]

    @property
    def ranks(self) -> int:
        """Number of ranks, one for each device."""
        return sum(len(server["device"]) for server in self.servers)

    def find_server(self, rank: int) -> tuple[dict[str, Any], int]:
        """Return the server of a rank, and the rank's index among that server's devices."""
        for server in self.servers:
            for number, device in enumerate(server["device"]):
                if int(device["rank_id"]) == rank:
                    return server, number
        raise KeyError(rank)


def read_table(path: Path) -> RankTable:
    """Read a rank table from its JSON file; raise UserError if it is invalid or its ranks are not 0, 1, 2, ..."""
    try:
        content = json_files.loads(path.read_bytes())
        servers = sorted(content["server_list"], key=lambda server: str(server["server_id"]))
        count = int(content.get("server_count", len(servers)))
        ranks = [int(device["rank_id"]) for server in servers for device in server["device"]]
    except OSError as error:
        raise UserError(f"rank table {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"rank table {path} is invalid: {type(error).__name__} {error}") from None
    if content.get("status", "completed") != "completed":
        raise UserError(f"rank table {path} has the status {content['status']!r}, not 'completed'")
    if count != len(servers):
        raise UserError(f"rank table {path}: server_count is {count}, but server_list has {len(servers)} entries")
    if ranks != list(range(len(ranks))) or not ranks:
        raise UserError(
            f"rank table {path}: the rank_ids, in the order of the server_ids, are {ranks}, not 0, 1, 2, ..."
        )
    return RankTable(servers)


def _read_rank_table(env: Mapping[str, str]) -> RankEnvironment:
    table = read_table(Path(env[_TABLE[0]]))
    rank = _number(env, _TABLE[1], "RANK_TABLE_FILE")
    if rank >= table.ranks:
        raise UserError(
            f"RANK_ID is {rank}, but the rank table {env[_TABLE[0]]} has {table.ranks} ranks, counted from 0"
        )
    server, local_rank = table.find_server(rank)
    device = server["device"][local_rank]
    if "DEVICE_ID" in env and str(device.get("device_id", env["DEVICE_ID"])) != env["DEVICE_ID"]:
        raise UserError(
            f"DEVICE_ID is {env['DEVICE_ID']}, but rank {rank} of the rank table has device {device['device_id']}"
        )
    number = device.get("device_id")
    if number is not None and not str(number).isdecimal():
        raise UserError(f"rank {rank} of the rank table {env[_TABLE[0]]} has the device_id {number!r}, not a number")
    number = None if number is None else int(number)
    if table.ranks == 1:
        return RankEnvironment(0, 1, 0, 1, "127.0.0.1", 0, _TABLE[0], device=number)
    first = table.servers[0]
    address = first.get("host_nic_ip")
    if not address or address == "reserve":
        address = "127.0.0.1" if len(table.servers) == 1 else first["server_id"]
    port, here = _port(env, _TABLE[0]), len(server["device"])
    return RankEnvironment(
        rank, table.ranks, local_rank, here, address, port, _TABLE[0], device=number, token=env.get(TOKEN_VARIABLE, "")
    )


def is_first_on_host() -> bool:
    """Return whether this process reports command-line errors for its host.

    All processes find the same errors, and one process per host reports them.
    """
    with contextlib.suppress(UserError):  # if the environment is wrong, every process reports that
        return find_rank_environment().local_rank == 0
    return True
