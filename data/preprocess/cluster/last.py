"""Tasks that write the shards, and verify files."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from hostdev.data import schema as schemas
from hostdev.data.preprocess import scaling as scalings
from hostdev.data.preprocess.cluster.first import Result, piece_name
from hostdev.data.preprocess.cluster.job import Files, Work
from hostdev.data.preprocess.second_pass import Range
from hostdev.data.preprocess.shards import ShardOptions, make_shard


@lru_cache(2)
def _options(work: Work, name: str, crc: str) -> ShardOptions:
    learned, layout = work.read_json(name, crc), work.source.layout
    of = work.options.dense, layout.dense, layout.scaling
    scaling = scalings.fixed(*of, learned["scaling"], signed=work.source.signed)
    schema = schemas.from_json(learned["schema"])
    return ShardOptions(schema, layout, scaling, hashed=work.hashed is not None, dense=work.options.dense)


def shard(work: Work, name: str, split: int, ranges: list[list[int]], index: list[str], learned: list[str]) -> Result:
    """Write a shard; return its entry, as `shards.make_shard` does."""
    content = work.read_json(*index)
    chosen = [Range(*one) for one in ranges]
    paths = {one.piece: work.path(piece_name(content["names"][one.piece])) for one in chosen}
    counts = {one.piece: content["rows"][one.piece] for one in chosen}
    how = _options(work, *learned)
    made: dict[str, Any] = {}

    def write(path: Path) -> str:
        made.update(make_shard(path, name, chosen, split, paths, counts, how))
        return str(made["sha256"])

    file = f"shards/{name}"
    return {"shard": made, "files": {file: work.write(file, write)}}


def verify(work: Work, files: Files) -> Result:
    """Return whether files have these checksums."""
    return {"intact": work.are_intact(files), "files": {}}
