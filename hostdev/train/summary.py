"""Parts of summary.json: the cache beside the best that there could be, the ranks, what of ops.log is gone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hostdev.cache.cache import EmbeddingCache
from hostdev.core.errors import in_words
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.progress import bar
from hostdev.core.rotation import RotatedFile
from hostdev.distributed.process_group import Ranks
from hostdev.train.host_time import host_costs_of
from hostdev.train.interrupt import Skippable
from hostdev.train.trainer import Trainer

_NOT_YET = "the process ended before it was found"


def of_caches(
    caches: Sequence[EmbeddingCache],
    ops: Mapping[str, Any],
    progress: Callable[[], object] | None = None,
    why: str = _NOT_YET,
) -> dict[str, Any]:
    """Return the caches' figures; of several groups by the names of their tables.

    ops       as `OpLog.summary` has them
    progress  called now and then while the offline optimum is searched; None: it is not
    why       it is missing then
    """
    found = {}
    for cache in caches:
        host = host_costs_of(ops, cache.tables)
        if progress is not None:
            figures = cache.summary(host=host, progress=progress)
        else:
            figures = cache.summary(optimum=False, host=host) | {"no_optimum": why}
        found[" and ".join(table.name for table in cache.tables)] = figures
    if not found:
        return {}
    return {"cache": next(iter(found.values()))} if len(found) == 1 else {"caches": found}


def with_optimum(caches: Sequence[EmbeddingCache], ops: Mapping[str, Any]) -> dict[str, Any]:
    """Return the caches' figures beside the offline optimum's, or why these are missing: nothing is raised.

    Ctrl-C or SIGTERM ends the search within seconds, and the run goes on to its end; a second one is as ever.
    """
    steps = sum(cache.optimum_steps for cache in caches)
    try:
        with Skippable() as skippable, bar(steps, "the cache's offline optimum", "step") as shown:

            def progress() -> None:
                shown.update()
                skippable.check()

            return of_caches(caches, ops, progress)
    except Exception as error:
        return of_caches(caches, ops, why=in_words(error))


def of_ranks(ranks: Ranks | None, trainer: Trainer, mesh: str | None, sent: Mapping[str, int]) -> dict[str, Any]:
    """Return how many processes there were, and what they exchanged; nothing of one that was alone.

    sent  bytes that all of them have sent
    """
    if ranks is None:
        return {}
    runtime = trainer.runtime
    assert runtime.dense_channel is not None
    return {
        "ranks": {
            "size": ranks.size,
            "mesh": mesh,
            "parts": trainer.cut,
            "dense_exchange": runtime.dense_exchange,
            "backend": runtime.dense_channel.backend,
            "exact": runtime.dense_exchange == EXCHANGES[0],
            "sent_bytes": dict(sent),
        }
    }


def of_ops_log(file: RotatedFile | None) -> dict[str, Any]:
    """Return how many bytes had to go; nothing where none had to."""
    if file is None or not file.dropped_bytes:
        return {}
    return {"ops_log": {"limit_bytes": file.limit, "dropped_bytes": file.dropped_bytes}}
