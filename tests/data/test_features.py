"""How single features are read: blanks, lists as text, marks of missing values, the file of --features."""

import json
import shlex

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.reading import ReadSettings
from hostdev.data.preprocess.scaling import select
from hostdev.data.preprocess.unlabelled import rows_in
from hostdev.data.shards import ShardReader


@pytest.fixture
def prepared(tmp_path, in_process):
    """Run `preprocess table`; return the folder, the manifest, and what was printed."""

    def run(*arguments, out="d"):
        code, printed, error = in_process(preprocess, "table", *arguments, "--out", out)
        assert code == 0, error
        return tmp_path / out, manifest.read(tmp_path / out), printed

    return run


def read_all(folder, found, split="train"):
    """Return all rows of a split as one batch."""
    [batch] = ShardReader(folder, found, split).batches(1 << 20)
    return batch


def encoding_in(folder, found):
    return Encoding(found, folder / found.vocabulary)


def assert_served_alike(folder, found, path):
    """The rows of a file have the ids and numbers that the data set has for them, whose order is the file's."""
    [part] = rows_in(path, encoding_in(folder, found), found.options).parts()
    there = read_all(folder, found)
    assert part.places is None
    np.testing.assert_array_equal(part.batch.ids, there.ids)
    np.testing.assert_array_equal(part.batch.dense.view(np.uint32), there.dense.view(np.uint32))
    for name, (values, lengths) in there.bags.items():
        np.testing.assert_array_equal(part.batch.bags[name][0], values)
        np.testing.assert_array_equal(part.batch.bags[name][1], lengths)


def write_rows(path, header, rows):
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_blanks_at_edges_make_no_other_value(tmp_path, prepared):
    """In ids, bags, --test-column, tabs and blanks outside ASCII alike; a data set of before keeps its blanks."""
    users = ["u1", " u1", "u1 ", "\tu1", "u1\u00a0", "u2"]
    rows = [f'{i % 2},"{users[i % 6]}",a| b,{" t " if i >= 54 else "n"}' for i in range(60)]
    path = write_rows(tmp_path / "t.csv", "y,u,g,s", rows)
    roles = ("--label", "y", "--categorical", "u", "--bag", "g=|", "--test-column", "s=t", "--threshold", 0)
    folder, found, _ = prepared(path, *roles)
    assert found.options["trimmed"] is True
    assert [space.values for space in found.schema.spaces] == [2, 2]
    assert found.rows("test") == 6
    assert len(np.unique(read_all(folder, found).ids)) == 2
    one = {"u": ["u1", " u1", "u1\u2003"], "g": [["a"], ["a "], [" a"]]}
    encoded = encoding_in(folder, found).encode(pa.RecordBatch.from_pydict(one))
    assert len(np.unique(encoded.ids)) == len(np.unique(encoded.bags["g"][0])) == 1

    # A data set that an earlier version made has no such option; a later one that takes its ids reads as it did.
    content = json.loads((folder / "manifest.json").read_text())
    del content["options"]["trimmed"], content["sha256"]
    content["sha256"] = manifest.json_checksum(content)
    (folder / "manifest.json").write_text(json.dumps(content))
    old = manifest.read(folder)
    kept = encoding_in(folder, old).encode(pa.RecordBatch.from_pydict(one))
    assert len(np.unique(kept.ids)) == 2  # "u1" and out of vocabulary
    flags = ("--vocabulary", folder, "--test-fraction", 0, "--threshold", 0)
    _, later, _ = prepared(path, *flags, out="later")
    assert "trimmed" not in later.options
    assert later.schema.spaces[0].values == 2 + 4


LISTS = {
    "[1, 2, 3]": ["1", "2", "3"],
    "1,2 ,3": ["1", "2", "3"],
    "['1', '2']": ["1", "2"],
    '["a b", "c, d"]': ["a b", "c, d"],
    "['it''s, x', 2, None]": ["its, x", "2"],
    "[]": [],
    "": [],
    " [ 7 ] ": ["7"],
    "[8": ["[8"],
    "x]": ["x]"],
    "[it's, 5]": ["it's", "5"],
    "['a','b']": ["a", "b"],
}


