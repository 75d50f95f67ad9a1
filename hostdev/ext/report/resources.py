"""The sections about time, memory, the cache, and the exchange between ranks."""

from collections.abc import Sequence
from typing import Any

from hostdev.ext.report import charts
from hostdev.ext.report.page import Cell, Chart, Section, SortableTable, cell, run_table
from hostdev.ext.report.reading import RunData
from hostdev.ext.report.values import (
    NONE,
    clean,
    clean_name,
    count,
    entry,
    number,
    numbers,
    seconds,
    share,
    size,
    table,
)

_MOST_OPS = 12
_MIB = 1 << 20
_CACHED_ROWS, _CACHED_BYTES = ("admitted", "evicted", "bypassed"), ("bytes_to_device", "bytes_to_host")
_SENT = {
    "rows": "rows of tables",
    "least": "least possible for rows",
    "dense": "gradients of dense layers",
    "parts": "between parts of the network",
    "network": "of all, between hosts",
}


def time(runs: Sequence[RunData]) -> Section:
    """Return the section about the times of ops and the overlap of the pipeline's stages."""
    names = [run.name for run in runs]
    ops = {run.name: _op_times(run) for run in runs}
    ops = {name: times for name, times in ops.items() if times}
    made = []
    if ops:
        made.append(_op_chart(names, ops))
    timed = [run for run in runs if number(run.summary, "pipeline", "wall_us")]
    if any(numbers(run.summary, "pipeline", "busy_us") for run in timed):
        made.append(_stage_chart(names, timed))
    notes = [
        f"{run.name}: without summary.json, times of ops are those of the last {count(run.ops_calls)} calls in ops.log."
        for run in runs
        if run.ops_calls
    ]
    missing = [
        f"{run.name}: no op was timed (ops.log is empty, or was turned off)." for run in runs if run.name not in ops
    ]
    missing += [
        f"{run.name}: the pipeline's overlap is known when the run has ended and written summary.json."
        for run in runs
        if not table(run.summary, "pipeline")
    ]
    return Section("time", "Where time goes", made, _op_tables(runs), notes, missing)


def _op_times(run: RunData) -> dict[str, dict[str, Any]]:
    """Return the times of each op, or of each op and table if the op has several tables."""
    found = {}
    for op, times in run.ops.items():
        for scope, part in (table(times, "by_scope") or {"": times}).items():
            if number(part, "total_us") is not None:
                found[clean_name(f"{op} ({scope})" if scope else op, 80)] = part
    return found


def _shares(times: dict[str, dict[str, Any]]) -> dict[str, float]:
    each = {name: number(part, "total_us") or 0.0 for name, part in times.items()}
    total = sum(each.values()) or 1.0
    return {name: value / total for name, value in each.items()}


def _op_chart(names: list[str], ops: dict[str, dict[str, dict[str, Any]]]) -> Chart:
    shares = {name: _shares(times) for name, times in ops.items()}
    most = {op: max(each.get(op, 0.0) for each in shares.values()) for each in shares.values() for op in each}
    shown = sorted(most, key=lambda op: -most[op])[:_MOST_OPS]
    rows = [
        {"run": name, "part": op, "value": each[op], "text": f"{share(each[op])}, {seconds(_total(ops[name][op]))}"}
        for name, each in shares.items()
        for op in shown
        if op in each
    ]
    others = len(most) - len(shown)
    if others:
        shown = [*shown, f"{others} others"]
        for name, each in shares.items():
            rest = sum(value for op, value in each.items() if op not in shown)
            rows.append({"run": name, "part": shown[-1], "value": rest, "text": share(rest)})
    first = "; ".join(
        f"{f'{name}: ' if len(ops) > 1 else ''}{max(each, key=each.__getitem__)} takes {share(max(each.values()))}"
        for name, each in shares.items()
    )
    spec = charts.bars(names, rows, "share of the time of all ops", order=shown, form="~%")
    return Chart("Ops by share of time", f"{first} of the time of all ops", spec)


def _total(part: dict[str, Any]) -> float:
    return (number(part, "total_us") or 0.0) / 1e6


