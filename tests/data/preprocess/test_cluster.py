"""A preparation on a cluster: the bytes of one machine, for any source and option."""

import bz2
import gzip
import random
from dataclasses import replace
from pathlib import Path

import distributed
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.core.errors import UserError
from hostdev.core.keys import RAW
from hostdev.data.preprocess import delimited, learning, sparse_text
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.cluster.prepare import prepare
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.earlier_vocabulary import read_earlier
from hostdev.data.preprocess.reading import ReadSettings
from hostdev.data.preprocess.scaling import ColumnScaling
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.schema import Targets
from tests.data.preprocess.clusters import files_of, local_cluster

BLOCK = 60_000


@pytest.fixture(scope="module")
def scheduler():
    with local_cluster() as address:
        yield address


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Make blocks, hash ranges and groups so small that there are several of each."""
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(sparse_text, "_BLOCK", 3000)
    monkeypatch.setattr(learning, "RANGE_SHARE", 2e-6)
    monkeypatch.setattr(learning, "GROUP_VALUES", 50)
    monkeypatch.setattr(learning, "SURVEYS", 3)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Criteo text with malformed lines and without a line end at its end."""
    path = tmp_path_factory.mktemp("text") / "rows.tsv"
    write_text(Synthetic(3000, 3), path)
    lines = path.read_bytes().splitlines(keepends=True)
    for i in (3, 700, 701, 2500):
        lines[i] = b"1\tx\n"
    path.write_bytes(b"".join(lines).removesuffix(b"\n"))
    return path


def same(source, tmp_path, options, scheduler, **how):
    """Make a data set on one machine and on the cluster; compare all bytes. Return the folder."""
    build(source(), tmp_path / "one", options, threads=2, **how)
    made = prepare(source(), tmp_path / "many", options, scheduler, **how)
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    return made


@pytest.mark.parametrize(
    "options",
    [
        Options(threshold=1, dense="standard", rows_per_shard=500),
        Options(threshold=0, dense="log", validation_fraction=0.2),
        pytest.param(Options(threshold=None, hash_buckets=1000, rows_per_shard=700), marks=pytest.mark.slow),
        Options(threshold=None, hash_buckets=RAW, test_fraction=0.3),
    ],
    ids=["vocabulary", "validation", "hashed", "raw"],
)
def test_criteo(text, tmp_path, options, scheduler):
    made = same(lambda: CriteoText([text], block_bytes=BLOCK), tmp_path, options, scheduler)
    assert made.statistics["rejected"] == 4


def test_workers_leave_no_file_open(text, tmp_path, scheduler):
    """Removed files would keep their space, and on NFS their folder could not be removed."""
    same(lambda: CriteoText([text], block_bytes=BLOCK), tmp_path, Options(threshold=1), scheduler)
    with distributed.Client(scheduler, set_as_default=False) as client:
        maps = client.run(lambda: Path("/proc/self/maps").read_text())
    assert maps
    assert not [line for each in maps.values() for line in each.splitlines() if str(tmp_path) in line]


def test_files_of_criteo_plain_and_compressed(text, tmp_path, scheduler):
    content = text.read_bytes()
    (tmp_path / "b.gz").write_bytes(gzip.compress(content))
    (tmp_path / "c.bz2").write_bytes(bz2.compress(content))
    files = [text, tmp_path / "b.gz", text, tmp_path / "c.bz2"]
    made = same(lambda: CriteoText(files, block_bytes=BLOCK), tmp_path, Options(threshold=8), scheduler)
    assert made.statistics["rejected"] == 16


@pytest.mark.slow
def test_synthetic_rows(tmp_path, scheduler):
    same(lambda: Synthetic(70_000, 5), tmp_path, Options(threshold=3, dense="standard"), scheduler)


def csv_rows(n, seed=1):
    """Rows with a value over several lines, quotes, bags and labels that are numbers."""
    rng = random.Random(seed)

    def word():
        return f"v{int(rng.paretovariate(0.5)) % 300}"

    rows = ["y,z,x,u,c,g,w,t"]
    for i in range(n):
        bag = "|".join(f"{word()}:{rng.uniform(0, 3):.3f}" for _ in range(rng.randrange(4)))
        quoted = f'"{word()}\n""{i % 3}"""' if i % 7 == 0 else word()
        number = "" if i % 11 == 0 else f"{rng.lognormvariate(0, 3):.6g}"
        rows.append(f"{i % 2},{rng.uniform(-5, 5):.5f},{number},{rng.randrange(-4, 4)},{quoted},{bag},{i % 3 + 1},{i}")
    return "\n".join(rows) + "\n"


