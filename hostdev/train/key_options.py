"""The options of `hostdev train` for tables by key: --tables dynamic and those that belong to it."""

from dataclasses import replace
from typing import Any

from hostdev.core.admission import MinCount
from hostdev.core.errors import UserError
from hostdev.core.eviction import Unused
from hostdev.core.memory import available_bytes, format_bytes, parse_bytes
from hostdev.data.preprocess.options import is_raw
from hostdev.data.schema import Schema
from hostdev.host.key_options import KEY_BYTES
from hostdev.models.model import Model
from hostdev.runtime.spec import KeySpec
from hostdev.train.config_checks import parse_capacity

_SHARE = 0.8  # of the free memory, if no capacity is given
_MOST_ROWS = 1 << 29


def require_kind(settings: Any, schema: Schema) -> None:
    """Raise UserError if the data has raw ids, which only tables by key have room for."""
    if is_raw(schema.rows) and settings.tables != "dynamic":
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
    given, free = parse_capacity(settings.capacity), available_bytes()
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
