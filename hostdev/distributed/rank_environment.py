"""The rank environment: this process's rank and the rendezvous address, from the variables that launchers set.

`start_processes` starts a command in several processes of this host, one per rank; `wait_for` waits until they end.
"""

import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hostdev.core import json_files
from hostdev.core.errors import UserError
from hostdev.core.launched import LAUNCHERS, RANK_TABLE, SLURM

DEFAULT_PORT = 29500
# Variables that `start_processes` sets: a secret of all processes and, for rank 0, a listening socket's descriptor.
TOKEN_VARIABLE = "HOSTDEV_TOKEN"
LISTEN_VARIABLE = "HOSTDEV_LISTEN_FD"
# Variables from the launcher of this process; the child processes must not inherit them.
_LAUNCHER_VARIABLES = {
    *itertools.chain.from_iterable(names for _, names in LAUNCHERS),
    *RANK_TABLE,
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
}
_BACKLOG = 2048
_END_SECONDS = 8.0  # time for the other processes to end after a failure


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
    # A shell loop may omit the local rank, or the number of ranks on this host. Without this number, all ranks count as
    # ranks of this host if the local rank equals the rank.
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


def start_processes(ranks: int, command: Sequence[str], **how: Any) -> "list[subprocess.Popen[bytes]]":
    """Start a command on this host in several processes, which are the ranks of a run.

    Args:
        ranks: Number of processes.
        command: Command line of each process.
        **how: Further arguments of `subprocess.Popen`.
    """
    # Rank 0 inherits the socket, so no other program can take the port first, and other hosts cannot reach it.
    with listen_at(("127.0.0.1", 0), socket.AF_INET, socket.SOCK_STREAM) as listening:
        return _start(ranks, command, listening, how)


def _start(
    ranks: int, command: Sequence[str], listening: socket.socket, how: dict[str, Any]
) -> "list[subprocess.Popen[bytes]]":
    port, descriptor = listening.getsockname()[1], listening.fileno()
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        TOKEN_VARIABLE: secrets.token_hex(16),
    }
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    end = die_with_parent if sys.platform == "linux" else None
    return [
        subprocess.Popen(
            command,
            env={**inherited, **common, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=end,
            pass_fds=[descriptor] if own else [],
            **how,
        )
        for rank, own in enumerate([{LISTEN_VARIABLE: str(descriptor)}, *[dict[str, str]()] * (ranks - 1)])
    ]


def listen_at(address: Any, *how: int) -> socket.socket:
    """Return a socket that listens at one address; `how` is passed to `socket.socket`."""
    made = socket.socket(*how)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def die_with_parent() -> None:
    """Have the kernel kill this child process if its parent dies (Linux)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def wait_for(processes: "list[subprocess.Popen[bytes]]") -> int:
    """Wait until all processes have ended; return the exit code of the first that failed, or 0.

    Processes that still run 8 s after a failure are killed. Stop signals are forwarded to all processes.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # unless ignored, as under nohup
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, _forward_signal(number, processes)) for number in numbers}
    deadline, first = float("inf"), 0
    try:
        while None in (codes := [process.poll() for process in processes]):
            if any(codes) and not first:
                first = next(code for code in codes if code)
                deadline = time.monotonic() + _END_SECONDS
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(0.05)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    first = first or next((code for code in codes if code), 0)
    return 128 - first if first < 0 else first


def _forward_signal(number: signal.Signals, processes: "list[subprocess.Popen[bytes]]") -> Any:
    has_terminal = os.isatty(0)

    def handle(*_: object) -> None:
        if number in (signal.SIGINT, signal.SIGHUP) and has_terminal:
            return  # the terminal has already sent it to the children
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    return handle
