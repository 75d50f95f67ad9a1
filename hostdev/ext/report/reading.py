"""Everything that a report shows of a run, read from its run directory while it trains, or after it has ended.

The lines of scores.jsonl give the calibration and the distribution of predictions.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint import folder, manifest
from hostdev.core import json_files, locks, run_files
from hostdev.core.addresses import is_remote
from hostdev.core.errors import UserError, in_words
from hostdev.core.run_files import SCORE_BINS, SCORE_LIMIT
from hostdev.ext.report.values import clean, clean_name, entry, table

RUNNING, KILLED = "running", "ended without a summary"
_ANY = (run_files.LOSS_LOG, run_files.CONFIG, run_files.SUMMARY)  # a run directory has one of these
_TAIL = 1 << 22  # bytes at the end of ops.log that are read if a run has no summary
_MOST_CHECKPOINTS = 100
_OP = re.compile(r"Default/(?:([^/\n]+)/)?([^/\n]+)-op\d+ costs (\d+) us\.$", re.MULTILINE)

T = TypeVar("T")


_GROUPS = 15  # number of groups of about equally many samples, for the calibration
_MERGED = 5  # number of bins that are merged into one bin of the distribution
_ERRORS = 2.0  # number of standard errors that are shown on each side of a share

Values = npt.NDArray[np.float64]


class Counts(NamedTuple):
    """The samples of an evaluation by bin of log-odds, each float64 [bins]."""

    step: int
    split: str
    negatives: Values
    positives: Values
    sums: Values  # sums of the predictions

    @property
    def samples(self) -> float:
        """The number of samples."""
        return float((self.negatives + self.positives).sum())


class ScoreBin(NamedTuple):
    """Samples with similar predictions: mean prediction, share of positives with two standard errors around it."""

    predicted: float
    observed: float
    low: float
    high: float
    samples: int


def newest(lines: Iterable[dict[str, Any]]) -> dict[str, Counts]:
    """Return the counts of the last evaluation by label; lines of another form are left out."""
    found: dict[str, Counts] = {}
    for line in lines:
        try:
            found = {str(label): _parse(line, bins) for label, bins in line["labels"].items()} or found
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError):
            continue
    return {label: counts for label, counts in found.items() if counts.samples}


def _parse(line: dict[str, Any], bins: Any) -> Counts:
    made = np.zeros((3, SCORE_BINS))
    values = np.array(bins, np.float64).reshape(-1, 4)
    if not np.isfinite(values).all() or (values[:, :3] < 0).any() or (values[:, 0] >= SCORE_BINS).any():
        raise ValueError
    places = values[:, 0].astype(np.int64)
    made[:, places] = values[:, 1:].T
    return Counts(int(line["step"]), str(line["split"]), *made)


def calibrate(counts: Counts) -> list[ScoreBin]:
    """Return groups of about equally many samples, by rising prediction."""
    samples = counts.negatives + counts.positives
    middle = np.cumsum(samples) - samples / 2
    groups = np.minimum((middle / samples.sum() * _GROUPS).astype(np.int64), _GROUPS - 1)
    found = []
    for number in np.unique(groups[samples > 0]):
        some = groups == number
        n, positives, total = (float(each[some].sum()) for each in (samples, counts.positives, counts.sums))
        share = positives / n
        error = _ERRORS * float(np.sqrt((share * (1 - share) + 1 / (4 * n)) / n))
        found.append(ScoreBin(total / n, share, max(0.0, share - error), min(1.0, share + error), int(n)))
    return found


def distribution(counts: Counts) -> tuple[Values, Values, Values]:
    """Return, for bins of log-odds, the left edges, and the shares of negatives and of positives, each float64 [bins].

    Empty bins at the ends are left out, except for one at each end.
    """
    shares: list[Values] = [
        each.reshape(-1, _MERGED).sum(axis=1) / max(1.0, each.sum()) for each in (counts.negatives, counts.positives)
    ]
    width = 2.0 * SCORE_LIMIT / SCORE_BINS * _MERGED
    edges = -SCORE_LIMIT + width * np.arange(len(shares[0]), dtype=np.float64)
    used = np.flatnonzero(shares[0] + shares[1])
    kept = slice(max(0, int(used[0]) - 1), int(used[-1]) + 2)
    return edges[kept], shares[0][kept], shares[1][kept]


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint in the run's folder."""

    name: str
    step: int
    created: str
    nbytes: int
    is_full: bool
    error: str = ""  # why it cannot be read; then only `name` and `step` are known, from its name


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run. A list or dict is empty if the run does not have its file.

    Attributes:
        name: The run's name on the page.
        losses: float64 [steps, 4], as `run_files.read_losses` returns them.
        scores: The counts of the last evaluation, by label.
        files: The lines of files.jsonl.
        ranks: The summaries of the other ranks, by rank.
        ops: Times by op.
        ops_calls: If `ops` covers only the last calls in ops.log, their number; else 0.
        notes: A line for each file that cannot be read.
    """

    name: str
    path: Path
    status: str
    config: dict[str, Any]
    summary: dict[str, Any]
    losses: npt.NDArray[np.float64]
    evaluations: list[run_files.EvalLine]
    scores: dict[str, Counts]
    files: list[dict[str, Any]]
    set_aside: int
    ranks: dict[int, dict[str, Any]]
    ops: dict[str, Any]
    ops_calls: int
    checkpoints: list[SavedCheckpoint]
    notes: list[str] = field(default_factory=list)


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Read run directories; raise UserError if a path is not a run directory, or a run is named twice."""
    found: dict[Path, str] = {}
    for path in paths:
        require_run(path)
        real = path.resolve()
        if real in found:
            raise UserError(f"{path} and {found[real]} are the same run; name it once")
        found[real] = str(path)
    names = [path.resolve().name or str(path) for path in paths]
    unique = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    return [_read(path, clean_name(name, 80)) for path, name in zip(paths, unique, strict=True)]


