"""Conversion of the flags of `preprocess table` and `query` to `TableOptions`.

The flags name columns, a --features file (TOML with the kind and the settings of every feature), or an earlier data set
(--vocabulary), whose columns are kept.
"""

import codecs
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hostdev.core.errors import UserError, in_words
from hostdev.core.options import flag_of
from hostdev.data.preprocess import scaling
from hostdev.data.preprocess.delimited import TextFormat
from hostdev.data.preprocess.earlier_vocabulary import Earlier, read_earlier
from hostdev.data.preprocess.lists import Vector, check_length, elements, vectors_in
from hostdev.data.preprocess.naming import listed, parse_names, short
from hostdev.data.preprocess.options import (
    DECIMALS,
    TASKS,
    CriteoFlags,
    RowFlags,
    SplitFlags,
    TableFlags,
    TextFlags,
)
from hostdev.data.preprocess.reading import ENDS, ReadSettings, own_settings
from hostdev.data.preprocess.scaling import ColumnScaling
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.schema import Targets

_TOP = {
    "label": str,
    "labels": dict,
    "task": str,
    "weight": str,
    "positive": str,
    "missing": list,
    "decimal": str,
    "features": dict,
}
_LABEL = {"task": str, "positive": str, "column": str, "missing": list}
_ANY = {"kind": str, "column": str, "missing": list}
_IDS = {**_ANY, "share": str, "threshold": int, "buckets": int}
_KINDS: dict[str, dict[str, type]] = {
    "numeric": {**_ANY, "scaling": str, "clip": list},
    "categorical": _IDS,
    "vector": {**_ANY, "length": int, "separator": str, "scaling": str},
    "bag": {**_IDS, "separator": str, "length": int, "end": str, "weights": str, "weights_column": str},
}
_TYPES = {str: "a quoted string", int: "an integer", list: 'a list, such as ["NA", "?"]', dict: "a table"}
_ESCAPES = {"\\t": "\t", "tab": "\t"}
_MOST = 120  # maximum number of characters of a column list in a message
_SAME = "leave the flag out: --vocabulary takes the columns from that data set"


@dataclass(frozen=True)
class FeaturesFile:
    """The content of a features file, as arguments of `TableOptions`.

    Attributes:
        roles: Arguments about the labels and the features.
        given: Names of the settings at the top of the file: any of label (also for [labels.NAME]), task, weight,
            positive, missing and decimal.
    """

    roles: Mapping[str, Any]
    given: frozenset[str]