def test_lists_written_as_text(tmp_path, prepared):
    """As Python, JSON and numpy print them; also with the separator inside quotes; the same in serving."""
    texts = list(LISTS)
    reading = ReadSettings(separator=",")
    codes, values, lengths = reading.bags(pa.array(texts))
    ends = np.cumsum(lengths)
    shown = [values.take(pa.array(codes[end - n : end])).to_pylist() for end, n in zip(ends, lengths, strict=True)]
    assert dict(zip(texts, shown, strict=True)) == LISTS
    table = pa.table({"y": [i % 2 for i in range(48)], "g": texts * 4})
    pq.write_table(table, tmp_path / "t.parquet")
    flags = ("--label", "y", "--bag", "g=,", "--threshold", 0, "--test-fraction", 0)
    folder, found, _ = prepared(tmp_path / "t.parquet", *flags)
    assert_served_alike(folder, found, tmp_path / "t.parquet")
    known = pa.chunked_array([manifest.arrow_files.read_table(folder / "vocabulary.arrow")["value"]]).to_pylist()
    assert set(known) - {None} == {value for each in LISTS.values() for value in each}
    _, spaced, _ = prepared(write_rows(tmp_path / "n.csv", "y,g", ["1,[1 2  3]", "0,[2]"]), *flags[:2], "--bag", "g= ",
                            "--threshold", 0, "--test-fraction", 0, out="n")  # fmt: skip
    assert spaced.schema.spaces[0].values == 3


def test_marks_of_missing_values(tmp_path, prepared):
    """In numbers, ids, bags and labels; typed columns too; rows without a label are set aside with line and reason."""
    rows = [f"{i % 2},{i},u{i % 5},a|b" for i in range(400)]
    rows[10], rows[20], rows[30], rows[40] = "?,1,u1,a", r"1,\N,u1,a", "1,-1,?,a", r"1,5,u1,a|?|\N"
    path = write_rows(tmp_path / "t.csv", "y,x,u,g", rows)
    flags = ("--label", "y", "--numeric", "x", "--categorical", "u", "--bag", "g=|", "--threshold", 0)
    marks = ("--missing", r"?,\N,-1", "--test-fraction", 0)
    folder, found, printed = prepared(path, *flags, *marks)
    assert f"1 row could not be read: {'d'}/rejected.tsv lists them with file, line and reason" in printed
    [line] = (folder / "rejected.tsv").read_text().splitlines()
    assert line.split("\t") == [str(path), "12", "column 'y': the value is missing", "y=?, x=1, u=u1, g=a"]
    assert found.statistics["missing"]["train"] == {"x": 2 / 399, "u": 1 / 399}
    assert found.statistics["bag_values"]["g"]["train"] == 2 * 399 - 2 - 1
    read = read_all(folder, found)
    assert read.dense[19, 0] == read.dense[29, 0] == 0
    assert_served_alike(folder, found, write_rows(tmp_path / "s.csv", "y,x,u,g", rows[:10] + rows[11:]))
    typed = pa.table({"y": [1, 0, -1] * 200, "x": [1.5, -1.0, 3.0] * 200, "u": [7, -1, 9] * 200})
    pq.write_table(typed, tmp_path / "t.parquet")
    with pytest.raises(
        AssertionError, match="200 rows cannot be read, more than 1% of all; the first is .*:3: column "
    ):
        prepared(tmp_path / "t.parquet", *flags[:6], *marks, out="e")
    pq.write_table(typed.set_column(0, "y", pa.array([1, 0, 1] * 200)), tmp_path / "t.parquet")
    folder, found, _ = prepared(tmp_path / "t.parquet", *flags[:6], *marks, out="e")
    assert found.statistics["missing"]["train"] == {"x": 1 / 3, "u": 1 / 3}
    assert_served_alike(folder, found, tmp_path / "t.parquet")


