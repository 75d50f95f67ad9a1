"""The text that a run prints: the lines at its start and the summary at its end."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hostdev.cache.cache import EmbeddingCache
from hostdev.core import run_files
from hostdev.core.memory import TableShape, format_bytes
from hostdev.core.progress import counted
from hostdev.core.table_dtypes import FP32
from hostdev.data.manifest import warn_of_unknown
from hostdev.kernels.arrays import in_words
from hostdev.train.key_log import describe
from hostdev.train.quality import Point, Quality
from hostdev.train.target_scores import Evaluation

_WAITED = 0.05  # share of the wall time that may be spent waiting for reads before the summary gives advice


def form_lines(tables: dict[str, Any]) -> list[str]:
    """Return a line for each table that continues with Adam(epsilon_hat=True) from an earlier version's checkpoint."""
    return [
        f"table {name} continues with Adam(epsilon_hat=True), the form of the checkpoint"
        for name, table in tables.items()
        if getattr(table.optimizer, "epsilon_hat", False)
    ]


def start_lines(
    config: dict[str, Any],
    data: str,
    rows: dict[str, int],
    tables: dict[str, Any],
    device: str,
    caches: list[EmbeddingCache],
    memory: str,
    checkpoints: str | None = None,
    parts: str | None = None,
    statistics: dict[str, Any] | None = None,
) -> str:
    """Return the lines to print before training: data, tables, caches, memory, device, checkpoints.

    Args:
        config: The options, as in config.json.
        memory: Text about the host memory that tables and caches take; empty if they take none.
        checkpoints: Text about when and where checkpoints are saved.
        parts: Text about the stages and slices of the model.
        statistics: The statistics in the data set's manifest.
    """
    where = "host memory" if config["host_device_mix"] else "device memory"
    if any(table.capabilities.on_disk for table in tables.values()):
        where += " and disk"
    if interleaving := in_words():
        where += f", {interleaving}"
    arithmetic = config["precision"] + " with TF32" * config["tf32"]
    epochs = f"{config['epochs']} epoch{'s' * (config['epochs'] > 1)}"
    inexact = f"NOT EXACT: --staleness {config['staleness']} lets lookups miss updates; runs differ"
    evaluated = "" if rows["test"] or rows.get("validation") else "; nothing is evaluated"
    validation = f", {rows['validation']:,} validation" if rows.get("validation") else ""
    trained = f"{data}: {rows['train']:,} training{validation} and {rows['test']:,} test rows{evaluated}"
    if config.get("follow") is not None:
        epochs, trained = "each row once", f"the files that arrive in {config['follow']}, read like those of {data}"
    lines = [
        *([inexact] if config["staleness"] else []),
        f"data     {trained}",
        *(f"         {line}" for line in warn_of_unknown(statistics or {})),
        f"tables   {tables_line(tables.values(), on_host=config['host_device_mix'])} of {where}",
        *_disk_lines(tables.values()),
        *map(_cache_line, caches),
        *([f"memory   {memory}"] if memory else []),
        f"dense    {arithmetic} on {device}; batch size {config['batch_size']:,}, {epochs}",
        *([f"parts    {parts}"] if parts else []),
        *([f"save     {checkpoints}"] if checkpoints else []),
    ]
    return "\n".join(lines)


def tables_line(tables: Iterable[Any], *, on_host: bool = True) -> str:
    """Return the names, shapes, optimizers and total size of tables, or of table specifications, as text."""
    shapes = sorted(tables, key=lambda table: table.name)
    size = sum(
        TableShape(table.dim, table.optimizer, *((table.dtype, table.slots_dtype) if on_host else ())).nbytes(
            _rows(table)
        )
        for table in shapes
    )
    each = [f"{table.name} {_size(table)} x {table.dim} ({kind(table)})" for table in shapes]
    return f"{', '.join(each)}: {format_bytes(size)}"


def _disk_lines(tables: Iterable[Any]) -> list[str]:
    """Return a line for each table on disk."""
    return [
        f"disk     {table.name} in {table.disk.path}, {table.storage.tier.count:,} of its rows in "
        f"{format_bytes(table.disk.nbytes)} of memory"
        for table in sorted(tables, key=lambda table: table.name)
        if table.capabilities.on_disk
    ]


def kind(table: Any) -> str:
    """Return a table's optimizer as text, with the dtype of weights or optimizer state that are not float32."""
    dtype = "" if table.dtype == FP32 else f", {table.dtype}"
    slots = "" if table.slots_dtype == FP32 else f", {table.slots_dtype} slots"
    return f"{type(table.optimizer).__name__}{dtype}{slots}"


