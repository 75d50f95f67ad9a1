"""Records of rows in blocks of a file: packed from memory, checked and unpacked as they are read.

A block is one or more pages of 4 KiB: a checksum (XXH64 of the rest of the block), a tag (number of the file << 32 |
number of the block in its file), and records. A record is the row's key, the record's version and the row's number,
8 bytes each, and then the row's bytes in each plane. All numbers are little-endian.

P: number of planes, which are arrays of rows in memory. They are given by the address of their first row, int64 [P],
and the bytes of a row, int64 [P].
"""

import sys
from typing import Any, NamedTuple

import numpy as np
from numba import types

from hostdev.kernels.jit import inline, kernel
from hostdev.kernels.xxhash import add_to_lane, add_word, finish, first_lanes, merge_lanes

PAGE = 4096
BLOCK_HEADER, _RECORD_HEADER = 16, 24
_CHUNK = 1 << 20  # bytes that are written at once
_MERGED = 1 << 16  # most bytes of neighbouring blocks that are read at once

GOOD, UNREADABLE, DAMAGED, MISPLACED = 0, 1, 2, 3  # results of reading a block


if sys.byteorder != "little":
    raise ImportError("hostdev's files of rows are little-endian, and so must be the processor")

# Symbols of the C library, resolved when a kernel is loaded; unlike pointers of ctypes, they can be cached.
_memcpy: Any = types.ExternalFunction("memcpy", types.voidptr(types.voidptr, types.voidptr, types.uintp))
_pread: Any = types.ExternalFunction("pread", types.intp(types.intc, types.voidptr, types.uintp, types.int64))


