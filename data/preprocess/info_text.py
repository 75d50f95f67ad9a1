"""The tables that `preprocess info` prints."""

from collections.abc import Iterable, Iterator, Sequence

from hostdev.core.keys import is_raw
from hostdev.core.memory import format_bytes
from hostdev.core.progress import counted
from hostdev.data.preprocess.earlier_vocabulary import growth
from hostdev.data.preprocess.info import TOPS, Curve, Information, shortened
from hostdev.data.preprocess.options import ids_in_words
from hostdev.data.schema import Column

_MOST_NAME = 24  # characters of a column's name
_NO_FIGURE = "-"
_Group = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, heads, cells [head][line]


def format_lines(info: Information) -> Iterator[str]:
    """Yield the lines of a data set's summary."""
    found = info.found
    ids = ids_in_words(found.schema.rows) + ", hashed" * (info.hashed and not is_raw(found.schema.rows))
    yield (
        f"data     {info.folder}: {counted(len(found.schema.dense), 'numeric column')}, "
        f"{counted(len(found.schema.columns), 'column')} with ids, {ids}"
    )
    yield from growth(found)
    yield ""
    labels = found.schema.labels
    titles = ["label mean"] if len(labels) == 1 else [f"mean of {label}" for label in labels]
    titles = [f"{title:>{max(13, len(title) + 2)}}" for title in titles]
    yield f"{'split':<8}{'rows':>16}{'shards':>9}{'on disk':>12}" + "".join(titles)
    for split in found.splits:
        shown = [f"{_label_mean(info, split, number):>{len(title)}}" for number, title in enumerate(titles)]
        yield (
            f"{split:<8}{found.rows(split):>16,}{len(found.shards(split)):>9,}{format_bytes(info.nbytes[split]):>12}"
            + "".join(shown)
        )
    if found.schema.dense:
        yield ""
        yield from _numeric(info)
    if found.schema.columns:
        yield ""
        yield from _features(info)


def _label_mean(info: Information, split: str, label: int) -> str:
    if not info.found.rows(split):
        return _NO_FIGURE
    schema, mean = info.found.schema, info.totals[split].label_mean(label)
    return f"{mean:.4g}" if schema.labels[label] in schema.targets.numeric else f"{mean:.2%}"


def _numeric(info: Information) -> Iterator[str]:
    names, found, splits = info.found.schema.dense, info.found, info.found.splits
    both = [(info.totals[split], found.rows(split)) for split in splits]
    groups = [
        *_missing(info, names),
        ("zeros", splits, [[_share(n, of) for n in totals.zeros] for totals, of in both]),
        ("mean", splits, [_figures(totals.sums / max(1, of), of) for totals, of in both]),
        ("min", splits, [_figures(totals.low, of) for totals, of in both]),
        ("max", splits, [_figures(totals.high, of) for totals, of in both]),
    ]
    yield from _table("numeric, scaled", names, groups)


def _figures(values: Iterable[float], rows: int) -> list[str]:
    return [f"{value:.4f}" if rows else _NO_FIGURE for value in values]


def _features(info: Information) -> Iterator[str]:
    columns = info.found.schema.columns
    train, test, splits = info.totals["train"], info.totals["test"], info.found.splits
    curves = [info.curves[column.space] for column in columns]
    rows = info.found.rows("train")
    out = [
        [_share(*pair) for pair in zip(totals.out, totals.uses, strict=True)]
        for totals in map(info.totals.__getitem__, splits)
    ]
    top = [[f"{curve.top[i]:.1%}" if curve.ids else _NO_FIGURE for curve in curves] for i in range(len(TOPS))]
    whose = "" if info.hashed else " in vocabulary"
    groups: list[_Group] = [
        ("ids", ["used"], [[f"{curve.ids:,}" for curve in curves]]),
        ("uses", ["per row"], [[f"{uses / rows:.1f}" for uses in train.uses]]),
        *_missing(info, [column.name for column in columns]),
        *([] if info.hashed else [("out of vocabulary", splits, out)]),
        ("test uses", ["seen"], [[_share(*pair) for pair in zip(test.seen, test.uses, strict=True)]]),
        (f"training uses{whose} of the top", [f"{n:,}" for n in TOPS], top),
        ("ids that have", ["50%", "90%"], [[f"{n:,}" for n in ns] for ns in zip(*_parts(curves), strict=True)]),
    ]
    yield from _table("feature", [_label(column) for column in columns], groups)
    for space in info.found.schema.spaces:
        if len(names := info.shared(space.name)) > 1:
            yield f"{', '.join(names)} share ids, so their ids and training uses of the top are counted together"


def _parts(curves: Sequence[Curve]) -> list[tuple[int, int]]:
    return [(curve.half, curve.most) for curve in curves]


def _missing(info: Information, names: Sequence[str]) -> list[_Group]:
    """Return the group of table columns with the shares of missing values; none if these are unknown."""
    splits = info.found.splits
    rates = [info.missing.get(split, {}) for split in splits]
    cells = [[f"{of[name]:.1%}" if name in of else _NO_FIGURE for name in names] for of in rates]
    return [("missing", splits, cells)] if info.missing else []


def _table(title: str, names: Sequence[str], groups: Sequence[_Group]) -> Iterator[str]:
    """Format a table with a line for each name; its columns are in titled groups."""
    names = [shortened(name, _MOST_NAME) for name in names]
    first = max(map(len, [title, *names]))
    above, below, lines = " " * first, f"{title:<{first}}", [f"{name:<{first}}" for name in names]
    for what, heads, columns in groups:
        width = max(len(text) for text in [*heads, *(cell for cells in columns for cell in cells)])
        width = max(width, -(-len(what) // len(heads)) - (len(heads) > 1)) + 2
        above += " " + f"{what:>{width * len(heads) - 1}}"
        below += "".join(f"{head:>{width}}" for head in heads)
        for cells in columns:
            lines = [f"{line}{cell:>{width}}" for line, cell in zip(lines, cells, strict=True)]
    return iter([above, below, *lines])


def _label(column: Column) -> str:
    return f"{column.name} (bag)" if column.kind == "bag" else column.name


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else _NO_FIGURE
