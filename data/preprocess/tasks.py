"""The tasks of a preparation, by name, and the threads of this process that run them.

The tasks that learn the scaling, write the shards and verify files are defined here. The scaling does not depend on how
many workers learn it: maxima are found by groups of pieces, in any order; for means and deviations, a group computes
the moments of its blocks of rows, which `scale` merges in the order of the rows. If columns are clipped, their limits
take several passes over all numbers; then a single task learns the scaling, as in one process.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import HostdevError
from hostdev.core.workers import Workers
from hostdev.data import ragged
from hostdev.data import schema as schemas
from hostdev.data.preprocess import first_pass, words
from hostdev.data.preprocess import scaling as scalings
from hostdev.data.preprocess.pieces import PieceFile
from hostdev.data.preprocess.runner import Files, Result, Task, Workspace, piece_name, result_name
from hostdev.data.preprocess.scaling import BLOCK, BlockMoments, ByColumn, ByMaximum, Scaling, Standard, learn
from hostdev.data.preprocess.second_pass import ShardOptions, get_numbers, make_shard
from hostdev.kernels.arrays import Numbers

_NAMES = ("low", "high", "count", "mean", "squares")


moments_name = "words/moments-{:06d}.arrow".format  # file with the maxima and moments of a group of pieces


def has_groups(scaling: Scaling) -> bool:
    """Return whether `find_moments` can prepare `scale` by groups of pieces; not if columns are clipped."""
    return not (isinstance(scaling, ByColumn) and scaling.clips)


def make_scaling(work: Workspace) -> Scaling:
    """Return the scaling before any row is seen."""
    layout = work.source.layout
    return work.earlier.scaling(work.options.dense, layout, signed=work.source.signed)


def _parts(scaling: Scaling, columns: int) -> Sequence[tuple[npt.NDArray[np.int64], Scaling]]:
    return scaling.parts if isinstance(scaling, ByColumn) else [(np.arange(columns), scaling)]


def find_moments(work: Workspace, group: int, start: int, stop: int, index: list[str]) -> Result:
    """Write the maxima of the pieces [start, stop), and the moments of the blocks that begin in them."""
    content, layout = work.read_json(*index), work.source.layout
    ends = ragged.offsets_of(np.array([rows[0] for rows in content["rows"]], np.int64))
    parts = _parts(make_scaling(work), len(layout.dense))
    blocks = {
        i: BlockMoments(tuple(layout.dense[column] for column in columns))
        for i, (columns, scaling) in enumerate(parts)
        if isinstance(scaling, Standard)
    }
    first, last = (-(-int(ends[at]) // BLOCK) * BLOCK for at in (start, stop))
    for number in range(start, len(content["names"])):
        if number >= stop and not (blocks and int(ends[number]) < last):
            break
        begin, end = int(ends[number]), int(ends[number + 1])
        piece = PieceFile(work.path(piece_name(content["names"][number])))
        numbers = get_numbers(piece, len(layout.dense))[: end - begin]
        for i, (columns, scaling) in enumerate(parts):
            if i in blocks:
                own = numbers[max(0, first - begin) : max(0, last - begin)]
                blocks[i].observe(_columns(own, columns, layout.dense))
            elif number < stop:
                scaling.observe(_columns(numbers, columns, layout.dense))
    lists: dict[str, Any] = {"label 0": np.zeros(0)}
    for i, (_, scaling) in enumerate(parts):
        if isinstance(scaling, ByMaximum):
            lists[f"maximum {i}"] = scaling.maximum
        else:
            blocks[i].finish()
            for name, values in zip(_NAMES, zip(*blocks[i].found, strict=True), strict=False):
                lists[f"{name} {i}"] = np.concatenate(values)
    return {"files": work.write_lists(moments_name(group), lists)}


def _columns(numbers: Numbers, columns: npt.NDArray[np.int64], dense: Sequence[str]) -> Numbers:
    return numbers if len(columns) == len(dense) else np.ascontiguousarray(numbers[:, columns])


def scale(work: Workspace, groups: int, index: list[str]) -> Result:
    """Return the scaling's statistics; `groups` is the number of files of `find_moments`, 0 to read the pieces here."""
    layout = work.source.layout
    scaling = make_scaling(work)
    if work.earlier.keeps:
        return {"scaling": scaling.statistics(), "files": {}}
    if layout.dense and not groups:
        content = work.read_json(*index)

        def known() -> Iterator[Numbers]:
            for name, rows in zip(content["names"], content["rows"], strict=True):
                if work.stopping.is_set():
                    return
                yield get_numbers(PieceFile(work.path(piece_name(name))), len(layout.dense))[: rows[0]]

        learn(scaling, known, work.advance)
    parts = _parts(scaling, len(layout.dense))
    for group in range(groups):
        lists = PieceFile(work.path(moments_name(group)))
        for i, (columns, part) in enumerate(parts):
            if isinstance(part, ByMaximum):
                part.maximum = np.maximum(part.maximum, lists.array(f"maximum {i}"))
            elif isinstance(part, Standard) and f"low {i}" in lists.names:
                arrays = [lists.array(f"{name} {i}").reshape(-1, len(columns)) for name in _NAMES]
                for block in zip(*arrays, strict=True):
                    part.merge(*block)
    return {"scaling": scaling.statistics(), "files": {}}