class Format(NamedTuple):
    """Sizes of a table's records, blocks, chunks (which are written at once) and segments (files)."""

    record_bytes: int
    block_bytes: int
    per_block: int  # records per block
    per_chunk: int  # records per chunk
    per_segment: int  # records per segment

    @classmethod
    def of(cls, row_bytes: int, segment_bytes: int) -> "Format":
        """Return the format for rows of `row_bytes` bytes."""
        record = -(-(_RECORD_HEADER + row_bytes) // 8) * 8
        block = -(-(BLOCK_HEADER + record) // PAGE) * PAGE
        per_block = (block - BLOCK_HEADER) // record
        per_chunk = max(1, _CHUNK // block) * per_block
        chunks = max(1, segment_bytes // max(_CHUNK, block))
        return cls(record, block, per_block, per_chunk, chunks * per_chunk)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self.per_chunk // self.per_block * self.block_bytes

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment's file."""
        return self.per_segment // self.per_block * self.block_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that `read` needs."""
        return max(_MERGED, self.block_bytes)


@inline
def _checksum(words, first, count):
    """Return XXH64 of `count` >= 4 words from words[first] on."""
    at, end, one = np.uint64(first), np.uint64(first) + np.uint64(count), np.uint64(1)
    a, b, c, d = first_lanes()
    while end - at >= np.uint64(4):
        a = add_to_lane(a, words[at])
        b = add_to_lane(b, words[at + one])
        c = add_to_lane(c, words[at + np.uint64(2)])
        d = add_to_lane(d, words[at + np.uint64(3)])
        at += np.uint64(4)
    found = merge_lanes(a, b, c, d) + np.uint64(8) * np.uint64(count)
    while at < end:
        found = add_word(found, words[at])
        at += one
    return finish(found)


@inline
def _word_of(format_, number):
    """Return the index of the first word of record `number` in an array of blocks."""
    block, place = number // np.uint64(format_.per_block), number % np.uint64(format_.per_block)
    return (
        block * np.uint64(format_.block_bytes) + np.uint64(BLOCK_HEADER) + place * np.uint64(format_.record_bytes)
    ) >> (np.uint64(3))


@inline
def _unpack(source, target, addresses, widths):
    """Copy a record's planes, from the address `source` on, to row `target` of each plane."""
    for p in range(np.uint64(len(widths))):
        _memcpy(addresses[p] + target * widths[p], source, widths[p])
        source += widths[p]


@kernel
def pack(start, stop, sources, keys, rows, version, first, words, format_, addresses, widths):
    """Write records of the rows sources[start:stop] of the planes to `words`.

    Args:
        sources: int32 [N], the row of each record in the planes.
        keys: int64 [N].
        rows: int32 or int64 [N], the rows' numbers.
        version: The version of the first record; each next one is larger by 1.
        first: The number that the first record gets in `words`.
        words: uint64 [any], whole blocks.
        format_: The `Format`.
        addresses: int64 [P], the planes' addresses.
        widths: int64 [P], bytes of a row in each plane.
    """
    base = words.ctypes.data
    for i in range(np.uint64(start), np.uint64(stop)):
        at = _word_of(format_, np.uint64(first) + i)
        words[at], words[at + np.uint64(1)] = np.uint64(keys[i]), np.uint64(version) + i
        words[at + np.uint64(2)] = np.uint64(rows[i])
        target, source = base + np.int64(at) * 8 + _RECORD_HEADER, np.int64(sources[i])
        for p in range(np.uint64(len(widths))):
            _memcpy(target, addresses[p] + source * widths[p], widths[p])
            target += widths[p]


@kernel
def seal(start, stop, words, tag, format_):
    """Write the tags and checksums of blocks [start, stop) of `words`; `tag` is that of the first block."""
    size = np.uint64(format_.block_bytes >> 3)
    for block in range(np.uint64(start), np.uint64(stop)):
        at = block * size
        words[at + np.uint64(1)] = np.uint64(tag) + block
        words[at] = _checksum(words, at + np.uint64(1), size - np.uint64(1))


@kernel
def copy_buffered(start, stop, positions, buffers, targets, words, format_, addresses, widths):
    """Copy records that are in buffers, not yet on disk, to the rows targets[start:stop] of the planes.

    Args:
        positions: int64 [N], the records' positions.
        buffers: int32 [N], the buffer that has each record's chunk.
        targets: int32 [N].
        words: uint64 [buffers, any], the buffers.
        format_: The `Format`.
        addresses: int64 [P], the planes' addresses.
        widths: int64 [P], bytes of a row in each plane.
    """
    base, stride = words.ctypes.data, words.strides[0]
    for i in range(np.uint64(start), np.uint64(stop)):
        at = _word_of(format_, np.uint64(positions[i]) % np.uint64(format_.per_chunk))
        source = base + np.int64(buffers[i]) * stride + np.int64(at) * 8 + _RECORD_HEADER
        _unpack(source, np.int64(targets[i]), addresses, widths)


@kernel
def copy_rows(start, stop, sources, targets, from_addresses, addresses, widths):
    """Copy rows sources[start:stop] of some planes to the rows targets[start:stop] of others of the same widths."""
    for i in range(np.uint64(start), np.uint64(stop)):
        source, target = np.int64(sources[i]), np.int64(targets[i])
        for p in range(np.uint64(len(widths))):
            _memcpy(addresses[p] + target * widths[p], from_addresses[p] + source * widths[p], widths[p])


@kernel
def read(start, stop, positions, keys, targets, files, maps, tags, format_, addresses, widths, words, failure):
    """Read records from files into the rows targets[start:stop] of the planes, and check their blocks.

    Args:
        positions: int64 [N], ascending.
        keys: int64 [N], the key that each record must have.
        targets: int32 [N].
        files: int32 [segments], the file descriptor of each segment.
        maps: int64 [segments], the address of each segment that is mapped into memory, and 0 for segments to read.
        tags: uint64 [segments], the tag of each segment's first block.
        format_: The `Format`.
        addresses: int64 [P], the planes' addresses.
        widths: int64 [P], bytes of a row in each plane.
        words: uint64 [Format.buffer_bytes / 8], a buffer that begins on a page.
        failure: int64 [3], written if a block is bad: the result, a record's position, and bytes read if UNREADABLE.
    """
    size, per_block = np.int64(format_.block_bytes), np.uint64(format_.per_block)
    per_segment, merged = np.uint64(format_.per_segment), np.uint64(max(_MERGED // int(size), 1))
    base, block_words = words.ctypes.data, np.uint64(size >> 3)
    i, end = np.uint64(start), np.uint64(stop)
    while i < end:
        segment = np.uint64(positions[i]) // per_segment
        first = np.uint64(positions[i]) % per_segment // per_block
        last, j = first, i + np.uint64(1)
        while j < end:
            if np.uint64(positions[j]) // per_segment != segment:
                break
            block = np.uint64(positions[j]) % per_segment // per_block
            if block > last + np.uint64(1) or block >= first + merged:
                break
            last, j = block, j + np.uint64(1)
        count = np.int64(last - first) + 1
        got = count * size
        if maps[segment] != 0:
            _memcpy(base, maps[segment] + np.int64(first) * size, got)
        else:
            got = _pread(files[segment], base, count * size, np.int64(first) * size)
        if got != count * size:
            failure[0], failure[1], failure[2] = UNREADABLE, positions[i], got
            return
        for number in range(np.uint64(count)):
            which: Any = np.uint64(number)
            at = which * block_words
            if words[at] != _checksum(words, at + np.uint64(1), block_words - np.uint64(1)):
                failure[0], failure[1] = DAMAGED, np.int64(segment * per_segment + (first + which) * per_block)
                return
            if words[at + np.uint64(1)] != tags[segment] + first + which:
                failure[0], failure[1] = MISPLACED, np.int64(segment * per_segment + (first + which) * per_block)
                return
        skipped: Any = segment * per_segment + first * per_block
        for k in range(i, j):
            at = _word_of(format_, np.uint64(positions[k]) - skipped)
            if words[at] != np.uint64(keys[k]):
                failure[0], failure[1] = MISPLACED, positions[k]
                return
            _unpack(base + np.int64(at) * 8 + _RECORD_HEADER, np.int64(targets[k]), addresses, widths)
        i = j


@kernel
def check(start, stop, words, tag, format_, failure):
    """Check blocks [start, stop) of `words`; `tag` is block 0's. Write a bad block's result and number to `failure`."""
    size = np.uint64(format_.block_bytes >> 3)
    for block in range(np.uint64(start), np.uint64(stop)):
        at = block * size
        good = words[at] == _checksum(words, at + np.uint64(1), size - np.uint64(1))
        if not good or words[at + np.uint64(1)] != np.uint64(tag) + block:
            failure[0], failure[1] = (MISPLACED if good else DAMAGED), np.int64(block)
            return


@kernel
def find_live(rows, first, where, saved, out):
    """Find the records with the current values of rows that are not in memory.

    A record with the current values of a row in memory is dropped: the row counts as changed from now on.

    Args:
        rows: int64 [N], the row of each record; numbers outside the table are skipped.
        first: The position of the first record.
        where: See `kernels.frames`.
        saved: See `kernels.frames`; CHANGED is written for rows whose records are dropped.
        out: int32 [N + 1], output: the numbers of the records found.

    Returns:
        The number of records found, and the number of records dropped.
    """
    found, dropped = np.uint64(0), np.int64(0)
    for number in range(np.uint64(len(rows))):
        row = np.uint64(rows[number])
        if row >= np.uint64(len(where)):
            continue
        own, place = np.int64(first) + np.int64(number) + 1, np.int64(where[row])
        out[found] = number
        found += np.uint64(place == own)
        if place < 0 and saved[np.uint64(-1 - place)] == own:
            saved[np.uint64(-1 - place)] = -1
            dropped += 1
    return np.int64(found), dropped


@kernel
def move(start, stop, numbers, rows, source, version, first, words, format_):
    """Copy the records numbers[start:stop] of `source` to `words`, from record `first` on.

    They get new versions, and the row numbers rows[start:stop], int64.
    """
    size = np.uint64(format_.record_bytes >> 3)
    for i in range(np.uint64(start), np.uint64(stop)):
        at, to = _word_of(format_, np.uint64(numbers[i])), _word_of(format_, np.uint64(first) + i)
        for k in range(size):
            words[to + k] = source[at + k]
        words[to + np.uint64(1)], words[to + np.uint64(2)] = np.uint64(version) + i, np.uint64(rows[i])


@kernel
def record_rows(start, stop, words, format_, rows):
    """Write the row numbers of the records [start, stop) of `words` to rows[start:stop], int64."""
    for i in range(np.uint64(start), np.uint64(stop)):
        rows[i] = np.int64(words[_word_of(format_, i) + np.uint64(2)])


@kernel
def clear(start, stop, words, format_):
    """Write zeros to the unused records [start, stop) of `words`."""
    size = np.uint64(format_.record_bytes >> 3)
    for i in range(np.uint64(start), np.uint64(stop)):
        at = _word_of(format_, i)
        for k in range(size):
            words[at + k] = np.uint64(0)