def read_features(path: Path) -> FeaturesFile:
    """Read a features file; raise UserError, which names the feature and the key, if it is invalid."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--features {path}: the file is not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--features {path}: the file cannot be read ({in_words(error)})") from None
    where = f"--features {path}"
    _check_keys(where, content, _TOP)
    features = content.get("features", {})
    if not features:
        raise UserError(f'{where}: the file has no features; write each as [features.NAME] with kind = "categorical"')
    parsed = {name: _feature(f"{where}, feature {name!r}", settings) for name, settings in features.items()}
    by_kind: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name, settings in parsed.items():
        by_kind[settings["kind"]].append(name)
    if content.get("decimal", ".") not in DECIMALS:
        raise UserError(f"{where}: decimal must be one of {' '.join(DECIMALS)}, not {content['decimal']!r}")
    given = {name: content[name] for name in _TOP if name in content and name not in ("features", "labels")}
    if "missing" in given:
        given["missing"] = tuple(given["missing"])
    if "label" in given:
        given["label"] = (given["label"],)
    vectors = {name: Vector(parsed[name]["length"], parsed[name].get("separator")) for name in by_kind["vector"]}
    labels = _labels(where, content)
    read = {**labels.pop("readings"), **{name: one["reading"] for name, one in parsed.items()}}
    roles = {
        **given,
        **labels,
        "numeric": (*by_kind["numeric"], *elements(vectors)),
        "vectors": vectors,
        "categorical": tuple(by_kind["categorical"]),
        "bags": tuple((name, parsed[name].get("separator")) for name in by_kind["bag"]),
        "share": tuple((name, one["share"]) for name, one in parsed.items() if "share" in one),
        "features": {name: one for name, one in read.items() if one != ReadSettings()},
        "thresholds": {name: one["threshold"] for name, one in parsed.items() if "threshold" in one},
        "scaling": {
            part: one["scaled"]
            for name, one in parsed.items()
            for part in (vectors[name].names(name) if name in vectors else [name])
            if one["scaled"] != ColumnScaling()
        },
    }
    return FeaturesFile(roles, frozenset(given) | ({"label"} if "labels" in content else frozenset()))


def _labels(where: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Check `task` and the tables [labels.NAME].

    Returns the arguments labels, numeric_labels and positives, and `readings`, which has each label's `ReadSettings`.
    """
    settings: dict[str, Any] = content.get("labels", {})
    if settings and "label" in content:
        raise UserError(f"{where}: both label and [labels.{next(iter(settings))}] are given; leave one of them out")
    for name, one in settings.items():
        if not isinstance(one, dict):
            raise UserError(f"{where}: write the settings of label {name!r} as [labels.{name}]")
        _check_keys(f"{where}, label {name!r}", one, _LABEL, " of a label")
        if one.get("task", content.get("task")) == "regression" and "positive" in one:
            raise UserError(
                f"{where}, label {name!r}: positive has no effect on a regression label; leave out positive"
            )
    for task in [content.get("task"), *(one.get("task") for one in settings.values())]:
        if task not in (None, *TASKS):
            raise UserError(f"{where}: task must be one of {', '.join(TASKS)}, not {task!r}")
    names = tuple(settings) or ((content["label"],) if "label" in content else ())
    tasks = {name: settings.get(name, {}).get("task", content.get("task")) for name in names}
    return {
        "labels": tuple(settings),
        "numeric_labels": tuple(name for name, task in tasks.items() if task == "regression"),
        "positives": {name: one["positive"] for name, one in settings.items() if "positive" in one},
        "readings": {
            name: ReadSettings.from_json({key: one[key] for key in ("column", "missing") if key in one})
            for name, one in settings.items()
        },
    }


def _feature(where: str, settings: Any) -> dict[str, Any]:
    """Check feature settings; return them with a `ReadSettings` as "reading" and a `ColumnScaling` as "scaled"."""
    if not isinstance(settings, dict):
        raise UserError(f'{where}: write its settings as [features.NAME] or NAME = {{kind = "categorical"}}')
    kind = settings.get("kind")
    if kind not in _KINDS:
        what = "kind is missing" if kind is None else f"kind is {short(repr(kind))}"
        raise UserError(f"{where}: {what}; it must be one of {', '.join(_KINDS)}")
    _check_keys(where, settings, _KINDS[kind], f" of a {kind} feature")
    for name, least in (("length", 1), ("buckets", 1), ("threshold", 0)):
        if settings.get(name, least) < least:
            raise UserError(f"{where}: {name} must be at least {least}, not {settings[name]}")
    if kind == "vector" and "length" not in settings:
        raise UserError(f"{where}: length is missing; set it to how many numbers each vector has")
    if kind == "vector":
        check_length(where, settings["length"])
    if settings.get("end", "last") not in ENDS:
        raise UserError(f"{where}: end must be one of {', '.join(ENDS)}, not {settings['end']!r}")
    if settings.get("separator") == "":
        raise UserError(f"{where}: the separator is empty; leave out separator for lists in Parquet and Arrow")
    if "weights" in settings and "weights_column" in settings:
        raise UserError(f"{where}: both weights and weights_column are given; leave out one of the two")
    clip = settings.get("clip")
    if clip is not None and (len(clip) != 2 or not all(isinstance(q, int | float) for q in clip)):
        raise UserError(f"{where}: clip must be two quantiles, such as [0.001, 0.999], not {clip}")
    try:
        scaled = ColumnScaling(
            mode=settings.get("scaling"), clip=None if clip is None else (float(clip[0]), float(clip[1]))
        )
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    read = {key for key in _KINDS["bag"] if key not in ("kind", "share", "threshold", "separator")}
    if kind == "vector":
        read -= {"length"}
    reading = ReadSettings.from_json({key: value for key, value in settings.items() if key in read})
    return {**settings, "reading": reading, "scaled": scaled}


