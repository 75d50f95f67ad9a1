"""The flags that keep the ids of an earlier data set: --vocabulary, --frozen-vocabulary."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hostdev.core.errors import UserError
from hostdev.data.preprocess import scaling
from hostdev.data.preprocess.earlier_vocabulary import Earlier, read_earlier
from hostdev.data.preprocess.lists import vectors_in
from hostdev.data.preprocess.reading import own_settings

_MOST = 120  # characters of a column list in a message
_SAME = "leave the flag out: --vocabulary takes the columns from that data set"


def has_columns(arguments: argparse.Namespace) -> bool:
    """Return whether the command's rows have named columns: `table`, and the registered sources."""
    return arguments.command == "table" or getattr(arguments, "source", None) is not None


def find_earlier(arguments: argparse.Namespace) -> Earlier | None:
    """Read the data set that --vocabulary names; raise UserError for flags that conflict with it."""
    folder: Path | None = arguments.vocabulary
    if folder is None:
        if arguments.frozen_vocabulary:
            raise UserError("--frozen-vocabulary has no effect without --vocabulary FROM; give both")
        return None
    if arguments.frozen_vocabulary and arguments.threshold is not None:
        raise UserError("--threshold has no effect with --frozen-vocabulary; leave one of them out")
    earlier = read_earlier(folder, frozen=arguments.frozen_vocabulary)
    if earlier.is_table != has_columns(arguments):
        command = "table or query" if earlier.is_table else "criteo"
        raise UserError(f"--vocabulary {folder}: this data set was made by another command; use preprocess {command}")
    if earlier.buckets is not None and arguments.threshold is not None:
        raise UserError(f"--threshold has no effect with --vocabulary {folder}, whose ids are hashed; omit --threshold")
    if arguments.hash_buckets not in (None, earlier.buckets):
        there = "a vocabulary" if earlier.buckets is None else f"{earlier.buckets} buckets"
        raise UserError(
            f"--hash-buckets {arguments.hash_buckets}: {folder} has {there}, whose ids --vocabulary keeps; omit "
            "--hash-buckets"
        )
    return earlier


def defaults(earlier: Earlier | None) -> dict[str, Any]:
    """Return the defaults of `Options` from the earlier data set, if any: threshold, hash buckets and scaling."""
    if earlier is None:
        return {}
    options = earlier.found.options
    return {name: options.get(name) for name in ("threshold", "hash_buckets")} | {"dense": options["dense"]}


def columns(given: Mapping[str, Any], earlier: Earlier) -> dict[str, Any]:
    """Return the arguments of `TableOptions` about columns, with the earlier data set's values and order of names.

    `given` has the flags' values for some of these arguments, None or empty if the flag is not set. Raises UserError if
    a flag that is set differs from the earlier data set in more than the order of names.
    """
    options = earlier.found.options
    targets = earlier.schema.targets
    there = {
        "labels": earlier.schema.labels,
        "numeric_labels": targets.numeric,
        "weight": targets.weight,
        "positive": options.get("positive"),
        "positives": options.get("positives", {}),
        "numeric": tuple(options.get("numeric", ())),
        "categorical": tuple(options.get("categorical", ())),
        "bags": tuple((name, options["bags"][name]) for name in earlier.schema.bags),
        "share": tuple(options.get("share", {}).items()),
        "missing": tuple(options.get("missing", ())),
        "decimal": options.get("decimal", "."),
        "features": own_settings(options),
        "thresholds": options.get("thresholds", {}),
        "scaling": scaling.own(options),
        "vectors": vectors_in(options),
        "trimmed": bool(options.get("trimmed", False)),
    }
    for name, value in given.items():
        if value and not _is_same(value, there[name]):
            flag = {
                "bags": "bag",
                "features": "padding, --last or --bag-weights",
                "labels": "label",
                "vectors": "vector",
                "numeric_labels": "task regression --label",
            }.get(name, name)
            shown = _shown(there[name]) or "none"
            raise UserError(f"--{flag} {_shown(value)}: {earlier.folder} has {shown}; {_SAME}")
    return there


def _is_same(value: Any, known: Any) -> bool:
    """Return whether a flag's value equals that of the earlier data set."""
    if isinstance(value, Mapping):
        mine, theirs = ({name: one.as_json() for name, one in each.items()} for each in (value, known))
        return mine == theirs
    return bool(value == known if isinstance(value, str) else set(value) == set(known))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one.as_json()}" for name, one in value.items())
    if isinstance(value, tuple):
        shown = ", ".join("=".join(map(str, one)) if isinstance(one, tuple) else one for one in value)
        return shown if len(shown) <= _MOST else shown[:_MOST] + "..."
    return "" if value is None else str(value)
