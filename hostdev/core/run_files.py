"""The files of a run directory: their names, and the lines of its logs, as they are written and read.

A log with a limited total size is rotated: full files get numbers, and the oldest are removed.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core import json_files

LOSS_LOG, EVAL_LOG, OPS_LOG = "loss.log", "eval.log", "ops.log"
SCORES_LOG = "scores.jsonl"  # for each evaluation, the counts of predictions by bin
TENSORBOARD, MLFLOW = "tensorboard", "mlflow.json"  # written with --log-to
KEYS_LOG, KEYS_PICTURE = "keys.log", "keys.png"  # written for tables by key
CONFIG, SUMMARY, CURVE, REPORT = "config.json", "summary.json", "curve.png", "report.html"
FILES_LOG, ASIDE_LOG, NEEDED = "files.jsonl", "set_aside.jsonl", "needed.json"  # written with --follow
GROWN, REPLACED = "grown", "replaced"  # values of `why` in set_aside.jsonl: how a known file has changed

SCORE_BINS, SCORE_LIMIT = 240, 12.0  # bins of scores.jsonl: of equal width in log-odds from -SCORE_LIMIT to SCORE_LIMIT

_LOSS = re.compile(rb"^epoch: (\d+) step: (\d+), wide_loss is (\S+), deep_loss is (\S+)$", re.MULTILINE)
_PLACE = re.compile(r"epoch: (\d+) step: (\d+), ")
_FIGURE = re.compile(r"(training )?(\w+) is ([^\s,]+)")
_BLOCK = 1 << 24  # bytes of loss.log that are parsed at a time
LARGEST = 64 << 20  # maximum bytes of one file of a rotated log
_FEWEST = 4  # minimum number of files that share a rotated log's limit


def loss_line(epoch: int, step: int, wide: float, deep: float) -> str:
    """Return a line of loss.log; `epoch`, and `step` within the epoch, count from 1."""
    return f"epoch: {epoch} step: {step}, wide_loss is {wide:.7f}, deep_loss is {deep:.7f}\n"


def read_losses(path: Path) -> npt.NDArray[np.float64]:
    """Return the lines of loss.log, float64 [steps, 4]: epoch, step within the epoch, wide and deep loss.

    Other lines, and a last line that is not complete, are left out.

    Raises:
        OSError: The file cannot be read.
    """
    parts = [np.empty((0, 4))]
    with path.open("rb") as file:
        rest = b""
        while block := file.read(_BLOCK):
            text, _, rest = (rest + block).rpartition(b"\n")
            found = _LOSS.findall(text)
            if found:
                parts.append(np.array(found).astype(np.float64))
    return np.concatenate(parts)


class EvalLine(NamedTuple):
    """A line of eval.log: metrics by name, such as "auc", on the rows of a split and on training rows."""

    epoch: int
    step: int  # since the start of training
    test: dict[str, float]
    training: dict[str, float]


def eval_line(epoch: int, step: int, test: Mapping[str, float], training: Mapping[str, float] | None) -> str:
    """Return a line of eval.log.

    Args:
        test: Metrics by name; "rows" is the number of rows.
        training: Metrics of training rows, in the same form; None if there are none.
    """
    line = f"epoch: {epoch} step: {step}, {_figures(test)}"
    if training is not None:
        line += f", {_figures(training, 'training ')}"
    return f"{line}\n"


def _figures(metrics: Mapping[str, float], prefix: str = "") -> str:
    shown = [f"{prefix}{name} is {value:.6f}" for name, value in metrics.items() if name != "rows"]
    return ", ".join([*shown, f"{prefix}rows: {metrics['rows']}"])


def read_evaluations(path: Path) -> Iterator[EvalLine]:
    """Yield the lines of eval.log; other lines, and a last line that is not complete, are left out.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open(errors="replace") as file:
        for line in file:
            place = _PLACE.match(line)
            if place is None or not line.endswith("\n"):
                continue
            found: tuple[dict[str, float], dict[str, float]] = {}, {}
            for prefix, name, value in _FIGURE.findall(line[place.end() :]):
                try:
                    found[bool(prefix)][name] = float(value)
                except ValueError:
                    continue
            yield EvalLine(int(place[1]), int(place[2]), *found)


def read_json_lines(path: Path, tell: Callable[[str], object] = lambda why: None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one a line; other lines, and a last line that is not complete, are left out.

    Args:
        tell: Called with the reason for each complete line that cannot be read.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                found = json_files.loads(line) if line.endswith(b"\n") else None
            except ValueError as error:
                tell(f"line {number}: {error}")
                continue
            if isinstance(found, dict):
                yield found


class RotatedFile:
    """A text file to append to; when full, it is renamed NAME.1, the previous NAME.1 becomes NAME.2, and so on.

    Args:
        path: The file.
        limit: Maximum total bytes of all files; each takes at most a quarter of it and at most 64 MiB.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit = path, limit
        self.dropped_bytes = 0  # bytes of removed files
        self._each = min(LARGEST, max(1, limit // _FEWEST))
        self._older = max(1, limit // self._each - 1)
        self._file = path.open("ab")
        self._size = os.fstat(self._file.fileno()).st_size

    def fit(self) -> None:
        """Apply the limit to the files of an earlier run, which may have had a higher limit."""
        if self._size > self._each:
            self._rotate()
        else:
            self._remove_beyond()

    def writelines(self, lines: Iterable[str]) -> None:
        """Append lines; no line is split across files."""
        part: list[bytes] = []
        room = self._each - self._size
        for line in lines:
            data = line.encode()
            if len(data) > room and (part or self._size):
                self._write(part)
                self._rotate()
                part, room = [], self._each
            part.append(data)
            room -= len(data)
        self._write(part)

    def _write(self, part: list[bytes]) -> None:
        data = b"".join(part)
        self._file.write(data)
        self._size += len(data)

    def _rotate(self) -> None:
        if not self.path.exists():  # the file or its folder was removed
            self._file.flush()
            self._file.truncate(0)
            self.dropped_bytes += self._size
        else:
            self._file.close()
            for number in range(self._older, -1, -1):
                if self._numbered(number).exists():
                    self._numbered(number).replace(self._numbered(number + 1))
            self._remove_beyond()
            self._file = self.path.open("ab")
        self._size = 0

    def _remove_beyond(self) -> None:
        """Remove the oldest files until neither their number nor their total size exceeds the limit."""
        numbers = (
            path.name.removeprefix(f"{self.path.name}.") for path in self.path.parent.glob(f"{self.path.name}.*")
        )
        total = 0
        for number in sorted(int(each) for each in numbers if each.isdecimal()):
            size = self._numbered(number).stat().st_size
            total += size
            if number > self._older or total > self.limit - self._each:
                self._numbered(number).unlink()
                self.dropped_bytes += size

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def flush(self) -> None:
        """Flush the lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