def _check_keys(where: str, content: Mapping[str, Any], known: Mapping[str, type], of: str = "") -> None:
    """Raise UserError for an unknown key or a value of the wrong type."""
    for name, value in content.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; valid keys are {listed(list(known))}"
            raise UserError(f"{where}: {name!r} is not a key{of}{hint}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise UserError(f"{where}: {name} must be {_TYPES[known[name]]}, not {short(repr(value))}")
    if not all(isinstance(mark, str) for mark in content.get("missing", ())):
        raise UserError(f"{where}: the values of missing must be quoted strings, also those that are numbers")


def parse_table_options(flags: RowFlags, earlier: Earlier | None = None) -> TableOptions:
    """Build `TableOptions` from parsed flags; an earlier data set, if given, determines the columns' roles."""
    what = _roles(flags)
    task = what.pop("task")
    if earlier is not None:
        if flags.features is not None:
            raise UserError("--features has no effect with --vocabulary, which sets the features; leave out --features")
        what = keep_columns(what, earlier)
        if task is not None and set(what["numeric_labels"]) != set(what["labels"] if task == "regression" else ()):
            raise UserError(
                f"--task {task} differs from the task of {earlier.folder}, which --vocabulary keeps; leave out --task"
            )
    elif not what["labels"]:
        if flags.features is not None:
            raise UserError(f'{flags.features} names no label; add label = "NAME" to it, or give --label NAME')
        raise UserError("the following arguments are required: --label")
    else:
        what["decimal"] = what.get("decimal") or "."
    label, *more = what.pop("labels")
    what["label"] = label
    numeric, weight = what.pop("numeric_labels"), what.pop("weight")
    what["targets"] = Targets(more=tuple(more), numeric=tuple(numeric), weight=weight)
    how: dict[str, Any] = vars(text_format(flags)) if isinstance(flags, TableFlags) else {}
    if isinstance(flags, TableFlags):
        how = how | {"test_files": tuple(flags.test or ()), "validation_files": tuple(flags.validation or ())}
    for name in SplitFlags.options():
        value = getattr(flags, name)
        how[name] = None if value is None else _pair(flag_of(name), value)
    return TableOptions(
        **what,
        **how,
    )


def text_format(flags: TextFlags) -> TextFormat:
    """Return the format of text files that the flags describe."""
    return TextFormat(
        columns=None if flags.columns is None else parse_names([flags.columns]),
        delimiter=None if flags.delimiter is None else _parse_delimiter(flags.delimiter),
        quotes=not flags.no_quotes,
        encoding=_parse_encoding(flags.encoding),
        skipped_lines=flags.skip_lines or 0,
    )


def _roles(flags: RowFlags) -> dict[str, Any]:
    """Return `task`, and the arguments of `TableOptions` about labels, weight, features and how to read values."""
    named = {"label": parse_names(flags.label), "positive": flags.positive}
    named |= {"weight": flags.weight, "task": flags.task}
    named |= {"missing": parse_names(flags.missing), "decimal": flags.decimal}
    if flags.features is not None:
        found = read_features(flags.features)
        for name in found.given:
            if named[name]:
                raise UserError(f"--{name} and {name} in {flags.features} are both given; leave out one of the two")
        kept = {
            name: value for name, value in named.items() if value or name in ("label", "positive", "weight", "task")
        }
        return _with_labels({**kept, **found.roles})
    features: dict[str, ReadSettings] = {}
    for text in flags.padding or ():
        name, value = _pair("--padding", text)
        before = features.get(name, ReadSettings())
        features[name] = replace(before, missing=(*before.missing, value))
    for text in flags.last or ():
        name, length = _number("--last", text)
        features[name] = replace(features.get(name, ReadSettings()), length=length)
    for text in flags.bag_weights or ():
        name, separator = _pair("--bag-weights", text)
        features[name] = replace(features.get(name, ReadSettings()), weights=separator)
    bags = tuple(
        (name, separator or (None if "=" not in text else ""))
        for text in flags.bag or ()
        for name, _, separator in [text.partition("=")]
    )
    for name in features:
        if name not in dict(bags):
            raise UserError(f"--padding, --last and --bag-weights apply only to --bag columns, but {name!r} is not one")
    vectors: dict[str, Vector] = {}
    for text in flags.vector or ():
        name, length = _number("--vector", text)
        check_length(f"--vector {text}", length)
        vectors[name] = Vector(length)
    roles = {
        **named,
        "numeric": (*parse_names(flags.numeric), *elements(vectors)),
        "vectors": vectors,
        "categorical": parse_names(flags.categorical),
        "bags": bags,
        "share": tuple(_pair("--share", text) for text in flags.share or ()),
        "features": features,
    }
    return _with_labels(roles)


def _with_labels(roles: dict[str, Any]) -> dict[str, Any]:
    """Replace the entry `label` with two entries: `labels`, and `numeric_labels` for the labels that are numbers."""
    labels = roles.pop("label") or roles.get("labels", ())
    numeric = labels if roles["task"] == "regression" else roles.get("numeric_labels", ())
    return {**roles, "labels": labels, "numeric_labels": numeric}


def _parse_delimiter(text: str) -> str:
    """Parse a separator, which may be written with escapes such as \\t and \\x01."""
    if text in _ESCAPES:
        return _ESCAPES[text]
    if not text.startswith("\\x"):
        return text
    try:
        return bytes.fromhex(text.removeprefix("\\x")).decode()
    except ValueError:
        raise UserError(
            f"--delimiter {text}: write the character's code with two hexadecimal digits, such as \\x01"
        ) from None


def _parse_encoding(name: str | None) -> str:
    try:
        return codecs.lookup(name or "utf-8").name
    except LookupError:
        raise UserError(f"--encoding {name}: unknown to Python; give an encoding such as latin-1 or cp1252") from None


def _number(flag: str, text: str) -> tuple[str, int]:
    name, value = _pair(flag, text)
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"{flag} {text}: write it as NAME=N, where N is at least 1")
    return name, int(value)


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UserError(f"{flag} {text}: write it as NAME=VALUE")
    return name, value