def require_run(path: Path) -> None:
    """Raise UserError unless a path is a run directory."""
    if not path.exists():
        raise UserError(f"there is no run directory {path}")
    if not path.is_dir():
        raise UserError(f"{path} is a file; name a run directory, such as runs/20261122-111257")
    if not any((path / name).exists() for name in _ANY):
        inner = sorted(each.name for each in path.iterdir() if any((each / name).exists() for name in _ANY))
        hint = f"; did you mean {path / inner[-1]}?" if inner else "; name the folder that train wrote its logs to"
        raise UserError(f"{path} is not a run directory: it has none of {', '.join(_ANY)}{hint}")


def _read(path: Path, name: str) -> RunData:
    notes: list[str] = []

    def read(file: str, how: Callable[[Path], T], otherwise: T) -> T:
        try:
            return how(path / file)
        except FileNotFoundError:
            return otherwise
        except (OSError, ValueError) as error:
            reason = in_words(error) if isinstance(error, OSError) else str(error)
            notes.append(clean(f"{name}: {file} cannot be read: {reason}"))
            return otherwise

    def read_lines(file: Path) -> Iterator[dict[str, Any]]:
        damaged: list[str] = []
        yield from run_files.read_json_lines(file, damaged.append)
        if damaged:
            notes.append(clean(f"{name}: {file.name}, {damaged[0]}; damaged lines, which are left out: {len(damaged)}"))

    summary, config = (table(read(file, json_files.read, {})) for file in (run_files.SUMMARY, run_files.CONFIG))
    is_running = _is_running(path)
    summary = {} if is_running else summary  # a run that trains may have an older summary, if it was resumed
    ops, calls = (table(summary, "ops"), 0) if summary else read(run_files.OPS_LOG, _read_ops, (dict[str, Any](), 0))
    status = RUNNING if is_running else clean(str(entry(summary, "status") or KILLED))
    return RunData(
        name=name,
        path=path,
        status=status,
        config=config,
        summary=summary,
        losses=read(run_files.LOSS_LOG, run_files.read_losses, np.empty((0, 4))),
        evaluations=read(run_files.EVAL_LOG, lambda file: list(run_files.read_evaluations(file)), []),
        scores=read(run_files.SCORES_LOG, lambda file: newest(read_lines(file)), {}),
        files=read(run_files.FILES_LOG, lambda file: list(read_lines(file)), []),
        set_aside=read(run_files.ASIDE_LOG, lambda file: _count_aside(read_lines(file)), 0),
        ranks=_read_ranks(path, read),
        ops=ops,
        ops_calls=calls,
        checkpoints=_read_checkpoints(path, config, notes),
        notes=notes,
    )


