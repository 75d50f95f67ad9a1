"""Data sets from hand-computed rows: ids, scaling, splits, rejects, and what the folder holds."""

import itertools
import json
import re

import numpy as np
import pyarrow as pa
import pytest

from hostdev import UserError
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.raw import BEGINNING
from hostdev.data.preprocess.synthetic import CHUNK_ROWS, Synthetic, write_text
from hostdev.kernels.counter import key64, uniform
from tests.data.test_criteo import line
from tests.manifests import as_version_1, write_manifest

A, B, C = "0000000a", "0000000b", "0000000c"


def read(folder, split):
    """All rows of a split, as plain arrays."""
    tables = [pa.ipc.open_file(folder / shard.file).read_all() for shard in manifest.read(folder).shards(split)]
    table = pa.concat_tables(tables).combine_chunks()
    return (
        np.array(table["label"]),
        np.array(table["dense"].to_pylist(), np.float32),
        np.array(table["cat"].to_pylist()),
    )


def write(path, lines):
    path.write_text("".join(text + "\n" for text in lines))
    return CriteoText([path])


def split_of(n, options):
    return uniform(key64(options.seed, "test split"), np.arange(n)) < options.test_fraction


@pytest.fixture
def ten_rows(tmp_path):
    """Ten rows, and options whose split takes rows 3 and 7 for testing."""
    first = [A, A, B, C, A, B, C, B, A, A]
    second = ["", B, B, "", "", C, B, A, "", B]
    lines = [line(str(i % 2), [i - 2, 10 * i, "", -i], [first[i], second[i]]) for i in range(10)]
    seed = next(
        s for s in range(10_000) if np.flatnonzero(split_of(10, Options(seed=s, test_fraction=0.2))).tolist() == [3, 7]
    )
    return write(tmp_path / "ten.txt", lines), Options(threshold=2, seed=seed, test_fraction=0.2)


def test_hand_computed_rows(tmp_path, ten_rows):
    source, options = ten_rows
    found = build(source, tmp_path / "out", options)
    # Training rows: 0 1 2 4 5 6 8 9. C1: A 5 times, B 2 (not more than 2), C once. C2: "" 3 times, B 4, C once.
    # By column in order of first occurrence: 39 = (C1, A), 40 = (C2, ""), 41 = (C2, B); every other column is always
    # empty, 8 times: 42 .. 65. Out of vocabulary: C1 13, C2 14.
    assert found.vocabulary_size == 66
    label, dense, cat = read(tmp_path / "out", "train")
    np.testing.assert_array_equal(label, [0, 1, 0, 0, 1, 0, 0, 1])
    np.testing.assert_array_equal(cat[:, 0], [39, 39, 13, 39, 13, 13, 39, 39])
    np.testing.assert_array_equal(cat[:, 1], [40, 41, 41, 40, 14, 41, 40, 41])
    np.testing.assert_array_equal(cat[:, 2:], np.broadcast_to(np.arange(42, 66), (8, 24)))
    # Maxima over training rows: I1 7, I2 90, I3 none, I4 0 (which does not divide).
    rows = np.array([0, 1, 2, 4, 5, 6, 8, 9])
    np.testing.assert_array_equal(dense[:, 0], ((rows - 2) / 7).astype(np.float32))
    np.testing.assert_array_equal(dense[:, 1], (10 * rows / 90).astype(np.float32))
    np.testing.assert_array_equal(dense[:, 2], np.zeros(8))
    np.testing.assert_array_equal(dense[:, 3], -rows.astype(np.float32))
    assert found.statistics["dense_max"][:4] == [7, 90, 0, 0]

    label, dense, cat = read(tmp_path / "out", "test")
    np.testing.assert_array_equal(label, [1, 1])
    np.testing.assert_array_equal(cat[:, :2], [[13, 40], [13, 14]])  # (C, ""), (B, A)
    np.testing.assert_array_equal(dense[:, 1], (np.array([30, 70]) / 90).astype(np.float32))

    vocabulary = pa.ipc.open_file(tmp_path / "out" / found.vocabulary).read_all()
    assert len(vocabulary) == 66
    assert vocabulary.slice(38, 4).to_pylist() == [
        {"field": "C26", "value": None, "count": 0},
        {"field": "C1", "value": A, "count": 5},
        {"field": "C2", "value": "", "count": 3},
        {"field": "C2", "value": B, "count": 4},
    ]
    assert vocabulary.slice(13, 2).to_pylist() == [
        {"field": "C1", "value": None, "count": 3},
        {"field": "C2", "value": None, "count": 1},
    ]