def find_earlier(flags: CriteoFlags | RowFlags) -> Earlier | None:
    """Read the data set that --vocabulary names, if any; raise UserError for flags that conflict with it."""
    folder: Path | None = flags.vocabulary
    if folder is None:
        if flags.frozen_vocabulary:
            raise UserError("--frozen-vocabulary has no effect without --vocabulary FROM; give both")
        return None
    earlier = read_earlier(folder, frozen=flags.frozen_vocabulary)
    if earlier.found.is_table != isinstance(flags, RowFlags):
        command = "table or query" if earlier.found.is_table else "criteo"
        raise UserError(f"--vocabulary {folder}: this data set was made by another command; use preprocess {command}")
    if earlier.buckets is not None and flags.threshold is not None:
        raise UserError(f"--threshold has no effect with --vocabulary {folder}, whose ids are hashed; omit --threshold")
    if flags.hash_buckets not in (None, earlier.buckets):
        there = "a vocabulary" if earlier.buckets is None else f"{earlier.buckets} buckets"
        raise UserError(
            f"--hash-buckets {flags.hash_buckets}: {folder} has {there}, whose ids --vocabulary keeps; omit "
            "--hash-buckets"
        )
    return earlier


def keep_defaults(earlier: Earlier | None) -> dict[str, Any]:
    """Return the earlier data set's threshold, hash buckets and scaling, as defaults of `Options`; {} without one."""
    if earlier is None:
        return {}
    options = earlier.found.options
    return {name: options.get(name) for name in ("threshold", "hash_buckets")} | {"dense": options["dense"]}


def keep_columns(given: Mapping[str, Any], earlier: Earlier) -> dict[str, Any]:
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
            shown = _in_words(there[name]) or "none"
            raise UserError(f"--{flag} {_in_words(value)}: {earlier.folder} has {shown}; {_SAME}")
    return there


def _is_same(value: Any, known: Any) -> bool:
    """Return whether a flag's value equals that of the earlier data set, in any order of names."""
    if isinstance(value, Mapping):
        mine, theirs = ({name: one.as_json() for name, one in each.items()} for each in (value, known))
        return mine == theirs
    return bool(value == known if isinstance(value, str) else set(value) == set(known))


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one.as_json()}" for name, one in value.items())
    if isinstance(value, tuple):
        shown = ", ".join("=".join(map(str, one)) if isinstance(one, tuple) else one for one in value)
        return shown if len(shown) <= _MOST else shown[:_MOST] + "..."
    return "" if value is None else str(value)
