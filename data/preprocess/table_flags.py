"""Conversion of the flags of `preprocess table` and `query` to `TableOptions`."""

import argparse
import codecs
from dataclasses import replace
from typing import Any

from hostdev.core.errors import UserError
from hostdev.core.outputs import is_text
from hostdev.data.preprocess import earlier_flags
from hostdev.data.preprocess.earlier_vocabulary import Earlier
from hostdev.data.preprocess.features_file import read_features
from hostdev.data.preprocess.naming import parse_names
from hostdev.data.preprocess.reading import ReadSettings
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.preprocess.vectors import Vector, check_length, elements
from hostdev.data.targets import Targets

_ESCAPES = {"\\t": "\t", "tab": "\t"}
_ROLES = (
    "numeric",
    "vector",
    "categorical",
    "bag",
    "share",
    "padding",
    "last",
    "bag_weights",
)  # flags that a features file replaces


def parse_table_options(arguments: argparse.Namespace, earlier: Earlier | None = None) -> TableOptions:
    """Build `TableOptions` from parsed flags; an earlier data set, if given, determines the columns' roles."""
    for name, given in vars(arguments).items():
        for text in given if isinstance(given, list) else [given]:
            if isinstance(text, str) and not is_text(text):
                raise UserError(f"{_flag(name)} {text!r} is not text in UTF-8")
    has_files = arguments.command == "table"
    what = _roles(arguments)
    task = what.pop("task")
    if earlier is not None:
        if arguments.features is not None:
            raise UserError("--features has no effect with --vocabulary, which sets the features; leave out --features")
        what = earlier_flags.columns(what, earlier)
        if task is not None and set(what["numeric_labels"]) != set(what["labels"] if task == "regression" else ()):
            raise UserError(
                f"--task {task} differs from the task of {earlier.folder}, which --vocabulary keeps; leave out --task"
            )
    elif not what["labels"]:
        if arguments.features is not None:
            raise UserError(f'{arguments.features} names no label; add label = "NAME" to it, or give --label NAME')
        raise UserError("the following arguments are required: --label")
    else:
        what["decimal"] = what.get("decimal") or "."
    label, *more = what.pop("labels")
    what["label"] = label
    numeric, weight = what.pop("numeric_labels"), what.pop("weight")
    what["targets"] = Targets(more=tuple(more), numeric=tuple(numeric), weight=weight)
    how = text_options(arguments) if has_files else {}
    for name in ("test_column", "test_after", "validation_column", "validation_after"):
        value = getattr(arguments, name)
        how[name] = None if value is None else _pair(_flag(name), value)
    return TableOptions(
        **what,
        test_files=tuple(arguments.test_files or ()) if has_files else (),
        validation_files=tuple(arguments.validation_files or ()) if has_files else (),
        **how,
    )


def text_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `TableOptions` for reading text files."""
    return {
        "columns": None if arguments.columns is None else parse_names([arguments.columns]),
        "delimiter": None if arguments.delimiter is None else _parse_delimiter(arguments.delimiter),
        "quotes": not arguments.no_quotes,
        "encoding": _parse_encoding(arguments.encoding),
        "skipped_lines": arguments.skip_lines or 0,
    }


def _roles(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `TableOptions` about labels, weight and features, and how their values are read."""
    named = {"label": parse_names(arguments.label), "positive": arguments.positive}
    named |= {"weight": arguments.weight, "task": arguments.task}
    named |= {"missing": parse_names(arguments.missing), "decimal": arguments.decimal}
    if arguments.features is not None:
        if flag := next((_flag(name) for name in _ROLES if getattr(arguments, name)), None):
            raise UserError(f"{flag} has no effect with --features, whose file defines the columns; leave out {flag}")
        found = read_features(arguments.features)
        for name in found.given:
            if named[name]:
                raise UserError(f"--{name} and {name} in {arguments.features} are both given; leave out one of the two")
        kept = {
            name: value for name, value in named.items() if value or name in ("label", "positive", "weight", "task")
        }
        return _with_labels({**kept, **found.roles})
    features: dict[str, ReadSettings] = {}
    for text in arguments.padding or ():
        name, value = _pair("--padding", text)
        before = features.get(name, ReadSettings())
        features[name] = replace(before, missing=(*before.missing, value))
    for text in arguments.last or ():
        name, length = _number("--last", text)
        features[name] = replace(features.get(name, ReadSettings()), length=length)
    for text in arguments.bag_weights or ():
        name, separator = _pair("--bag-weights", text)
        features[name] = replace(features.get(name, ReadSettings()), weights=separator)
    bags = tuple(
        (name, separator or (None if "=" not in text else ""))
        for text in arguments.bag or ()
        for name, _, separator in [text.partition("=")]
    )
    for name in features:
        if name not in dict(bags):
            raise UserError(f"--padding, --last and --bag-weights apply only to --bag columns, but {name!r} is not one")
    vectors: dict[str, Vector] = {}
    for text in arguments.vector or ():
        name, length = _number("--vector", text)
        check_length(f"--vector {text}", length)
        vectors[name] = Vector(length)
    roles = {
        **named,
        "numeric": (*parse_names(arguments.numeric), *elements(vectors)),
        "vectors": vectors,
        "categorical": parse_names(arguments.categorical),
        "bags": bags,
        "share": tuple(_pair("--share", text) for text in arguments.share or ()),
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


def _flag(name: str) -> str:
    """Return the flag whose value argparse stores under a name."""
    return "--" + name.replace("_", "-")


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
