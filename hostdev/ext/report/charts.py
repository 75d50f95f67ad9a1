"""Vega-Lite specifications of a report's charts.

A specification is a dict, as the format's reference describes it; no library that generates such dicts is needed.
Colours are CSS variables of the page, so that a chart follows the colour scheme, also when it is printed.

Long series are shortened to a bounded number of points, without the loss of their extremes.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.ext.report.reading import Counts, calibrate, distribution

MOST_POINTS = 400

Values = npt.NDArray[np.float64]
Spec = dict[str, Any]
Rows = list[dict[str, Any]]
COLOURS = 8  # CSS variables --run0, --run1, ...
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name; nothing is fetched
_HEIGHT = 240
_BAR = 18  # height of a bar in pixels; less if there are several runs
_GAP = 12
_SPACE = 1.75  # length of the axis as a multiple of the longest bar, so that the bar's value fits next to it
_MOST_TICKS = 10  # a horizontal axis with at most so many whole numbers has a tick for each
_MOST_POINTS = 60  # with more positions than this, no points are drawn on lines
_MOST_LINES = 30  # with more epochs than this, no vertical lines are drawn at their ends
_TICKS = (0.0001, 0.001, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99, 0.999)  # probabilities on an axis of log-odds
_TWO_LINES = (  # breaks a long name before its brackets, such as "OP (TABLE)"
    "length(datum.value) > 18 && indexof(datum.value, ' (') > 0 ? [slice(datum.value, 0, indexof(datum.value, ' (')), "
    "slice(datum.value, indexof(datum.value, ' (') + 1)] : datum.value"
)
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


class Series(NamedTuple):
    """Consecutive values in groups: each group's middle position, mean, least and greatest value, float64 [groups]."""

    at: Values
    mean: Values
    low: Values
    high: Values
    group: int  # maximum number of values in a group


def shorten(values: Values, most: int = MOST_POINTS) -> Series:
    """Return the finite values, at positions 1, 2, ..., in at most `most` groups of equally many positions.

    Args:
        values: float64 [n].
    """
    group = max(1, -(-len(values) // most))
    positions = np.flatnonzero(np.isfinite(values))
    kept, groups = values[positions], positions // group
    starts = np.flatnonzero(np.concatenate([np.ones(len(groups[:1]), np.bool_), groups[1:] != groups[:-1]]))
    if not len(starts):
        none = np.empty(0)
        return Series(none, none, none, none, group)
    counts = np.diff([*starts, len(kept)])
    at = np.add.reduceat(positions + 1.0, starts) / counts
    mean = np.add.reduceat(kept, starts) / counts
    return Series(at, mean, np.minimum.reduceat(kept, starts), np.maximum.reduceat(kept, starts), group)


_CONFIG: Spec = {
    "background": None,
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "gridColor": "var(--grid)",
        "domainColor": "var(--axis)",
        "tickColor": "var(--axis)",
        "labelLimit": 165,
        "labelOverlap": True,
    },
    "axisQuantitative": {"tickCount": 6},
    "legend": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--muted)",
        "labelFontSize": 12,
        "symbolStrokeColor": "var(--ink)",
        "symbolBaseStrokeColor": "var(--ink)",
        "orient": "top",
        "title": None,
        "symbolSize": 160,
    },
}


def colour(number: int) -> str:
    """Return the colour of a run, by its number on the page."""
    return f"var(--run{number % COLOURS})"


def _base(height: int, **more: Any) -> Spec:
    return {"$schema": _SCHEMA, "config": _CONFIG, "width": "container", "height": height, **more}


def _run_colour(names: Sequence[str]) -> Spec:
    """Return the encoding of runs by colour; the page has the legend."""
    scale = {"domain": list(names), "range": [colour(number) for number in range(len(names))]}
    return {"field": "run", "type": "nominal", "scale": scale, "legend": None}


def _dashes(kinds: Sequence[str]) -> Spec:
    """Return the encoding of two kinds of lines: solid and dashed."""
    scale = {"domain": list(kinds), "range": [[1, 0], [5, 3]]}
    return {"field": "kind", "type": "nominal", "scale": scale, "legend": {"symbolType": "stroke"}}


