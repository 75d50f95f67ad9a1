"""The flag --scheduler. This module imports neither Dask nor anything that is slow to import."""

import re

from hostdev.core.errors import UserError

_LOCAL = re.compile(r"local:([0-9]+)")
_ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}")
MOST_LOCAL = 1024


def parse_scheduler(text: str) -> int | None:
    """Return N for local:N, and None for an address such as tcp://HOST:PORT; raise UserError for anything else."""
    found = _LOCAL.fullmatch(text)
    if found is not None:
        workers = int(found[1])
        if not 1 <= workers <= MOST_LOCAL:
            raise UserError(f"--scheduler {text}: the number of workers must be from 1 to {MOST_LOCAL:,}")
        return workers
    if _ADDRESS.fullmatch(text) is None:
        raise UserError(
            f"--scheduler {text}: give the address of Dask's scheduler, such as tcp://HOST:8786, or local:N for N "
            "processes on this machine"
        )
    return None