def _is_running(path: Path) -> bool:
    """Return whether a process trains in the run directory; if none does, this takes the log's lock for a moment."""
    try:
        loss, summary = path / run_files.LOSS_LOG, path / run_files.SUMMARY
        if summary.exists() and summary.stat().st_mtime_ns > loss.stat().st_mtime_ns:
            return False
        with loss.open("rb") as file:
            return locks.lock_state(file.fileno()) == "held"
    except OSError:
        return False


def _count_aside(lines: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of files that lines of set_aside.jsonl set aside; lines about later changes do not count."""
    return sum(line.get("why") not in (run_files.GROWN, run_files.REPLACED) for line in lines)


def _read_ranks(path: Path, read: Callable[[str, Callable[[Path], Any], Any], Any]) -> dict[int, dict[str, Any]]:
    """Return the summaries in rank1, rank2, ... by rank."""
    numbers = sorted(
        int(each.name.removeprefix("rank")) for each in path.glob("rank*") if re.fullmatch(r"rank[1-9]\d*", each.name)
    )
    found = {rank: table(read(f"rank{rank}/{run_files.SUMMARY}", json_files.read, {})) for rank in numbers}
    return {rank: summary for rank, summary in found.items() if summary}


def _read_ops(path: Path) -> tuple[dict[str, Any], int]:
    """Return the times of the last calls in ops.log in the form of summary.json, and the number of these calls."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        text = file.read().decode(errors="replace")
    found: dict[str, Any] = {}
    calls = 0
    for scope, op, duration in _OP.findall(text):
        times = found.setdefault(op, {"by_scope": {}})["by_scope"].setdefault(scope, {"count": 0, "total_us": 0.0})
        times["count"] += 1
        times["total_us"] += float(duration)
        calls += 1
    for each in found.values():
        scopes = each["by_scope"]
        for times in scopes.values():
            times["mean_us"] = times["total_us"] / times["count"]
        if len(scopes) == 1:  # as in summary.json
            each["by_scope"] = {"": next(iter(scopes.values()))}
    return found, calls


def _read_checkpoints(path: Path, config: dict[str, Any], notes: list[str]) -> list[SavedCheckpoint]:
    """Return the newest checkpoints, oldest first; none if they are in a store."""
    given = entry(config, "checkpoint_dir")
    if isinstance(given, str) and is_remote(given):
        return []
    place = Path(given) if isinstance(given, str) and Path(given).is_dir() else path / folder.FOLDER
    try:
        names = folder.names_in(place)[-_MOST_CHECKPOINTS:]
    except UserError as error:
        notes.append(clean(str(error)))
        return []
    return [_read_checkpoint(place / name) for name in names]


def _read_checkpoint(path: Path) -> SavedCheckpoint:
    try:
        found = manifest.read(path)
    except UserError as error:
        step = re.search(r"\d+", path.name)
        return SavedCheckpoint(
            name=clean(path.name),
            step=int(step[0]) if step else 0,
            created="",
            nbytes=0,
            is_full=True,
            error=clean(str(error)),
        )
    return SavedCheckpoint(
        name=clean(path.name),
        step=found.step,
        created=clean(found.created.removesuffix("+00:00").replace("T", " ")),
        nbytes=found.nbytes,
        is_full=found.parent is None,
    )