def _rows(table: Any) -> int:
    """Return the maximum number of rows of a table, or of a table specification, over all processes."""
    rows: int = table.capacity
    return rows


def _size(table: Any) -> str:
    return f"up to {_rows(table):,} keys" if table.capabilities.by_key else f"{_rows(table):,}"


def _cache_line(cache: EmbeddingCache) -> str:
    ahead = f", {cache.window} batches ahead" if cache.window else ""
    policy = cache.planner.policy
    return (
        f"cache    {cache.capacity:,} rows of each table, {format_bytes(cache.nbytes)} on {cache.device}: "
        f"{policy}{ahead}"
    )


def evaluation_line(point: Point, split: str, labels: tuple[str, ...]) -> str:
    """Return a line with the model's quality after an epoch on the rows of a split, for all labels."""
    test, training = point.test, point.training
    others = training.figures() if training else {}
    shown = (
        f"{name} {value:.4f}" + (f" (training {others[name]:.4f})" if name in others else "")
        for name, value in test.figures().items()
    )
    return f"epoch {point.epoch}: {', '.join(shown)} on {test.rows:,} {split} rows{_by_label(test, labels)}"


def _by_label(found: Evaluation, labels: tuple[str, ...]) -> str:
    """Return the AUC or RMSE of each label as text if there are several labels, otherwise an empty text."""
    each = (
        f"{name} {'AUC' if math.isnan(one.rmse) else 'RMSE'} {one.auc if math.isnan(one.rmse) else one.rmse:.4f}"
        for name, one in zip(labels, found.labels, strict=False)
    )
    return f": {', '.join(each)}" if found.labels else ""


def result_line(quality: Quality) -> str | None:
    """Return a line with the quality on the test rows if training evaluated validation rows, otherwise None."""
    found = quality.result
    if quality.split == "test" or found is None:
        return None
    epoch = next(point.epoch for point in quality.points if point.final is found)
    which = "the best on validation rows" if quality.best is not None and quality.best.final is found else "the last"
    return (
        f"test rows, after epoch {epoch} ({which}): "
        + ", ".join(f"{name} {value:.4f}" for name, value in found.figures().items())
        + f" on {found.rows:,} rows{_by_label(found, quality.labels)}"
    )


def early_stop_line(quality: Quality, patience: int | None) -> str:
    """Return a line that says why a run stops before its last epoch."""
    last, best, metric = quality.points[-1].epoch, quality.best, quality.points[-1].test.metric
    none = f"no epoch has an {metric}"
    found = none if best is None else f"the best is {best.test.value:.4f}, after epoch {best.epoch}"
    epochs = "the last epoch" if patience == 1 else f"the last {patience} epochs"
    return f"stopped after epoch {last} (--early-stop {patience}): no better {metric} in {epochs}; {found}"


def summary_lines(
    summary: dict[str, Any],
    epochs: int,
    run_dir: Path,
    trace: Path | None = None,
    *,
    undrawn: str | None = None,
    has_ops_log: bool = True,
) -> str:
    """Return the summary as text: quality, speed, time per op, and files.

    Args:
        summary: The content of summary.json.
        epochs: Planned epochs.
        undrawn: Reason why there is no picture; "" if this process draws none, None if there is a picture.
    """
    lines = ["", _quality(summary), *(_op_table(summary["ops"]) if summary["ops"] else [])]
    ops = [run_files.OPS_LOG] if has_ops_log else []
    pictures = [run_files.CURVE] if undrawn is None else []
    if "keys" in summary:
        ops, pictures = [*ops, run_files.KEYS_LOG], [*pictures, run_files.KEYS_PICTURE] if pictures else []
    if "files" in summary:
        saved = summary.get("checkpoints", {}).get("saved", 0)
        ops = [
            run_files.FILES_LOG,
            *[run_files.ASIDE_LOG] * bool(summary["files"]["set_aside"]),
            *[run_files.NEEDED] * bool(saved),
            *ops,
        ]
    scores, page = ([name] if (run_dir / name).exists() else [] for name in (run_files.SCORES_LOG, run_files.REPORT))
    files = [
        run_files.LOSS_LOG,
        run_files.EVAL_LOG,
        *scores,
        *ops,
        run_files.CONFIG,
        run_files.SUMMARY,
        *pictures,
        *page,
    ]
    files += [name for name in (run_files.TENSORBOARD, run_files.MLFLOW) if (run_dir / name).exists()]
    removed = [name for name in files if not (run_dir / name).exists()]
    files = [name for name in files if name not in removed]
    best = ""
    if summary["best_epoch"]:
        metric, value = (
            ("AUC", summary["best_auc"]) if summary["best_auc"] is not None else ("RMSE", summary["best_rmse"])
        )
        best = f"{metric} {value:.4f} after epoch {summary['best_epoch']} of {epochs}"
    lines += [
        "",
        *([f"best           {best}"] if best else []),
        f"pipeline       {_pipeline(summary['pipeline'])}",
        *([f"arrived        {_arrived(summary['files'])}"] if "files" in summary else []),
        *([f"keys           {describe(summary['keys'])}"] if "keys" in summary else []),
        *([f"cache          {_cache(summary['cache'])}"] if "cache" in summary else []),
        *(f"cache          {name}: {_cache(one)}" for name, one in summary.get("caches", {}).items()),
        *_disk_reports(summary),
        *([f"processes      {_ranks(summary['ranks'], summary['steps'])}"] if "ranks" in summary else []),
        *([f"checkpoints    {_checkpoints(summary['checkpoints'])}"] if "checkpoints" in summary else []),
        f"peak memory    {format_bytes(summary['peak_rss_bytes'])}",
        f"state_sha256   {summary['state_sha256']}",
        f"files          {run_dir}/: {', '.join(files)}{f'; {trace}' if trace is not None else ''}",
        *([f"               {_dropped(summary['ops_log'])}"] if "ops_log" in summary else []),
        *([f"               removed during the run: {', '.join(removed)}"] if removed else []),
        *([f"no {run_files.CURVE}   {undrawn}"] if undrawn else []),
    ]
    return "\n".join(lines)


