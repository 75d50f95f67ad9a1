"""The sections about quality: losses, metrics by epoch or file, calibration, and the distribution of scores."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostdev.ext.report import charts
from hostdev.ext.report.charts import shorten
from hostdev.ext.report.page import Cell, Chart, Section, SortableTable, cell, run_table
from hostdev.ext.report.reading import Counts, RunData
from hostdev.ext.report.values import clean, clean_name, count, entry, metric, number, share

METRICS = {"auc": "AUC", "logloss": "log loss", "rmse": "RMSE", "mae": "MAE"}
_RISING = "auc"  # the only metric whose higher values are better
_MOST_LABELS = 6


def losses(runs: Sequence[RunData]) -> Section:
    """Return the section about the losses of steps and the quality by epoch."""
    names = [run.name for run in runs]
    made = [*_loss_charts(runs, names), *_epoch_charts(runs, names)]
    missing = [
        f"{run.name}: no step has ended yet, or {'loss.log is missing' if run.summary else 'none is in loss.log'}."
        for run in runs
        if not len(run.losses)
    ]
    missing += [
        f"{run.name}: nothing has been evaluated: that takes test or validation rows, and the end of an epoch."
        for run in runs
        if not run.evaluations and not run.files
    ]
    return Section("quality", "Loss and quality", made, _evaluations(runs), missing=missing)


def _loss_charts(runs: Sequence[RunData], names: list[str]) -> list[Chart]:
    made = []
    differs = [run for run in runs if len(run.losses) and (run.losses[:, 2] != run.losses[:, 3]).any()]
    for column, title, some in ((2, "Training loss by step", runs), (3, "Loss of the deep part by step", differs)):
        series = {run.name: shorten(run.losses[:, column]) for run in some if len(run.losses)}
        series = {name: each for name, each in series.items() if len(each.at)}
        if not series:
            continue
        group = max(each.group for each in series.values())
        ends = [(np.flatnonzero(np.diff(run.losses[:, 0])) + 1.0).tolist() for run in some if len(run.losses)]
        finding = "; ".join(_loss_finding(name, each.mean, len(series)) for name, each in series.items())
        if group > 1:
            finding += f". Lines are means of up to {group:,} steps, bands their least and greatest loss."
        common = ends[0] if all(each == ends[0] for each in ends) else []
        made.append(Chart(title, finding, charts.loss_curve(names, series, common, "loss of a step"), True))
    return made


def _loss_finding(name: str, means: Any, several: int) -> str:
    edge = max(1, len(means) // 20)
    first, last = float(means[:edge].mean()), float(means[-edge:].mean())
    verb = "fell" if last < first else "rose"
    prefix = f"{name}: " if several > 1 else "The loss "
    return f"{prefix}{verb} from {metric(first)} to {metric(last)}"


def _epoch_charts(runs: Sequence[RunData], names: list[str]) -> list[Chart]:
    made = []
    for field, title in METRICS.items():
        rows: charts.Rows = []
        for run in runs:
            for line in run.evaluations:
                for kind, found in (("evaluated rows", line.test), ("training rows (sampled)", line.training)):
                    value = found.get(field, math.nan)
                    if math.isfinite(value):
                        rows.append({"run": run.name, "epoch": line.epoch, "value": value, "kind": kind})
        if rows:
            kinds = list(dict.fromkeys(row["kind"] for row in rows))
            best = "; ".join(filter(None, (_best(run, field, len(runs)) for run in runs)))
            spec = charts.lines(names, rows, ("epoch", "epoch"), ("value", title), kinds)
            made.append(Chart(f"{_capital(title)} by epoch", best, spec))
    return made


def _capital(title: str) -> str:
    return title[0].upper() + title[1:]


def _best(run: RunData, field: str, several: int) -> str:
    """Return a text with the best value of a metric and its epoch; "" if there is no value."""
    found = [(line.test.get(field, math.nan), line.epoch) for line in run.evaluations]
    found = [each for each in found if math.isfinite(each[0])]
    if not found:
        return ""
    value, epoch = min(found, key=lambda one: -one[0] if field == _RISING else one[0])  # the earliest of equal ones
    prefix = f"{run.name}: best" if several > 1 else "Best:"
    return f"{prefix} {metric(value)} after epoch {epoch} of {found[-1][1]}"


def _evaluations(runs: Sequence[RunData]) -> list[SortableTable]:
    present = [name for name in METRICS if any(name in line.test for run in runs for line in run.evaluations)]
    rows = [
        [
            Cell(run.name),
            cell(line.epoch, count),
            cell(line.step, count),
            *(_metric(found.get(name)) for name in present for found in (line.test, line.training)),
        ]
        for run in runs
        for line in run.evaluations
    ]
    shown = [text for name in present for text in (METRICS[name], f"{METRICS[name]}, training")]
    return run_table("All evaluations", ["run", "epoch", "step", *shown], rows, runs, is_folded=True)


def _metric(value: float | None) -> Cell:
    return cell(value if value is not None and math.isfinite(value) else None, metric)


def arrivals(runs: Sequence[RunData]) -> Section | None:
    """Return the section about the files that runs with --follow have taken, or None if no run followed a folder."""
    following = [run for run in runs if run.files or entry(run.config, "follow") is not None]
    if not following:
        return None
    names = [run.name for run in runs]
    made = []
    for field, title in (*METRICS.items(), ("calibration", "mean prediction / mean label")):
        rows: charts.Rows = []
        for run in following:
            for kind, path in (("each file", ()), ("the last files together", ("window",))):
                values = np.array([number(line, *path, field) for line in run.files], np.float64)
                series = shorten(values)
                rows += [
                    {"run": run.name, "kind": kind, "file": round(float(at)), "value": float(f"{mean:.6g}")}
                    for at, mean in zip(series.at, series.mean, strict=True)
                ]
        if rows:
            kinds = list(dict.fromkeys(row["kind"] for row in rows))
            spec = charts.lines(names, rows, ("file", "file"), ("value", title), kinds)
            head = "Calibration" if field == "calibration" else _capital(title)
            made.append(Chart(f"{head} before training on a file", _last_file(following, field), spec))
    notes = [
        f"{run.name}: {count(len(run.files))} files taken, {count(run.set_aside)} set aside"
        + (f"; the last was {clean(str(run.files[-1].get('file')), 120)}." if run.files else ".")
        for run in following
    ]
    missing = [f"{run.name}: no file has arrived yet." for run in following if not run.files]
    return Section("files", "Files that arrived", made, notes=notes, missing=missing)


def _last_file(runs: Sequence[RunData], field: str) -> str:
    found = []
    for run in runs:
        value = next((number(line, "window", field) for line in reversed(run.files)), None)
        if value is not None:
            found.append(f"{f'{run.name}: ' if len(runs) > 1 else ''}{metric(value)} over the last files")
    return "; ".join(found)


def scores(runs: Sequence[RunData]) -> Section:
    """Return the section about calibration and the distribution of predictions after the last evaluation."""
    names = [run.name for run in runs]
    labels = list(dict.fromkeys(label for run in runs for label in run.scores))
    made = []
    for label in labels[:_MOST_LABELS]:
        counts = {run.name: run.scores[label] for run in runs if label in run.scores}
        about = f" of {clean_name(label, 60)}" if len(labels) > 1 else ""
        finding = "; ".join(_calibration(name, each, len(counts)) for name, each in counts.items())
        finding += ". On the dashed line, predictions equal what was observed; bars are two standard errors."
        made.append(Chart(f"Calibration{about}", finding, charts.calibration(names, counts)))
        spec = charts.score_distribution(names, counts)
        made.append(Chart(f"Distribution of scores{about}", _samples(counts), spec))
    missing = [f"{run.name}: {_why_no_scores(run)}" for run in runs if not run.scores]
    if len(labels) > _MOST_LABELS:
        missing.append(f"There are {len(labels)} labels; the first {_MOST_LABELS} are drawn.")
    return Section("scores", "Calibration and scores", made, missing=missing)


def _calibration(name: str, counts: Counts, several: int) -> str:
    predicted, observed = counts.sums.sum() / counts.samples, counts.positives.sum() / counts.samples
    prefix = f"{name}: mean" if several > 1 else "Mean"
    if not observed:
        return f"{prefix} prediction {share(predicted)}, and no sample is positive"
    off = predicted / observed - 1
    how = f"{abs(off):.1%} too {'high' if off > 0 else 'low'}" if abs(off) >= 0.0005 else "as observed"
    return f"{prefix} prediction {share(predicted)}, observed {share(observed)}: {how}"


def _samples(counts: dict[str, Counts]) -> str:
    shown = []
    for name, each in counts.items():
        prefix = f"{name}: " if len(counts) > 1 else ""
        shown.append(f"{prefix}{count(each.samples)} {clean(each.split)} rows after step {count(each.step)}")
    return "; ".join(shown)


def _why_no_scores(run: RunData) -> str:
    if run.files or entry(run.config, "follow") is not None:
        return "a run with --follow has a calibration by file (above), and keeps no counts of scores."
    if not run.evaluations:
        return "nothing has been evaluated yet."
    if any("rmse" in line.test for line in run.evaluations):
        return "its labels are numbers, which have no probability."
    return "it was made by an earlier version of hostdev, which wrote no scores.jsonl."
