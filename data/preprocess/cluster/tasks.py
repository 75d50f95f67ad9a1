"""The tasks of a worker, by name; errors for users are returned as JSON.

The tasks that write the shards and verify files stand here.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from hostdev.core.errors import HostdevError, in_words
from hostdev.core.memory import available_bytes
from hostdev.data import schema as schemas
from hostdev.data.preprocess import scaling as scalings
from hostdev.data.preprocess.cluster import first, numbers, words
from hostdev.data.preprocess.cluster.first import Result, piece_name
from hostdev.data.preprocess.cluster.job import Files, Reference, WorkerJob, name_worker, open_job, worker_name
from hostdev.data.preprocess.second_pass import RowRange
from hostdev.data.preprocess.shards import ShardOptions, make_shard


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
    "moments": numbers.find_moments,
    "scale": numbers.scale,
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
