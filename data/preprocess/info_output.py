"""The tables that `preprocess info` prints, and the picture that it draws."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hostdev.core import pictures
from hostdev.core.keys import is_raw
from hostdev.core.memory import format_bytes
from hostdev.core.progress import counted
from hostdev.data.preprocess.earlier_vocabulary import growth
from hostdev.data.preprocess.info import PLACES, TOPS, Curve, Information, shortened
from hostdev.data.preprocess.options import ids_in_words
from hostdev.data.schema import Column, Schema

_MOST_NAME = 24  # maximum characters of a column's name in a table
_NO_FIGURE = "-"
_Group = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, heads, cells [head][line]
_COLORS = {"train": "C0", "test": "C1", "validation": "C4"}
_SHOWN = ("train", "test")  # splits that are drawn as bars
_NAMED = 6  # maximum curves with a color and a name
_SIDE_BY_SIDE = 30  # maximum columns in a half-width panel
_MOST_NAMES = 120  # maximum names on the axis of a full-width panel
_MOST_LETTERS = 18  # maximum characters of a name in the picture
_LETTERS = 90  # characters that fit in a line under a half-width panel
_DEVIATIONS = 2  # half-width of the 95% interval of a part's mean, in standard deviations


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


def draw(info: Information, out: Path) -> None:
    """Draw the picture into file `out`; raise UserError if the file cannot be written."""
    rates = _rates(info)
    features = len(info.found.schema.columns)
    bars = [name for name, n in (("rates", len(rates[1])), ("coverage", features)) if n]
    narrow = max(len(rates[1]), features) <= _SIDE_BY_SIDE
    top = ["labels", "curves"] if features else ["labels"]
    if narrow:
        rows = [top, bars] if len(top) == len(bars) else [[*top, *bars]]
    else:
        rows = [top, *([name] * len(top) for name in bars)]
    figure = pictures.figure(15, 0.6 + 4.6 * len(rows))
    panels = figure.subplot_mosaic(rows)
    lines = 2 if len(rows[0]) == 3 else 1
    _draw_labels(panels["labels"], info)
    if info.found.schema.targets.more:
        panels["labels"].set_title("Label means by position", pad=9 + 15 * lines)
        _as_they_are(panels["labels"].legend(fontsize=9).get_texts())
    else:
        _entitle(panels["labels"], "Label mean by position", lines=lines)
    if "curves" in panels:
        _draw_curves(panels["curves"], info)
        panels["curves"].set_title("Frequency curves", pad=9 + 15 * lines)
    if "rates" in panels:
        _draw_rates(panels["rates"], *rates[1:], wide=not narrow)
        _entitle(panels["rates"], rates[0], lines=lines)
    if "coverage" in panels:
        _draw_coverage(panels["coverage"], info, wide=not narrow)
        _entitle(panels["coverage"], "Ids of the test rows", lines=lines)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)  # a missing glyph is drawn as a box
        pictures.save(figure, out)


def _draw_labels(axes: Any, info: Information) -> None:
    schema, train = info.found.schema, info.totals["train"]
    has = train.rows > 0
    place = (np.flatnonzero(has) + 0.5) / PLACES
    several, is_share = bool(schema.targets.more), not schema.targets.numeric
    for number, name in enumerate(schema.labels):
        whole = train.label_mean(number)
        unit = (abs(whole) or 1.0) if several else 1.0  # several labels are drawn relative to their means
        mean = train.labels[number, has] / train.rows[has] / unit
        chance = _DEVIATIONS * train.label_deviation(number) / np.sqrt(train.rows[has]) / unit
        low, high = whole / unit - chance, whole / unit + chance
        if is_share and not several:
            low, high = np.maximum(0, low), np.minimum(1, high)
        color = f"C{number}" if several else "grey"
        label = None if several else "95% range by chance"
        axes.fill_between(place, low, high, color=color, alpha=0.15, linewidth=0, label=label)
        means = {split: info.totals[split].label_mean(number) for split in info.found.splits if info.found.rows(split)}
        if several:
            shown = ", ".join(f"{split} {_mean_text(schema, name, mean)}" for split, mean in means.items())
            axes.plot(
                place, mean, color=color, marker=".", linewidth=1, label=f"{shortened(name, _MOST_LETTERS)}: {shown}"
            )
            for split in means.keys() - {"train"}:
                axes.axhline(means[split] / unit, color=color, linestyle="--", linewidth=1)
            continue
        axes.plot(place, mean, color=_COLORS["train"], marker=".", linewidth=1, label=f"training, in {has.sum()} parts")
        for split, found in means.items():
            title = "training" if split == "train" else split
            text = f"{title}: {_mean_text(schema, name, found)}"
            axes.axhline(found, color=_COLORS[split], linestyle="--", linewidth=1, label=text)
    ylabel = "label mean, relative to all training rows" if several else "label mean"
    axes.set(xlabel="position in the training rows", ylabel=ylabel, xlim=(0, 1))
    if is_share and not several:
        bottom, above = axes.get_ylim()
        axes.set_ylim(max(0, bottom), min(1, above))
        _percent(axes.yaxis)
    _percent(axes.xaxis)
    axes.grid(alpha=0.3)


def _mean_text(schema: Schema, label: str, mean: float) -> str:
    """Return a label's mean as text: a percentage, or a number for labels of a regression."""
    return f"{mean:.4g}" if label in schema.targets.numeric else f"{mean:.2%}"


