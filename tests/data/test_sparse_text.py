"""LIBSVM, libffm and slots: found by their lines, with columns of lists or numbers, also in serving."""

import numpy as np
import pytest

from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.inputs import open_input
from hostdev.data.preprocess.sparse_text import find_kind
from hostdev.data.preprocess.unlabelled import rows_in
from hostdev.data.shards import ShardReader


def prepare(path, out, *flags):
    arguments = ["table", path, "--out", out, "--threshold", 0, "--test-fraction", 0, *flags]
    assert cli.run(preprocess.PROG, preprocess.main, list(map(str, arguments))) == 0
    found = manifest.read(out)
    [batch] = ShardReader(out, found, "train").batches(1 << 20)
    [part] = rows_in(path, Encoding(found, out / found.vocabulary), found.options).parts()
    np.testing.assert_array_equal(part.batch.ids, batch.ids)
    np.testing.assert_array_equal(part.batch.dense, batch.dense)
    for name, (values, lengths) in batch.bags.items():
        np.testing.assert_array_equal(part.batch.bags[name][0], values)
        np.testing.assert_array_equal(part.batch.bags[name][1], lengths)
    return found, batch


def test_libsvm_of_ones_and_zeros(tmp_path):
    rng = np.random.default_rng(0)
    rows = [sorted(rng.choice(200, rng.integers(1, 9), replace=False).tolist()) for _ in range(300)]
    lines = [f"{1 if i % 3 else -1:+d} {' '.join(f'{index}:1' for index in row)} 900:0" for i, row in enumerate(rows)]
    (tmp_path / "a.svm").write_text("\n".join(lines) + "\n")
    assert find_kind(open_input(tmp_path / "a.svm")) == "LIBSVM"
    found, batch = prepare(
        tmp_path / "a.svm", tmp_path / "d", "--label", "label", "--positive", ">0", "--bag", "features"
    )
    assert batch.bags["features"][1].tolist() == list(map(len, rows))
    assert found.schema.spaces[0].values == len({index for row in rows for index in row})
    assert batch.label.mean() == pytest.approx(2 / 3, abs=0.01)


def test_libsvm_of_numbers(tmp_path):
    (tmp_path / "a.svm").write_text("".join(f"{i % 2} 1:{i}.5 2:7 {'3:2.5' if i % 4 else ''}\n" for i in range(1, 50)))
    flags = ("--label", "label", "--numeric", "1,3", "--categorical", "2")
    found, batch = prepare(tmp_path / "a.svm", tmp_path / "d", *flags)
    np.testing.assert_allclose(batch.dense[:, 0], (np.arange(1, 50) + 0.5) / 49.5, rtol=1e-6)
    np.testing.assert_allclose(batch.dense[:, 1], [1.0 if i % 4 else 0.0 for i in range(1, 50)])
    assert found.statistics["dense_max"] == [49.5, 2.5]


def test_libffm(tmp_path, capsys):
    (tmp_path / "a.ffm").write_text("".join(f"{i % 2} 0:{i % 5}:1 1:{i % 7}:0.5 1:{i % 3}:0.5\n" for i in range(200)))
    flags = ("--label", "label", "--bag", "field 0", "--bag", "field 1")
    found, batch = prepare(tmp_path / "a.ffm", tmp_path / "d", *flags)
    assert [space.values for space in found.schema.spaces] == [5, 7]
    assert set(batch.bags["field 1"][1].tolist()) == {2}
    assert "nonzero values are read as 1, because lists of ids have no weights" in capsys.readouterr().err


def test_slots(tmp_path):
    lines = [f"click:{i % 2} 1:{i % 9} 2:{i % 4} 2:{i % 6}" + (" 3:x" if i % 3 == 0 else "") for i in range(300)]
    lines[100] = "click:1 1:3 77:5"
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
    flags = ("--label", "click", "--bag", "1", "--bag", "2", "--bag", "3")
    found, batch = prepare(tmp_path / "a.txt", tmp_path / "d", *flags)
    assert batch.bags["3"][1].tolist() == [int(i % 3 == 0) for i in range(300)]
    assert found.statistics["rejected"] == 0


def test_a_column_that_the_first_mib_has_not(tmp_path, monkeypatch):
    monkeypatch.setattr("hostdev.data.preprocess.sparse_text.HEAD_BYTES", 2000)
    lines = [f"click:{i % 2} 1:{i % 9}" for i in range(1000)]
    lines[700], lines[800] = "click:1 1:3 77:5", "what is this"
    (tmp_path / "a.txt").write_text("\n".join(lines))
    code = cli.run(preprocess.PROG, preprocess.main, ["table", str(tmp_path / "a.txt"), "--out", str(tmp_path / "d"),
                                                      "--label", "click", "--bag", "1"])  # fmt: skip
    assert code == 0
    shown = [line.split("\t") for line in (tmp_path / "d" / "rejected.tsv").read_text().splitlines()]
    assert [line[1:3] for line in shown] == [
        [n, "not in slots format, or has a column that does not occur in the first MiB"] for n in ("701", "801")
    ]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "1\t2:3\n", "1 a b\n", "y x\n1 3:1\n", "12:30 13:45\n", "a:b c:d\n"])
def test_other_text_is_no_sparse_text(tmp_path, text):
    (tmp_path / "t.txt").write_text(text)
    assert find_kind(open_input(tmp_path / "t.txt")) is None
