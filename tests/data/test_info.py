"""preprocess info: its figures are those of an obvious count over all rows; its picture; what it refuses."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from hostdev import UserError
from hostdev.core import memory, pictures
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess import info, info_output, stored
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.kernels.pool import set_host_threads
from tests.data import twins
from tests.data.test_manifest import VERSION_1
from tests.manifests import edit_manifest
from tests.test_shards import rewrite


def rows(n=700):
    """Rows without chance: missing numbers, values that are rare, new in test rows, or shared by two columns."""
    return {
        "y": [i % 3 % 2 for i in range(n)],
        "x": [None if i % 7 == 0 else (i % 11) / 7 - 0.5 for i in range(n)],
        "z": [i // 5 for i in range(n)],
        "word": [f"w{i * i % 53 if i % 30 != 9 else i}" for i in range(n)],
        "item": [f"item {i * 37 % 101 % (i % 40 + 1) if i % 20 != 9 else i}" for i in range(n)],
        "seen": [[f"item {(i + k) % 60}" for k in range(i % 7)] for i in range(n)],
        "split": ["test" if i % 10 == 9 else "train" for i in range(n)],
    }


def made(folder, name, **options):
    path = twins.write_arrow(folder / f"{name}.arrow", rows())
    twins.build_table(
        path,
        folder / name,
        label="y",
        numeric=("x", "z"),
        categorical=("word", "item"),
        bags=(("seen", None),),
        share=(("seen", "item"),),
        test_column=("split", "test"),
        options=Options(**{"threshold": 3, "rows_per_shard": 90, "test_fraction": None, **options}),
    )
    forget_missing(folder / name)
    return folder / name


def forget_missing(folder):
    """Make a data set one of before it was counted what is missing."""
    edit_manifest(folder, lambda content: content["statistics"].pop("missing"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The same table with a vocabulary and with hashed ids; tests must not change them."""
    folder = tmp_path_factory.mktemp("tables")
    return {"words": made(folder, "words"), "hashed": made(folder, "hashed", threshold=None, hash_buckets=64)}


def ids_of(rows, column):
    """The ids of a column in rows as `twins.read` has them."""
    places = {"word": lambda row: [row[2][0]], "item": lambda row: [row[2][1]], "seen": lambda row: row[3][0]}
    return [one for row in rows for one in places[column](row)]


