"""The options of `hostdev train` for tables by key: --tables dynamic and those that belong to it."""

from dataclasses import replace
from typing import Any

from hostdev.core.admission import MOST_USES, MinCount
from hostdev.core.errors import UserError
from hostdev.core.eviction import Unused
from hostdev.core.memory import available_bytes, format_bytes, parse_bytes
from hostdev.data.preprocess.options import RAW
from hostdev.data.schema import Schema
from hostdev.host.key_options import KEY_BYTES
from hostdev.models.model import Model
from hostdev.runtime.spec import KeySpec

TABLES = ("vocabulary", "dynamic")
_OWN = ("capacity", "admit_count", "evict_unused")
_SHARE = 0.8  # of the free memory, if no capacity is given
_MOST_ROWS = 1 << 29


def check(settings: Any) -> None:
    """Raise UserError for options of a `TrainConfig` that contradict each other or have no effect."""
    if settings.tables != "dynamic":
        for name in _OWN:
            if getattr(settings, name) is not None:
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} has no effect without --tables dynamic; leave out {option}")
        return
    if not settings.host_device_mix:
        raise UserError("--tables dynamic needs --host-device-mix: tables that grow are in host memory")
    if settings.spawn is not None or settings.mesh is not None or settings.parallel not in (None, "none"):
        raise UserError(
            "--tables dynamic does not work with several processes yet; leave out --spawn, --mesh, --parallel"
        )
    if settings.l2 == "table":
        raise UserError("--l2 table has no fixed table to regularize with --tables dynamic; use --l2 batch")
    if settings.initial_vectors is not None:
        raise UserError("--initial-vectors names the values of a vocabulary; leave it out with --tables dynamic")
    if settings.staleness:
        raise UserError("--staleness does not work with --tables dynamic; leave it out")
    if settings.admit_count is not None and not 1 <= settings.admit_count <= MOST_USES:
        raise UserError(f"--admit-count must be from 1 to {MOST_USES:,}, not {settings.admit_count}")
    if settings.evict_unused is not None and settings.evict_unused < 1:
        raise UserError(f"--evict-unused must be at least 1 step, not {settings.evict_unused}")
    _parse(settings.capacity)


def _parse(capacity: str | None) -> int | str | None:
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


def require_kind(settings: Any, schema: Schema) -> None:
    """Raise UserError if the data has raw ids, which only tables by key have room for."""
    if schema.rows > RAW and settings.tables != "dynamic":
        raise UserError(
            "the data has raw ids (hostdev preprocess --ids raw), which need tables that grow: give --tables dynamic"
        )


def set_keys(model: Model, settings: Any) -> None:
    """Make a model's tables tables by key, if the options of a `TrainConfig` say so.

    All tables have the same keys, and share the memory that --capacity gives.
    """
    if settings.tables != "dynamic":
        return
    admit = None if settings.admit_count is None else MinCount(settings.admit_count)
    evict = (
        None if settings.evict_unused is None else Unused(settings.evict_unused, every=min(100, settings.evict_unused))
    )
    each = sum(spec.shape.nbytes(1) + KEY_BYTES for spec in model.tables.values())
    given, free = _parse(settings.capacity), available_bytes()
    if isinstance(given, int):
        rows = given
    else:
        rows = (int(free * _SHARE) if given is None else parse_bytes(given)) // each
        rows = min(rows, _MOST_ROWS)
    if rows < 1:
        raise UserError(f"--capacity {given}: a key takes {each} bytes in the tables together; give more")
    if rows * each > free:
        raise UserError(
            f"--capacity {settings.capacity}: {rows:,} keys take {format_bytes(rows * each)}, but {format_bytes(free)} "
            "of host memory are free; give less, or use a smaller --emb-dim"
        )
    keys = KeySpec(admit, evict)
    model.tables = {name: replace(spec, rows=rows, keys=keys) for name, spec in model.tables.items()}
