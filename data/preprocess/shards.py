"""Shards: one is made from rows of pieces; all of them have statistics for the manifest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostdev.data.advice import APART, SQUEEZED, UNKNOWN
from hostdev.data.manifest import SPLITS, Shard
from hostdev.data.preprocess import second_pass
from hostdev.data.preprocess.dense import Scaling
from hostdev.data.preprocess.raw import SourceLayout
from hostdev.data.preprocess.writer import write_shard
from hostdev.data.schema import Schema


@dataclass(frozen=True)
class ShardOptions:
    """What all shards are made with; `dense` is the scaling's mode, `hashed` says that pieces have ids already."""

    schema: Schema
    layout: SourceLayout
    scaling: Scaling
    hashed: bool
    dense: str


def shard_name(split: str, number: int) -> str:
    """Return the path of a shard within its data set."""
    return f"{split}/part-{number:05d}.arrow"


def make_shard(
    path: Path,
    name: str,
    ranges: Sequence[second_pass.RowRange],
    split: int,
    paths: Sequence[Path] | Mapping[int, Path],
    counts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    how: ShardOptions,
) -> dict[str, Any]:
    """Write a shard to `path`; return its entry of the journal: name, rows, SHA-256 and statistics.

    `counts` has the number of rows by split of each piece.
    """
    rows = second_pass.build_shard(ranges, split, paths, counts, how.schema, how.layout, how.scaling, hashed=how.hashed)
    out, uses = second_pass.out_of_vocabulary(rows, how.schema)
    is_first = name == shard_name(SPLITS[0], 0)
    apart = second_pass.apart(rows, how.schema) if is_first and not how.hashed else []
    near = second_pass.squeezed(rows, how.schema.dense, how.dense) if is_first else []
    sha256 = write_shard(path, rows, how.schema)
    return {
        "file": name,
        "rows": len(rows),
        "sha256": sha256,
        "out": out,
        "uses": uses,
        APART: apart,
        SQUEEZED: near,
    }


class Shards:
    """The shards of a data set.

    Attributes:
        found: The shards by split, in order.
    """

    def __init__(self, splits: Sequence[str], schema: Schema, *, hashed: bool) -> None:
        self.found: dict[str, list[Shard]] = {split: [] for split in splits}
        self._names, self._hashed = [*schema.ids, *schema.bags], hashed
        self._out = {split: [0] * len(self._names) for split in splits}
        self._uses = {split: [0] * len(self._names) for split in splits}
        self._told: dict[str, list[str]] = {APART: [], SQUEEZED: []}

    def add(self, split: str, made: Mapping[str, Any]) -> None:
        """Add the next shard of a split, a result of `make_shard`."""
        self.found[split].append(Shard(file=made["file"], rows=made["rows"], sha256=made["sha256"]))
        self._out[split] = [*map(sum, zip(self._out[split], made["out"], strict=True))]
        self._uses[split] = [*map(sum, zip(self._uses[split], made["uses"], strict=True))]
        for about in (APART, SQUEEZED):
            self._told[about] += made[about]

    def statistics(self) -> dict[str, Any]:
        """Return the manifest's statistics of ids out of vocabulary, and the columns to tell of."""
        whole = {split: sum(self._out[split]) / max(1, sum(self._uses[split])) for split in self.found}
        by_column = {
            split: {
                name: a / max(1, b) for name, a, b in zip(self._names, self._out[split], self._uses[split], strict=True)
            }
            for split in self.found
        }
        return {"out_of_vocabulary": whole, **({} if self._hashed else {UNKNOWN: by_column}), **self._told}
