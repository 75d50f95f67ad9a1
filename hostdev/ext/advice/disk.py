"""Memory for tables on disk (`hostdev advise --disk`), from measured rates and simulated reads."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hostdev.cache.plan import Statistics
from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.memory import format_bytes
from hostdev.data.shards import ShardReader
from hostdev.ext.advice.curves import TableGroup, Trial, measure_groups, read_unique, run_passes
from hostdev.ext.advice.simulation import SimulatedCache
from hostdev.host.disk.frame_pool import FRAME_BYTES, MemorySize, count_kept, count_most
from hostdev.host.disk.readers import Planes
from hostdev.host.disk.segments import SEGMENT_BYTES, TableFolder
from hostdev.host.disk.store import SegmentStore
from hostdev.kernels.disk_records import Format
from hostdev.models.model import Model
from hostdev.train.build import LEAST_ROW, groups_of

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
_SECONDS = 1.0  # the time to measure writing, and the time to measure reading
_MOST_WRITTEN = 1 << 30  # maximum bytes that the measurement writes
_ROW_BYTES = 1000
_AT_ONCE = 4096  # rows that are read at a time
_COLLECTED = 2.0  # most bytes written per byte of a changed row: segments are rewritten when half of them is dead


class DiskRates(NamedTuple):
    """The measured rates of a disk: random reads of pages per second, and bytes written in sequence per second."""

    reads: float
    written: float
    direct: bool  # whether the disk itself was measured, not the system's page cache


class Need(NamedTuple):
    """The disk's work in a step, if a share of the rows is in memory.

    Attributes:
        share: Share of the rows that is in memory.
        nbytes: Bytes of memory that the share takes.
        rows: Rows read per step.
        read: Bytes read per step.
        written: Bytes written per step.
    """

    share: float
    nbytes: int
    rows: float
    read: float
    written: float

    def seconds(self, rates: DiskRates) -> float:
        """Return the disk's time for a step."""
        return self.rows / rates.reads + self.written / rates.written