@pytest.mark.parametrize("kind", ["words", "hashed"])
@pytest.mark.parametrize(("most_rows", "threads"), [(stored.MOST_ROWS, 1), (37, 3)])
def test_the_figures(tables, monkeypatch, kind, most_rows, threads):
    monkeypatch.setattr(stored, "MOST_ROWS", most_rows)
    set_host_threads(threads)
    folder = tables[kind]
    found = info.gather(folder)
    fixed = found.found.schema.first_value
    train, test = (twins.read(folder, split) for split in ("train", "test"))
    for split, of_split in (("train", train), ("test", test)):
        totals = found.totals[split]
        label, dense = np.array([row[0] for row in of_split]), np.array([row[1] for row in of_split])
        assert totals.label_mean(0) == label.mean()
        parts = [label[(np.arange(len(label)) * info.PLACES // len(label)) == i] for i in range(info.PLACES)]
        assert totals.rows.tolist() == list(map(len, parts))
        assert totals.labels[0].tolist() == [int(part.sum()) for part in parts]
        assert totals.zeros.tolist() == (dense == 0).sum(axis=0).tolist()
        np.testing.assert_allclose(totals.sums, dense.sum(axis=0), rtol=1e-12)
        assert totals.low.tolist() == dense.min(axis=0).tolist()
        assert totals.high.tolist() == dense.max(axis=0).tolist()
        for i, name in enumerate(("word", "item", "seen")):
            ids = ids_of(of_split, name)
            assert totals.uses[i] == len(ids)
            assert totals.out[i] == sum(one < fixed for one in ids)
    for i, columns in enumerate((["word"], ["item", "seen"], ["item", "seen"])):
        uses = Counter(one for name in columns for one in ids_of(train, name) if one >= fixed)
        name = ("word", "item", "seen")[i]
        assert found.totals["test"].seen[i] == sum(uses[one] > 0 for one in ids_of(test, name))
        some = kind == "words" and name != "seen"
        assert not some or 0 < found.totals["test"].seen[i] < found.totals["test"].uses[i]
        check_curve(found.curves[columns[0]], sorted(uses.values(), reverse=True))


def check_curve(curve, counts):
    total = sum(counts)
    assert curve.ids == len(counts)
    np.testing.assert_allclose(curve.top, [sum(counts[:n]) / total for n in info.TOPS], rtol=1e-12)
    for n, part in ((curve.half, 0.5), (curve.most, 0.9)):
        assert sum(counts[:n]) >= part * total - 1e-9
        assert sum(counts[: n - 1]) < part * total - 1e-9
    np.testing.assert_allclose(curve.shares, [counts[rank - 1] / total for rank in curve.ranks], rtol=1e-12)
    assert (curve.ranks[0], curve.ranks[-1]) == (1, len(counts))


@pytest.mark.parametrize("counts", [[5], [1, 1], [0, 3, 0, 1], [7, 1, 2, 9, 4, 4, 0, 1, 1, 1], list(range(5000))])
@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_a_curve(counts, dtype):
    check_curve(info.make_curve(np.array(counts, dtype)), sorted((n for n in counts if n), reverse=True))


@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_a_curve_of_no_uses(counts):
    curve = info.make_curve(np.array(counts, np.int64))
    assert (curve.ids, curve.half, curve.most, len(curve.ranks), curve.top.tolist()) == (0, 0, 0, 0, [0, 0, 0, 0])


def test_hashed_ids_are_counted_as_many_columns_at_once_as_fit(tables, monkeypatch):
    whole = info.gather(tables["hashed"])
    passes = []
    each = stored.each_shard
    monkeypatch.setattr(info, "each_shard", lambda *args: passes.append(args[3]) or each(*args))
    monkeypatch.setattr(info, "available_bytes", lambda: 0)  # so that it is one at a time
    found = info.gather(tables["hashed"])
    assert passes[2:] == ["counting ids of 1 columns", "comparing ids of 1 columns"] * 2
    assert found.totals["test"].seen.tolist() == whole.totals["test"].seen.tolist()
    for name, curve in whole.curves.items():
        for value, other in zip(vars(curve).values(), vars(found.curves[name]).values(), strict=True):
            np.testing.assert_array_equal(value, other)


def test_too_little_memory(tables, tmp_path, monkeypatch):
    build(Synthetic(50, 1), tmp_path / "data", Options(threshold=None, hash_buckets=2**45))
    with pytest.raises(
        UserError, match=r"data: counting its 35,184,372,088,832 ids needs .* of host memory are free; use a machine"
    ):
        info.gather(tmp_path / "data")
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    with pytest.raises(UserError, match=r"words: counting its \d+ ids needs .*, but 100 bytes of host memory"):
        info.gather(tables["words"])


def test_version_1():
    """Whose each id is stands in the vocabulary alone there."""
    found = info.gather(VERSION_1)
    train = twins.read(VERSION_1, "train")
    assert sum(curve.ids for curve in found.curves.values()) == 191 - 39
    for i, name in enumerate(found.found.schema.ids):
        uses = Counter(row[2][i] for row in train if row[2][i] >= 39)
        check_curve(found.curves[name], sorted(uses.values(), reverse=True))


def test_what_is_printed(tables):
    folder = tables["words"]
    lines = list(info_output.format_lines(info.gather(folder)))
    on_disk = [
        memory.format_bytes(sum(path.stat().st_size for path in (folder / split).iterdir()))
        for split in ("train", "test")
    ]
    assert lines[0] == f"data     {folder}: 2 numeric columns, 3 columns with ids, 91 ids"
    assert lines[2:5] == [
        "split               rows   shards     on disk   label mean",
        f"train                630        7{on_disk[0]:>12}       33.33%",
        f"test                  70        1{on_disk[1]:>12}       32.86%",
    ]
    assert lines[6].split() == ["zeros", "mean", "min", "max"]
    assert lines[7] == "numeric, scaled  train   test   train    test    train     test   train    test"
    assert [line.split()[0] for line in lines[8:10]] == ["x", "z"]
    assert lines[11].endswith(" ids that have")
    assert [line.split()[0] for line in lines[13:16]] == ["word", "item", "seen"]
    assert lines[16] == "item, seen share ids, so their ids and training uses of the top are counted together"
    assert not any("missing" in line for line in lines)


def test_hashed_ids_are_never_out_of_vocabulary(tables):
    text = "\n".join(info_output.format_lines(info.gather(tables["hashed"])))
    assert text.splitlines()[0].endswith(" with ids, 68 ids, hashed")
    assert "vocabulary" not in text


def test_missing_values_where_the_manifest_has_them(tmp_path, in_process):
    folder = made(tmp_path, "own")
    rates = {"train": {"x": 0.25, "z": 0, "word": 0.125}, "test": {"x": 0.5, "word": 1}}
    edit_manifest(folder, lambda content: content["statistics"].update(missing=rates))
    code, out, _ = in_process(preprocess, "info", folder, "--out", "mine.png")
    lines = out.splitlines()
    assert code == 0
    assert lines[-1] == "picture  mine.png"
    assert lines[8].split()[:3] == ["x", "25.0%", "50.0%"]
    assert lines[9].split()[:3] == ["z", "0.0%", "-"]
    assert lines[13].split()[3:5] == ["12.5%", "100.0%"]
    assert lines[14].split()[3:5] == ["-", "-"]


def test_the_command(tables, tmp_path, in_process):
    code, out, err = in_process(preprocess, "info", tables["words"])
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "picture  info.png"
    assert pictures.new_path("info") == Path("info-2.png")
    png = (tmp_path / "info.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def drawn(monkeypatch, folder, tmp_path):
    """The figure that is drawn of a data set."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **options: figures.append(figure) or save(figure, *args, **options)
    )
    info_output.draw(info.gather(folder), tmp_path / "x.png")
    return figures[0]


@pytest.mark.parametrize(("features", "numbers"), [(1, 0), (7, 2), (60, 60)])
def test_the_picture(monkeypatch, tmp_path, features, numbers):
    """Every panel with something in it, as many curves as there are features, names that do not touch."""
    names = [f"feature_with_a_long_name_{i}" for i in range(features)]
    columns = {"y": [i % 2 for i in range(60)]}
    columns |= {name: [f"v{i % (k + 2)}" for i in range(60)] for k, name in enumerate(names)}
    columns |= {f"x{k}": [float(i % 3) for i in range(60)] for k in range(numbers)}
    path = twins.write_arrow(tmp_path / "t.arrow", columns)
    numeric = tuple(f"x{k}" for k in range(numbers))
    twins.build_table(
        path, tmp_path / "data", label="y", numeric=numeric, categorical=tuple(names), options=Options(threshold=0)
    )
    forget_missing(tmp_path / "data")
    figure = drawn(monkeypatch, tmp_path / "data", tmp_path)
    titles = [axes.get_title() for axes in figure.axes]
    rates = ["Numeric columns: zeros, including missing values"] * (numbers > 0)
    assert titles == ["Label mean by position", "Frequency curves", *rates, "Ids of the test rows"]
    curves, coverage = figure.axes[1], figure.axes[-1]
    assert len([line for line in curves.get_lines() if len(line.get_xdata())]) == features
    assert len(curves.get_legend().get_texts()) == min(features, 7)
    assert len(coverage.patches) == 2 * features
    for axes in figure.axes[2:]:
        boxes = sorted((label.get_window_extent() for label in axes.get_xticklabels()), key=lambda box: box.x0)
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
    box = figure.bbox
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert box.x0 <= legend.x0
        assert legend.x1 <= box.x1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "taken.png"], "--out taken.png exists; choose another file"),
        (["--out", "x.jpg"], "--out x.jpg must be a .png, .pdf or .svg file in a folder that exists"),
        (["--out", "no/x.png"], "--out no/x.png must be a .png, .pdf or .svg file in a folder that exists"),
        (["--threshold", "3"], "unrecognized arguments: --threshold 3 (see hostdev.data.preprocess --help)"),
    ],
)
def test_wrong_options(tables, tmp_path, in_process, flags, message):
    (tmp_path / "taken.png").write_text("mine")
    code, out, err = in_process(preprocess, "info", tables["words"], *flags)
    assert (code, out, err) == (2, "", f"hostdev.data.preprocess: error: {message}\n")
    assert (tmp_path / "taken.png").read_text() == "mine"


def test_a_damaged_data_set_is_refused(own_data, in_process, tmp_path):
    rewrite(own_data, lambda table: table.set_column(0, "label", [[0.5] * 200]).cast(table.schema))
    code, out, err = in_process(preprocess, "info", own_data)
    assert (code, out) == (2, "")
    assert "train/part-00001.arrow: 200 labels not 0 or 1, the first in row 0: 0.5; preprocess" in err
    assert not (tmp_path / "info.png").exists()
    (own_data / "train/part-00001.arrow").unlink()
    assert "part-00001.arrow: it is missing; preprocess" in in_process(preprocess, "info", own_data)[2]
    (own_data / "vocabulary.arrow").write_bytes(b"")
    assert "vocabulary.arrow: it has a wrong checksum" in in_process(preprocess, "info", own_data)[2]


def test_no_data_set(tmp_path, in_process):
    code, _, err = in_process(preprocess, "info", tmp_path)
    assert code == 2
    assert "is not a data set: it has no manifest.json" in err


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("names", [("_id",), ("_id", "x"), ("$x^$", "x"), ("a$b_$c",), ("\u65b0", "x")])
def test_names_that_are_no_formulas_and_no_hints(tmp_path, monkeypatch, names):
    saved = []
    save = pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, out: (saved.append(figure), save(figure, out)))
    columns = {"y": [i % 2 for i in range(60)], **{name: [i % 7 for i in range(60)] for name in names}}
    path = twins.write_parquet(tmp_path / "t.parquet", columns)
    twins.build_table(path, tmp_path / "d", label="y", categorical=names, options=Options(threshold=0))
    info_output.draw(info.gather(tmp_path / "d"), tmp_path / "info.png")
    texts = [text.get_text().strip() for axes in saved[0].axes for text in axes.get_legend().get_texts()]
    assert {text.partition(":")[0] for text in texts} >= set(names)
