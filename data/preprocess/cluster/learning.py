"""The client's part of learning: it plans the tasks for scaling and vocabulary, and makes the schema of the counts."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.progress import bar
from hostdev.data.preprocess.cluster import words
from hostdev.data.preprocess.cluster.first import Result, survey_name
from hostdev.data.preprocess.cluster.job import WorkerJob
from hostdev.data.preprocess.cluster.runner import Runner, Task
from hostdev.data.preprocess.cluster.tasks import has_groups, make_scaling
from hostdev.data.preprocess.earlier_vocabulary import Earlier
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.pieces import PieceFile
from hostdev.data.preprocess.raw import Source
from hostdev.data.preprocess.vocabulary import MOST_OF_A_BAG, HashBuckets
from hostdev.data.schema import Schema, Space
from hostdev.kernels.strings import BYTES_A_TEXT, BYTES_A_VALUE

RANGE_SHARE = 0.25  # of a worker's memory for a thread, for the values of a range
_PLACE_BYTES = 48  # of a value's first occurrence and uses, while a range's file is written
_MARGIN = 1.05  # error margin of the estimates, and the ranges' different sizes
GROUP_VALUES = 1 << 20  # values that a task puts in order
SURVEYS = 64  # that a task merges
MOMENTS = 8  # pieces whose numbers a task looks at


class _Group(NamedTuple):
    """Values with consecutive ids of an id space, which one task puts in order; see `words.rank`."""

    number: int
    place: tuple[int, int, int, int]
    ids: list[list[int]]


class Learning:
    """Learns scaling and vocabulary on the workers.

    Args:
        memory: Bytes of memory for a task.
    """

    def __init__(
        self, source: Source, job: WorkerJob, options: Options, earlier: Earlier, runner: Runner, memory: int
    ) -> None:
        self._source, self._job, self._options, self._earlier = source, job, options, earlier
        self._known = earlier.known_ids(source.layout)
        self._runner, self._memory, self._layout = runner, memory, source.layout

    def run(self, names: Sequence[str], index: list[str], rows: int) -> Result:
        """Return the schema, the statistics of the scaling and more, as JSON.

        Args:
            names: The names of all pieces.
            index: Name and checksum of the file that lists all pieces.
            rows: Number of training rows.
        """
        task = Task("learned", "learned", (index,))
        known = self._runner.known(task)
        if known is not None and self._are_intact(known["files"]):
            return known
        self._names, self._index = names, index
        hashed = self._options.hash_buckets
        groups = self._moments()
        scale = Task("scale", "scale", (len(groups), index))
        if hashed is not None:
            found: Result = {"schema": HashBuckets(hashed, self._layout).schema.as_json(), "padded": {}, "files": {}}
            self._runner.map(groups)
            found |= {"known_shares": None, "sha256": None, "scaling": self._runner.map([scale])["scale"]["scaling"]}
        else:
            found = self._find_words(groups, scale, rows)
            self._runner.connection.close_files()  # those of the vocabulary, which are removed now
        self._runner.note(task, found)
        for folder in ("spread", "words"):  # what is still needed are the ids of the pieces, and the vocabulary
            for path in self._job.path(folder).iterdir():
                if f"{folder}/{path.name}" not in found["files"]:
                    with suppress(OSError):
                        path.unlink()
        return found

    def _are_intact(self, files: dict[str, str]) -> bool:
        tasks = [
            Task(f"verify-{i:06d}", "verify", ({name: crc},), again=True) for i, (name, crc) in enumerate(files.items())
        ]
        return all(result["intact"] for result in self._runner.map(tasks).values())

    def _moments(self) -> list[Task]:
        """Return the tasks that look at the numbers of groups of pieces; none if one task looks at all of them."""
        if self._earlier.keeps or not self._layout.dense or not has_groups(make_scaling(self._job)):
            return []
        starts = range(0, len(self._names), MOMENTS)
        return [
            Task(f"moments-{group:06d}", "moments", (group, start, min(start + MOMENTS, len(self._names)), self._index))
            for group, start in enumerate(starts)
        ]

    def _find_words(self, groups_of_numbers: list[Task], scale: Task, rows: int) -> Result:
        """Find the vocabulary, and the scaling at the same time."""
        self._ranges = self._count_ranges()
        parts = [(space, r, several) for space, several in enumerate(self._ranges) for r in range(several)]
        steps = len(self._names) * (max(self._ranges) > 1) + 2 * len(parts) + len(self._names) + 1
        with bar(steps, "counting", "steps") as progress:
            if max(self._ranges) > 1:
                self._runner.map(
                    (Task(f"spread-{name}", "spread", (name, self._ranges)) for name in self._names), progress.update
                )
            counts = [
                Task(f"count-{space:04d}-{r:06d}of{several}", "count", ((space, r, several), self._index))
                for space, r, several in parts
            ]
            self._runner.map(groups_of_numbers)
            results = self._runner.map([scale, *counts], progress.update)
            by_space: list[list[Result]] = [[] for _ in self._ranges]
            for (space, _, _), task in zip(parts, counts, strict=True):
                by_space[space].append(results[task.key])
            schema, groups = self._number(by_space)
            self._runner.map(
                Task(f"rank-{space:04d}-{one.number:06d}", "rank", (space, one.number, self._ranges[space], *one[1:]))
                for space, some in enumerate(groups)
                for one in some
            )
            oovs = [space.oov for space in schema.spaces]
            order = sorted(
                (one.ids[0][0], space, one.number, oovs[space]) for space, some in enumerate(groups) for one in some
            )
            rare = [sum(one["uses"] - one["kept_uses"] for one in some) for some in by_space]
            fixed = [rows] * len(self._layout.dense) + rare
            write = Task("vocabulary", "vocabulary", ([one[1:] for one in order], fixed))
            numbers = [
                Task(
                    f"number-{space:04d}-{r:06d}of{several}",
                    "number",
                    ((space, r, several), len(groups[space]), self._index, oovs[space], schema.id_type),
                )
                for space, r, several in parts
            ]
            written = self._runner.map([write, *numbers], progress.update)["vocabulary"]
            encoded = self._runner.map(
                (
                    Task(f"encode-{name}", "encode", (name, place, self._ranges, schema.id_type))
                    for place, name in enumerate(self._names)
                ),
                progress.update,
            )
        files = dict(written["files"])
        for result in encoded.values():
            files |= result["files"]
        return {
            "schema": schema.as_json(),
            "scaling": results["scale"]["scaling"],
            "padded": self._fillers(by_space),
            "known_shares": self._earlier.known_shares(map(_sum_uses, by_space)),
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
            ranges.append(max(1, math.ceil(needed / max(1.0, self._memory * RANGE_SHARE))))
        return ranges

    def _number(self, by_space: Sequence[Sequence[Result]]) -> tuple[Schema, list[list[_Group]]]:
        """Return the schema, and the groups of values that get consecutive ids, by id space."""
        spaces, groups, first = [], [], self._known.first
        for number, space in enumerate(self._known.spaces):
            firsts = self._firsts(number, len(by_space[number]))
            size = int(firsts.sum())
            mine = list(_earlier_groups(space))
            mine += _new_groups(firsts, first, len(mine))
            spaces.append(self._known.grow(space, first, size))
            groups.append(mine)
            first += size
        layout = self._layout
        return Schema(layout.label, layout.dense, layout.columns, tuple(spaces), first, layout.targets), groups

    def _firsts(self, space: int, ranges: int) -> npt.NDArray[np.int64]:
        """Return for each piece how many values that get new ids occur first in it, int64 [pieces]."""
        paths = (self._job.path(words.firsts_name(space, r)) for r in range(ranges))
        total: npt.NDArray[np.int64] = np.sum([PieceFile(path).array("new") for path in paths], axis=0)
        return total

    def _fillers(self, by_space: Sequence[Sequence[Result]]) -> dict[str, list[Any]]:
        """Return what `Vocabulary.fillers` returns."""
        found: dict[str, list[Any]] = {}
        for space, some in zip(self._layout.spaces, by_space, strict=True):
            bags = [bag.name for bag in self._layout.bags if bag.space == space]
            uses = sum(one["uses"] for one in some)
            most = max((one["most"] for one in some if one["most"] is not None), key=lambda one: one[0], default=None)
            if bags and most is not None and sum(one["values"] for one in some) > 1 and most[0] > MOST_OF_A_BAG * uses:
                found |= {bag: [most[1], most[0] / uses] for bag in bags}
        return found


def _sum_uses(parts: Sequence[Result]) -> tuple[int, int]:
    """Return the occurrences of values with a known id, and of all values, in the parts of an id space."""
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
    """Yield groups of new values: those of some consecutive pieces, about GROUP_VALUES; ids begin at `first`."""
    ends = np.cumsum(firsts)
    start = done = 0
    while start < len(firsts) and ends[-1] > done:
        stop = max(start + 1, int(np.searchsorted(ends, done + GROUP_VALUES, "right")))
        size = int(ends[stop - 1]) - done
        if size:
            yield _Group(number, (start + 1, stop + 1, 0, 0), [[first + done, size]])
            number += 1
        start, done = stop, int(ends[stop - 1])
