"""The page's head, and the sections about the data set, the configuration and the checkpoints."""

from collections.abc import Sequence
from typing import Any

from hostdev.ext.report.page import Cell, Fact, Section, SortableTable, cell, run_table
from hostdev.ext.report.quality import METRICS
from hostdev.ext.report.reading import RUNNING, RunData
from hostdev.ext.report.values import NONE, clean, count, entry, metric, number, option, share, size, table

_APART = ("data_set", "versions", "preprocess")  # entries of config.json that are not options of training
_EMPTY: tuple[Any, ...] = (None, "", {}, [])
_OWN = ("--run-dir",)  # options that differ between any two runs


def final(run: RunData, name: str) -> float | None:
    """Return a run's final metric, from summary.json, or else from the last evaluation or file so far."""
    found = number(run.summary, name)
    if found is None and run.evaluations:
        found = number(run.evaluations[-1].test, name)
    if found is None and run.files:
        found = number(run.files[-1], "window", name)
    return found


def steps(run: RunData) -> float:
    """Return the number of steps."""
    found = number(run.summary, "steps")
    return len(run.losses) if found is None else found


def peak(run: RunData) -> float | None:
    """Return the highest peak memory of the run's processes in bytes."""
    found = [number(each, "peak_rss_bytes") for each in (run.summary, *run.ranks.values())]
    known = [each for each in found if each is not None]
    return max(known, default=None)


def head(run: RunData) -> list[Fact]:
    """Return the figures in the page's head, for a page with a single run."""
    made = [Fact("status", run.status, "so far; make the page again later" if run.status == RUNNING else "")]
    for name, title in METRICS.items():
        if (value := final(run, name)) is not None:
            training = number(run.summary, f"training_{name}")
            more = f"{metric(training)} on training rows" if training is not None else ""
            made.append(Fact(title, metric(value), more))
    if not any(fact.name in METRICS.values() for fact in made):
        made.append(Fact("AUC", NONE, "nothing has been evaluated"))
    planned = number(run.config, "epochs")
    done = number(run.summary, "epochs")
    epochs = "" if planned is None or done is None else f"{count(done)} of {count(planned)} epochs"
    if run.files:  # with --follow
        epochs = f"over {count(len(run.files))} file{'s' if len(run.files) > 1 else ''}"
    speed = number(run.summary, "samples_per_second")
    made += [
        Fact("samples/s", count(speed), "in training steps" if speed is not None else "known at the end"),
        Fact("peak memory", size(peak(run)), f"the most of {1 + len(run.ranks)} processes" if run.ranks else ""),
        Fact("steps", count(steps(run)), epochs),
    ]
    return made


def summary(runs: Sequence[RunData]) -> Section:
    """Return the section with a row for each run."""
    present = [name for name in METRICS if any(final(run, name) is not None for run in runs)]
    best = {
        name: (max if name == "auc" else min)(value for run in runs if (value := final(run, name)) is not None)
        for name in present
    }
    rows = []
    for run in runs:
        digest = entry(run.summary, "state_sha256")
        speed, memory = number(run.summary, "samples_per_second"), peak(run)
        rows.append(
            [
                Cell(run.name),
                Cell(run.status),
                *(_metric(final(run, name), best[name], len(runs)) for name in present),
                cell(speed, count),
                cell(memory, size),
                cell(steps(run), count),
                Cell(clean(str(entry(run.config, "model") or NONE))),
                Cell(digest[:12] if isinstance(digest, str) else NONE),
            ]
        )
    shown = [METRICS[name] for name in present]
    columns = ["run", "status", *shown, "samples/s", "peak memory", "steps", "model", "digest"]
    notes = ["★ is the best of its column. Runs with equal digests have the same model, bit for bit."]
    return Section("summary", "Summary", tables=[SortableTable("", columns, rows)], notes=notes)


def _metric(value: float | None, best: float, several: int) -> Cell:
    if value is None:
        return Cell(NONE)
    return Cell(f"{metric(value)}{' ★' if value == best and several > 1 else ''}", value)


def data_set(runs: Sequence[RunData]) -> Section:
    """Return the section with the facts of the data sets."""
    names: list[str] = []
    each = {run.name: _data_facts(run) for run in runs}
    for found in each.values():
        names += [name for name in found if name not in names]
    known = [run for run in runs if table(run.config, "data_set")]
    rows = [[Cell(name), *(Cell(each[run.name].get(name, NONE)) for run in runs)] for name in names]
    head = ["fact", *(run.name for run in runs)] if len(runs) > 1 else ["fact", "value"]
    missing = [
        f"{run.name}: config.json has no facts of the data set; it is missing, or of an earlier version."
        for run in runs
        if run not in known
    ]
    return Section("data", "Data set", tables=[SortableTable("", head, rows)] if rows else [], missing=missing)