def test_rows_that_cannot_be_read_are_set_aside(tmp_path, prepared, in_process):
    """Up to one in a hundred; whatever the block in which they are; the rest is as if they were not there."""
    rows = [f"{i % 2},{i},u{i % 7},{i}" for i in range(1000)]
    clean = [row for i, row in enumerate(rows) if i not in (3, 500, 501, 999)]
    rows[3], rows[500], rows[501], rows[999] = "maybe,1,u1,1", "1,five,u1,1", "1,1,u1,", ",,,"
    flags = ("--label", "y", "--numeric", "x", "--categorical", "u", "--test-after", "t=900", "--threshold", 0)
    folder, found, _ = prepared(write_rows(tmp_path / "t.csv", "y,x,u,t", rows), *flags)
    _, twin, _ = prepared(write_rows(tmp_path / "clean.csv", "y,x,u,t", clean), *flags, out="clean")
    assert [found.train, found.test] == [twin.train, twin.test]
    shown = [line.split("\t") for line in (folder / "rejected.tsv").read_text().splitlines()]
    assert [int(line[1]) for line in shown] == [5, 502, 503, 1001]
    assert "'maybe' is not 0 or 1" in shown[0][2]
    assert shown[1][2].startswith("column 'x': 'five' is not a number; a missing number is empty, NA")
    assert shown[2][2].startswith("column 't': the value is missing")
    assert shown[3][2] == "column 'y': the value is missing"
    rows[4:12] = ["?,1,u1,1"] * 8
    code, _, error = in_process(
        preprocess, "table", write_rows(tmp_path / "t.csv", "y,x,u,t", rows), "--out", "e", *flags
    )
    assert code == 2
    assert "12 rows cannot be read, more than 1% of all; the first is" in error


def test_a_header_in_the_middle_of_a_file(tmp_path, prepared):
    rows = [f"yes,u{i % 7}" for i in range(150)] + ["y,u"] + [f"no,u{i % 7}" for i in range(150)]
    flags = ("--label", "y", "--categorical", "u", "--positive", "yes", "--test-fraction", 0)
    folder, found, _ = prepared(write_rows(tmp_path / "t.csv", "y,u", rows), *flags)
    assert found.rows("train") == 300
    assert found.statistics["label_mean"]["train"] == 0.5
    [line] = (folder / "rejected.tsv").read_text().splitlines()
    assert line.split("\t")[1:] == ["152", "a repeated header", "y,u"]


FEATURES = r"""
label = "y"
missing = ["?"]

[features.price]
kind = "numeric"
scaling = "log"

[features.clipped]
kind = "numeric"
column = "price"
scaling = "max"
clip = [0.0, 0.9]

[features.plain]
kind = "numeric"
column = "x"

[features.price_id]
kind = "categorical"
column = "price"
threshold = 3

[features.user]
kind = "categorical"
threshold = 0
buckets = 4

[features.history]
kind = "bag"
separator = "|"
missing = ["0"]
length = 2
end = "first"
share = "item"

[features.item]
kind = "categorical"
threshold = 0
"""


