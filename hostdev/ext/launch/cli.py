"""The command `launch`: start the processes that a rank table assigns to this host, or check their connections."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from hostdev.core import cli
from hostdev.core.addresses import local_path, require_input
from hostdev.core.errors import UserError, write_stderr
from hostdev.distributed.rank_environment import RankTable, read_table

PROG = "hostdev.launch"
_CHECKED_BYTES = 8 << 20
HELP = "start the processes that a rank table assigns to this host; test the connections"


def find_server(table: RankTable, wanted: str | None, path: Path) -> dict[str, Any]:
    """Return this host's entry in a rank table.

    This is the entry with the ID `wanted` if an ID is given, else the only entry, else the entry that names this host.
    """
    names = [str(server["server_id"]) for server in table.servers]
    if wanted is not None:
        if wanted not in names:
            raise UserError(f"--server {wanted}: {path} has only the servers {', '.join(names)}")
        return table.servers[names.index(wanted)]
    if len(names) == 1:
        return table.servers[0]
    addresses = {address.address for each in psutil.net_if_addrs().values() for address in each} | {
        socket.gethostname()
    }
    found = [server for server in table.servers if {str(server["server_id"]), server.get("host_nic_ip")} & addresses]
    if len(found) != 1:
        raise UserError(
            f"{path} has the servers {', '.join(names)}; give --server ID to say which of them is this host"
        )
    return found[0]


def start(path: Path, table: RankTable, server: dict[str, Any], command: Sequence[str], folder: Path) -> int:
    """Start a server's processes, each with a log in its own folder, wait for them, and return the exit code.

    If rank 0 runs on this host, its output is also printed.
    """
    from hostdev.distributed.rank_environment import die_with_parent, wait_for

    with_python = command[0].startswith("-") or command[0].endswith(".py")
    full_command = [sys.executable, *command] if with_python else list(command)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"--log-dir {folder} exists already; choose another folder") from None
    ranks = [int(device["rank_id"]) for device in server["device"]]
    listed = ", ".join(map(str, ranks))
    print(
        f"{len(ranks)} of {table.ranks} ranks on this host ({server['server_id']}): {listed}; logs in {folder}",
        flush=True,
    )
    processes, showing = [], []
    with contextlib.ExitStack() as files:
        for device in server["device"]:
            rank = int(device["rank_id"])
            rank_folder = folder / f"rank{rank}"
            rank_folder.mkdir()
            variables = {"RANK_TABLE_FILE": str(path.resolve()), "RANK_ID": str(rank)}
            if "device_id" in device:
                variables["DEVICE_ID"] = str(device["device_id"])
            lines = "".join(f"{name}={value}\n" for name, value in variables.items())
            (rank_folder / "environment.txt").write_text(lines, errors="surrogateescape")
            log = files.enter_context((rank_folder / "output.log").open("wb"))
            try:
                process = subprocess.Popen(
                    full_command,
                    env={**os.environ, **variables},
                    stdout=subprocess.PIPE if rank == 0 else log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=die_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:
                raise UserError(f"{full_command[0]} cannot be started: {error.strerror}; check the command") from None
            processes.append(process)
            if rank == 0:
                showing.append(threading.Thread(target=_show, args=(process.stdout, log), daemon=True))
                showing[-1].start()
        code = wait_for(processes)
        for thread in showing:
            thread.join()
        for process in processes:
            if process.stdout is not None:
                process.stdout.close()
    if not code:
        if PROG not in command:
            print("training succeeded")
        return 0
    failed = [rank for rank, process in zip(ranks, processes, strict=True) if process.returncode]
    each = ", ".join(f"rank {rank} exited with {processes[ranks.index(rank)].returncode}" for rank in failed)
    what = "the check" if PROG in command else "training"
    print(f"{what} failed: {each}; see {folder}/rank{failed[0]}/output.log", file=sys.stderr)
    return code


def _show(output: Any, log: IO[bytes]) -> None:
    """Copy a process's output to its log and to stdout."""
    for line in output:
        log.write(line)
        log.flush()
        sys.stdout.write(line.decode(errors="replace"))
        sys.stdout.flush()