def _quality(summary: dict[str, Any]) -> str:
    speed = f"{summary['samples_per_second']:,.0f} samples/s over {summary['steps']:,} steps on {summary['device']}"
    quality = {"AUC": summary["auc"], "log loss": summary["logloss"]}
    quality |= {"RMSE": summary.get("rmse"), "MAE": summary.get("mae")}
    return "   ".join([*(f"{name} {value:.4f}" for name, value in quality.items() if value is not None), speed])


def _arrived(files: dict[str, Any]) -> str:
    """Return as text how many files a run with --follow has taken."""
    rest = f"; {files['waiting_rows']:,} rows of them wait for a full batch" if files["waiting_rows"] else ""
    over = f"; the quality above is that of the last {files['window']['files']}" if files["window"] else ""
    changed = f", {files['changed']:,} changed afterwards" if files["changed"] else ""
    return f"{files['taken']:,} files taken, {files['set_aside']:,} set aside{changed}{rest}{over}"


def _pipeline(pipeline: dict[str, Any]) -> str:
    """Return how well the stages overlapped and how long the step waited, as text."""
    wall = pipeline["wall_us"] / 1e6
    parts = [f"depth {pipeline['depth']}"]
    if not pipeline["exact"]:
        parts.append(f"NOT EXACT: staleness {pipeline['staleness']}")
    parts.append(
        f"host busy {pipeline['host_busy_us'] / 1e6:.1f} s, device busy {pipeline['device_busy_us'] / 1e6:.1f} s "
        f"of {wall:.1f} s: overlap efficiency {pipeline['overlap_efficiency'] or 0:.2f}"
    )
    if pipeline["depth"]:
        parts.append(f"the step waited {pipeline['stall_us']['step'] / 1e6:.1f} s")
    return "; ".join(parts)


def _cache(cache: dict[str, Any]) -> str:
    """Return as text a cache's hit rate and, per step, the moved rows and bytes and the saved time."""
    steps = max(1, cache["batches"])
    moved = (cache["bytes_to_device"] + cache["bytes_to_host"]) // steps
    time = ""
    if cache["host_us_saved"] is not None:
        time = f"; it saves the host {cache['host_us_saved'] / steps / 1e3:.2f} ms per step"
        if cache["host_us_saved"] < 0:
            time = f"; it costs the host {-cache['host_us_saved'] / steps / 1e3:.2f} ms per step more than it saves"
    return (
        f"{cache['rows']:,} rows, {cache['policy']}: {cache['hit_rate']:.2%} of lookups hit; "
        f"a step admits {cache['admitted'] // steps:,} rows, evicts {cache['evicted'] // steps:,}, bypasses "
        f"{cache['bypassed'] // steps:,} and moves {format_bytes(moved)}{time}"
    )


def _disk_reports(summary: dict[str, Any]) -> list[str]:
    """Return a line for each table on disk, and advice if reads have held up the training."""
    disks, wall = summary.get("disk", {}), summary["pipeline"]["wall_us"]
    lines = [f"disk           {name}: {_disk(one, max(1, summary['steps']))}" for name, one in disks.items()]
    if sum(one["waited_us"] for one in disks.values()) > _WAITED * wall:
        lines.append("               more memory would make this faster; hostdev advise --disk DIR says how much")
    if any(one["exceeded"] for one in disks.values()):
        # Tables share --table-memory in fixed proportions.
        factor = max(one["needed_bytes"] / one["given_bytes"] for one in disks.values())
        needed = math.ceil(factor * sum(one["given_bytes"] for one in disks.values()) / (1 << 20))
        lines.append(f"               --table-memory {needed}MiB has room for the rows of each batch")
    return lines