def test_log_scaling(tmp_path, ten_rows):
    source, options = ten_rows
    build(source, tmp_path / "out", Options(**{**vars(options), "dense": "log"}))
    _, dense, _ = read(tmp_path / "out", "train")
    rows = np.array([0, 1, 2, 4, 5, 6, 8, 9])
    np.testing.assert_array_equal(dense[:, 0], (np.log1p(np.maximum(rows - 2, 0)) / np.log1p(7)).astype(np.float32))
    np.testing.assert_array_equal(dense[:, 3], np.zeros(8))


def test_hash_buckets(tmp_path, ten_rows):
    source, options = ten_rows
    hashed = Options(**{**vars(options), "threshold": None, "hash_buckets": 100})
    found = build(source, tmp_path / "out", hashed)
    assert found.vocabulary_size == 139
    assert found.vocabulary is None
    assert found.vocabulary_sha256 is None
    assert not (tmp_path / "out" / "vocabulary.arrow").exists()
    _, _, cat = read(tmp_path / "out", "train")
    assert cat.min() >= 39
    assert cat.max() < 139
    first = np.array([0, 0, 1, 0, 1, 2, 0, 0])  # A A B A B C A A: equal values have equal ids
    assert all(len(set(cat[first == value, 0].tolist())) == 1 for value in range(3))
    again = build(source, tmp_path / "again", Options(**{**vars(hashed), "seed": options.seed + 1}))
    assert again.vocabulary_size == 139
    other = np.concatenate([read(tmp_path / "again", split)[2] for split in ("train", "test")])
    ours = np.concatenate([cat, read(tmp_path / "out", "test")[2]])
    assert sorted(map(tuple, ours)) == sorted(map(tuple, other))  # no state: the split does not matter


@pytest.mark.parametrize(("buckets", "id_type"), [(2**31 - 39, "int32"), (2**31 - 38, "int64"), (2**40, "int64")])
def test_ids_take_64_bits_where_they_must(tmp_path, ten_rows, buckets, id_type):
    source, options = ten_rows
    found = build(source, tmp_path / "out", Options(**{**vars(options), "threshold": None, "hash_buckets": buckets}))
    assert found.id_type == id_type
    assert read(tmp_path / "out", "train")[2].max() < found.vocabulary_size