def check() -> int:
    """Connect to the other processes, send some MiB to each, and print the processes and the speeds."""
    from hostdev.distributed.rank_environment import find_rank_environment

    env = find_rank_environment()
    if env.alone:
        raise UserError("--check needs several processes; start it with torchrun, mpirun or --rank-table FILE")
    import hostdev.core.environment  # isort: skip  # noqa: F401  (before torch)

    import numpy as np
    import torch

    from hostdev.distributed.process_group import Ranks

    def fault(rank: int, why: str) -> None:
        write_stderr(f"{PROG}: error: rank {rank} of {env.ranks}: {why}")
        os._exit(2)

    ranks = Ranks(env, fault, levels=1)
    name = np.frombuffer(f"{socket.gethostname()} pid {os.getpid()}".encode(), np.uint8)
    names = [each.tobytes().decode() for each in ranks.control.gather(name)]
    values = torch.zeros(_CHECKED_BYTES, dtype=torch.uint8)
    times = np.zeros(env.ranks)
    for other in range(env.ranks):  # in round `other`, each rank sends to the rank `other` places ahead in the ring
        give, take = [0] * env.ranks, [0] * env.ranks
        give[(env.rank + other) % env.ranks] = len(values)
        take[(env.rank - other) % env.ranks] = len(values)
        begin = time.perf_counter()
        ranks.control.all_to_all(values, give, take)
        times[(env.rank + other) % env.ranks] = time.perf_counter() - begin
    all_times = ranks.control.gather(times)
    if env.rank == 0:
        print(f"{env.ranks} processes connected at {env.address}:{env.port}, and each reached all others")
        for rank, (who, each) in enumerate(zip(names, all_times, strict=True)):
            speeds = [_CHECKED_BYTES / seconds / 1e6 for other, seconds in enumerate(each) if other != rank]
            print(f"rank {rank}: {who}, {min(speeds):,.0f} to {max(speeds):,.0f} MB/s to the others")
    ranks.leave()
    return 0


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(
        prog, "Start the processes that a rank table assigns to this host; give the program and its options after --."
    )
    made.inputs["rank_table"] = partial(require_input, said="rank table {}: No such file or directory")
    made.add_argument(
        "--rank-table",
        type=cli.checked(local_path),
        metavar="FILE",
        help="JSON file with the servers and their devices",
    )
    made.add_argument(
        "--server", metavar="ID", help="this host's server_id in the table (default: found by name or address)"
    )
    made.add_argument(
        "--log-dir",
        type=cli.checked(local_path),
        metavar="DIR",
        help="a new folder for the logs of the ranks (default launch-<time>)",
    )
    made.add_argument("--check", action="store_true", help="test and time the connections; works under any launcher")
    return made


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Parse the command line and start processes, or check their connections."""
    own, command = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    options = parser(prog).parse_args(own)
    if options.check and command:
        raise UserError("--check starts no program; leave out -- and everything after it")
    if options.rank_table is None:
        for name in ("server", "log_dir"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} has no effect without --rank-table; "
                    f"leave out --{name.replace('_', '-')}"
                )
        if not options.check:
            raise UserError("give --rank-table FILE -- PROGRAM OPTIONS, or --check to test connections")
        return check()
    if not command and not options.check:
        raise UserError("missing command after --, such as -- -m hostdev.train --host-device-mix ...")
    if options.check:
        command = ["-m", PROG, "--check"]
    table = read_table(options.rank_table)
    server = find_server(table, options.server, options.rank_table)
    folder = options.log_dir or Path(time.strftime("launch-%Y%m%d-%H%M%S"))
    return start(options.rank_table, table, server, command, folder)
