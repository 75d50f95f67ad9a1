"""Tables on disk: damaged blocks, full disks and failing files are found, named, and end training in one line."""

import errno
import os
import shutil

import numpy as np
import pytest

from hostdev import SGD, Disk, HostTable, UserError
from hostdev.core.errors import DiskFullError
from hostdev.host.disk import segments as segments_module
from hostdev.host.disk import store as store_module
from hostdev.host.disk.readers import Planes
from hostdev.kernels import disk_records
from hostdev.kernels.disk_records import Format
from hostdev.kernels.xxhash import xxh64
from tests.host.disk_tables import ROWS, filled, flip, on_disk, pair, require_equal


def test_blocks_have_the_checksum_that_their_description_says():
    format_ = Format.of(100, 1 << 16)
    rows = np.arange(50 * 100, dtype=np.int64).astype(np.uint8).reshape(50, 100)
    words, planes = np.zeros(format_.chunk_bytes // 8, np.uint64), Planes.of([rows])
    order = np.arange(50, dtype=np.int32)
    disk_records.pack(
        0, 50, order, order.astype(np.int64) + 7, order, 1, 0, words, format_, planes.addresses, planes.widths
    )
    disk_records.seal(0, 2, words, np.uint64(9 << 32), format_)
    block = words[:512].view(np.uint8)
    assert words[0] == xxh64(np.array([0, disk_records.PAGE - 8]), block[8:].copy())[0]
    assert words[1] == 9 << 32 and words[512 + 1] == (9 << 32) + 1
    assert words[2:5].tolist() == [7, 1, 0]  # key, version, row
    assert np.array_equal(block[16 + 24 : 16 + 124], rows[0])


def test_every_flipped_byte_of_a_block_is_found_and_named(tmp_path, small):
    table = HostTable(
        ROWS, 8, SGD(), name="t", seed=3, storage=Disk(tmp_path / "disk", memory=4 * (1 << 14) + 64 * 100)
    )
    for start in range(0, ROWS, 50):
        table.apply(np.arange(start, start + 50), np.ones((50, 8), np.float32))
    tier = table.storage.tier
    row = int(np.flatnonzero((tier.where > 0) & (tier.where <= tier.store.format.per_chunk))[0])
    block = (int(tier.where[row]) - 1) // tier.store.format.per_block
    path = next(tier._folder.path.glob("segment-00000001"))
    expected = table.lookup(np.array([row]))
    for byte in [0, 7, 8, 15, 16, 23, 24, 40, 100, 2_000, 4_095]:
        flip(path, block * 4_096 + byte)
        with pytest.raises(UserError, match=rf"table 't': bytes {block * 4096:,} to .*segment-00000001 are damaged"):
            table.lookup(np.array([row]))
        flip(path, block * 4_096 + byte)
    assert np.array_equal(table.lookup(np.array([row])), expected)


def test_a_swapped_block_is_found(tmp_path, small):
    table = filled(tmp_path)
    tier, row = table.storage.tier, int(on_disk(table)[0])
    segment, number = divmod(int(tier.where[row]) - 1, tier.store.format.per_segment)
    path = tier.store.segments.path(segment)
    data = bytearray(path.read_bytes())
    block = number // tier.store.format.per_block
    other = block + 1 if block % 2 == 0 else block - 1
    data[block * 4096 : (block + 1) * 4096] = data[other * 4096 : (other + 1) * 4096]
    with path.open("rb+") as file:
        file.write(data)
    with pytest.raises(UserError, match="are those of another place"):
        table.lookup(np.array([row]))


def test_an_unreadable_segment_ends_training_in_one_line(tmp_path, small):
    table = filled(tmp_path)
    tier, row = table.storage.tier, int(on_disk(table)[0])
    segment = (int(tier.where[row]) - 1) // tier.store.format.per_segment
    os.truncate(tier.store.segments.path(segment), 0)
    for _ in range(2):  # and no call after it uses the row's frame
        with pytest.raises(UserError, match=r"cannot be read \(only 0 bytes of them are there\); resume from the last"):
            table.apply(np.array([row]), np.ones((1, 8), np.float32))


def test_a_full_disk_is_said_and_rows_are_kept(tmp_path, small, monkeypatch):
    one, other = pair(tmp_path, kept=300)
    random, made = np.random.default_rng(6), []
    allocate = os.posix_fallocate

    def fail(file, offset, size):
        made.append(size)
        if len(made) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, size)

    monkeypatch.setattr(segments_module.os, "posix_fallocate", fail)
    with pytest.raises(
        UserError, match=r"table 't' needs 64.0 KiB more in .*No space left on device.*Free space there"
    ):
        for _ in range(500):
            ids = random.integers(0, ROWS, 100)
            other.apply(ids, np.ones((100, 8), np.float32))
            one.apply(ids, np.ones((100, 8), np.float32))
    require_equal(one, other)  # all steps that were taken


def test_a_folder_that_is_removed_is_not_called_a_full_disk(tmp_path, small):
    table = filled(tmp_path)
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(UserError, match="table 't': its folder .*hostdev-table-t-.* was removed") as raised:
        for start in range(0, 10 * ROWS, 100):
            table.apply(np.arange(start, start + 100) % ROWS, np.ones((100, 8), np.float32))
    assert not isinstance(raised.value, DiskFullError)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_why_no_segment_can_be_made(code, tmp_path, small, monkeypatch):
    def fail(file, offset, size):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segments_module.os, "posix_fallocate", fail)
    with pytest.raises(UserError, match=os.strerror(code)) as raised:
        filled(tmp_path)
    assert isinstance(raised.value, DiskFullError) == (code == errno.EDQUOT)


def test_a_write_that_fails_ends_training_in_one_line(tmp_path, small, monkeypatch):
    table = filled(tmp_path)

    def fail(file, data, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store_module, "write_all", fail)
    with pytest.raises(UserError, match="cannot be written"):
        for start in range(0, 10 * ROWS, 100):
            table.apply(np.arange(start, start + 100) % ROWS, np.ones((100, 8), np.float32))


def test_a_file_system_without_direct_io_works(tmp_path, small, monkeypatch):
    opened = os.open

    def refuse(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return opened(path, flags, mode)

    monkeypatch.setattr(segments_module.os, "open", refuse)
    table = filled(tmp_path)
    assert not table.storage.tier.store.segments.direct
    row = int(on_disk(table)[0])
    assert np.isfinite(table.lookup(np.array([row]))).all()
