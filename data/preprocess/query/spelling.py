"""Types for columns of text, chosen from all their values, and the texts that typed values have in their files.

DuckDB guesses the type of a column from its first rows, and converts what comes later. Here, a guess holds only if all
values of the column fit. A type also has *spellings*: SQL expressions that turn a value back into a text. The first
spelling that reproduces every text of a column lets a query compute with numbers and times, and still return the texts
of the file, as `preprocess table` reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hostdev.data.preprocess.query.engine import Engine

X = "$x"  # stands for the value in a spelling
_SAMPLE = 2000  # rows in which spellings are tried before they are checked in all rows
_NUMBER = (
    r"[+-]?((0|[1-9][0-9]{0,14})|(0|[1-9][0-9]*)?\.[0-9]+|(0|[1-9][0-9]*)\.|"
    r"(0|[1-9][0-9]*)(\.[0-9]*)?[eE][+-]?[0-9]+|\.[0-9]+[eE][+-]?[0-9]+|[nN][aA][nN]|[iI]nf(inity)?)"
)  # neither 007, nor integers so long that a float may stand for several of them
_CLOCKS = ("%H:%M:%S", "%H:%M", "%H:%M:%S.%g", "%H:%M:%S.%f")
_TEXT = f"CAST({X} AS VARCHAR)"


def _times(zones: Iterable[str]) -> tuple[str, ...]:
    formats = (f"%Y-%m-%d{t}{clock}{zone}" for t in " T" for clock in _CLOCKS for zone in zones)
    return tuple(_formatted(one) for one in formats)


def _formatted(pattern: str) -> str:
    return f"strftime({X}, {quoted(pattern)})"


def _booleans(true: str, false: str) -> str:
    return f"CASE {X} WHEN true THEN '{true}' WHEN false THEN '{false}' END"


def quoted(text: str) -> str:
    """Return a text as an SQL constant."""
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "BIGINT": (_TEXT,),
    "HUGEINT": (_TEXT,),
    "DOUBLE": (
        _TEXT,
        f"regexp_replace({_TEXT}, '\\.0$', '')",
        *(f"format('{{:.{digits}f}}', {X})" for digits in range(1, 7)),
    ),
    "BOOLEAN": (_booleans("true", "false"), _booleans("True", "False"), _booleans("TRUE", "FALSE")),
    "DATE": (_TEXT,),
    "TIME": (_TEXT, f"left({_TEXT}, 5)"),
    "TIMESTAMP": (_TEXT, *_times(("", "Z")), _formatted("%Y-%m-%d")),
    "TIMESTAMP WITH TIME ZONE": _times(("Z", "+00:00", "+00", "+0000", " UTC")),
}
"""The spellings of each type, the usual one first."""

TAGS = {
    "DOUBLE": "DECIMAL(37,11)",
    "BOOLEAN": "VARCHAR",
    "DATE": "TIMESTAMP_S",
    "TIME": "TIME_NS",
    "TIMESTAMP": "TIMESTAMP_S",
    "TIMESTAMP WITH TIME ZONE": "TIMESTAMP_S",
}
"""For each type whose spelling matters, a rare type that replaces it when `plan.kept_columns` traces columns."""

PLAIN = frozenset((SPELLINGS["BOOLEAN"][0], SPELLINGS["DATE"][0]))
"""Spellings that give the same text as Arrow's cast."""