WEIGHTED = TableOptions(
    label="y",
    numeric=("x", "u"),
    categorical=("c", "t"),
    bags=(("g", "|"),),
    share=(("g", "c"),),
    features={"g": ReadSettings(weights=":")},
    scaling={"x": ColumnScaling(mode="standard", clip=(0.05, 0.9))},
    thresholds={"t": 0},
    targets=Targets(more=("z",), numeric=("z",), weight="w"),
)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_table_with_quotes_bags_weights_and_several_labels(tmp_path, scheduler, hashed):
    (tmp_path / "t.csv").write_text(csv_rows(900))
    how = {"threshold": None, "hash_buckets": 99} if hashed else {"threshold": 1}
    options = Options(dense="max", rows_per_shard=200, **how)
    columns = replace(WEIGHTED, thresholds={}) if hashed else WEIGHTED
    same(lambda: TableSource([tmp_path / "t.csv"], columns), tmp_path, options, scheduler)


def test_splits_by_column_and_by_file(tmp_path, scheduler):
    """Rows that are not drawn: pieces are written at once, and the numbers of malformed lines are added later."""
    lines = csv_rows(800).splitlines(keepends=True)
    lines[300] = "no row\n"
    (tmp_path / "a.csv").write_text("".join(lines))
    (tmp_path / "b.csv").write_text(csv_rows(200, seed=2))
    plain = {"label": "y", "numeric": ("x",), "categorical": ("c",)}
    options = Options(threshold=0, test_fraction=None, rows_per_shard=300)
    for number, columns in enumerate(
        (
            TableOptions(**plain, test_after=("t", "600"), validation_after=("t", "500")),
            TableOptions(**plain, test_files=(str(tmp_path / "b.csv"),)),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = same(lambda columns=columns: TableSource([tmp_path / "a.csv"], columns), folder, options, scheduler)
        assert made.statistics["rejected"] == 1


def test_drawn_validation_rows_among_those_that_a_column_leaves(tmp_path, scheduler):
    (tmp_path / "a.csv").write_text(csv_rows(800))
    columns = TableOptions(label="y", categorical=("c",), test_after=("t", "600"))
    options = Options(threshold=0, test_fraction=None, validation_fraction=0.2)
    same(lambda: TableSource([tmp_path / "a.csv"], columns), tmp_path, options, scheduler)


def test_other_forms_of_text(tmp_path, scheduler):
    """Without quotes in windows; in another encoding and compressed, in order; LIBSVM."""
    rng = np.random.default_rng(1)
    rows = [f"{i % 2}\t{rng.integers(90)}\tä{rng.integers(200)}\n" for i in range(900)]
    (tmp_path / "a.tsv").write_text("y\tx\tc\n" + "".join(rows))
    (tmp_path / "b.tsv").write_text("y\tx\tc\n" + "".join(rows), encoding="latin-1")
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress((tmp_path / "a.tsv").read_bytes()))
    sparse = [f"{i % 2} " + " ".join(f"{j}:1" for j in sorted({*rng.integers(1, 80, 5).tolist()})) for i in range(900)]
    (tmp_path / "d.svm").write_text("\n".join(sparse) + "\n")
    plain = {"label": "y", "numeric": ("x",), "categorical": ("c",)}
    for name, columns in (
        ("a.tsv", TableOptions(**plain, quotes=False)),
        ("b.tsv", TableOptions(**plain, encoding="latin-1")),
        ("c.tsv.gz", TableOptions(**plain)),
        ("d.svm", TableOptions(label="label", bags=(("features", None),))),
    ):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        same(
            lambda name=name, columns=columns: TableSource([tmp_path / name], columns),
            folder,
            Options(threshold=1),
            scheduler,
        )


def arrow_table(n, seed=0):
    rng = np.random.default_rng(seed)
    words = [f"w{value}" for value in rng.zipf(1.3, n) % 400]
    lists = [[int(v) for v in rng.integers(0, 50, k)] for k in rng.integers(0, 5, n)]
    return pa.table(
        {
            "y": rng.integers(0, 2, n),
            "x": rng.normal(size=n),
            "c": words,
            "g": lists,
            "d": pa.array(words).dictionary_encode(),
        }
    )


def test_parquet_and_arrow_files(tmp_path, scheduler):
    table = arrow_table(3000)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=250)
    pq.write_table(arrow_table(500, 1), tmp_path / "b.parquet")
    with pa.ipc.new_file(tmp_path / "c.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=400)
    with pa.ipc.new_stream(tmp_path / "d.arrows", table.schema) as file:
        file.write_table(table, max_chunksize=400)
    columns = TableOptions(label="y", numeric=("x",), categorical=("c", "d"), bags=(("g", None),))
    for number, names in enumerate((["a.parquet", "b.parquet"], ["c.arrow"], ["d.arrows", "a.parquet"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = [tmp_path / name for name in names]
        options = Options(threshold=1, dense="standard", rows_per_shard=1000)
        same(lambda files=files: TableSource(files, columns), folder, options, scheduler)


@pytest.mark.parametrize("frozen", [False, True])
def test_ids_of_an_earlier_data_set(tmp_path, scheduler, frozen):
    columns = TableOptions(label="y", numeric=("x",), categorical=("c", "d"), bags=(("g", None),), share=(("d", "c"),))
    for day in range(3):
        pq.write_table(arrow_table(900, day), tmp_path / f"{day}.parquet", row_group_size=200)
    options = Options(threshold=1, dense="standard")
    build(TableSource([tmp_path / "0.parquet"], columns), tmp_path / "day0", options)
    earlier = read_earlier(tmp_path / "day0")
    build(TableSource([tmp_path / "1.parquet"], columns), tmp_path / "day1", options, earlier=earlier)
    again = read_earlier(tmp_path / "day1", frozen=frozen)  # its id spaces have several segments
    made = same(lambda: TableSource([tmp_path / "2.parquet"], columns), tmp_path, options, scheduler, earlier=again)
    assert "known_shares" in made.statistics


def test_criteo_with_the_ids_of_an_earlier_data_set(text, tmp_path, scheduler):
    write_text(Synthetic(1500, 9), tmp_path / "before.tsv")
    options = Options(threshold=1)
    build(CriteoText([tmp_path / "before.tsv"]), tmp_path / "before", options)
    earlier = read_earlier(tmp_path / "before")
    same(lambda: CriteoText([text], block_bytes=BLOCK), tmp_path, options, scheduler, earlier=earlier)


def test_padding_is_told(tmp_path, scheduler):
    rows = "".join(f"{i % 2},{'|'.join(['0'] * 5 + [str(i % 9 + 1)])}\n" for i in range(600))
    (tmp_path / "t.csv").write_text("y,g\n" + rows)
    columns = TableOptions(label="y", bags=(("g", "|"),))
    made = same(lambda: TableSource([tmp_path / "t.csv"], columns), tmp_path, Options(threshold=1), scheduler)
    assert made.statistics["padded"]["g"][0] == "0"


def test_relative_paths_are_shown_as_they_were_given(text, tmp_path, scheduler, monkeypatch):
    """Rejected lines name the file with the user's text, wherever a worker runs."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.tsv").write_bytes(text.read_bytes())
    monkeypatch.chdir(tmp_path / "in")
    same(lambda: CriteoText([Path("rows.tsv")], block_bytes=BLOCK), tmp_path, Options(threshold=8), scheduler)
    assert (tmp_path / "many" / "rejected.tsv").read_text().startswith("rows.tsv\t4\t")


def broken(tmp_path, name):
    """Files with an error, and their columns."""
    rows = csv_rows(900).splitlines(keepends=True)
    columns = TableOptions(label="y", numeric=("x",), categorical=("c",), bags=(("g", "|"),))
    if name == "unclosed":
        rows[-1] = '1,1,1,1,"open,a:1,1,5\n'
    elif name == "many malformed":
        rows[400:600] = ["x\n"] * 200
    elif name == "early and late":
        rows[50:70] = ["x\n"] * 20
        rows[-1] = '1,1,1,1,"open,a:1,1,5\n'
    elif name == "positive":
        columns = TableOptions(label="y", positive=">7", categorical=("c",))
    elif name == "weights":
        columns = WEIGHTED
        rows[500:560] = [row.replace(":", "?") for row in rows[500:560]]
    else:
        columns = TableOptions(label="y", categorical=("c",))
        rows[700] = "1,1,1,1,1,a:1,1,\xe4\n"
    path = tmp_path / "t.csv"
    path.write_bytes("".join(rows).encode("latin-1"))
    return lambda: TableSource([path], columns)


@pytest.mark.parametrize("name", ["unclosed", "many malformed", "early and late", "positive", "weights", "encoding"])
def test_errors_are_those_of_one_machine(tmp_path, scheduler, name):
    source, options = broken(tmp_path, name), Options(threshold=1)
    with pytest.raises(UserError) as one:
        build(source(), tmp_path / "out", options, threads=1)
    with pytest.raises(UserError) as many:
        prepare(source(), tmp_path / "out", options, scheduler)
    assert str(many.value) == str(one.value)
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_a_wrong_row_has_its_number_in_the_file(tmp_path, scheduler):
    table = arrow_table(3000)
    values = [0.0] * 3000
    values[2345] = 1e300
    pq.write_table(pa.table({"y": table["y"], "c": values}), tmp_path / "t.parquet", row_group_size=250)
    columns = TableOptions(label="y", categorical=("c",))
    with pytest.raises(UserError) as one:
        build(TableSource([tmp_path / "t.parquet"], columns), tmp_path / "out", Options(), threads=1)
    with pytest.raises(UserError) as many:
        prepare(TableSource([tmp_path / "t.parquet"], columns), tmp_path / "out", Options(), scheduler)
    assert str(many.value) == str(one.value)
    assert "row 2346" in str(one.value)
