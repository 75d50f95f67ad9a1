"""Validation of a manifest's options and statistics."""

from typing import Any

from hostdev.core.json_files import parse
from hostdev.data.schema import Schema

_OPTIONS: dict[str, Any] = {
    "preset": str,
    "dense": str,
    "hash_buckets": int | None,
    "positive": str | None,
    "bags": dict[str, str | None],
    "threshold": int | None,
}
_SCALES = ("dense_max", "dense_mean", "dense_deviation")  # a value for each numeric column
CLIP = "dense_clip"  # limits by column
SCALING_STATISTICS = (*_SCALES, CLIP)
STATISTICS_OF = {"max": _SCALES[:1], "log": _SCALES[:1], "standard": _SCALES[1:]}
BY_COLUMN = "by column"  # numeric columns have different scalings, given by options.scaling
_ALL = {**STATISTICS_OF, BY_COLUMN: SCALING_STATISTICS}


def check_values(options: dict[str, Any], statistics: dict[str, Any], dense: tuple[str, ...]) -> None:
    """Raise ValueError if an option or statistic is present but invalid."""
    for name, kind in _OPTIONS.items():
        if name in options:
            parse(kind, options[name], f"options.{name}")
    if "dense" in options and options["dense"] not in STATISTICS_OF:
        raise ValueError("options.dense is not one of " + ", ".join(STATISTICS_OF))
    if not 1 <= (options.get("hash_buckets") or 1) <= 2**62:
        raise ValueError("options.hash_buckets is not in 1..2^62")
    for name in SCALING_STATISTICS:
        if name in statistics:
            _check_scale(name, statistics[name], dense)


def check_scaling(mode: str, statistics: dict[str, Any], dense: tuple[str, ...]) -> None:
    """Raise ValueError unless `statistics` has exactly the entries that scaling `mode` needs, all valid.

    The modes are max, log, standard and "by column".
    """
    if sorted(statistics) != sorted(_ALL[mode]):
        raise ValueError(f"scaling {mode} needs {', '.join(_ALL[mode])}, not {', '.join(statistics) or 'nothing'}")
    for name, values in statistics.items():
        _check_scale(name, values, dense)


def _check_scale(name: str, values: Any, dense: tuple[str, ...]) -> None:
    if name == CLIP:
        limits = parse(dict[str, list[float]], values, f"statistics.{name}")
        if not set(limits) <= set(dense) or any(len(two) != 2 for two in limits.values()):
            raise ValueError(f"statistics.{name} must map names of numeric columns to two limits each")
    elif len(parse(list[float], values, f"statistics.{name}")) != len(dense):
        raise ValueError(f"statistics.{name} must have one value for each of the {len(dense)} numeric columns")


def check_learned(
    options: dict[str, Any], statistics: dict[str, Any], schema: Schema, id_type: str, vocabulary: str | None
) -> None:
    """Raise ValueError unless a validated manifest has all values needed to encode new rows."""
    buckets, bags = options.get("hash_buckets"), options.get("bags") or {}
    mode = BY_COLUMN if options.get("scaling") and "dense" in options else options.get("dense", "")
    for name in _ALL.get(mode, ("dense",)):
        if name not in (statistics if name != "dense" else options):
            raise ValueError(f"{name} is missing")
    for what, right in (
        ("bags", "" not in bags.values()),
        ("vocabulary", (buckets is None) == (vocabulary is not None)),
        (
            "spaces",
            buckets is None
            or all((space.first, space.size) == (schema.first_value, buckets) for space in schema.spaces),
        ),
        ("id_type", id_type == "int64" or schema.rows <= 2**31),
    ):
        if not right:
            raise ValueError(f"an invalid value of {what}")
