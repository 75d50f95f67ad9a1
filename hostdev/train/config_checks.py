"""Checks of options of `hostdev train` that belong together; each takes a `TrainConfig`."""

from typing import Any

from hostdev.cache.options import AUTO, MOST_WINDOW, rows_of
from hostdev.core.disk_storage import MOST_DISK_WINDOW
from hostdev.core.errors import UserError
from hostdev.core.memory import parse_bytes

ORDERS = ("shuffled", "stored")
TABLES = ("vocabulary", "dynamic")
_OF_KEYS = ("capacity", "admit_count", "unknown_ids", "evict_unused")
_MOST_USES = (1 << 24) - 1  # as in core.admission, whose kernels a command line need not import


def option_name(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def check_cache(settings: Any) -> None:
    """Raise UserError for options of the cache that contradict each other or have no effect."""
    if settings.cache_rows is None:
        for name in ("cache_policy", "cache_window"):
            if getattr(settings, name) is not None:
                raise UserError(
                    f"{option_name(name)} has no effect without --cache-rows; leave out {option_name(name)}"
                )
        return
    if settings.cache_rows != AUTO and not rows_of(settings.cache_rows, 1 << 30):
        return
    if not settings.host_device_mix:
        raise UserError(f"--cache-rows {settings.cache_rows} has no effect without --host-device-mix; give both")
    if settings.staleness:
        raise UserError(
            "--staleness cannot be combined with --cache-rows, because a stale row would stay in the cache; leave "
            "out one of the two"
        )
    if settings.l2 == "table":
        raise UserError(
            "--l2 table cannot be combined with --cache-rows: the L2 term reads the whole table on the host, so "
            "each step would write back all cached rows; leave out one of the two"
        )
    if settings.cache_window is not None:
        if settings.cache_policy not in (None, "lookahead"):
            raise UserError(
                f"--cache-window has no effect with --cache-policy {settings.cache_policy}; leave out --cache-window"
            )
        if not 0 <= settings.cache_window <= MOST_WINDOW:
            raise UserError(f"--cache-window must be in 0..{MOST_WINDOW}, not {settings.cache_window}")


def check_vectors(settings: Any) -> None:
    """Raise UserError for options of given vectors that contradict each other or others."""
    files = settings.vector_files
    for name in settings.frozen_columns:
        if name not in files:
            raise UserError(f"--frozen-vectors {name}: the column has no file; give --initial-vectors {name}=FILE")
    if settings.frozen_columns and settings.l2 != "none":
        raise UserError(f"--l2 {settings.l2} would change the rows of --frozen-vectors; leave out one of the two")
    if settings.frozen_columns and settings.table_weight_decay:
        raise UserError("--table-weight-decay would change the rows of --frozen-vectors; leave out one of the two")


def check_order(settings: Any) -> None:
    """Raise UserError if an option of the shuffling has no effect."""
    if settings.order == "stored" and settings.shuffle_window != 1:
        raise UserError("--shuffle-window has no effect with --order stored; leave out --shuffle-window")


def check_keys(settings: Any) -> None:
    """Raise UserError for options of tables by key that contradict each other or have no effect."""
    if settings.tables != "dynamic":
        for name in _OF_KEYS:
            if getattr(settings, name) is not None:
                option = option_name(name)
                raise UserError(f"{option} has no effect without --tables dynamic; leave out {option}")
        return
    if not settings.host_device_mix:
        raise UserError("--tables dynamic needs --host-device-mix: tables that grow are in host memory")
    if settings.l2 == "table":
        raise UserError("--l2 table has no fixed table to regularize with --tables dynamic; use --l2 batch")
    if settings.initial_vectors is not None:
        raise UserError("--initial-vectors names the values of a vocabulary; leave it out with --tables dynamic")
    if settings.staleness:
        raise UserError("--staleness does not work with --tables dynamic; leave it out")
    if settings.admit_count is not None and not 1 <= settings.admit_count <= _MOST_USES:
        raise UserError(f"--admit-count must be from 1 to {_MOST_USES:,}, not {settings.admit_count}")
    if settings.evict_unused is not None and settings.evict_unused < 1:
        raise UserError(f"--evict-unused must be at least 1 step, not {settings.evict_unused}")
    parse_capacity(settings.capacity)


def parse_capacity(capacity: str | None) -> int | str | None:
    """Return a number of keys, or a size as text; raise UserError if --capacity is neither."""
    if capacity is None:
        return None
    if capacity.isdigit():
        if int(capacity) < 1:
            raise UserError(f"--capacity must be at least 1 key, not {capacity}")
        return int(capacity)
    try:
        parse_bytes(capacity)
    except UserError as error:
        raise UserError(f"--capacity: {error}") from None
    return capacity


def require_table_window(window: int) -> None:
    """Raise UserError unless --table-window is possible."""
    if not 0 <= window <= MOST_DISK_WINDOW:
        raise UserError(f"--table-window must be in 0..{MOST_DISK_WINDOW} batches, not {window}")


def check_disk(settings: Any) -> None:
    """Raise UserError for options of tables on disk that contradict each other or have no effect."""
    for one, other in (("table_dir", "table_memory"), ("table_memory", "table_dir")):
        if getattr(settings, one) is not None and getattr(settings, other) is None:
            raise UserError(f"{option_name(one)} needs {option_name(other)}; give both")
    if settings.table_dir is None:
        if settings.table_window is not None:
            raise UserError("--table-window has no effect without --table-dir; leave out --table-window")
        return
    if settings.table_window is not None:
        require_table_window(settings.table_window)
    if not settings.host_device_mix:
        raise UserError("--table-dir needs --host-device-mix: tables on disk belong to the host")
    if settings.l2 == "table":
        raise UserError(
            "--l2 table would read all rows from disk in every step; use --l2 batch, or leave out --table-dir"
        )
    try:
        parse_bytes(settings.table_memory)
    except UserError as error:
        raise UserError(f"--table-memory: {error}") from None
