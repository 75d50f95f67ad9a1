"""The option of a table that stores its rows on disk."""

import os
from dataclasses import dataclass
from pathlib import Path

from hostdev.core.memory import parse_bytes

MOST_DISK_WINDOW = 1024  # maximum of `Disk.window`, in batches


@dataclass(frozen=True)
class Disk:
    """Store a table's rows on disk, and keep as many of them in memory as fit; results do not depend on how many.

    The table writes its rows to its own subfolder of `dir`, and removes the subfolder at the end. Rows that have their
    initial values take no space.

    Attributes:
        dir: The folder, which is created if it does not exist. Several tables may use the same folder.
        memory: Memory for the rows of the table, in bytes or as text such as "4GiB". In addition, a table takes 4 bytes
            for each of its rows (8 bytes for more than about a billion rows).
        window: Number of batches that loops read ahead, at most 1024, to know which rows to keep in memory. A larger
            window reads less from the disk if much of the table is in memory, but holds more batches in memory.
    """

    dir: str | os.PathLike[str]
    memory: int | str
    window: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.dir, str | os.PathLike) or not str(self.dir):
            raise ValueError(f"Disk needs a folder, not {self.dir!r}")
        if isinstance(self.memory, bool) or not isinstance(self.memory, int | str):
            raise ValueError(
                f"the memory of Disk must be a number of bytes or a size such as '4GiB', not {self.memory!r}"
            )
        if self.nbytes < 1:
            raise ValueError(f"the memory of Disk must be more than {self.memory!r}")
        is_number = isinstance(self.window, int) and not isinstance(self.window, bool)
        if not is_number or not 0 <= self.window <= MOST_DISK_WINDOW:
            raise ValueError(f"the window of Disk must be in 0..{MOST_DISK_WINDOW} batches, not {self.window!r}")

    @property
    def path(self) -> Path:
        """`dir` as a path."""
        return Path(self.dir)

    @property
    def nbytes(self) -> int:
        """The memory in bytes."""
        return parse_bytes(self.memory) if isinstance(self.memory, str) else self.memory