def _data_facts(run: RunData) -> dict[str, str]:
    found = table(run.config, "data_set")
    made = {"data set": option(entry(run.config, "data"))} if entry(run.config, "data") is not None else {}
    if entry(run.config, "follow") is not None:
        made["followed folder"] = option(entry(run.config, "follow"))
    if not found:
        return made
    for split, rows in table(found, "rows").items():
        made[f"{clean(split)} rows"] = count(rows) if isinstance(rows, int) else NONE
    ids = "range of ids, without a vocabulary" if entry(found, "vocabulary") is False else "ids in the vocabulary"
    for name, title in (("shards", "shards"), ("ids", ids), ("rejected", "rows rejected")):
        if (value := number(found, name)) is not None:
            made[title] = count(value)
    columns = table(found, "columns")
    made["columns"] = ", ".join(f"{option(value)} {clean(name)}" for name, value in columns.items() if value) or NONE
    made["labels"] = option(entry(found, "labels"))
    for name, title in (("label_mean", "mean label"), ("out_of_vocabulary", "values out of the vocabulary")):
        for split, value in table(found, name).items():
            made[f"{title}, {clean(split)}"] = _of_split(value, is_share=name != "label_mean")
    prepared = table(run.config, "preprocess")
    made |= {f"prepared with {clean(name)}": option(value) for name, value in prepared.items() if value not in _EMPTY}
    return made


def _of_split(value: Any, *, is_share: bool) -> str:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return share(value) if is_share or 0 <= value <= 1 else f"{value:,.4g}"
    if isinstance(value, list):
        return ", ".join(_of_split(each, is_share=is_share) for each in value)
    return option(value)


def configuration(runs: Sequence[RunData]) -> Section:
    """Return the section with all options; those that differ between the runs are marked, and come first."""
    options: dict[str, list[Any]] = {}
    for run in runs:
        for name in run.config:
            if name not in _APART:
                options[f"--{clean(name).replace('_', '-')}"] = [entry(each.config, name) for each in runs]
        for name in table(run.config, "versions"):
            options[f"version of {clean(name)}"] = [entry(each.config, "versions", name) for each in runs]
    several = len(runs) > 1
    head = ["option", *(run.name for run in runs)] if several else ["option", "value"]
    given: list[list[Cell]] = []
    unset: list[list[Cell]] = []
    for name, values in options.items():
        shown = [option(value) for value in values]
        differs = len(set(shown)) > 1 and name not in _OWN
        key = f"{0 if differs else 1}{name}" if several else name
        row = [Cell(f"{'≠ ' if differs else ''}{name}", key, differs), *map(Cell, shown)]
        (given if any(value is not None and value is not False for value in values) else unset).append(row)
    if several:
        given.sort(key=lambda row: not row[0].marked)
    tables = [SortableTable("", head, given)] if given else []
    if unset:
        tables.append(SortableTable(f"{len(unset)} options that were left out", head, unset, is_folded=True))
    marked = sum(row[0].marked for row in given)
    notes = [f"{marked} of {len(options)} entries differ between the runs; they are marked with ≠."] if several else []
    missing = [f"{run.name}: config.json is missing or cannot be read." for run in runs if not run.config]
    return Section("configuration", "Configuration", tables=tables, notes=notes, missing=missing)


def checkpoints(runs: Sequence[RunData]) -> Section:
    """Return the section with the checkpoints that are in the runs' folders."""
    rows, notes, missing = [], [], []
    for run in runs:
        saved = table(run.summary, "checkpoints")
        if saved:
            failed = number(saved, "failed")
            stall = number(saved, "stall_us")
            where, uploaded = f"in {option(entry(saved, 'path'))}", ""
            if number(saved, "failed_uploads"):
                where, uploaded = "on its machine", f"; {count(number(saved, 'uploaded'))} uploaded to {where[3:]}"
            notes.append(
                f"{run.name}: {count(number(saved, 'saved'))} saved {where}{uploaded}"
                + (f", {count(failed)} not saved" if failed else "")
                + (f"; training stalled for {stall / 1e6:.1f} s." if stall is not None else ".")
            )
        for each in run.checkpoints:
            kind = each.error or ("full" if each.is_full else "increment")
            nbytes = cell(None if each.error else each.nbytes, size)
            rows.append(
                [
                    Cell(run.name),
                    Cell(each.name),
                    cell(each.step, count),
                    Cell(kind),
                    nbytes,
                    Cell(each.created or NONE),
                ]
            )
        if not run.checkpoints:
            missing.append(f"{run.name}: {_why_none(run)}")
    tables = run_table("", ["run", "checkpoint", "step", "kind", "size", "created (UTC)"], rows, runs)
    return Section("checkpoints", "Checkpoints", tables=tables, notes=notes, missing=missing)


def _why_none(run: RunData) -> str:
    if entry(run.config, "checkpoint_every") is None and entry(run.config, "checkpoint_minutes") is None:
        return "the run saves no checkpoints (--checkpoint-every and --checkpoint-minutes were left out)."
    if (given := entry(run.config, "checkpoint_dir")) is not None:
        return f"its checkpoints are in {option(given)}, which is not read from here."
    return "its folder has no checkpoint yet."
