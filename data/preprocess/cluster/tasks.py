"""The tasks of a worker, by name; errors for users are returned as JSON.

The tasks that learn the scaling, write the shards and verify files stand here. Scaling has the sums of one machine in
the same order: maxima are found by groups of pieces in any order. For means and deviations, a group computes the
moments of its blocks of rows, which `scale` merges in order. Limits of clipped columns take several passes over all
numbers; then one task does everything.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import HostdevError, in_words
from hostdev.core.memory import available_bytes
from hostdev.data import ragged
from hostdev.data import schema as schemas
from hostdev.data.preprocess import scaling as scalings
from hostdev.data.preprocess.cluster import first, words
from hostdev.data.preprocess.cluster.first import Result, piece_name
from hostdev.data.preprocess.cluster.job import Files, Reference, WorkerJob, name_worker, open_job, worker_name
from hostdev.data.preprocess.pieces import PieceFile
from hostdev.data.preprocess.scaling import BLOCK, BlockMoments, ByColumn, ByMaximum, Scaling, Standard, learn
from hostdev.data.preprocess.second_pass import RowRange, ShardOptions, get_numbers, make_shard
from hostdev.kernels.arrays import Numbers

_NAMES = ("low", "high", "count", "mean", "squares")


moments_name = "words/moments-{:06d}.arrow".format  # of a group of pieces: their maxima and moments


def has_groups(scaling: Scaling) -> bool:
    """Return whether groups of pieces can be looked at before `scale`."""
    return not (isinstance(scaling, ByColumn) and scaling.clips)


def make_scaling(work: WorkerJob) -> Scaling:
    """Return the scaling before any row is seen."""
    layout = work.source.layout
    return work.earlier.scaling(work.options.dense, layout, signed=work.source.signed)


def _parts(scaling: Scaling, columns: int) -> Sequence[tuple[npt.NDArray[np.int64], Scaling]]:
    return scaling.parts if isinstance(scaling, ByColumn) else [(np.arange(columns), scaling)]


def find_moments(work: WorkerJob, group: int, start: int, stop: int, index: list[str]) -> Result:
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


def scale(work: WorkerJob, groups: int, index: list[str]) -> Result:
    """Return the statistics of the scaling; `groups` is the number of files of `find_moments`, 0 for none."""
    layout = work.source.layout
    scaling = make_scaling(work)
    if work.earlier.keeps:
        return {"scaling": scaling.statistics(), "files": {}}
    if layout.dense and not groups:
        content = work.read_json(*index)

        def known() -> Iterator[Numbers]:
            for name, rows in zip(content["names"], content["rows"], strict=True):
                yield get_numbers(PieceFile(work.path(piece_name(name))), len(layout.dense))[: rows[0]]

        learn(scaling, known)
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


@lru_cache(2)
def _options(work: WorkerJob, name: str, crc: str) -> ShardOptions:
    learned, layout = work.read_json(name, crc), work.source.layout
    of = work.options.dense, layout.dense, layout.scaling
    scaling = scalings.fixed(*of, learned["scaling"], signed=work.source.signed)
    schema = schemas.from_json(learned["schema"])
    return ShardOptions(schema, layout, scaling, hashed=work.hashed is not None, dense=work.options.dense)


def shard(
    work: WorkerJob, name: str, split: int, ranges: list[list[int]], index: list[str], learned: list[str]
) -> Result:
    """Write a shard; return its entry, as `shards.make_shard` does."""
    content = work.read_json(*index)
    chosen = [RowRange(*one) for one in ranges]
    paths = {one.piece: work.path(piece_name(content["names"][one.piece])) for one in chosen}
    counts = {one.piece: content["rows"][one.piece] for one in chosen}
    how = _options(work, *learned)
    made: dict[str, Any] = {}

    def write(path: Path) -> str:
        made.update(make_shard(path, name, chosen, split, paths, counts, how))
        return str(made["sha256"])

    file = f"shards/{name}"
    return {"shard": made, "files": {file: work.write(file, write)}}


def verify(work: WorkerJob, files: Files) -> Result:
    """Return whether files have these checksums."""
    return {"intact": work.are_intact(files), "files": {}}


_TASKS = {
    "look": first.look,
    "parse": first.parse,
    "piece": first.piece,
    "survey": first.survey,
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


def run(reference: Reference, kind: str, arguments: tuple[Any, ...], known: Files | None) -> dict[str, Any]:
    """Run a task of a job.

    Returns {"result": ...}, {"known": True} if the files `known`, with their checksums, are there already, or
    {"error": ...}. An error is returned, as Dask would log one that is raised.
    """
    try:
        work = open_job(reference)
        if known is not None and work.are_intact(known):
            return {"known": True}
        task: Any = _TASKS[kind]
        return {"result": task(work, *arguments)}
    except HostdevError as error:
        return {"error": first.describe_error(error)}
    except (OSError, MemoryError) as error:
        return {"error": _failed(error)}


def _failed(error: OSError | MemoryError) -> dict[str, Any]:
    """Describe an error of this worker's machine."""
    return {"kind": "TransientError", "message": f"{in_words(error)} ({worker_name()})"}


def check(reference: Reference, dask_worker: Any = None) -> dict[str, Any]:
    """Check this worker; return an error as `run` does, or None, and the bytes of memory for each of its threads."""
    name_worker(dask_worker.address)
    try:
        open_job(reference)
    except HostdevError as error:
        return {"error": first.describe_error(error), "memory": 0}
    except (OSError, MemoryError) as error:
        return {"error": _failed(error), "memory": 0}
    free = available_bytes()
    manager = getattr(dask_worker, "memory_manager", None)
    limit = getattr(manager, "memory_limit", None) or free
    return {"error": None, "memory": min(free, limit) // max(1, dask_worker.state.nthreads)}