def test_a_file_of_features(tmp_path, prepared):
    """Each setting, against what NumPy makes of the same columns; the same in serving, by file and by dict."""
    rng = np.random.default_rng(1)
    n = 500
    price, x = rng.integers(1, 60, n), rng.normal(0, 2, n).round(3)
    user, item = rng.integers(0, 100, n), rng.integers(1, 9, n)
    history = [[0] * int(rng.integers(0, 3)) + rng.integers(1, 9, rng.integers(0, 5)).tolist() for _ in range(n)]
    price[5] = 10_000
    rows = [
        f"{i % 2},{price[i] if i % 50 else '?'},{x[i]},u{user[i]},{item[i]},{'|'.join(map(str, history[i]))}"
        for i in range(n)
    ]
    path = write_rows(tmp_path / "t.csv", "y,price,x,user,item,history", rows)
    (tmp_path / "f.toml").write_text(FEATURES)
    folder, found, _ = prepared(path, "--features", tmp_path / "f.toml", "--dense", "standard", "--test-fraction", 0)
    read = read_all(folder, found)
    known = np.arange(n) % 50 != 0
    expected = np.zeros((n, 3))
    expected[known, 0] = np.log1p(price[known]) / np.log1p(price[known].max())
    limit = np.quantile(price[known], 0.9, method="lower")
    expected[known, 1] = np.minimum(price[known], limit) / limit
    expected[:, 2] = (x - x.mean()) / x.std()
    assert found.schema.dense == ("price", "clipped", "plain")
    np.testing.assert_allclose(read.dense, expected, rtol=2e-6, atol=1e-7)
    assert found.statistics["dense_clip"] == {"clipped": [float(price[known].min()), float(limit)]}
    spaces = {space.name: space for space in found.schema.spaces}
    _, counts = np.unique(price[known], return_counts=True)
    assert spaces["price_id"].values == np.count_nonzero(counts > 3) + 1  # with the missing value
    assert spaces["user"].values == 4
    lists = [[value for value in one if value][:2] for one in history]
    np.testing.assert_array_equal(read.bags["history"][1], list(map(len, lists)))
    by_item = dict(zip(item.tolist(), read.ids[:, found.schema.ids.index("item")].tolist(), strict=True))
    flat = [value for one in lists for value in one]
    assert read.bags["history"][0].tolist() == [by_item[value] for value in flat]
    assert_served_alike(folder, found, path)
    encoding = encoding_in(folder, found)
    assert encoding.columns() == ["price", "x", "user", "item", "history"]
    some = {"price": [7, 8], "x": [0.5, 1.5], "user": ["u1", "u2"], "item": [3, 4], "history": [[1, 0, 2, 3], []]}
    served = encoding.encode(pa.RecordBatch.from_pydict(some))
    assert served.bags["history"][1].tolist() == [2, 0]
    _, again, _ = prepared(path, "--features", tmp_path / "f.toml", "--dense", "standard", "--test-fraction", 0,
                           "--threads", 1, out="again")  # fmt: skip
    assert again.identity == found.identity
    _, later, _ = prepared(path, "--vocabulary", folder, "--test-fraction", 0, out="later")
    np.testing.assert_array_equal(read_all(tmp_path / "later", later).dense, read.dense)
    assert later.options["features"] == found.options["features"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[features.u]\nkind = 'categorical'\ntreshold = 3", "feature 'u': 'treshold' is not a key of a categorical"),
        ("[features.u]\nkind = 'id'", "feature 'u': kind is 'id'; it must be one of numeric, categorical, vector, bag"),
        ("[features.u]\ncolumn = 'v'", "feature 'u': kind is missing"),
        ("[features.u]\nkind = 'numeric'\nlength = 3", "'length' is not a key of a numeric feature"),
        ("[features.u]\nkind = 'bag'\nlength = 0", "feature 'u': length must be at least 1, not 0"),
        ("[features.u]\nkind = 'bag'\nend = 'middle'", "feature 'u': end must be one of first, last, not 'middle'"),
        (
            "[features.u]\nkind = 'numeric'\nclip = [0.9]",
            "clip must be two quantiles, such as [0.001, 0.999], not ",
        ),
        ("[features.u]\nkind = 'numeric'\nclip = [0.9, 0.1]", "0 <= low < high <= 1, not [0.9, 0.1]"),
        ("[features.u]\nkind = 'numeric'\nscaling = 'cube'", "scaling must be one of max, log, standard, not 'cube'"),
        ("[features.u]\nkind = 'categorical'\nmissing = [0]", "the values of missing must be quoted strings"),
        ("[features.u]\nkind = 'categorical'\nmissing = 0", "missing must be a list"),
        ("[features.u]\nkind = 'categorical'\nthreshold = true", "threshold must be an integer, not True"),
        ("[features]\nu = 3", "feature 'u': write its settings as [features.NAME]"),
        ("label = 'y'", "the file has no features"),
        ("decimal = ';'\n[features.u]\nkind = 'categorical'", "decimal must be one of . ,, not ';'"),
        ("features.u = ", "the file is not TOML: Invalid value (at end of document)"),
        ("lable = 'y'\n[features.u]\nkind = 'bag'", "'lable' is not a key; did you mean label?"),
        ("[features.u]\nkind = 'categorical'\ncolumn = 'v'", "has no column 'v'; it has y, u"),
        ("label = 'u'\n[features.u]\nkind = 'categorical'", "--label and label in "),
    ],
)
def test_wrong_files_of_features(tmp_path, refused, text, message):
    (tmp_path / "t.csv").write_text("y,u\n1,a\n0,b\n")
    (tmp_path / "f.toml").write_text(text)
    assert message in refused("t.csv", "--features", "f.toml", columns=())


