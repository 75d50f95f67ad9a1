"""How much memory is free, and the refusal of a table that cannot fit, before it is allocated."""

import resource
import sys
from pathlib import Path

import psutil

from hostdev.errors import UserError

_CGROUP = Path("/sys/fs/cgroup")


def gib(n: int) -> str:
    """Return a number of bytes as text, in the unit that suits it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit if there is one."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int((_CGROUP / limit_file).read_text())
            used = int((_CGROUP / used_file).read_text())
        except (OSError, ValueError):  # no such control group, or the limit is "max"
            continue
        available = min(available, max(0, limit - used))
    return available


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def table_bytes(rows: int, dim: int, slots: int) -> int:
    """Return what a table holds: rows x dim x (1 + slots) x 4 bytes."""
    return rows * dim * (1 + slots) * 4


def require_table(name: str, rows: int, dim: int, slots: int, free: int, where: str) -> None:
    """Raise UserError unless a table of this shape fits into `free` bytes of the memory `where`."""
    needed = table_bytes(rows, dim, slots)
    if needed > free:
        raise UserError(
            f"table {name!r} needs {rows} rows x {dim} x (1 + {slots} slots) x 4 = {needed} bytes ({gib(needed)}), "
            f"but {free} bytes ({gib(free)}) of {where} memory are free; use fewer rows or a smaller dimension"
        )
