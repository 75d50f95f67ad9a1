"""The tasks of a worker, by name; errors for users are returned as JSON."""

from typing import Any

from hostdev.core.errors import HostdevError, in_words
from hostdev.core.memory import available_bytes
from hostdev.data.preprocess.cluster import first, last, numbers, words
from hostdev.data.preprocess.cluster.job import Files, Reference, name_worker, open_job, worker_name

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
    "shard": last.shard,
    "verify": last.verify,
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
