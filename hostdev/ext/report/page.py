"""The page: sections with charts and tables, rendered as one HTML document with scripts, styles and data."""

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import hostdev
from hostdev.ext.report import charts
from hostdev.ext.report.reading import RunData
from hostdev.ext.report.values import NONE

GENERATOR = "hostdev report"  # in a page's head: a later report may replace a file that has it
_SNIPPET = "window.vegaEmbed = vegaEmbed;"


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, the value by which the table is sorted, and whether it is marked."""

    text: str
    key: float | str | None = None
    marked: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the cell is sorted, and aligned, as a number."""
        return isinstance(self.key, float | int)


def cell(value: float | None, form: Callable[[Any], str]) -> Cell:
    """Return a cell that shows a number, formatted by `form`, and is sorted by it; for None, a cell with a dash."""
    return Cell(NONE) if value is None else Cell(form(value), value)


@dataclass(frozen=True)
class SortableTable:
    """A sortable table. A column is numeric if the key of its first cell that has one is a number."""

    title: str
    head: list[str]
    rows: list[list[Cell]]
    is_folded: bool = False  # shown after a click only
    numeric: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.head)
        keyed = [[cell for cell in column if cell.key is not None] for column in columns]
        object.__setattr__(self, "numeric", [bool(each) and each[0].is_number for each in keyed])


def run_table(
    title: str, head: list[str], rows: list[list[Cell]], runs: Sequence[RunData], *, is_folded: bool = False
) -> list[SortableTable]:
    """Return a list with the table of the runs' rows, or [] without rows; a single run needs no column "run"."""
    if len(runs) == 1:
        place = head.index("run")
        head = [*head[:place], *head[place + 1 :]]
        rows = [[*row[:place], *row[place + 1 :]] for row in rows]
    return [SortableTable(title, head, rows, is_folded)] if rows else []


@dataclass(frozen=True)
class Chart:
    """A chart: its title, its main result in words, and its Vega-Lite specification."""

    title: str
    finding: str
    spec: charts.Spec
    is_wide: bool = False


@dataclass(frozen=True)
class Fact:
    """A figure with its name, in the page's head."""

    name: str
    text: str
    more: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page; `missing` says why the section, or a part of it, has no data."""

    anchor: str
    title: str
    charts: list[Chart] = field(default_factory=list)
    tables: list[SortableTable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def render(runs: Sequence[RunData], facts: Sequence[Fact], sections: Sequence[Section]) -> str:
    """Return the page as HTML, with its scripts, styles and data."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hostdev.ext.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    specs = [chart.spec for section in sections for chart in section.charts]
    assets = environment.loader
    assert assets is not None
    style, script = (assets.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    library = _bundle()
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    page: str = environment.get_template("page.html").render(
        title=title,
        generator=GENERATOR,
        version=hostdev.__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=[(run.name, run.status, charts.colour(number)) for number, run in enumerate(runs)],
        colours=charts.COLOURS,
        facts=facts,
        sections=sections,
        notes=[note for run in runs for note in run.notes],
        style=style,
        scripts=[library, script],
        hashes=[_hash(library), _hash(script)],
        data=_embed(specs),
    )
    return page


@functools.cache
def _bundle() -> str:
    """Return the script of Vega, Vega-Lite and Vega-Embed, which takes a second or two to put together."""
    import vl_convert

    made: str = vl_convert.javascript_bundle(_SNIPPET).replace("\r", "")
    for text in ("</script", "<!--"):  # they would end the element or change its parsing, and occur only in strings
        made = made.replace(text, f"<\\{text[1:]}")
    return made


def _hash(script: str) -> str:
    """Return a script's hash in the form of the page's Content-Security-Policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _embed(content: Any) -> str:
    """Return JSON that may stand in a script element: no name in it can end the element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
