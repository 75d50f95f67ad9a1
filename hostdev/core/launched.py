"""The number of processes that a launcher has started, and whether each trains its own tables."""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hostdev.core import json_files
from hostdev.core.errors import UserError

# Per launcher: its name, and its variables for rank, number of ranks, local rank, and number of ranks on the host.
LAUNCHERS = (
    (
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("MPICH", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("RANK and WORLD_SIZE", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
)
RANK_TABLE = ("RANK_TABLE_FILE", "RANK_ID")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")  # set by srun, not in the batch script
_alone = False


def alone() -> None:
    """Declare that this process trains its own tables, although a launcher has started several processes.

    Without this declaration, a `Runtime`, a `HostTable` or a `Network` that trains without `ranks` in one of several
    processes raises UserError. The declaration holds until the process ends, and has no effect in a single process.
    """
    global _alone
    _alone = True


def started(environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Return the number of processes started together, and a text that says how it was found; (1, "") for one process.

    If `environment` is given, it replaces the process's environment variables, and torch.distributed is not consulted.
    """
    env = os.environ if environment is None else environment
    found = [(_number(env, names[1]), f"{names[1]} is {env[names[1]]}") for _, names in LAUNCHERS if names[1] in env]
    if RANK_TABLE[0] in env and RANK_TABLE[1] in env:
        found.append((_count_ranks(Path(env[RANK_TABLE[0]])), f"listed in {RANK_TABLE[0]}"))
    if not found and SLURM[0] in env and SLURM[1] in env:
        found.append((_number(env, SLURM[1]), f"{SLURM[1]} is {env[SLURM[1]]}"))
    if environment is None:
        found.append((group_size(), "torch.distributed is initialised"))
    return max([one for one in found if one[0] > 1], default=(1, ""))


def require_alone(what: str, joining: str) -> None:
    """Raise UserError if this is one of several processes, unless `alone` was called.

    Args:
        what: What is about to train without ranks, for the message.
        joining: What to do after `hostdev.join`, for the message.
    """
    if _alone:
        return
    count, why = started()
    if count > 1:
        raise UserError(
            f"{what} in one of {count} processes ({why}) has no ranks: each process would train its own copy, and the "
            f"copies would drift apart. Join the processes: `with hostdev.join() as ranks:`, then {joining}. If each "
            "process should train its own copy, call hostdev.alone() first"
        )


def _number(env: Mapping[str, str], name: str) -> int:
    value = env[name].strip()
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else 1


def _count_ranks(path: Path) -> int:
    """Return the number of devices in a rank table, or 1 if it cannot be read; `hostdev.join` reports such a file."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return sum(len(server["device"]) for server in json_files.loads(path.read_bytes())["server_list"])
    return 1


def group_size() -> int:
    """Return the size of torch's default process group, or 1 if there is none; never import torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1
    return int(dist.get_world_size())
