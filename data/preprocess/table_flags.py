"""The options of `preprocess table` as flags."""

import argparse
import csv
from collections.abc import Sequence

from hostdev.core.disk import is_text
from hostdev.core.errors import UserError
from hostdev.data.preprocess import earlier_flags
from hostdev.data.preprocess.earlier_vocabulary import Earlier
from hostdev.data.preprocess.table import TableOptions

_ESCAPES = {"\\t": "\t", "tab": "\t"}


def parse_table_options(arguments: argparse.Namespace, earlier: Earlier | None = None) -> TableOptions:
    """Build `TableOptions` from parsed flags; an earlier data set determines the columns' roles."""
    for name, given in vars(arguments).items():
        for text in given if isinstance(given, list) else [given]:
            if isinstance(text, str) and not is_text(text):
                raise UserError(f"--{name.replace('_', '-')} {text!r} is not text in UTF-8")
    is_query = arguments.command == "query"  # its text is read by the engine
    columns = None if is_query or arguments.columns is None else _names([arguments.columns])
    delimiter = None if is_query else arguments.delimiter
    what = {
        "label": arguments.label,
        "positive": arguments.positive,
        "numeric": _names(arguments.numeric),
        "categorical": _names(arguments.categorical),
        "bags": tuple(
            (name, separator or (None if "=" not in text else ""))
            for text in arguments.bag or ()
            for name, _, separator in [text.partition("=")]
        ),
        "share": tuple(_pair("--share", text) for text in arguments.share or ()),
    }
    if earlier is not None:
        what = earlier_flags.columns(what, earlier)
    elif arguments.label is None:
        raise UserError("the following arguments are required: --label")
    return TableOptions(
        **what,
        test_column=None if arguments.test_column is None else _pair("--test-column", arguments.test_column),
        test_after=None if arguments.test_after is None else _pair("--test-after", arguments.test_after),
        columns=columns,
        delimiter=None if delimiter is None else _ESCAPES.get(delimiter, delimiter),
        quotes=is_query or not arguments.no_quotes,
    )


def _names(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Parse comma-separated names; a name with a comma is in double quotes."""
    try:
        return tuple(name for text in texts or () for name in next(csv.reader([text], skipinitialspace=True)))
    except csv.Error:
        raise UserError(
            f"{', '.join(map(repr, texts or ()))}: not a list of names with commas between them; put a name "
            "with a comma or a line end in it in double quotes"
        ) from None


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UserError(f"{flag} {text}: write it as NAME=VALUE")
    return name, value
