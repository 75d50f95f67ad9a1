"""The options of `hostdev train` for tables on disk: --table-dir, --table-memory and --table-window."""

from dataclasses import replace
from typing import Any

from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.memory import parse_bytes
from hostdev.models.model import Model

LEAST_ROW = 64  # bytes; for smaller rows, what is kept in memory to find them would take about as much as the rows


def set_disks(model: Model, settings: Any) -> None:
    """Put a model's tables on disk, if the options of a `TrainConfig` say so.

    The memory is shared in proportion to the bytes of the tables' rows. Tables whose rows have less than 64 bytes stay
    in memory, such as those of one column.
    """
    if settings.table_dir is None:
        return
    sizes = {name: spec.rows * spec.shape.nbytes(1) for name, spec in model.tables.items()}
    sizes = {name: size for name, size in sizes.items() if model.tables[name].shape.nbytes(1) >= LEAST_ROW}
    if not sizes:
        raise UserError(
            f"--table-dir has no effect: no table has rows of {LEAST_ROW} bytes or more, and smaller rows stay in "
            "memory; leave out --table-dir"
        )
    memory, total = parse_bytes(settings.table_memory), sum(sizes.values())
    window = Disk.window if settings.table_window is None else settings.table_window
    for name, size in sizes.items():
        disk = Disk(settings.table_dir, memory * size // total, window)
        model.tables = {**model.tables, name: replace(model.tables[name], disk=disk)}