def test_shards_hold_every_row_in_order(tmp_path):
    source = Synthetic(1000, 3)
    whole = build(source, tmp_path / "whole", Options(threshold=3))
    parts = build(source, tmp_path / "parts", Options(threshold=3, rows_per_shard=70))
    for split in ("train", "test"):
        assert len(whole.shards(split)) == 1
        rows = whole.rows(split)
        assert [shard.rows for shard in parts.shards(split)] == [70] * (rows // 70) + [rows % 70] * (rows % 70 > 0)
        for a, b in zip(read(tmp_path / "whole", split), read(tmp_path / "parts", split), strict=True):
            np.testing.assert_array_equal(a, b)
        for shard in parts.shards(split):
            assert manifest.checksum(tmp_path / "parts" / shard.file) == shard.sha256
    assert whole.rows("train") + whole.rows("test") == 1000
    assert 60 < whole.rows("test") < 140
    assert manifest.read(tmp_path / "parts") == parts


def test_rejects_are_kept_with_file_line_and_reason(tmp_path):
    lines = [line(str(i % 2), [i]) for i in range(300)]
    lines[4], lines[200], lines[299] = "1\t2", line("0", ["x"]), line("3")
    source = write(tmp_path / "in.txt", lines)
    found = build(source, tmp_path / "out", Options(threshold=0))
    assert found.statistics["rejected"] == 3
    assert found.rows("train") + found.rows("test") == 297
    name = str(tmp_path / "in.txt")
    rejected = (tmp_path / "out" / "rejected.tsv").read_text().splitlines()
    assert [text.split("\t", 3) for text in rejected] == [
        [name, "5", "2 columns, not 40", lines[4]],
        [name, "201", "I1 is 'x', not an integer or empty", lines[200]],
        [name, "300", "label is '3', not 0 or 1", lines[299]],
    ]


def test_too_many_rejects_leave_nothing(tmp_path):
    lines = [line(str(i % 2), [i]) for i in range(300)]
    lines[10:14] = ["x"] * 4
    source = write(tmp_path / "in.txt", lines)
    message = r"4 rows cannot be read, more than 1% of all; the first is .*in.txt:11: 1 columns, not 40"
    with pytest.raises(UserError, match=message):
        build(source, tmp_path / "out", Options())
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


class Interrupted(Synthetic):
    """Rows that come until a chunk, and then an interruption."""

    until = 3

    def blocks(self, start=BEGINNING):
        yield from itertools.islice(super().blocks(start), self.until - start.offset)
        raise KeyboardInterrupt


def test_an_interruption_before_anything_is_finished_leaves_nothing(tmp_path):
    source = Interrupted(200_000, 1)
    source.until = 0
    with pytest.raises(KeyboardInterrupt):
        build(source, tmp_path / "out", Options())
    assert list(tmp_path.iterdir()) == []


def test_after_an_interruption_the_same_call_goes_on(tmp_path, capsys):
    for n, said in ((200_000, "finished work is kept in"), (200_000, "the same command resumes from there")):
        with pytest.raises(KeyboardInterrupt):
            build(Interrupted(n, 1), tmp_path / "out", Options(), threads=1)
        assert said in capsys.readouterr().err
    [work] = tmp_path.iterdir()
    kept = {path.name: path.stat().st_mtime_ns for path in (work / "pieces").iterdir()}
    assert len(kept) >= 1
    seen = []

    class Rest(Synthetic):
        def parse(self, block, *, hashed=False):
            seen.append(block.content[0])
            return super().parse(block, hashed=hashed)

    made = build(Rest(200_000, 1), tmp_path / "out", Options(), threads=1)
    assert sorted(seen) == list(range(len(kept), 4))  # nothing that was finished is parsed again
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert made == build(Synthetic(200_000, 1), tmp_path / "straight", Options())


def test_other_work_is_not_gone_on_with(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        build(Interrupted(200_000, 1), tmp_path / "out", Options(), threads=1)
    capsys.readouterr()
    made = build(Synthetic(140_000, 1), tmp_path / "out", Options(threshold=5))
    said = capsys.readouterr().err
    assert "unfinished work of another command, or on input files that have since changed, is removed from " in said
    assert re.search(r" is removed from .*\.out\.partial \([0-9.]+ MiB\)\n$", said)
    assert made == build(Synthetic(140_000, 1), tmp_path / "straight", Options(threshold=5))


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_of_others_where_the_work_would_be_is_left_alone(tmp_path, there):
    mine = tmp_path / ".out.partial" / "mine"
    mine.mkdir(parents=True)
    if there:
        (tmp_path / "out").mkdir()
    message = "exists already" if there else r"\.out\.partial is needed as the work folder, but has other files"
    with pytest.raises(UserError, match=message):
        build(Synthetic(100, 1), tmp_path / "out", Options())
    assert mine.is_dir()


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(UserError, match="exists already"):
        build(Synthetic(100, 1), tmp_path / "out", Options())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_split_must_have_rows(tmp_path):
    with pytest.raises(UserError, match="none of the 2 rows is in the test split"):
        build(Synthetic(2, 1), tmp_path / "out", Options(test_fraction=0.001))


def test_the_manifest_of_another_version_is_refused(tmp_path):
    build(Synthetic(100, 1), tmp_path / "out", Options())
    path = tmp_path / "out" / "manifest.json"
    content = json.loads(path.read_text())
    for change, message in [
        ({"version": 3}, "version 3; this version of hostdev reads 'hostdev-shards' versions 1 to 2"),
        ({"format": "x"}, "'x'"),
        ({"extra": 1}, "extra"),
        ({"vocabulary_sha256": 3}, "vocabulary_sha256 is 3"),
        ({"rejected_sha256": 3}, "rejected_sha256 is 3"),
    ]:
        write_manifest(tmp_path / "out", {**content, **change})
        with pytest.raises(UserError, match=message):
            manifest.read(tmp_path / "out")
    path.write_text("{")
    with pytest.raises(UserError, match="broken"):
        manifest.read(tmp_path / "out")
    with pytest.raises(UserError, match="not a data set"):
        manifest.read(tmp_path)


def rewrite_vocabulary(folder, change):
    """Replace the counts of a data set's vocabulary."""
    path = folder / "vocabulary.arrow"
    vocabulary = pa.ipc.open_file(pa.OSFile(str(path))).read_all()
    counts = pa.array(change(vocabulary["count"].to_numpy().copy()))
    vocabulary = vocabulary.slice(0, len(counts)).set_column(2, "count", counts)
    with pa.ipc.new_file(path, vocabulary.schema) as file:
        file.write_table(vocabulary)


def forget_checksum(folder):
    """Make the manifest one of version 1, of before the vocabulary had a checksum."""
    content = as_version_1(json.loads((folder / "manifest.json").read_text()))
    del content["vocabulary_sha256"]
    write_manifest(folder, content)


def plus(index, by):
    def change(counts):
        counts[index] += by
        return counts

    return change


def test_the_vocabulary_has_a_checksum(own_data):
    found = manifest.read(own_data)
    assert found.vocabulary_sha256 == manifest.checksum(own_data / "vocabulary.arrow")
    assert manifest.read_counts(own_data, found).sum() == found.rows("train") * 39
    rewrite_vocabulary(own_data, plus(40, 3))
    with pytest.raises(
        UserError, match="vocabulary.arrow has a wrong checksum: it is damaged or was changed; preprocess"
    ):
        manifest.read_counts(own_data, found)
    (own_data / "vocabulary.arrow").unlink()
    with pytest.raises(UserError, match="vocabulary.arrow is broken .*; preprocess the data again"):
        manifest.read_counts(own_data, found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda counts: counts, None),
        (lambda counts: counts[:-1], r"has \d+ ids, but the manifest has \d+"),
        (plus(40, 3), r"its counts do not add up to the \d+ ids in the training rows"),
        (plus(slice(40, 42), np.array([-(10**6), 10**6])), "a count is below 0"),
        (lambda counts: counts.astype(np.float64), "its counts are double, not int64"),
        (lambda counts: [None, *counts[1:]], "a count is missing"),
    ],
)
def test_a_damaged_vocabulary_of_a_data_set_without_a_checksum(own_data, change, message):
    """Data sets made before there was one are read, and looked at."""
    rewrite_vocabulary(own_data, change)
    forget_checksum(own_data)
    found = manifest.read(own_data)
    assert found.vocabulary_sha256 is None
    if message is None:
        assert len(manifest.read_counts(own_data, found)) == found.vocabulary_size
        return
    with pytest.raises(UserError, match=rf"vocabulary.arrow (is broken \()?{message}.*preprocess the data again"):
        manifest.read_counts(own_data, found)