def _options(work: Workspace, name: str, crc: str) -> ShardOptions:
    learned, layout = work.read_json(name, crc), work.source.layout
    of = work.options.dense, layout.dense, layout.scaling
    scaling = scalings.fixed(*of, learned["scaling"], signed=work.source.signed)
    schema = schemas.from_json(learned["schema"])
    return ShardOptions(schema, layout, scaling, hashed=work.hashed is not None, dense=work.options.dense)


def shard(
    work: Workspace, name: str, split: int, ranges: list[list[int]], index: list[str], learned: list[str]
) -> Result:
    """Write a shard; return its entry, as `second_pass.make_shard` does, and its file."""
    content, rows_of = work.read_json(*index), []
    for piece, start, stop in ranges:
        before = sum(content["rows"][piece][:split])
        rows_of.append((work.path(piece_name(content["names"][piece])), slice(before + start, before + stop)))
    how = work.once(f"shards {learned[1]}", partial(_options, work, *learned))
    file = result_name(name)
    made = make_shard(work.path(file), name, rows_of, how)
    return {"shard": made, "files": {file: made["sha256"]}}


def verify(work: Workspace, files: Files) -> Result:
    """Return whether all files have their checksums."""
    return {"intact": work.are_intact(files), "files": {}}


TASKS = {
    "parse": first_pass.parse,
    "piece": first_pass.write,
    "spread": words.spread,
    "count": words.count,
    "rank": words.rank,
    "number": words.number,
    "encode": words.encode,
    "vocabulary": words.vocabulary,
    "moments": find_moments,
    "scale": scale,
    "shard": shard,
    "verify": verify,
}


def run_task(work: Workspace, task: Any, arguments: tuple[Any, ...], known: Files | None) -> dict[str, Any]:
    """Run a task, a function such as those of `TASKS`.

    Returns {"result": ...}; or {"known": True} if the files `known` are there already and have their checksums; or
    {"error": ...} for a HostdevError.
    """
    try:
        if known is not None and work.are_intact(known):
            return {"known": True}
        return {"result": task(work, *arguments)}
    except HostdevError as error:
        return {"error": error}


class Threads:
    """Runs tasks in threads of this process: a `runner.Executor`."""

    memory: int | None = None

    def __init__(self, work: Workspace, workers: Workers, threads: int) -> None:
        self._work, self._workers, self.sharing = work, workers, threads
        self._done: SimpleQueue[tuple[Task, Future[dict[str, Any]]]] = SimpleQueue()

    def has_room(self, running: int, parsing: int, pieces: int) -> bool:
        """See `Executor`; the number of parsed blocks and unwritten pieces is limited, as they are in memory."""
        return max(parsing, pieces) <= self.sharing and running <= 2 * self.sharing + 1

    def submit(self, task: Task, known: Files | None) -> None:
        """See `Executor`."""
        future = self._workers.submit(partial(run_task, self._work, TASKS[task.kind], task.arguments, known))
        future.add_done_callback(lambda future: self._done.put((task, future)))

    def gather(self) -> list[tuple[Task, dict[str, Any]]]:
        """See `Executor`."""
        task, future = self._done.get()
        return [(task, future.result())]

    def stop(self) -> None:
        """See `Executor`."""
        self._work.stopping.set()

    def close_files(self) -> None:
        """See `Executor`; tasks leave no files open here."""
