"""Tasks that find the vocabulary by hash ranges, so that no worker has to hold it.

The values of an id space are divided by their hash into R ranges. `spread` sorts each piece's dictionary by range.
`count` counts a range's values over all pieces, with the place where each value occurs first: the piece, from 1, and
its index in the piece's dictionary; the values of an earlier data set come first, as piece 0. Ids follow the order of
these places: `rank` merges the ranges, a group of pieces at a time. `number` finds the ids of all entries of the
dictionaries, by range, and `encode` puts them together for each piece.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hostdev.core.checksums import Crc32, HashedFile, checksum
from hostdev.core.outputs import replacing
from hostdev.data import ragged
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.pieces import PieceFile
from hostdev.data.preprocess.runner import Files, Result, Workspace, ids_name, piece_name, result_name
from hostdev.data.preprocess.stored import DamagedError
from hostdev.data.preprocess.vocabulary import (
    DIGITS,
    CountedValues,
    FormatKeys,
    IntegerValues,
    TextValues,
    WrittenValues,
    make_values,
    write_values,
)
from hostdev.kernels.arrays import Array, LongIds
from hostdev.kernels.counter import mix64
from hostdev.kernels.strings import hash_texts

VOCABULARY_FILE = "vocabulary.arrow"
_KEPT_OPEN = 1024  # maximum number of files that stay mapped into memory

Entry = tuple[Any, Array, Array | None]
Part = tuple[int, int, int]  # id space, range, number of ranges


# Names of files. `spread`: a piece's dictionaries, sorted by range. `counted`: a range's values that get ids. `firsts`:
# for each piece, the number of a range's new values that occur first in it. `ranked`: values in the order of their ids.
# `ids`: the ids of a range's entries in all dictionaries. `ends`: where each piece's entries begin and end in `ids`.
spread_name = "spread/{}.arrow".format
counted_name = "words/counted-{:04d}-{:06d}.arrow".format
firsts_name = "words/firsts-{:04d}-{:06d}.arrow".format
ranked_name = "words/ranked-{:04d}-{:06d}.arrow".format
numbers_name = "words/ids-{:04d}-{:06d}.bin".format
ends_name = "words/ends-{:04d}-{:06d}.arrow".format


def _ranges_of(keys: Any, ranges: int) -> LongIds:
    """Return the range of each value, int64 [N]; it depends on other bits of the hash than places in hash tables do."""
    hashes = hash_texts(*arrow.get_buffers(keys)) if isinstance(keys, pa.Array) else keys.view(np.uint64)
    return (((mix64(hashes) >> np.uint64(32)) * np.uint64(ranges)) >> np.uint64(32)).astype(np.int64)


def spread(work: Workspace, name: str, ranges: list[int]) -> Result:
    """Write the dictionaries of a piece, sorted by range, for all id spaces with more than one range."""
    piece = PieceFile(work.path(piece_name(name)))
    content: dict[str, Any] = {}
    for space, several in enumerate(ranges):
        if several > 1:
            keys, uses = piece.keys(space), piece.array(f"uses {space}")
            of = _ranges_of(keys, several)
            order = np.argsort(of, kind="stable")
            padded = np.zeros(len(keys), np.uint32)
            padded[: len(uses)] = uses
            content[f"keys {space}"] = keys.take(pa.array(order)) if isinstance(keys, pa.Array) else keys[order]
            content[f"uses {space}"], content[f"index {space}"] = padded[order], order.astype(np.uint32)
            content[f"ends {space}"] = ragged.offsets_of(np.bincount(of, minlength=several))
    return {"files": work.write_lists(spread_name(name), content)}


def _open(path: Path) -> PieceFile:
    """Return a file that tasks of many ranges, or of many pieces, read in part; it stays open until `close_files`."""
    found = path.stat()
    return _open_once(path, found.st_ino, found.st_mtime_ns)  # it may have been written anew


@lru_cache(_KEPT_OPEN)
def _open_once(path: Path, inode: int, mtime: int) -> PieceFile:
    return PieceFile(path)


def close_files() -> None:
    """Close the files that tasks of this process have left open; on a network share, open files cannot be removed."""
    _open_once.cache_clear()


def _entries(work: Workspace, name: str, part: Part) -> Entry:
    """Return a range's entries in a piece's dictionary: values, uses in training rows, and indices in the dictionary.

    If there is only one range, the indices are None, and the uses end after the values of training rows.
    """
    space, number, ranges = part
    if ranges == 1:
        path = work.path(piece_name(name))
        piece = PieceFile(path) if work.in_memory else _open(path)
        return piece.keys(space), piece.array(f"uses {space}"), None
    piece = _open(work.path(spread_name(name)))
    start, stop = piece.array(f"ends {space}")[number : number + 2].tolist()
    index = piece.array(f"index {space}")[start:stop]
    return piece.keys(space)[start:stop], piece.array(f"uses {space}")[start:stop], index


def _training_entries(work: Workspace, name: str, part: Part) -> Entry:
    """Return a range's entries of a piece that occur in training rows, as `_entries` does."""
    keys, uses, where = _entries(work, name, part)
    if where is None:  # a dictionary begins with the values of training rows
        return keys[: len(uses)], uses, None
    there = uses > 0
    return (keys, uses, where) if there.all() else (_select(keys, there), uses[there], where[there])


