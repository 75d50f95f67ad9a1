"""Free memory, and checks that a table fits before it is allocated."""

import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from hostdev.core.errors import HostdevError, UserError
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.table_dtypes import EIGHT_BIT, FP32, slot_bytes, weight_bytes

_CGROUP = Path("/sys/fs/cgroup")
_LEAST_RESERVE = 256 << 20


def format_bytes(n: int) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"


def parse_bytes(text: str) -> int:
    """Parse a size such as "16GiB", "500 MB" or "1e9"; raise UserError for other text."""
    number, letter, rest = re.findall(r"(?is)^(.*?)(?:([KMGT])(iB|B|))?$", text.strip())[0]
    base = 1000 if rest in ("B", "b") else 1024
    try:
        size = float(number) * (1 if not letter else base ** (1 + "KMGT".index(letter.upper())))
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise UserError(f"a size must be a number of bytes, or a number with KiB, MiB, GiB or TiB, not {text!r}")
    return int(size)


_sharing = 1  # number of processes of this run that share the host's memory


def share_memory(processes: int) -> None:
    """Make `available_bytes` return an equal share for each of `processes` processes that allocate at the same time."""
    global _sharing
    _sharing = processes


def available_bytes() -> int:
    """Return the bytes that this process may allocate without swapping, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    for folder in _control_groups():
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                limit = int((folder / limit_name).read_text())
                used = int((folder / used_name).read_text()) - _page_cache(folder)
            except (OSError, ValueError, KeyError):  # no such control group, or the limit is "max"
                continue
            available = min(available, max(0, limit - used))
    return available // _sharing


def require_memory(needed: int, what: str, advice: str = "", error: type[HostdevError] = UserError) -> None:
    """Raise `error` unless `needed` bytes are available.

    The message says what needs them (`what`), how many are needed and how many are free, and gives `advice`.
    """
    free = available_bytes()
    if needed > free:
        raise error(
            f"{what} needs {format_bytes(needed)}, but {format_bytes(free)} of host memory are free"
            f"{advice and f'; {advice}'}"
        )


def free_addresses() -> int | None:
    """Return the bytes of address space that this process may still reserve; None without a limit (ulimit -v)."""
    try:
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, OSError):
        return None
    return None if limit == resource.RLIM_INFINITY else max(0, limit - int(psutil.Process().memory_info().vms))


def _control_groups() -> list[Path]:
    """Return the folders of this process's memory control group and of its ancestors (cgroup v2, then v1)."""
    found = [_CGROUP, _CGROUP / "memory"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = _CGROUP / controllers if controllers == "memory" else _CGROUP
        if controllers in ("", "memory"):
            inner = root / path.lstrip("/")
            found += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder != root]
    return found


def _page_cache(folder: Path) -> int:
    """Return the bytes of cached files in a control group's usage, which the kernel frees on demand."""
    values = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    prefix = "total_" if "total_inactive_file" in values else ""
    return int(values[f"{prefix}inactive_file"]) + int(values[f"{prefix}active_file"])


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def table_bytes(rows: int, dim: int, slots: int, row_slots: int = 0, dtype: str = FP32, slots_dtype: str = FP32) -> int:
    """Return a table's size in bytes: rows x (dim x w + slots x s + 4 x row_slots).

    w is the size of a weight: 4, or 2 for bf16. s is the size of a slot: dim x 4; for bf16, dim x 2; for 8 bits, dim
    rounded up to a multiple of 4, plus 4.
    """
    return rows * (dim * weight_bytes(dtype) + slot_bytes(slots_dtype, dim) * slots + 4 * row_slots)


class TableShape(NamedTuple):
    """The properties of a table that determine its bytes per row."""

    dim: int
    optimizer: SparseOptimizer
    dtype: str = FP32  # of the weights in host memory
    slots_dtype: str = FP32  # of the slots in host memory

    def nbytes(self, rows: int) -> int:
        """Return the size in bytes of `rows` rows with their slots."""
        slots, row_slots = len(self.optimizer.slots), len(self.optimizer.row_slots)
        return table_bytes(rows, self.dim, slots, row_slots, self.dtype, self.slots_dtype)