@pytest.mark.parametrize(
    "wrong",
    [
        {"threshold": -1},
        {"threshold": None, "hash_buckets": 0},
        {"test_fraction": -0.1},
        {"test_fraction": 1.0},
        {"rows_per_shard": 0},
    ],
)
def test_wrong_options(wrong):
    with pytest.raises(UserError, match=f"--{list(wrong)[-1].replace('_', '-')} must be"):
        Options(**wrong)


class TestSynthetic:
    def test_text_and_rows_agree(self, tmp_path):
        write_text(Synthetic(3000, 5), tmp_path / "rows.tsv")
        source = CriteoText([tmp_path / "rows.tsv"])
        text = [source.parse(block) for block in source.blocks()]
        made = next(Synthetic(3000, 5).chunks())
        assert len(text) == 1
        for name in ("label", "numbers", "keys"):
            np.testing.assert_array_equal(getattr(text[0], name), getattr(made, name), err_msg=name)
        assert text[0].rejected.numbers.tolist() == []

    def test_text_that_is_there_stays(self, tmp_path):
        (tmp_path / "rows.tsv").write_text("mine")
        with pytest.raises(UserError, match=r"rows.tsv exists already; remove it or choose another --tsv"):
            write_text(Synthetic(10, 5), tmp_path / "rows.tsv")
        assert (tmp_path / "rows.tsv").read_text() == "mine"

    def test_a_longer_set_begins_with_the_shorter_one(self):
        short = list(Synthetic(CHUNK_ROWS + 10, 5).chunks())
        long = list(Synthetic(CHUNK_ROWS + 500, 5).chunks())
        np.testing.assert_array_equal(short[0].keys, long[0].keys)
        np.testing.assert_array_equal(short[1].numbers, long[1].numbers[:10])
        assert not np.array_equal(next(Synthetic(10, 6).chunks()).keys, short[0].keys[:10])

    def test_it_looks_like_criteo(self):
        rows = next(Synthetic(CHUNK_ROWS, 5).chunks())
        assert 0.2 < rows.label.mean() < 0.3
        counts = np.sort(np.unique(rows.keys[:, 2], return_counts=True)[1])[::-1]
        assert len(counts) > 10_000  # of ten million values
        assert counts[: len(counts) // 100].sum() > 0.5 * counts.sum()  # a hundredth of them takes half of the uses
        assert len(np.unique(rows.keys[:, 8])) == 3
        assert abs(np.isnan(rows.numbers[:, 11]).mean() - 0.77) < 0.02
        assert np.nanmin(rows.numbers[:, 1]) < 0


def test_the_command(command, in_process, tmp_path):
    assert in_process(preprocess, "synthetic", "--rows", 500, "--tsv", "rows.tsv")[0] == 0
    done = command("hostdev.data.preprocess", "criteo", "rows.tsv", "--out", "out", "--threshold", 1, "--dense", "log")
    assert done.returncode == 0, done.stderr
    assert "training and" in done.stdout
    assert manifest.read(tmp_path / "out").options["threshold"] == 1
    options = ["--rows", 500, "--out", "direct", "--threshold", 1, "--dense", "log"]
    assert in_process(preprocess, "synthetic", *options)[0] == 0
    for split in ("train", "test"):
        for a, b in zip(read(tmp_path / "out", split), read(tmp_path / "direct", split), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["criteo", "nowhere", "--out", "out"], "nowhere: no such file"),
        (["criteo", "empty", "--out", "out"], "empty: the file is empty"),
        (["criteo", "columns", "--out", "out"], "columns:2: 3 columns, not 40"),
        (["criteo", "label", "--out", "out"], "label:1: label is '2', not 0 or 1"),
        (["criteo", "hex", "--out", "out"], "hex:1: C1 is 'xyz', not 8 hexadecimal digits or empty"),
        (["criteo", "columns", "--out", "out", "--bogus"], "unrecognized arguments: --bogus"),
        (
            ["criteo", "columns", "--out", "out", "--threshold", "1", "--hash-buckets", "5"],
            "--threshold has no effect with --hash-buckets",
        ),
        (["criteo", "columns"], "required: --out"),
        (["synthetic", "--rows", "5", "--tsv", "x", "--dense", "log"], "--dense has no effect with --tsv"),
        (["synthetic", "--rows", "0", "--tsv", "x"], "--rows must be at least 1, not 0"),
        (["synthetic", "--rows", "5", "--out", "empty"], "empty exists already"),
        ([], "required: table|query|criteo|synthetic"),
    ],
)
def test_wrong_input_gets_one_line(in_process, tmp_path, arguments, message):
    (tmp_path / "empty").touch()
    (tmp_path / "columns").write_text(line() + "\n1\t2\t3\n")
    (tmp_path / "label").write_text(line("2") + "\n")
    (tmp_path / "hex").write_text(line("0", [], ["xyz"]) + "\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, error = in_process(preprocess, *arguments)
    assert code == 2
    assert error.count("\n") == 1
    assert error.startswith("hostdev.data.preprocess: error: ")
    assert message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_debug_shows_the_traceback(command):
    assert "Traceback" in command("hostdev.data.preprocess", "criteo", "nowhere", "--out", "out", "--debug").stderr


def test_the_real_sample(criteo_sample, tmp_path):
    found = build(CriteoText([criteo_sample]), tmp_path / "out", Options(threshold=10))
    assert found.statistics["rejected"] == 0
    assert found.rows("train") + found.rows("test") == 100_000
    _, dense, cat = read(tmp_path / "out", "train")
    assert dense.max() == 1
    assert cat.min() >= 13
    assert cat.max() == found.vocabulary_size - 1