def _select(keys: Any, rows: Array) -> Any:
    """Return the values at some indices, or where a mask is true."""
    if isinstance(keys, pa.Array):
        return keys.filter(pa.array(rows)) if rows.dtype == np.bool_ else keys.take(pa.array(rows))
    return np.ascontiguousarray(keys[rows])


def count(work: Workspace, part: Part, index: list[str]) -> Result:
    """Count the values of a range in the training rows of all pieces; keep the values that get ids; return totals.

    `index` has the name and the checksum of the file that lists all pieces.
    """
    space = part[0]
    values = make_values(work.source.format_keys)
    places: list[tuple[LongIds, LongIds]] = []  # for each value, its first piece, and its index in that dictionary
    for keys, indices in _earlier(work, part):
        before = len(values.uses)
        values.count(keys, np.zeros(len(keys), np.int64))
        if len(values.uses) != before + len(keys):
            raise DamagedError(work.stored.path, f"a value of {work.source.layout.spaces[space]!r} occurs twice")
        if not work.in_memory:
            places.append((np.zeros(len(keys), np.int64), indices))
    known = len(values.uses)
    names = work.read_json(*index)["names"]
    for p, name in enumerate(names, 1):
        if work.stopping.is_set():
            break
        keys, uses, where = _training_entries(work, name, part)
        before = len(values.uses)
        values.count(keys, uses)
        work.advance()
        if not work.in_memory and (more := len(values.uses) - before):
            # In a single range, values are counted in the order of their indices, so any increasing numbers will do.
            indices = np.arange(before, before + more) if where is None else where[values.find(keys) >= before]
            places.append((np.full(more, p), indices.astype(np.int64)))
    counted = CountedValues(values, known, _threshold(work, space))
    uses = values.uses
    new = sum(map(len, counted.new()))
    kept_uses = int(uses[:known].sum()) + sum(int(uses[kept].sum()) for kept in counted.new())
    most = int(uses.argmax()) if len(uses) else -1
    files: Files = {}
    if work.in_memory:
        work.values[space] = counted
    else:
        files = _write_counted(
            work, part, len(names), values, places, np.concatenate([np.arange(known), *counted.new()])
        )
    return {
        "values": len(uses),
        "new": new,
        "uses": int(uses.sum()),
        "known_uses": int(uses[:known].sum()),
        "kept_uses": kept_uses,
        "most": None if most < 0 else [int(uses[most]), values.texts(np.array([most]))[0].as_py()],
        "files": files,
    }


def _write_counted(
    work: Workspace,
    part: Part,
    pieces: int,
    values: IntegerValues | TextValues,
    places: Sequence[tuple[LongIds, LongIds]],
    kept: LongIds,
) -> Files:
    """Write the values that get ids, with the places where they occur first, and how many occur first in each piece."""
    none = np.zeros(0, np.int64)
    piece, index = (np.concatenate([none, *some])[kept] for some in (zip(*places, strict=True) if places else ((), ())))
    content = {"piece": piece, "index": index, "uses": values.uses[kept], "keys": values.keys(kept)}
    firsts = {"new": np.bincount(piece, minlength=pieces + 1)[1:]}
    files = work.write_lists(counted_name(*part[:2]), content)
    return files | work.write_lists(firsts_name(*part[:2]), firsts)


def _threshold(work: Workspace, space: int) -> int | None:
    earlier, layout = work.earlier, work.source.layout
    if earlier.frozen:
        return None
    assert work.options.threshold is not None
    return layout.thresholds.get(layout.spaces[space], work.options.threshold)


def _earlier(work: Workspace, part: Part) -> Iterator[tuple[Any, LongIds]]:
    """Yield a range's values of the earlier data set, with their indices in the order of its ids."""
    space, number, ranges = part
    start = 0
    for keys in work.earlier.keys(work.stored, space):
        if ranges == 1:
            yield _large(keys), np.arange(start, start + len(keys))
        else:
            there = _ranges_of(_large(keys), ranges) == number
            yield _large(_select(keys, there)), start + np.flatnonzero(there)
        start += len(keys)


def _large(keys: Any) -> Any:
    return keys.cast(pa.large_string()) if isinstance(keys, pa.Array) else keys