_TRIED = {
    "BIGINT": ("BIGINT", "HUGEINT", "DOUBLE"),
    "HUGEINT": ("BIGINT", "HUGEINT", "DOUBLE"),
    "DOUBLE": ("BIGINT", "HUGEINT", "DOUBLE"),
    **{kind: (kind,) for kind in ("BOOLEAN", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE")},
    "DATE": ("DATE", "TIMESTAMP"),
}  # types to try in this order, by the type that DuckDB guessed


class SpelledColumn(NamedTuple):
    """A column of text that a query sees with another type.

    Attributes:
        type: The type.
        spelling: The expression that gives each value's text, or None if no expression gives all of them.
        parsed: The expression that turns a text of the column into a value of the type.
    """

    type: str
    spelling: str | None
    parsed: str


def choose(
    engine: Engine, relation: str, guesses: Mapping[str, str], formats: Mapping[str, str]
) -> dict[str, SpelledColumn | None]:
    """Return, for each column of text, a type that fits all its values; None if the column stays text.

    Args:
        relation: A query whose columns are text.
        guesses: For some columns of the relation, the types that DuckDB guessed.
        formats: For a type, the format of its values that DuckDB guessed.
    """
    tried = {name: _TRIED[guess] for name, guess in guesses.items() if guess in _TRIED}
    tests = {
        (name, kind): [*_fits(name, kind, formats), *_spelled(name, kind, formats)]
        for name, kinds in tried.items()
        for kind in kinds
    }
    if not tests:
        return dict.fromkeys(guesses)
    likely = _true(engine, f"SELECT * FROM ({relation}) LIMIT {_SAMPLE}", tests, if_missing=True)
    true = _true(engine, relation, likely, if_missing=False)
    found: dict[str, SpelledColumn | None] = {}
    for name in guesses:
        found[name] = None
        for kind in tried.get(name, ()):
            if not set(_fits(name, kind, formats)) <= set(true[name, kind]):
                continue
            spellings = [*_spellings(kind, formats)]
            tests_of = dict(zip(_spelled(name, kind, formats), spellings, strict=True))
            right = next((spelling for test, spelling in tests_of.items() if test in true[name, kind]), None)
            if right is None and kind in ("BIGINT", "HUGEINT"):
                continue
            found[name] = SpelledColumn(kind, right, _parsed(name, kind, formats))
            break
    return found


def usual(column: SpelledColumn) -> str:
    """Return the expression for the text that a value gets if its column has no spelling."""
    return SPELLINGS[column.type][0].replace(X, column.parsed)


def _text(name: str) -> str:
    return f"trim({identifier(name)})"


def _parsed(name: str, kind: str, formats: Mapping[str, str]) -> str:
    if kind in formats:
        return f"CAST(try_strptime({_text(name)}, {quoted(formats[kind])}) AS {kind})"
    return f"TRY_CAST({_text(name)} AS {kind})"


def _spellings(kind: str, formats: Mapping[str, str]) -> Sequence[str]:
    return (*SPELLINGS[kind], _formatted(formats[kind])) if kind in formats else SPELLINGS[kind]


def _spelled(name: str, kind: str, formats: Mapping[str, str]) -> list[str]:
    """Return for each spelling the test that it reproduces a text of the column."""
    value = _parsed(name, kind, formats)
    return [f"{spelling.replace(X, value)} = {_text(name)}" for spelling in _spellings(kind, formats)]


def _fits(name: str, kind: str, formats: Mapping[str, str]) -> list[str]:
    """Return the tests that all texts of a column must pass, so that it can have a type."""
    tests = [f"{_parsed(name, kind, formats)} IS NOT NULL"]
    if kind == "DOUBLE":
        tests.append(f"regexp_full_match({_text(name)}, {quoted(_NUMBER)})")
    elif kind == "BOOLEAN":
        tests.append(f"lower({_text(name)}) IN ('true', 'false')")
    elif kind in ("DATE", "TIME") and kind not in formats:
        length = "<= 10" if kind == "DATE" else "<= 15"
        tests.append(f"length({_text(name)}) {length}")  # the cast ignores a time after a date
    return tests


def _true(
    engine: Engine, relation: str, tests: Mapping[tuple[str, str], Sequence[str]], *, if_missing: bool
) -> dict[tuple[str, str], list[str]]:
    """Return the tests that hold for all values of their column; if it has no values, `if_missing` decides."""
    asked = [(key, test) for key, of in tests.items() for test in of]
    if not asked:
        return {key: [] for key in tests}
    shown = ", ".join(f"bool_and(coalesce({test}, false)) FILTER ({_text(key[0])} <> '')" for key, test in asked)
    [row] = engine.rows(f"SELECT {shown} FROM ({relation})")
    true: dict[tuple[str, str], list[str]] = {key: [] for key in tests}
    for (key, test), holds in zip(asked, row, strict=True):
        if if_missing if holds is None else holds:
            true[key].append(test)
    return true