def measure_disk(folder: Path) -> DiskRates:
    """Measure a disk in about two seconds, in a new folder in `folder`; raise UserError if it cannot be written."""
    format_ = Format.of(_ROW_BYTES, SEGMENT_BYTES)
    most = _MOST_WRITTEN // format_.record_bytes
    own = TableFolder(folder, "advise")
    where, saved, changed = np.zeros(most + 1, np.int32), np.zeros(1, np.int64), threading.Condition()
    store = SegmentStore("advise", own.path, format_, where, saved, changed, buffers=16)
    try:
        n = format_.per_chunk
        block = np.random.default_rng(0).integers(0, 256, (max(n, _AT_ONCE), _ROW_BYTES), np.uint8)
        planes, places = Planes.of([block]), np.arange(n, dtype=np.int32)
        begin, count = time.perf_counter(), 0
        while count + n <= most and time.perf_counter() - begin < _SECONDS:
            with changed:
                has_room = store.room() >= n
                if has_room:
                    rows = np.arange(count, count + n)
                    ((position, _),) = store.append(places, rows, rows, planes)
                    where[rows] = 1 + position + np.arange(n)
                    count += n
            if not has_room:
                store.await_room()
        with changed:
            store.begin_read()  # keeps segments open, even one that is collected meanwhile
            positions = where[:count].astype(np.int64) - 1
        store.finish(np.unique(positions // format_.per_segment).tolist())
        written = count * format_.record_bytes / (time.perf_counter() - begin)
        positions = positions[:: format_.per_block]  # one row of each page
        order = np.random.default_rng(1).permutation(len(positions))
        begin, done = time.perf_counter(), 0
        while time.perf_counter() - begin < _SECONDS:
            some = order[done % len(order) : done % len(order) + _AT_ONCE]
            keys, targets = some * format_.per_block, np.arange(len(some), dtype=np.int32)
            read = store.read(positions[some], keys, targets, planes, lambda read: None)
            read.wait()
            store.require_read(read)
            done += len(some)
        return DiskRates(done / (time.perf_counter() - begin), written, store.segments.direct)
    finally:
        store.close()
        own.remove()


def choose_groups(model: Model, groups: Sequence[TableGroup]) -> list[TableGroup]:
    """Return the groups of tables that --table-dir puts on disk, without the groups' tables that stay in memory.

    Raises:
        UserError: No table goes to disk.
    """
    found = []
    for names, group in zip(groups_of(model), groups, strict=True):
        kept = [name for name in names if model.tables[name].shape.nbytes(1) >= LEAST_ROW]
        if kept:
            shapes = tuple(shape for name, shape in zip(names, group.tables, strict=True) if name in kept)
            found.append(TableGroup(tuple(kept), group.rows, shapes, group.host, group.unique))
    if not found:
        raise UserError(
            f"no table has rows of {LEAST_ROW} bytes or more, and smaller rows stay in memory; leave out --disk"
        )
    return found


def simulate(
    model: Model, groups: Sequence[TableGroup], reader: ShardReader, size: int, seed: int, window: int
) -> list[Need]:
    """Return what a step needs with each share of the rows in memory, over one pass in batches of `size` samples.

    Shares with less memory than a batch needs are left out. The figures are means over the second half of the pass, in
    which rows that were used before are on disk.
    """
    steps = reader.steps(size)
    shares = [share for share in SHARES if all(_count(group, share) > group.unique for group in groups)]
    kept = [[count_kept(_count(group, share), group.rows, group.unique) for share in shares] for group in groups]

    def make(trial: Trial) -> SimulatedCache:
        rows, size = groups[trial.group].rows, kept[trial.group][trial.number]
        return SimulatedCache(rows, size, trial.policy, steps, window)

    tries = [Trial("nearest", number, group) for group in range(len(groups)) for number in range(len(shares))]
    ended = run_passes([tries], make, lambda: read_unique(model, groups, reader, size, seed), steps, "simulating")
    parts = ended["nearest"] if tries else {}
    return [
        _need(share, groups, [parts[group][n].statistics for group in range(len(groups))])
        for n, share in enumerate(shares)
    ]


def _count(group: TableGroup, share: float) -> int:
    """Return how many rows the pipeline can hold at once if the tables' memory fits this share of a group's rows."""
    size = MemorySize(group.rows, *_formats(group)[0])
    return count_most(size.count_frames(int(share * group.rows * size.frame_bytes)), group.rows)


def _formats(group: TableGroup) -> list[tuple[int, Format]]:
    """Return the bytes of a row, and the format of records, of each table."""
    return [(shape.nbytes(1), Format.of(shape.nbytes(1), SEGMENT_BYTES)) for shape in group.tables]


def _need(share: float, groups: Sequence[TableGroup], parts: Sequence[Statistics]) -> Need:
    nbytes, rows, read, written = 0, 0.0, 0.0, 0.0
    for group, part in zip(groups, parts, strict=True):
        steps = max(1, part.batches)
        for row_bytes, format_ in _formats(group):
            nbytes += int(share * group.rows * (row_bytes + FRAME_BYTES))
            rows += (part.unique - part.unique_hits) / steps
            read += (part.unique - part.unique_hits) / steps * format_.block_bytes
            written += _COLLECTED * (part.passed + part.evicted) / steps * format_.record_bytes
    return Need(share, nbytes, rows, read, written)


def advise_disk(
    model: Model, reader: ShardReader, size: int, *, folder: Path, seed: int, step: float | None, window: int
) -> None:
    """Measure the disk of a folder, simulate a pass, and print what fits: memory, bytes, steps a second, and wear.

    Args:
        model: The model.
        reader: The training samples.
        size: The batch size.
        folder: A folder on the disk.
        seed: The seed of the samples' order.
        step: Seconds of a step with all rows in memory, or None for the host's work alone, which is measured.
        window: Number of batches that are read ahead.
    """
    every = measure_groups(model, reader, size, seed)
    groups = choose_groups(model, every)
    rates = measure_disk(folder)
    written = f"{format_bytes(int(rates.written))}/s"
    where = "" if rates.direct else " (through the system's page cache, which may be faster than the disk)"
    print(f"disk     {rates.reads:,.0f} random reads of 4 KiB a second, {written} written in sequence{where}")
    needs = simulate(model, groups, reader, size, seed, window)
    unique = sum(group.unique for group in groups)
    host = sum(group.host.passed * group.unique for group in every) / 1e9
    least = host if step is None else step
    total = sum(group.rows * row_bytes for group in groups for row_bytes, _ in _formats(group))
    names = ", ".join(name for group in groups for name in group.names)
    print(f"tables   {names}: {format_bytes(total)} of rows; other tables stay in memory")
    given = "given by --step-ms" if step is not None else "the host's work for its rows; --step-ms gives another"
    print(f"step     up to {unique:,} unique rows; {least * 1e3:.2f} ms with all rows in memory ({given})\n")
    print("\n".join(format_needs(needs, rates, least, window)))


def format_needs(needs: Sequence[Need], rates: DiskRates, least: float, window: int = Disk.window) -> list[str]:
    """Return a table and the advice as lines; `least` is the seconds of a step without the disk."""
    lines = [
        f"{'':<7}{'':>12}   in a step",
        f"{'share':<7}{'memory':>12}{'rows read':>12}{'read':>12}{'written':>12}{'disk':>12}{'steps/s':>10}"
        f"{'TB/day':>9}",
    ]
    chosen = next((need for need in needs if need.seconds(rates) <= least), None)
    for need in needs:
        seconds = need.seconds(rates)
        rate = 1 / max(seconds, least)
        note = "  <- recommended" if need is chosen else ""
        lines.append(
            f"{need.share:<7.0%}{format_bytes(need.nbytes):>12}{need.rows:>12,.0f}{format_bytes(int(need.read)):>12}"
            f"{format_bytes(int(need.written)):>12}{seconds * 1e3:>9.2f} ms{rate:>10,.1f}"
            f"{need.written * rate * 86_400 / 1e12:>9.2f}{note}"
        )
    if not needs:
        advice = "keep the tables in memory: with less, the rows of a batch do not fit"
    elif chosen is None:
        best = needs[-1]
        advice = (
            f"keep the tables in memory, or use a faster disk: even with {best.share:.0%} of the rows in memory, the "
            f"disk takes {best.seconds(rates) / least:.1f} times as long as a step"
        )
    else:
        options = f"--table-memory {format_bytes(chosen.nbytes).replace(' ', '')}"
        if window != Disk.window:
            options += f" --table-window {window}"
        advice = f"{options}: the disk keeps up with the steps"
    return [*lines, "", f"advice   {advice}"]
