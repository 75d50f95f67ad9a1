"""Tasks after the first pass that are not about the vocabulary: the scaling, and the shards."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from hostdev.data import schema as schemas
from hostdev.data.preprocess import scaling as scalings
from hostdev.data.preprocess.cluster.first import Result, piece_name
from hostdev.data.preprocess.cluster.job import Files, Work
from hostdev.data.preprocess.dense import Numbers
from hostdev.data.preprocess.pieces import Piece
from hostdev.data.preprocess.scaling import ByColumn
from hostdev.data.preprocess.second_pass import Range, get_numbers
from hostdev.data.preprocess.shards import ShardOptions, make_shard


def scale(work: Work, index: list[str]) -> Result:
    """Learn the scaling from all training rows, in order; return its statistics."""
    layout, content = work.source.layout, work.read_json(*index)
    if work.earlier is not None:
        return {"scaling": work.earlier.scaling(layout, signed=work.source.signed).statistics(), "files": {}}
    scaling = scalings.make(work.options.dense, layout.dense, layout.scaling, signed=work.source.signed)

    def known() -> Iterator[Numbers]:
        for name, rows in zip(content["names"], content["rows"], strict=True):
            yield get_numbers(Piece(work.path(piece_name(name))), len(layout.dense))[: rows[0]]

    if layout.dense:
        if isinstance(scaling, ByColumn):
            scaling.find_limits(known)
        for numbers in known():
            scaling.observe(numbers)
    return {"scaling": scaling.statistics(), "files": {}}


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