def _stage_chart(names: list[str], runs: Sequence[RunData]) -> Chart:
    rows: charts.Rows = []
    order: list[str] = []
    findings = []
    for run in runs:
        pipeline = table(run.summary, "pipeline")
        wall = number(pipeline, "wall_us") or 1.0
        whole = [("device, all", number(pipeline, "device_busy_us")), ("host, all", number(pipeline, "host_busy_us"))]
        for stage, busy in [*whole, *numbers(pipeline, "busy_us").items()]:
            if busy:
                text = f"{share(busy / wall)}, {seconds(busy / 1e6)}"
                rows.append({"run": run.name, "part": stage, "value": busy / wall, "text": text})
                order.append(stage)
        findings.append(_overlap(run, pipeline, len(names)))
    parts: list[str] = [name for name in ("device, all", "host, all") if name in order]
    parts += sorted(set(order) - set(parts), key=lambda name: -max(row["value"] for row in rows if row["part"] == name))
    spec = charts.bars(names, rows, "busy, as a share of wall time", order=parts, form="~%")
    return Chart("Overlap of the pipeline's stages", "; ".join(findings), spec)


def _overlap(run: RunData, pipeline: dict[str, Any], several: int) -> str:
    prefix = f"{run.name}: o" if several > 1 else "O"
    efficiency, depth = number(pipeline, "overlap_efficiency"), number(pipeline, "depth")
    waited = number(pipeline, "stall_us", "step")
    text = f"{prefix}verlap efficiency {NONE if efficiency is None else f'{efficiency:.2f}'}"
    if depth == 0:
        return f"{text}; stages ran one after another (depth 0)"
    return text if waited is None else f"{text}; the step waited {seconds(waited / 1e6)} for rows"


def _op_tables(runs: Sequence[RunData]) -> list[SortableTable]:
    rows = []
    for run in runs:
        times = _op_times(run)
        shares = _shares(times)
        for op, part in times.items():
            mean, p99, moved = (number(part, name) for name in ("mean_us", "p99_us", "bytes"))
            total = number(part, "total_us") or 0.0
            speed = moved / total / 1e3 if moved and total else None
            cells = [
                Cell(op),
                Cell(run.name),
                cell(number(part, "count"), count),
                cell(mean, _decimal),
                cell(p99, _decimal),
                Cell(f"{total / 1e6:,.2f}", total),
                Cell(share(shares[op]), shares[op]),
                cell(speed, lambda value: f"{value:.1f}"),
            ]
            rows.append(cells)
    rows.sort(key=lambda row: -float(row[-2].key or 0.0))
    head = ["op", "run", "calls", "mean µs", "p99 µs", "total s", "share", "GB/s"]
    return run_table("All ops", head, rows, runs, is_folded=True)


def _decimal(value: float) -> str:
    return f"{value:,.1f}"


def memory(runs: Sequence[RunData]) -> Section:
    """Return the section about memory by part."""
    names = [run.name for run in runs]
    rows: charts.Rows = []
    most: dict[str, float] = {}
    for run in runs:
        parts = {f"{name} (host)": value for name, value in numbers(run.summary, "memory", "host").items()}
        parts |= {f"{name} (device)": value for name, value in numbers(run.summary, "memory", "device").items()}
        if (peak := number(run.summary, "peak_rss_bytes")) is not None:
            parts["peak of the process"] = peak
        for name, value in parts.items():
            rows.append({"run": run.name, "part": name, "value": value / _MIB, "text": size(value)})
            most[name] = max(most.get(name, 0.0), value)
    made, missing = [], []
    if rows:
        order = sorted(most, key=lambda name: (name != "peak of the process", -most[name]))
        finding = "The peak is measured; parts in host memory are the bounds that were checked before the first step."
        spec = charts.bars(names, rows, "MiB", order=order, form=",~r")
        made.append(Chart("Memory by part", finding, spec))
    for run in runs:
        if not run.summary:
            missing.append(f"{run.name}: memory is known when the run has ended and written summary.json.")
        elif not table(run.summary, "memory"):
            why = "it was made by an earlier version of hostdev, which did not write memory by part."
            missing.append(f"{run.name}: {why}")
    more = _exchange(runs, names), _caches(runs, names)
    return Section(
        "memory",
        "Memory, cache and exchange",
        [*made, *(chart for charts_of, _, _ in more for chart in charts_of)],
        [each for _, tables, _ in more for each in tables],
        missing=[*missing, *(line for _, _, lines in more for line in lines)],
    )


Found = tuple[list[Chart], list[SortableTable], list[str]]