def _draw_curves(axes: Any, info: Information) -> None:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    curves = [(name, curve) for name, curve in info.curves.items() if curve.ids]
    largest = sorted(curves, key=lambda each: -each[1].ids)[:_NAMED]
    for name, curve in curves:
        if (name, curve) not in largest:
            axes.plot(curve.ranks, curve.shares, color="grey", alpha=0.4, linewidth=0.8)
    for i, (name, curve) in enumerate(largest):
        label = f"{shortened(', '.join(info.shared(name)), _MOST_LETTERS)}: {curve.ids:,} ids"
        label = f" {label}" if label.startswith("_") else label  # matplotlib hides labels with a leading underscore
        axes.plot(curve.ranks, curve.shares, color=f"C{i}", label=label, marker="." if len(curve.ranks) < 20 else "")
    if len(curves) > len(largest):
        axes.plot([], [], color="grey", alpha=0.4, linewidth=0.8, label=f"{len(curves) - len(largest)} others")
    if curves:
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        _as_they_are(axes.legend(fontsize=9, loc="upper right").get_texts())
    else:
        axes.text(0.5, 0.5, "no value is in the vocabulary", transform=axes.transAxes, ha="center")
    axes.set(xlabel="rank of the id", ylabel="share of training uses")
    axes.grid(alpha=0.3)


def _rates(info: Information) -> tuple[str, list[str], dict[str, list[float]]]:
    """Return a title, column names and, by split, the columns' shares of missing values.

    If the manifest does not record these shares, the numeric columns' shares of zeros are returned instead.
    """
    dense = info.found.schema.dense
    if info.missing:
        every = [*dense, *(column.name for column in info.found.schema.columns)]
        names = [name for name in every if any(name in info.missing.get(split, {}) for split in _SHOWN)]
        rates = {split: [info.missing.get(split, {}).get(name, np.nan) for name in names] for split in _SHOWN}
        return "Missing values", names, rates
    zeros = {split: (info.totals[split].zeros / max(1, info.found.rows(split))).tolist() for split in _SHOWN}
    return "Numeric columns: zeros, including missing values", list(dense), zeros


def _draw_coverage(axes: Any, info: Information, *, wide: bool) -> None:
    test = info.totals["test"]
    seen = test.seen / np.maximum(1, test.uses)
    rest = "not in training rows" if info.hashed else "out of vocabulary"
    names = [column.name for column in info.found.schema.columns]
    place = np.arange(len(names))
    axes.bar(place, seen, 0.8, color="C2", label="also in training rows")
    axes.bar(place, np.where(test.uses > 0, 1 - seen, 0), 0.8, bottom=seen, color="C3", alpha=0.5, label=rest)
    _name_bars(axes, names, wide=wide)
    axes.set(ylabel="share of uses", ylim=(0, 1))


def _draw_rates(axes: Any, names: Sequence[str], rates: dict[str, list[float]], *, wide: bool) -> None:
    """Draw two bars for each name: the shares `rates` in training and in test rows."""
    place = np.arange(len(names))
    for split, name, side in (("train", "training rows", -0.2), ("test", "test rows", 0.2)):
        axes.bar(place + side, rates[split], 0.4, color=_COLORS[split], label=name)
    _name_bars(axes, names, wide=wide)
    largest = max((rate for split in _SHOWN for rate in rates[split] if rate > 0), default=0.0)
    axes.set(ylabel="share of rows", ylim=(0, max(0.01, 1.05 * largest)))
    if not largest:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")


def _name_bars(axes: Any, names: Sequence[str], *, wide: bool) -> None:
    """Label the bars at 0, 1, ...: vertically if names would overlap, and only some bars if there are too many."""
    step = -(-len(names) // (_MOST_NAMES if wide else _MOST_NAMES // 2))
    shown = [shortened(name, _MOST_LETTERS) for name in names[::step]]
    upright = (max(map(len, shown), default=0) + 2) * len(shown) > _LETTERS * (1 + wide)
    size = 9 if len(shown) <= _MOST_NAMES // 2 else 7
    axes.set_xticks(np.arange(len(names))[::step], shown, rotation=90 if upright else 0, fontsize=size)
    _as_they_are(axes.get_xticklabels())
    edge = max(0.6, (4 - len(names)) / 2)  # keeps few bars narrow
    axes.set_xlim(-edge, len(names) - 1 + edge)
    _percent(axes.yaxis)
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)


def _entitle(axes: Any, title: str, *, lines: int) -> None:
    """Add a title, and a legend of `lines` lines between the title and the plot."""
    axes.set_title(title, pad=9 + 15 * lines)
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.99)}
    axes.legend(fontsize=9, ncols=4 // lines, frameon=False, borderpad=0.2, **place)


def _as_they_are(texts: Iterable[Any]) -> None:
    """Disable math formatting of names with dollar signs."""
    for text in texts:
        text.set_parse_math(False)


def _percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1))
