"""The --features file: TOML with the kind and the settings of every feature."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostdev.core.errors import UserError, in_words
from hostdev.data.preprocess.flags import TASKS
from hostdev.data.preprocess.naming import listed, short
from hostdev.data.preprocess.reading import DECIMALS, ENDS, ReadSettings
from hostdev.data.preprocess.scaling import ColumnScaling
from hostdev.data.preprocess.vectors import Vector, check_length, elements

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
            name: ReadSettings(column=one.get("column"), missing=tuple(one.get("missing", ())))
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
    reading = ReadSettings(
        column=settings.get("column"),
        missing=tuple(settings.get("missing", ())),
        length=settings.get("length") if kind == "bag" else None,
        end=settings.get("end", "last"),
        buckets=settings.get("buckets"),
        weights=settings.get("weights"),
        weights_column=settings.get("weights_column"),
    )
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