def test_flags_that_a_file_of_features_replaces(tmp_path, refused):
    (tmp_path / "t.csv").write_text("y,u\n1,a\n0,b\n")
    (tmp_path / "f.toml").write_text("[features.u]\nkind = 'categorical'\nthreshold = 1")
    both = refused("t.csv", "--features", "f.toml")
    assert "--categorical has no effect with --features" in both
    hashed = refused("t.csv", "--features", "f.toml", "--hash-buckets", 8, columns=())
    assert "threshold of feature 'u' has no effect with --hash-buckets" in hashed
    assert "--features missing.toml: the file cannot be read" in refused(
        "t.csv", "--features", "missing.toml", columns=()
    )


def test_encodings_line_ends_and_first_lines(tmp_path, prepared):
    """All are the same table: cp1252, UTF-16, carriage returns alone, title lines, Hive's separator, decimal commas."""
    rows = [f"{i % 2};{i % 5},{i % 10};é{i % 3}" for i in range(300)]
    text = "\n".join(["y;x;u", *rows]) + "\n"
    flags = ("--label", "y", "--numeric", "x", "--categorical", "u", "--decimal", ",", "--test-fraction", 0)
    given = {
        "utf-8": (text.encode(), ["--delimiter", ";"]),
        "cp1252": (text.encode("cp1252"), ["--delimiter", ";", "--encoding", "cp1252"]),
        "utf-16": (text.encode("utf-16"), ["--delimiter", ";", "--encoding", "utf-16"]),
        "returns": (text.replace("\n", "\r").encode(), ["--delimiter", ";"]),
        "title": (b"made by\nsomebody\n" + text.encode(), ["--delimiter", ";", "--skip-lines", "2"]),
        "hive": (text.replace(";", "\x01").encode(), ["--delimiter", r"\x01"]),
    }
    identities = set()
    for name, (content, how) in given.items():
        (tmp_path / f"{name}.csv").write_bytes(content)
        folder, found, _ = prepared(tmp_path / f"{name}.csv", *flags, *how, out=name)
        identities.add(found.identity)
        assert_served_alike(folder, found, tmp_path / f"{name}.csv")
    assert len(identities) == 1
    assert found.statistics["dense_max"] == [4.9]


def test_a_large_file_with_carriage_returns(tmp_path, prepared, monkeypatch):
    monkeypatch.setattr("hostdev.data.preprocess.delimited.BLOCK_BYTES", 1000)
    rows = [f"{i % 2},u{i % 7}" for i in range(5000)]
    flags = ("--label", "y", "--categorical", "u", "--test-fraction", 0)
    _, plain, _ = prepared(write_rows(tmp_path / "t.csv", "y,u", rows), *flags)
    (tmp_path / "r.csv").write_bytes(("\r".join(["y,u", *rows])).encode())
    _, found, _ = prepared(tmp_path / "r.csv", *flags, out="r")
    assert found.identity == plain.identity


