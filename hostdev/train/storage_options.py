"""The options of how tables are stored and read: tables by key, tables on disk, prefetching and the cache."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hostdev.cache.options import AUTO, MOST_WINDOW, POLICIES, WINDOW, rows_of
from hostdev.core.addresses import local_path
from hostdev.core.cli import checked
from hostdev.core.disk_storage import MOST_DISK_WINDOW, Disk
from hostdev.core.keys import UNKNOWN
from hostdev.core.memory import parse_bytes
from hostdev.core.options import OptionError, OptionGroup, When, choice, count, option

MOST_DEPTH = 64  # reading further ahead does not help
TABLES = ("vocabulary", "dynamic")
_MOST_USES = (1 << 24) - 1  # as in core.key_rules, which is slow to import because of its kernels
_HOST = "host_device_mix"
_WHOLE_TABLE = "l2=table"
_DYNAMIC = "tables=dynamic"


def parse_capacity(capacity: str | None) -> int | str | None:
    """Return --capacity as a number of keys, a size as text, or None; raise UserError if it is malformed."""
    if capacity is None or not capacity.isdigit():
        parse_bytes(capacity or "0")
        return capacity
    if int(capacity) < 1:
        raise OptionError("capacity", f" must be at least 1 key, not {capacity}")
    return int(capacity)


def _own_rule(effect: str, kind: str, *, instead_of: str) -> Any:
    """Return the field of an option that names the user's own rule."""
    return option(
        f"your rule for which keys {effect}, as package.module:NAME: an object of hostdev.{kind}, or a class of it",
        str,
        metavar="RULE",
        needs={_DYNAMIC: ""},
        excludes={instead_of: ""},
        is_flag=False,
        is_fixed=True,
    )


@dataclass(frozen=True, kw_only=True)
class KeyOptions(OptionGroup):
    """Tables by key."""

    section: ClassVar[str] = "keys"
    title: ClassVar[str] = "tables by key"
    tables: str = choice(
        "vocabulary: a row for each id of the data; dynamic: tables by key, which grow as ids come",
        TABLES,
        default=TABLES[0],
        needs={_HOST: "tables that grow are in host memory"},
        excludes={
            _WHOLE_TABLE: "there is no fixed table to regularize, unlike --l2 batch",
            "initial_vectors": "it names the values of a vocabulary",
            "staleness": "",
        },
        is_fixed=True,
    )
    capacity: str | None = option(
        "most keys of --tables dynamic, or their memory, such as 8GiB (default: what is free)",
        str,
        metavar="X",
        check=parse_capacity,
        needs={_DYNAMIC: ""},
        is_number=True,
    )
    admit_count: int | None = count(
        "give a key a row at its N-th use (default: at once)", most=_MOST_USES, needs={_DYNAMIC: ""}, is_fixed=True
    )
    unknown_ids: str | None = choice(
        "what ids without a row read: shared, a row of their column, which is trained; zeros; or initial, their own "
        "initial values (default shared)",
        UNKNOWN,
        needs={_DYNAMIC: ""},
        is_fixed=True,
    )
    evict_unused: int | None = count(
        "remove keys that N steps have not used (default: never)", unit="step", needs={_DYNAMIC: ""}, is_fixed=True
    )
    admission: str | None = _own_rule("get a row", "Admission", instead_of="admit_count")
    eviction: str | None = _own_rule("lose their row", "Eviction", instead_of="evict_unused")


@dataclass(frozen=True, kw_only=True)
class DiskOptions(OptionGroup):
    """Tables on disk."""

    section: ClassVar[str] = "disk"
    title: ClassVar[str] = "tables on disk"
    table_dir: Path | None = option(
        "folder on a disk for the rows of embedding tables that do not fit in --table-memory; empty again at the end",
        checked(local_path),
        needs={"table_memory": "", _HOST: "tables on disk belong to the host"},
        excludes={_WHOLE_TABLE: "each step would read all rows from disk, unlike --l2 batch"},
    )
    table_memory: str | None = option(
        "memory for the rows of the tables in --table-dir, in each process, such as 4GiB",
        str,
        metavar="X",
        check=parse_bytes,
        needs={"table_dir": ""},
    )
    table_window: int | None = option(
        "batches that are read ahead to know which rows of the tables in --table-dir to keep in memory "
        f"(default {Disk.window})",
        int,
        least=0,
        most=MOST_DISK_WINDOW,
        unit="batches",
        needs={"table_dir": ""},
    )


def _has_no_rows(size: str) -> bool:
    """Return whether --cache-rows gives a cache without rows; raise UserError if it is malformed."""
    return size != AUTO and not rows_of(size, 1 << 30)


@dataclass(frozen=True, kw_only=True)
class CacheOptions(OptionGroup):
    """Prefetching, staleness and the cache on the device."""

    section: ClassVar[str] = "pipeline_and_cache"
    title: ClassVar[str] = "prefetching and the cache"
    pipeline_depth: int = option(
        "batches to read and look up ahead of the step; 0 runs the stages one after another",
        int,
        default=2,
        least=0,
        most=MOST_DEPTH,
    )
    staleness: int = option(
        "let lookups miss the updates of the last N batches; NOT EXACT above 0",
        int,
        default=0,
        least=0,
        needs={_HOST: "", When("pipeline_depth", above=0, shown="a --pipeline-depth above 0"): ""},
        excludes={"cache_rows": "a stale row would stay in the cache"},
    )
    cache_rows: str | None = option(
        "cached rows of each table on the device: a number, a share such as 5%%, or auto for the shortest steps "
        "(default 0: no cache)",
        str,
        metavar="N",
        check=_has_no_rows,
        off=_has_no_rows,
        needs={_HOST: ""},
        excludes={
            _WHOLE_TABLE: "the L2 term reads the whole table on the host, so each step would write back all cached rows"
        },
        is_number=True,
    )
    cache_policy: str | None = choice(
        f"which rows to cache (default {POLICIES[0]})", POLICIES, needs={"cache_rows": ""}, is_local=True
    )
    cache_window: int | None = option(
        f"batches that the policy lookahead knows in advance (default {WINDOW})",
        int,
        least=0,
        most=MOST_WINDOW,
        needs={"cache_rows": "", When("looks_ahead", shown="--cache-policy lookahead"): ""},
        is_local=True,
    )

    @property
    def looks_ahead(self) -> bool:
        """Whether the cache's policy is lookahead; true if there is no cache."""
        return self.cache_policy in (None, POLICIES[0]) or self.cache_rows is None or _has_no_rows(self.cache_rows)
