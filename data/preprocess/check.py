"""The command `preprocess check DIR`: read a whole data set and report everything that contradicts its manifest."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.memory import format_bytes
from hostdev.core.printable import printable
from hostdev.core.progress import counted
from hostdev.data import manifest
from hostdev.data.manifest import REJECTED_FILE, Manifest
from hostdev.data.preprocess.earlier_vocabulary import recorded
from hostdev.data.preprocess.info import SplitTotals, read_split
from hostdev.data.preprocess.stored import (
    REMEDY,
    Counter,
    DamagedError,
    StoredVocabulary,
    count_bytes,
    get_size,
    require_checksum,
    require_room,
)
from hostdev.kernels.arrays import Array

_NO_CHECKSUM = "no checksum recorded"
_SHOWN = 40  # maximum characters of a value in the report
_CLOSE = 1e-9  # relative tolerance for means, as their last bits depend on the order of summation


class DamagedDataError(UserError):
    """A data set is damaged or inconsistent."""

    exit_code = 1


@dataclass
class Report:
    """The report of a check.

    Attributes:
        lines: A line for each part of the data set and each finding.
        wrong: Only the lines of the findings.
    """

    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def say(self, path: Path, about: str, wrong: list[str]) -> None:
        """Add the findings about a part of the data set, then a line about the part, with the description `about`.

        Each finding in `wrong` is a line with the path, the problem and the remedy.
        """
        wrong = [printable(line) for line in wrong]
        self.lines += wrong
        self.wrong += wrong
        verdict = f"DAMAGED, {counted(len(wrong), 'finding')}" if wrong else "intact"
        self.lines.append(": ".join([str(path), *([about] if about else []), verdict]))


def run(folder: Path) -> None:
    """Check a data set and print the report; raise DamagedDataError if there are findings."""
    report = check(folder)
    for line in report.lines:
        print(line)
    if report.wrong:
        findings = counted(len(report.wrong), "finding")
        raise DamagedDataError(f"{folder} is damaged: {findings}: {report.wrong[0]}")


def check(folder: Path) -> Report:
    """Read every file of a data set and report all findings; raise UserError without a manifest or enough memory."""
    report = Report()
    path = folder / manifest.FILE_NAME
    if not path.is_file():
        manifest.read(folder)  # raises UserError, because there is no manifest
    try:
        found = manifest.read(folder)
    except UserError as error:
        report.say(path, "", [str(error)])
        return report
    vocabulary, wrong = _open_vocabulary(folder, found, report)
    counter = None
    if vocabulary is not None:
        ids, uses = found.schema.rows, found.uses("train")
        largest = max((space.values for space in found.schema.spaces), default=0)
        require_room(folder, ids, max(ids * (count_bytes(uses) + 1), 8 * largest))
        counter = Counter(ids, uses)
    totals = {split: _check_shards(folder, found, split, counter, report) for split in found.splits}
    if vocabulary is not None and counter is not None:
        counts = None if totals["train"] is None else counter.total()
        about = f"{found.schema.rows:,} ids{_format_kept(found)}, {format_bytes(get_size(vocabulary.path))}"
        if counts is None:
            about += ", counts not compared"
        if found.vocabulary_sha256 is None:
            about += f", {_NO_CHECKSUM}"
        report.say(vocabulary.path, about, [*wrong, *_wrong_ids(vocabulary, found, counts)])
    _check_rejected(folder, found, report)
    lines = [
        f"{path}: {what}; {REMEDY}" for split in found.splits for what in _wrong_statistics(found, split, totals[split])
    ]
    unknown = [split for split in found.splits if totals[split] is None]
    notes = [f"statistics of {' and '.join(unknown)} rows not compared"] if unknown else []
    notes += [_NO_CHECKSUM] if found.rejected_sha256 is None else []
    report.say(path, ", ".join(notes), lines)
    report.lines += [f"{extra}: does not belong to the data set" for extra in _find_extra_files(folder, found)]
    return report


def _check_rejected(folder: Path, found: Manifest, report: Report) -> None:
    """Check the file of malformed lines, and add the result to the report."""
    path, expected = folder / REJECTED_FILE, found.rejected_sha256
    about = printable(counted(found.statistics.get("rejected", 0), "malformed line"), _SHOWN)
    try:
        if expected is not None:
            require_checksum(path, expected)
    except DamagedError as error:
        report.say(path, about, [str(error)])
        return
    report.say(path, about if expected is not None else f"{about}, {_NO_CHECKSUM}", [])


def _open_vocabulary(folder: Path, found: Manifest, report: Report) -> tuple[StoredVocabulary | None, list[str]]:
    """Open the vocabulary; return it and the findings about its id ranges.

    Returns None for the vocabulary if ids are hashed, or if the file is missing or damaged. A missing or damaged file
    is added to the report.
    """
    if found.vocabulary is None:
        return None, []
    try:
        vocabulary = StoredVocabulary(folder, found)
    except DamagedError as error:
        report.say(folder / found.vocabulary, "", [str(error)])
        return None, []
    try:
        spaces = vocabulary.spaces
    except DamagedError as error:
        return vocabulary, [str(error)]
    lines = []
    for space in found.schema.spaces if not _shares_one_range(found) else ():
        if spaces[space.name] != space:
            here, there = (each.in_words() or "none" for each in (spaces[space.name], space))
            lines.append(f"{vocabulary.path}: the ids of {space.name!r} are {here}, not {there}; {REMEDY}")
    return vocabulary, lines


def _format_kept(found: Manifest) -> str:
    """Format the number of ids kept from an earlier data set; return "" if there is no earlier data set."""
    earlier = recorded(found)
    return "" if earlier is None else f" ({earlier['ids']:,} kept from {earlier['path']})"


def _shares_one_range(found: Manifest) -> bool:
    """Return whether several id spaces have the same range, as in manifests of version 1, which record no ranges."""
    return len(found.schema.spaces) > 1 and len({(space.first, space.size) for space in found.schema.spaces}) == 1


def _wrong_ids(vocabulary: StoredVocabulary, found: Manifest, counts: Array | None) -> Iterator[str]:
    """Yield the findings about a vocabulary's values and counts.

    `counts` [ids] has the number of occurrences of each id, counted in the training rows; None if it is unknown. The
    counts of the numeric columns' ids are overwritten.
    """
    path, fixed = vocabulary.path, found.schema.first_value
    values = vocabulary.table["value"]
    if values.slice(0, fixed).null_count != fixed or values.null_count != fixed:
        yield f"{path}: the ids without a value are not exactly the first {fixed}; {REMEDY}"
        return
    try:
        spaces = vocabulary.spaces
    except DamagedError:
        spaces = {}
    for space in spaces.values():
        repeated = vocabulary.find_repeated_value(space)
        if repeated is not None:
            yield f"{path}: ids {repeated[0]} and {repeated[1]} both stand for {vocabulary.text(repeated[0])}; {REMEDY}"
    least, total = pc.min(vocabulary.table["count"]).as_py(), pc.sum(vocabulary.table["count"]).as_py()
    if least is not None and least < 0:
        yield f"{path}: it has counts below 0; {REMEDY}"
    elif (total or 0) != found.uses("train"):
        yield (
            f"{path}: its counts add up to {total:,}, not to the {found.uses('train'):,} id occurrences in the "
            f"training rows; {REMEDY}"
        )
    if counts is None:
        return
    counts[: len(found.schema.dense)] = found.rows("train")
    differ = counts != vocabulary.counts
    if number := int(np.count_nonzero(differ)):
        first = int(differ.argmax())
        yield (
            f"{path}: {counted(number, 'wrong count')} of training occurrences, the first for id {first} "
            f"({vocabulary.text(first)}): {vocabulary.counts[first]:,}, not {counts[first]:,}; {REMEDY}"
        )


def _check_shards(
    folder: Path, found: Manifest, split: str, counter: Counter | None, report: Report
) -> SplitTotals | None:
    """Check the shards of a split, and add the result to the report.

    Returns the sums over the rows; None if a row was unreadable or invalid, as the sums cannot be compared then. The
    ids of the "train" split are counted with `counter`, if it is given.
    """
    shards = found.shards(split)
    counting = counter if split == "train" else None
    totals, wrong = read_split(folder, found, split, f"checking {split} rows", counter=counting)
    nbytes = sum(get_size(folder / shard.file) for shard in shards)
    about = f"{counted(found.rows(split), 'row')}, {format_bytes(nbytes)}"
    report.say(folder / split, f"{counted(len(shards), 'shard')}, {about}", wrong)
    return None if wrong else totals


def _label_means(found: Manifest, recorded: dict[str, Any], totals: SplitTotals) -> Iterator[tuple[str, Any, float]]:
    """Yield, for each label, the name of its entry in the statistics, the entry itself, and the mean over the rows."""
    means = [totals.label_mean(number) for number in range(len(found.schema.labels))]
    yield "label_mean", recorded.get("label_mean"), means[0]
    for name, mean in zip(found.schema.targets.more, means[1:], strict=True):
        more = recorded.get("label_means")
        yield f"label_means of {name!r}", more.get(name) if isinstance(more, dict) else None, mean


def _wrong_statistics(found: Manifest, split: str, totals: SplitTotals | None) -> Iterator[str]:
    """Yield a finding for each statistic of a split that contradicts the split's rows."""
    if totals is None:
        return
    uses = dict(zip((column.name for column in found.schema.columns), totals.uses.tolist(), strict=True))
    recorded = found.statistics
    expected: list[tuple[str, Any, float]] = [
        ("rows", recorded.get("rows"), int(totals.rows.sum())),
        *_label_means(found, recorded, totals),
        ("out_of_vocabulary", recorded.get("out_of_vocabulary"), int(totals.out.sum()) / max(1, sum(uses.values()))),
        *((f"bag_values of {name!r}", recorded["bag_values"][name], uses[name]) for name in found.schema.bags),
    ]
    for what, given, right in expected:
        value = given.get(split) if isinstance(given, dict) else None
        is_number = isinstance(value, int | float) and abs(value) < 2**63
        if value is None or not is_number or not abs(value - right) <= _CLOSE * max(1, abs(right)):
            shown = printable(str(value), _SHOWN)
            yield f"{what} of the {split} rows is {shown} in the statistics, but {right} in the rows"


def _find_extra_files(folder: Path, found: Manifest) -> Iterator[Path]:
    """Yield the files in a data set's folder that do not belong to it."""
    shards = (shard.file for split in found.splits for shard in found.shards(split))
    own = {manifest.FILE_NAME, REJECTED_FILE, found.vocabulary, *shards}
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and path.relative_to(folder).as_posix() not in own:
            yield path
