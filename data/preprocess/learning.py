"""The client's part of learning: it plans the tasks for scaling and vocabulary, and makes the schema from the counts.

In one process, values are counted in memory. Workers count them by hash ranges, so that no worker has to hold them all.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.progress import bar
from hostdev.data.preprocess import words
from hostdev.data.preprocess.pieces import PieceFile
from hostdev.data.preprocess.runner import Result, Runner, Task, Workspace, survey_name
from hostdev.data.preprocess.tasks import has_groups, make_scaling
from hostdev.data.preprocess.vocabulary import MOST_OF_A_BAG
from hostdev.data.schema import Schema, Space
from hostdev.kernels.strings import BYTES_A_TEXT, BYTES_A_VALUE

RANGE_SHARE = 0.25  # share of a worker's memory per thread, for the values of a range
_PLACE_BYTES = 48  # bytes per value for its first occurrence and its uses, while a range's file is written
_MARGIN = 1.05  # factor for the error of the estimates, and for ranges larger than others
GROUP_VALUES = 1 << 20  # maximum values that a task `rank` puts in order, unless a single piece has more new ones
SURVEYS = 64  # maximum surveys that a task merges
MOMENTS = 8  # maximum pieces in the group of a task `moments`


class _Group(NamedTuple):
    """Values of an id space that one task puts in the order of their ids; see `words.rank`."""

    number: int
    place: tuple[int, int, int, int]
    ids: list[list[int]]


class Learning:
    """Learns scaling and vocabulary."""

    def __init__(self, work: Workspace, runner: Runner) -> None:
        self._work, self._runner = work, runner
        self._layout, self._known = work.source.layout, work.earlier.known_ids(work.source.layout)

    def run(self, names: Sequence[str], index: list[str], rows: int) -> Result:
        """Return the schema, the statistics of the scaling and of the values, and the vocabulary's SHA-256, as JSON.

        Args:
            names: The names of all pieces.
            index: Name and checksum of the file that lists all pieces.
            rows: Number of training rows.
        """
        task = Task("learned", "learned", (index,))
        known = self._runner.known(task)
        if known is not None and all(self._runner.verify({name: crc} for name, crc in known["files"].items())):
            return known
        self._names, self._index = names, index
        hashed = self._work.hashed
        groups = self._moments()
        scale = Task("scale", "scale", (len(groups), index), noted=not self._work.in_memory)
        try:
            if hashed is not None:
                found: Result = {"schema": hashed.schema.as_json(), "padded": {}, "files": {}}
                self._runner.map(groups)
                scaling = self._runner.map([scale])["scale"]["scaling"]
                found |= {"known_shares": None, "sha256": None, "scaling": scaling}
            else:
                found = self._find_words(groups, scale, rows)
        finally:
            self._work.values.clear()
        self._runner.executor.close_files()  # the files of the vocabulary's tasks, which are removed below
        self._runner.note(task, found)
        for folder in () if self._work.in_memory else ("spread", "words"):
            for path in self._work.path(folder).iterdir():
                with suppress(OSError):
                    path.unlink()
        return found

    def _moments(self) -> list[Task]:
        """Return the tasks `moments`, one per group of pieces; [] if the task `scale` reads all pieces, or none."""
        work = self._work
        if work.in_memory or work.earlier.keeps or not self._layout.dense or not has_groups(make_scaling(work)):
            return []
        starts = range(0, len(self._names), MOMENTS)
        return [
            Task(f"moments-{group:06d}", "moments", (group, start, min(start + MOMENTS, len(self._names)), self._index))
            for group, start in enumerate(starts)
        ]

    def _find_words(self, groups_of_numbers: list[Task], scale: Task, rows: int) -> Result:
        """Find the vocabulary, and the scaling at the same time; return the result of `run`."""
        in_memory, noted, pieces = self._work.in_memory, not self._work.in_memory, len(self._names)
        self._ranges = [1] * len(self._layout.spaces) if in_memory else self._count_ranges()
        parts = [(space, r, several) for space, several in enumerate(self._ranges) for r in range(several)]
        steps = pieces * (max(self._ranges) > 1) + 2 * len(parts) + pieces + 1
        if in_memory:
            has_numbers = bool(self._layout.dense) and not self._work.earlier.keeps
            steps = pieces * (1 + len(parts) + has_numbers)
        with bar(steps, "counting", "steps") as progress:
            done: Callable[[int], object] = progress.update
            if in_memory:  # each task advances the bar after each piece
                self._work.advance, done = progress.update, lambda n: None
            if max(self._ranges) > 1:
                self._runner.map((Task(f"spread-{name}", "spread", (name, self._ranges)) for name in self._names), done)
            counts = [
                Task(f"count-{space:04d}-{r:06d}of{several}", "count", ((space, r, several), self._index), noted=noted)
                for space, r, several in parts
            ]
            self._runner.map(groups_of_numbers)
            results = self._runner.map([scale, *counts], done)
            by_space: list[list[Result]] = [[] for _ in self._ranges]
            for (space, _, _), task in zip(parts, counts, strict=True):
                by_space[space].append(results[task.key])
            schema, firsts, groups = self._number(by_space)
            if not in_memory:
                self._runner.map(
                    Task(
                        f"rank-{space:04d}-{one.number:06d}", "rank", (space, one.number, self._ranges[space], *one[1:])
                    )
                    for space, some in enumerate(groups)
                    for one in some
                )
            oovs = [space.oov for space in schema.spaces]
            order = sorted(
                (one.ids[0][0], space, oovs[space], one.number, one.place)
                for space, some in enumerate(groups)
                for one in some
            )
            rare = [sum(one["uses"] - one["kept_uses"] for one in some) for some in by_space]
            fixed = [rows] * len(self._layout.dense) + rare
            write = Task("vocabulary", "vocabulary", ([one[1:] for one in order], fixed), noted=noted)
            numbers = [
                Task(
                    f"number-{space:04d}-{r:06d}of{several}",
                    "number",
                    ((space, r, several), firsts[space], len(groups[space]), self._index, oovs[space], schema.id_type),
                    noted=noted,
                )
                for space, r, several in parts
            ]
            encode = [
                Task(f"encode-{name}", "encode", (name, place, self._ranges, schema.id_type), noted=noted)
                for place, name in enumerate(self._names)
            ]
            written = self._runner.map([write, *numbers], done)["vocabulary"]
            encoded = self._runner.map(encode, done)
        files = dict(written["files"])
        for result in encoded.values():
            files |= result["files"]
        return {
            "schema": schema.as_json(),
            "scaling": results["scale"]["scaling"],
            "padded": self._fillers(by_space),
            "known_shares": self._work.earlier.known_shares(map(_sum_uses, by_space)),
            "sha256": written["sha256"],
            "files": files,
        }

    def _count_ranges(self) -> list[int]:
        """Return the number of hash ranges of each id space, such that a worker can hold the values of a range."""
        files = list(map(survey_name, self._names))
        merged: list[str] = []
        tasks = []
        for start in range(0, len(files), SURVEYS):
            merged.append(f"words/survey-{start // SURVEYS:06d}")
            tasks.append(Task(f"survey-{start // SURVEYS:06d}", "survey", (files[start : start + SURVEYS], merged[-1])))
        results = self._runner.map(tasks)
        found = results[tasks[0].key]
        if len(tasks) > 1:
            found = self._runner.map([Task("survey", "survey", (merged, "words/survey"))])["survey"]
        texts = found["texts"] or [0.0] * len(found["values"])
        each = BYTES_A_VALUE if found["texts"] is None else BYTES_A_TEXT
        ranges = []
        for space, (values, size) in enumerate(zip(found["values"], texts, strict=True)):
            number = values + self._known.spaces[space].values
            length = size / max(1.0, values)
            needed = _MARGIN * number * (each + _PLACE_BYTES + 3 * length)
            ranges.append(max(1, math.ceil(needed / max(1.0, (self._runner.executor.memory or 0) * RANGE_SHARE))))
        return ranges

    def _number(self, by_space: Sequence[Sequence[Result]]) -> tuple[Schema, list[int], list[list[_Group]]]:
        """Return the schema and, for each id space, the first id of its new values and its groups of values."""
        spaces, firsts, groups, first = [], [], [], self._known.first
        for number, (space, counted) in enumerate(zip(self._known.spaces, by_space, strict=True)):
            size = sum(one["new"] for one in counted)
            mine = list(_earlier_groups(space))
            if self._work.in_memory:
                mine += [_Group(len(mine), (1, 0, 0, 0), [[first, size]])] if size else []
            else:
                mine += _new_groups(self._count_firsts(number, len(counted)), first, len(mine))
            spaces.append(self._known.grow(space, first, size))
            firsts.append(first)
            groups.append(mine)
            first += size
        layout = self._layout
        schema = Schema(layout.label, layout.dense, layout.columns, tuple(spaces), first, layout.targets)
        return schema, firsts, groups

    def _count_firsts(self, space: int, ranges: int) -> npt.NDArray[np.int64]:
        """Return for each piece how many values that get new ids occur first in it, int64 [pieces]."""
        paths = (self._work.path(words.firsts_name(space, r)) for r in range(ranges))
        total: npt.NDArray[np.int64] = np.sum([PieceFile(path).array("new") for path in paths], axis=0)
        return total

    def _fillers(self, by_space: Sequence[Sequence[Result]]) -> dict[str, list[Any]]:
        """Return the value that makes up most of a bag's values, and its share, for each bag that has such a value.

        Such a value is usually padding. Shares are computed over the bag's id space.
        """
        found: dict[str, list[Any]] = {}
        for space, some in zip(self._layout.spaces, by_space, strict=True):
            bags = [bag.name for bag in self._layout.bags if bag.space == space]
            uses = sum(one["uses"] for one in some)
            most = max((one["most"] for one in some if one["most"] is not None), key=lambda one: one[0], default=None)
            if bags and most is not None and sum(one["values"] for one in some) > 1 and most[0] > MOST_OF_A_BAG * uses:
                found |= {bag: [most[1], most[0] / uses] for bag in bags}
        return found


def _sum_uses(parts: Sequence[Result]) -> tuple[int, int]:
    """Return how often values of the earlier data set, and all values, occur in the parts of an id space."""
    return sum(part["known_uses"] for part in parts), sum(part["uses"] for part in parts)


def _earlier_groups(space: Space) -> Iterator[_Group]:
    """Yield groups of an earlier data set's values: each has ids of one segment, at most GROUP_VALUES of them."""
    place = number = 0
    for first, size in space.segments:
        for start in range(0, size, GROUP_VALUES):
            stop = min(size, start + GROUP_VALUES)
            yield _Group(number, (0, 1, place + start, place + stop), [[first + start, stop - start]])
            number += 1
        place += size


def _new_groups(firsts: npt.NDArray[np.int64], first: int, number: int) -> Iterator[_Group]:
    """Yield groups of new values that occur first in consecutive pieces; see `GROUP_VALUES` for their size.

    Args:
        firsts: For each piece, the number of new values that occur first in it, int64 [pieces].
        first: The first id.
        number: The first group's number.
    """
    ends = np.cumsum(firsts)
    start = done = 0
    while start < len(firsts) and ends[-1] > done:
        stop = max(start + 1, int(np.searchsorted(ends, done + GROUP_VALUES, "right")))
        size = int(ends[stop - 1]) - done
        if size:
            yield _Group(number, (start + 1, stop + 1, 0, 0), [[first + done, size]])
            number += 1
        start, done = stop, int(ends[stop - 1])