def _axis(field: str, title: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def loss_curve(names: Sequence[str], runs: dict[str, Series], ends: Sequence[float], title: str) -> Spec:
    """Return the chart of losses by step: the mean of each group of steps, in a band of its least and greatest loss.

    Args:
        names: All runs of the page.
        runs: Losses by run.
        ends: The last step of each epoch if it is the same in all runs, else [].
    """
    values: Rows = [
        {"run": name, **dict(zip(("step", "loss", "low", "high"), map(_round, each), strict=True))}
        for name, series in runs.items()
        for each in zip(series.at, series.mean, series.low, series.high, strict=True)
    ]
    x = _axis("step", "step", axis={"format": ",.0f", "grid": False}, scale={"nice": False})
    y = _axis("loss", title, scale={"zero": False})
    tooltip = [
        {"field": "run", "title": "run"},
        *({"field": name, "type": "quantitative", "format": ",.5~g"} for name in ("step", "loss", "low", "high")),
    ]
    colours = _run_colour(names)
    layer: list[Spec] = [
        {"mark": {"type": "area", "opacity": 0.18}, "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"mark": {"type": "line", "strokeWidth": 1.8, "point": len(values) == len(runs)}, "encoding": {"y": y}},
        {"mark": {"type": "circle", "opacity": 0, "size": 90}, "encoding": {"y": y, "tooltip": tooltip}},
    ]
    if any(series.group == 1 for series in runs.values()):
        layer = layer[1:] if all(series.group == 1 for series in runs.values()) else layer
    for each in layer:
        each["encoding"] = {"x": x, "color": colours, **each["encoding"]}
    if 0 < len(ends) <= _MOST_LINES:
        rules = {"data": {"values": [{"step": end} for end in ends]}, "encoding": {"x": x}}
        layer.insert(0, {"mark": {"type": "rule", "color": "var(--axis)", "strokeDash": [3, 3]}, **rules})
    return _base(_HEIGHT, data={"values": values}, layer=layer)


def lines(names: Sequence[str], rows: Rows, x: tuple[str, str], y: tuple[str, str], kinds: Sequence[str]) -> Spec:
    """Return a chart of lines by run, and by `kind` with solid and dashed lines.

    Args:
        rows: Dicts with "run", "kind", and the fields of `x` and `y`.
        x: The field and the title of the horizontal axis, whose values are whole numbers.
        y: The field and the title of the vertical axis.
        kinds: The kinds that occur, at most two.
    """
    positions = sorted({row[x[0]] for row in rows})
    ticks: Spec = {"values": positions} if len(positions) <= _MOST_TICKS else {"tickMinStep": 1}
    axis = {"format": ",.0f", "grid": False, **ticks}
    encoding: Spec = {
        "x": _axis(*x, scale={"zero": False, "nice": False, "padding": 12}, axis=axis),
        "y": _axis(*y, scale={"zero": False}),
        "color": _run_colour(names),
        "detail": {"field": "kind"},
        "tooltip": [
            {"field": "run", "title": "run"},
            {"field": "kind", "title": "rows"},
            {"field": x[0], "title": x[1]},
            {"field": y[0], "title": y[1], "format": ".5~g"},
        ],
    }
    dashed = {**encoding, "strokeDash": _dashes(kinds)} if len(kinds) > 1 else encoding
    points = {"type": "circle", "size": 36, "opacity": 1 if len(positions) <= _MOST_POINTS else 0}
    layer = [{"mark": {"type": "line", "strokeWidth": 2}, "encoding": dashed}, {"mark": points, "encoding": encoding}]
    return _base(_HEIGHT, data={"values": rows}, layer=layer)


def calibration(names: Sequence[str], runs: dict[str, Counts]) -> Spec:
    """Return the chart of observed shares of positives by predicted probability, with two standard errors."""
    values: Rows = [
        {"run": name, **dict(zip(("x", "y", "low", "high", "samples"), map(_round, group), strict=True))}
        for name, counts in runs.items()
        for group in calibrate(counts)
    ]
    most = max([each["x"] for each in values] + [each["high"] for each in values])
    most = min(1.0, 1.05 * most) or 1.0
    scale, axis = {"domain": [0, most], "nice": False}, {"format": "~%"}
    x = _axis("x", "predicted probability", scale=scale, axis=axis)
    y = _axis("y", "share of positives", scale=scale, axis=axis)
    tooltip = [
        {"field": "run", "title": "run"},
        {"field": "x", "title": "predicted", "format": ".3~%"},
        {"field": "y", "title": "observed", "format": ".3~%"},
        {"field": "samples", "title": "samples", "format": ",.0f"},
    ]
    ideal: Spec = {
        "data": {"values": [{"x": 0, "y": 0}, {"x": most, "y": most}]},
        "mark": {"type": "line", "color": "var(--axis)", "strokeDash": [4, 4], "strokeWidth": 1.5},
        "encoding": {"x": x, "y": y},
    }
    encoding: Spec = {"x": x, "y": y, "color": _run_colour(names), "tooltip": tooltip}
    errors: Spec = {**encoding, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    layer = [
        ideal,
        {"mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.6}, "encoding": errors},
        {"mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.7}, "encoding": encoding},
        {"mark": {"type": "circle", "size": 46, "opacity": 1}, "encoding": encoding},
    ]
    return _base(300, data={"values": values}, layer=layer)


def score_distribution(names: Sequence[str], runs: dict[str, Counts]) -> Spec:
    """Return the chart of the distribution of predictions, separately for negative and positive samples."""
    kinds = ("positive samples", "negative samples")
    values: Rows = []
    for name, counts in runs.items():
        edges, *shares = distribution(counts)
        for kind, each in zip(kinds, reversed(shares), strict=True):
            values += [
                {"run": name, "kind": kind, "x": _round(edge), "share": _round(share)}
                for edge, share in zip(edges, each, strict=True)
            ]
    low, high = min(each["x"] for each in values), max(each["x"] for each in values)
    ticks = [math.log(p / (1 - p)) for p in _TICKS]
    axis = {
        "values": [tick for tick in ticks if low <= tick <= high] or None,
        "labelExpr": "format(1 / (1 + exp(-datum.value)), '.3~%')",
        "grid": False,
    }
    scale = {"domain": [low, high], "nice": False}
    encoding: Spec = {
        "x": _axis("x", "predicted probability (on a scale of log-odds)", axis=axis, scale=scale),
        "y": _axis("share", "share of these samples", axis={"format": "~%"}),
        "color": _run_colour(names),
        "tooltip": [
            {"field": "run", "title": "run"},
            {"field": "kind", "title": "samples"},
            {"field": "share", "format": ".2~%"},
        ],
    }
    mark = {"type": "line", "interpolate": "step-after", "strokeWidth": 2}
    layer: list[Spec] = [{"mark": mark, "encoding": {**encoding, "strokeDash": _dashes(kinds)}}]
    if len(runs) == 1:
        area = {"type": "area", "interpolate": "step-after", "opacity": 0.15}
        apart = {**encoding, "y": {**encoding["y"], "stack": None}, "detail": {"field": "kind"}}
        layer.insert(0, {"mark": area, "encoding": apart})
    return _base(_HEIGHT, data={"values": values}, layer=layer)


def bars(names: Sequence[str], rows: Rows, title: str, *, order: Iterable[str], form: str, shown: str = "text") -> Spec:
    """Return horizontal bars: one for each part and run.

    Args:
        rows: Dicts with "run", "part", "value", and the value as "text". The label of a single run's bar is the text
            before the first comma.
        title: Title of the horizontal axis, with its unit.
        order: The parts from top to bottom.
        form: d3's format of the axis.
        shown: The field of `rows` that a tooltip shows as the value.
    """
    parts = list(order)
    present = [name for name in names if any(row["run"] == name for row in rows)]
    several = len(present) > 1
    step = max(9, _BAR - 3 * len(present)) if several else _BAR
    no_more = {"labelExpr": "datum.value > 1 ? '' : datum.label"} if form.endswith("%") else {}
    encoding: Spec = {
        "x": _axis("value", title, axis={"format": form, "tickCount": 3, **no_more}, scale={"zero": True}),
        "y": {
            "field": "part",
            "type": "nominal",
            "sort": parts,
            "title": None,
            "axis": {
                "domain": False,
                "ticks": False,
                "labelPadding": 6,
                "labelLimit": 165,
                "labelLineHeight": 12,
                "labelExpr": _TWO_LINES,
            },
            "scale": {"paddingInner": 0.3, "paddingOuter": 0.1},
        },
        "color": _run_colour(names),
        "tooltip": [
            {"field": "run", "title": "run"},
            {"field": "part", "title": "part"},
            {"field": shown, "title": "value"},
        ],
    }
    if several:
        encoding["yOffset"] = {"field": "run", "sort": present}
    height = len(parts) * (step * len(present) + _GAP)
    rows = [{**row, "label": row["text"].partition(",")[0]} for row in rows]
    layer: list[Spec] = [{"mark": {"type": "bar", "cornerRadiusEnd": 2}, "encoding": encoding}]
    if not several:
        encoding["x"]["scale"] = {"domain": [0, _SPACE * max(row["value"] for row in rows) or 1], "nice": False}
        label = {"type": "text", "align": "left", "dx": 5, "fontSize": 12, "color": "var(--ink)"}
        place: Spec = {name: encoding[name] for name in ("x", "y", "tooltip")}
        layer.append({"mark": label, "encoding": {**place, "text": {"field": "label"}}})
    return _base(height, data={"values": rows}, layer=layer)