def _disk(disk: dict[str, Any], steps: int) -> str:
    """Return as text how many of a table's rows were in memory, and what a step read and wrote."""
    written = sum(disk["written_bytes"].values()) // steps
    missed = disk["missed"] / disk["used"] if disk["used"] else 0.0
    page_cache = "" if disk["direct"] else ", through the system's page cache"
    exceeded = ""
    if disk["exceeded"]:
        exceeded = (
            f"; rows of a batch did not fit in its memory {counted(disk['exceeded'], 'time')}, and took up to "
            f"{format_bytes(disk['exceeded_bytes'])} more"
        )
    return (
        f"{disk['rows_in_memory']:,} of {disk['rows']:,} rows in memory, which had {1 - missed:.2%} of the rows that "
        f"batches used; a step read {disk['read'] // steps:,} rows and wrote {format_bytes(written)}{page_cache}; "
        f"prefetching waited {disk['waited_us'] / 1e6:.1f} s for reads{exceeded}"
    )


def _ranks(ranks: dict[str, Any], steps: int) -> str:
    """Return the number of processes, and the bytes that they exchanged per step, as text."""
    sent = ranks["sent_bytes"]
    rows, least, dense = (sent[name] / max(1, steps) for name in ("rows", "least", "dense"))
    more = f", {rows / least - 1:.1%} more than the least possible" if least else ""
    each = [f"{format_bytes(round(rows))} for rows{more}"]
    if "parts" in sent:
        each.append(f"{format_bytes(round(sent['parts'] / max(1, steps)))} between parts of the network")
    if dense:
        each.append(f"{format_bytes(round(dense))} for the dense layers' gradients by {ranks['backend']}")
    network = format_bytes(round(sent["network"] / max(1, steps)))
    between = f"; {network} of this between hosts" if ranks["hosts"] > 1 else ""
    exchanged = " and ".join([", ".join(each[:-1]), each[-1]]) if len(each) > 2 else ", and ".join(each)
    return (
        f"{ranks['size']}{f' ({mesh})' if (mesh := ranks['mesh']) else ''}; "
        + ("" if ranks["exact"] else f"NOT EXACT: --dense-exchange {ranks['dense_exchange']}; ")
        + f"a step exchanges {exchanged}"
        + between
    )


def _checkpoints(saved: dict[str, Any]) -> str:
    """Return the number of checkpoints, and how long they stalled training, as text."""
    last = "" if saved["last_step"] is None else f", the last after step {saved['last_step']:,}"
    failed = f"; {saved['failed']} not saved" * bool(saved["failed"])
    where = f"in {saved['path']}"
    if saved.get("failed_uploads"):
        where, failed = "on this machine", f"; {saved['uploaded']} uploaded to {saved['path']}{failed}"
    stall = saved["stall_us"] / 1e6
    return f"{saved['saved']} saved {where}{last}{failed}; training stalled for {stall:.1f} s"


def _dropped(log: dict[str, int]) -> str:
    return (
        f"{run_files.OPS_LOG} lacks its first {format_bytes(log['dropped_bytes'])}: --ops-log limits it to "
        f"{format_bytes(log['limit_bytes'])}"
    )


def _op_table(ops: dict[str, dict[str, Any]]) -> list[str]:
    """Return text lines with the times of all ops, sorted by total time: a line for each op and embedding table."""
    rows = []
    for name, times in ops.items():
        for scope, part in times.get("by_scope", {"": times}).items():
            rows.append((f"{name} ({scope})" if scope else name, part))
    rows.sort(key=lambda row: -row[1]["total_us"])
    total = sum(times["total_us"] for _, times in rows) or 1.0
    width = max(28, *(len(name) + 2 for name, _ in rows), 28)
    lines = ["", f"{'op':<{width}}{'calls':>8}{'mean us':>12}{'p99 us':>12}{'total s':>10}{'share':>8}{'GB/s':>8}"]
    for name, times in rows:
        speed = f"{times['bytes'] / times['total_us'] / 1e3:8.1f}" if times["bytes"] and times["total_us"] else ""
        lines.append(
            f"{name:<{width}}{times['count']:>8}{times['mean_us']:>12,.0f}{times['p99_us']:>12,.0f}"
            f"{times['total_us'] / 1e6:>10.2f}{times['total_us'] / total:>8.1%}{speed}"
        )
    return lines