def row_bytes(tables: Iterable[tuple[int, SparseOptimizer] | TableShape]) -> tuple[int, int]:
    """Return the bytes of one float32 row of each table, summed over the tables: without the slots, and with them.

    Each table is given as (dim, optimizer) or as a `TableShape`.
    """
    passing = whole = 0
    for dim, optimizer, *_ in tables:
        passing += table_bytes(1, dim, 0)
        whole += TableShape(dim, optimizer).nbytes(1)
    return passing, whole


def copied_bytes(passing: int, changing: int, uses: int, row: int, whole: int) -> int:
    """Return the bytes of host memory for the copies of one batch when training on an accelerator.

    Args:
        passing: Number of rows sent and returned. Each direction counts twice, for extra copies of conflicting rows.
        changing: Number of rows that a cache admits or evicts; their copies include the slots.
        uses: Number of row occurrences; each takes 16 bytes for a position, a weight, etc.
        row: Total bytes of one row of each table, weights only.
        whole: Total bytes of one row of each table, with its slots.
    """
    return 4 * passing * row + 2 * changing * whole + 16 * uses


def pinned_size(nbytes: int) -> int:
    """Return the size of a pinned buffer: `nbytes` plus a quarter, rounded up to a power of two as in torch."""
    return 1 << max(12, (nbytes * 5 // 4 - 1).bit_length())


def require_table(
    name: str,
    rows: int,
    dim: int,
    optimizer: SparseOptimizer,
    free: int | None = None,
    where: str = "host",
    dtype: str = FP32,
    slots_dtype: str = FP32,
) -> int:
    """Return a table's size in bytes; raise UserError if it exceeds the `free` bytes in `where`.

    By default, these are the available bytes of the host.
    """
    free = available_bytes() if free is None else free
    needed = TableShape(dim, optimizer, dtype, slots_dtype).nbytes(rows)
    if needed > free:
        slots, row_slots = len(optimizer.slots), len(optimizer.row_slots)
        of_rows = f" + {rows} rows x {row_slots} x 4" if row_slots else ""
        weight, slot = weight_bytes(dtype), slot_bytes(slots_dtype, dim)
        if slots_dtype == EIGHT_BIT:
            of_one = f"({dim} x {weight} + {slots} slots x {slot})"
        elif slot == dim * weight:
            of_one = f"{dim} x (1 + {slots} slots) x {weight}"
        else:
            of_one = f"{dim} x ({weight} + {slots} slots x {slot // dim})"
        raise UserError(
            f"table {name!r} needs {rows} rows x {of_one}{of_rows} = {needed} bytes "
            f"({format_bytes(needed)}), but {free} bytes ({format_bytes(free)}) of {where} memory are "
            f"free; use fewer rows or a smaller "
            "dimension"
        )
    return needed


def cache_room(free: int, beside: int = 0) -> int:
    """Return how many of an accelerator's `free` bytes a cache may take if other uses will still need `beside` bytes.

    A tenth of `free`, and at least 256 MiB, is reserved for uses that are not known in advance: library workspaces,
    fragmentation, the user's model.
    """
    return max(0, free - beside - max(free // 10, _LEAST_RESERVE))


def dense_bytes(batch_size: int, inputs: int, layers: Sequence[int]) -> int:
    """Estimate the bytes of float32 memory that dense layers take in a step with Adam.

    This counts each parameter, its gradient and its two moments. For each sample, it counts the inputs before and after
    scaling, and their gradient; and each hidden layer's output and activation, and the gradients of both.
    """
    parameters = sum(a * b + b for a, b in itertools.pairwise([inputs, *layers, 1]))
    return 16 * parameters + 4 * batch_size * (3 * inputs + 4 * sum(layers))