def rank(
    work: Workspace, space: int, group: int, ranges: int, place: tuple[int, int, int, int], ids: list[list[int]]
) -> Result:
    """Write the values whose first occurrence is in a range of places, in the order of their ids.

    Args:
        place: (start, stop, low, high): pieces [start, stop); from piece 0, only the values with indices [low, high).
        ids: The ids, as pairs (first, number).
    """
    start, stop, low, high = place
    parts = []
    for number in range(ranges):
        found = PieceFile(work.path(counted_name(space, number)))
        pieces = found.array("piece")
        a, b = np.searchsorted(pieces, [start, stop]).tolist()
        if start == 0:
            a, b = np.searchsorted(found.array("index")[:b], [low, high]).tolist()
        parts.append((pieces[a:b], found.array("index")[a:b], found.array("uses")[a:b], found.keys_of("keys")[a:b]))
    piece, index, uses = (np.concatenate([part[i] for part in parts]) for i in range(3))
    texts = isinstance(parts[0][3], pa.Array)
    keys = pa.concat_arrays([part[3] for part in parts]) if texts else np.concatenate([part[3] for part in parts])
    order = np.lexsort((index, piece))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.concatenate([np.arange(first, first + size) for first, size in ids])
    edges = np.cumsum([0, *(len(part[0]) for part in parts)])
    content: dict[str, Any] = {"keys": _select(keys, order), "uses": uses[order]}
    content |= {f"ids {i}": numbers[edges[i] : edges[i + 1]] for i in range(ranges)}
    return {"files": work.write_lists(ranked_name(space, group), content)}


def number(work: Workspace, part: Part, first: int, groups: int, index: list[str], oov: int, id_type: str) -> Result:
    """Find the ids of a range's entries in all dictionaries.

    Args:
        first: The first id of new values.
        groups: The number of groups of values (see `rank`).
        index: Name and checksum of the file that lists all pieces.
    """
    space, number, _ = part
    if work.in_memory:
        earlier = work.earlier.known_ids(work.source.layout).spaces[space].segments
        work.values[space].assign(earlier, first, oov, id_type)
        return {"files": {}}
    counted = PieceFile(work.path(counted_name(space, number)))
    values = make_values(work.source.format_keys)
    values.count(counted.keys_of("keys"), np.zeros(len(counted.array("uses")), np.int64))
    parts = [PieceFile(work.path(ranked_name(space, group))).array(f"ids {number}") for group in range(groups)]
    ids = np.concatenate([*parts, [oov]]).astype(id_type)  # `find` returns -1 for an unknown value
    assert len(ids) == len(values.uses) + 1
    lengths: list[int] = []
    name = numbers_name(space, number)
    with replacing(work.path(name)) as partial, closing(HashedFile(partial, Crc32)) as file:
        for piece in work.read_json(*index)["names"]:
            keys, _, _ = _entries(work, piece, part)
            lengths.append(len(keys))
            if len(keys):
                file.write(ids[values.find(keys)])
        files = {name: file.finish(to_disk=False)}
    ends = {"ends": ragged.offsets_of(np.array(lengths, np.int64))}
    return {"files": files | work.write_lists(ends_name(space, number), ends)}


def encode(work: Workspace, name: str, place: int, ranges: list[int], id_type: str) -> Result:
    """Write the ids of the dictionaries of piece number `place`."""
    piece, content = PieceFile(work.path(piece_name(name))), {}
    for space, several in enumerate(ranges):
        if work.in_memory:
            content[f"ids {space}"] = work.values[space].find(piece.keys(space))
            continue
        parts = [_read_ids(work, space, number, place, id_type) for number in range(several)]
        if several == 1:
            content[f"ids {space}"] = parts[0]
            continue
        ids = np.empty(len(piece.keys(space)), id_type)
        ids[PieceFile(work.path(spread_name(name))).array(f"index {space}")] = np.concatenate(parts)
        content[f"ids {space}"] = ids
    work.advance()
    return {"files": work.write_lists(ids_name(name), content)}


def _read_ids(work: Workspace, space: int, number: int, place: int, id_type: str) -> Array:
    ends = _open(work.path(ends_name(space, number))).array("ends")
    start, stop = ends[place : place + 2].tolist()
    path, size = work.path(numbers_name(space, number)), np.dtype(id_type).itemsize
    return np.fromfile(path, id_type, stop - start, offset=start * size)  # not mapped: it is large, and read in part


def vocabulary(work: Workspace, groups: list[list[Any]], fixed: list[int]) -> Result:
    """Write the vocabulary's file.

    `groups` has, in the order of ids, the id space, the out-of-vocabulary id, the number and the place of each group of
    values (see `rank`).
    """
    name = result_name(VOCABULARY_FILE)
    write_values(work.path(name), work.source.layout, fixed, _written(work, groups))
    return {"sha256": checksum(work.path(name)), "files": {name: checksum(work.path(name), Crc32)}}


def _written(work: Workspace, groups: Sequence[Sequence[Any]]) -> Iterator[WrittenValues]:
    for space, oov, group, (is_new, _, *indices) in groups:
        if work.in_memory:
            counted = work.values[space]
            yield from counted.written(oov, counted.new() if is_new else [np.arange(*indices)])
            continue
        ranked = PieceFile(work.path(ranked_name(space, group)))
        keys = ranked.keys_of("keys")
        if isinstance(keys, pa.Array):
            lengths = np.diff(arrow.get_buffers(keys)[0]).astype(np.int64)
        else:
            lengths = np.full(len(keys), DIGITS)
        yield WrittenValues(oov, lengths, ranked.array("uses"), partial(_format, keys, work.source.format_keys))


def _format(keys: Any, format_keys: FormatKeys | None, start: int, stop: int) -> pa.Array:
    some = keys[start:stop]
    return some.cast(pa.string()) if format_keys is None else format_keys(np.array(some))