def _caches(runs: Sequence[RunData], names: list[str]) -> Found:
    bars: charts.Rows = []
    rows: list[list[Cell]] = []
    findings: list[str] = []
    missing: list[str] = []
    for run in runs:
        found = {**table(run.summary, "caches"), **({"": one} if (one := table(run.summary, "cache")) else {})}
        for name, cache in found.items():
            steps = max(1.0, number(cache, "batches") or 1.0)
            label = clean_name(name, 60)
            for direction, field in (("to the device", "bytes_to_device"), ("to the host", "bytes_to_host")):
                value = (number(cache, field) or 0.0) / steps
                part = f"{direction} ({label})" if label else direction
                bars.append({"run": run.name, "part": part, "value": value / _MIB, "text": size(value)})
            hits = number(cache, "hit_rate")
            prefix = f"{run.name}: " if len(runs) > 1 else ""
            findings.append(f"{prefix}{label + ': ' if label else ''}{share(hits)} of lookups hit")
            cells = [
                Cell(run.name),
                Cell(label or "all tables"),
                Cell(clean(str(entry(cache, "policy")))),
                cell(number(cache, "rows"), count),
                cell(hits, share),
                *(cell(_by(number(cache, each), steps), _decimal) for each in _CACHED_ROWS),
                *(cell(_by(number(cache, each), steps), size) for each in _CACHED_BYTES),
            ]
            rows.append(cells)
        if not found:
            known = "no embedding cache was used." if run.summary else "the cache's figures are known at the run's end."
            missing.append(f"{run.name}: {known}")
    if not rows:
        return [], [], missing
    order = list(dict.fromkeys(row["part"] for row in bars))
    spec = charts.bars(names, bars, "MiB per step", order=order, form=",~r")
    chart = Chart("Bytes that the cache moves", "; ".join(findings), spec)
    head = ["run", "cache of", "policy", "rows", "hit rate", "admitted/step", "evicted/step", "bypassed/step"]
    return [chart], run_table("Caches", [*head, "to device/step", "to host/step"], rows, runs), missing


def _by(value: float | None, steps: float) -> float | None:
    return None if value is None else value / steps


def _exchange(runs: Sequence[RunData], names: list[str]) -> Found:
    bars: charts.Rows = []
    rows: list[list[Cell]] = []
    findings: list[str] = []
    missing: list[str] = []
    for run in runs:
        ranks = table(run.summary, "ranks")
        if not ranks:
            known = "one process trained, so nothing was exchanged."
            known = known if run.summary else "exchange is known at the run's end."
            missing.append(f"{run.name}: {known}")
            continue
        steps = max(1.0, number(run.summary, "steps") or 1.0)
        for name, value in numbers(ranks, "sent_bytes").items():
            if value:
                part, text = _SENT.get(name, name), size(value / steps)
                bars.append({"run": run.name, "part": part, "value": value / steps / _MIB, "text": text})
        more = "" if entry(ranks, "exact") is not False else ", not exact"
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        hosts = number(ranks, "hosts")
        where = f"{count(hosts)} hosts" if hosts != 1 else "one host"
        findings.append(f"{prefix}{count(number(ranks, 'size'))} processes on {where}{more}")
        rows += _ranks(run)
    made = []
    if bars:
        order = [name for name in _SENT.values() if any(row["part"] == name for row in bars)]
        order += sorted({row["part"] for row in bars} - set(order))
        spec = charts.bars(names, bars, "MiB per step, sent by all processes", order=order, form=",~r")
        made.append(Chart("Exchange between processes", "; ".join(findings), spec))
    head = ["run", "rank", "status", "peak memory", "host busy", "device busy", "step waited"]
    return made, run_table("Processes", head, rows, runs), missing


def _ranks(run: RunData) -> list[list[Cell]]:
    """Return a table row for rank 0, and for each other rank whose summary was found."""
    made = []
    for rank, summary in {0: run.summary, **run.ranks}.items():
        busy = [number(summary, "pipeline", name) for name in ("host_busy_us", "device_busy_us")]
        times = [*busy, number(summary, "pipeline", "stall_us", "step")]
        made.append(
            [
                Cell(run.name),
                Cell(str(rank), rank),
                Cell(clean(str(entry(summary, "status")))),
                cell(number(summary, "peak_rss_bytes"), size),
                *(cell(_by(each, 1e6), seconds) for each in times),
            ]
        )
    return made