@pytest.mark.parametrize(
    ("content", "how", "message"),
    [
        ("y,u\n1,é\n0,b\n".encode("latin-1"), [], "is not UTF-8; give the file's encoding, such as --encoding latin-1"),
        ("y,u\n1,é\n0,b\n".encode("latin-1"), ["--encoding", "ascii"], "is not ascii; choose another --encoding"),
        (b"y,u\n1,a\n", ["--encoding", "klingon"], "--encoding klingon: unknown to Python"),
        ("y,u\n1,a\n".encode("utf-16"), [], "the file is UTF-16; give --encoding utf-16"),
        (b"y,u\n1,a\n", ["--skip-lines", "-1"], "--skip-lines must be at least 0"),
        (b"y,u\n1,a\n", ["--skip-lines", "9"], "the file is empty"),
        (b"y,u\n1,a\n", ["--delimiter", r"\xzz"], "write the character's code with two hexadecimal digits"),
        (
            b"y,u\n1,a\n",
            ["--padding", "u=0"],
            "--padding, --last and --bag-weights apply only to --bag columns, but 'u' is not one",
        ),
        (b"y,u\n1,a\n", ["--bag", "g=|", "--last", "g=x"], "--last g=x: write it as NAME=N"),
    ],
)
def test_wrong_ways_to_read(tmp_path, refused, content, how, message):
    (tmp_path / "t.csv").write_bytes(content)
    assert message in refused("t.csv", *how, columns=("--categorical", "u"))


def test_spark_files_without_a_suffix(tmp_path, prepared):
    (tmp_path / "in").mkdir()
    for number in range(2):
        rows = [f"{i % 2},u{i % 7}" for i in range(number, 200, 2)]
        write_rows(tmp_path / "in" / f"part-{number:05d}", "y,u", rows)
    (tmp_path / "in" / "_SUCCESS").write_text("")
    _, found, _ = prepared(tmp_path / "in", "--label", "y", "--categorical", "u", "--test-fraction", 0)
    assert found.rows("train") == 200


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_quantiles_are_exact(dtype):
    rng = np.random.default_rng(0)
    numbers = np.concatenate([rng.normal(0, 1e3, 5000), [0.0, -0.0, 1e30, -1e-30, np.nan]]).astype(dtype)
    numbers = numbers.astype(np.float64)
    parts = np.array_split(rng.permutation(numbers), 7)
    quantiles = [0.0, 0.001, 0.5, 0.999, 1.0]
    known = numbers[~np.isnan(numbers)]
    assert select(lambda: iter(parts), quantiles) == [np.quantile(known, q, method="lower") for q in quantiles]
    assert select(lambda: iter([np.array([np.nan])]), quantiles) is None


@pytest.mark.parametrize("missing", ["", "NA", "None"])
def test_the_error_about_missing_labels_has_a_query_that_works(in_process, tmp_path, missing):
    """Names and values are quoted for SQL, and the query for a shell."""
    lines = [f"{i % 2 if i % 3 else missing},u{i % 5}" for i in range(300)]
    (tmp_path / "it's.csv").write_text("\n".join(["group,user", *lines]) + "\n")
    flags = ["--label", "group", "--categorical", "user", "--out", "data"]
    code, _, error = in_process(preprocess, "table", "it's.csv", *flags)
    assert code == 2 and "100 rows cannot be read, more than 1% of all" in error
    command = shlex.split(error.split("to leave out such rows: ")[1])
    assert command[:3] == ["hostdev", "preprocess", "query"]
    code, _, error = in_process(preprocess, "query", command[3], *flags)
    assert code == 0 and sum(manifest.read(tmp_path / "data").rows(split) for split in ("train", "test")) == 200, error
