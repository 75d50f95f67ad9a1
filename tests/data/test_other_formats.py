"""Files that are no tables as they are: one in a .zip file is read; others are named, with the way round."""

import pickle
import sqlite3
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.orc
import pytest

from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess

TEXT = "y,c\n" + "".join(f"{i % 2},v{i % 5}\n" for i in range(3000))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_the_one_table_of_a_zip_file(tmp_path, in_process, method):
    """As the plain file, whatever lies beside it by macOS's doing; a folder with several of them, too."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("folder/t.csv", TEXT)
        archive.writestr("__MACOSX/folder/._t.csv", b"\0")
        archive.writestr("folder/.DS_Store", b"\0")
    (tmp_path / "t.csv").write_text(TEXT)
    flags = ("--label", "y", "--categorical", "c")
    for source, out in (("t.csv", "plain"), ("a.zip", "zip")):
        assert in_process(preprocess, "table", tmp_path / source, "--out", out, *flags)[0] == 0
    plain, found = (manifest.read(tmp_path / out) for out in ("plain", "zip"))
    assert plain.identity == found.identity
    assert found.sources[0]["member"] == "folder/t.csv"
    (tmp_path / "in").mkdir()
    (tmp_path / "a.zip").rename(tmp_path / "in" / "a.zip")
    assert in_process(preprocess, "table", tmp_path / "in", "--out", "folder", *flags)[0] == 0
    assert manifest.read(tmp_path / "folder").identity == plain.identity


def test_zip_files_that_are_refused(tmp_path, refused):
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a.csv", TEXT)
        archive.writestr("b.csv", TEXT)
    assert "two.zip: the .zip file must have a single file, but has a.csv, b.csv; unpack" in refused("two.zip")
    with zipfile.ZipFile(tmp_path / "book.xlsx", "w") as archive:
        archive.writestr("[Content_Types].xml", "<x/>")
        archive.writestr("xl/workbook.xml", "<x/>")
    assert "book.xlsx: this is an Excel workbook; save the sheet as CSV" in refused("book.xlsx")
    np.savez(tmp_path / "a.npz", y=np.zeros(3), c=np.zeros(3))
    assert "a.npz: this is NumPy's .npz; write its arrays as Parquet" in refused("a.npz")
    content = bytearray((tmp_path / "two.zip").read_bytes())
    (tmp_path / "cut.zip").write_bytes(content[: len(content) // 2])
    assert "cut.zip: the .zip file cannot be read (" in refused("cut.zip")
    with zipfile.ZipFile(tmp_path / "one.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.csv", TEXT)
    content = bytearray((tmp_path / "one.zip").read_bytes())
    content[len(content) // 3] ^= 0xFF
    (tmp_path / "one.zip").write_bytes(content)
    assert "one.zip" in refused("one.zip")


def test_formats_that_are_named(tmp_path, refused):
    frame = pd.DataFrame({"y": [0, 1], "c": ["a", "b"]})
    pyarrow.orc.write_table(pa.Table.from_pandas(frame), tmp_path / "t.orc")
    (tmp_path / "t.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    (tmp_path / "t.xls").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100))
    np.save(tmp_path / "t.npy", np.zeros(3))
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (y)")
    connection.close()
    (tmp_path / "t.tfrecord").write_bytes((40).to_bytes(8, "little") + b"\x8a\x01\xf0\x02" + b"\n\x26" + bytes(42))
    for protocol in (2, 3, 4, 5):
        (tmp_path / f"t{protocol}.pkl").write_bytes(pickle.dumps({"a": 1}, protocol))
    for name, what in (
        (
            "t.orc",
            "this is ORC, which is not supported; write it as Parquet, such as pandas.read_orc(...).to_parq",
        ),
        ("t.h5", "this is HDF5"),
        ("t.tfrecord", "this is TFRecord, which is not supported; write its examples as Parquet"),
        ("t.xls", "this is an Excel workbook, which is not supported; save the sheet as CSV"),
        ("t.npy", "this is a NumPy array"),
        (
            "t.db",
            "this is a SQLite database, which is not supported; write a query's rows as CSV, such as sqlite3",
        ),
        *((f"t{protocol}.pkl", "this is a pickle") for protocol in (2, 3, 4, 5)),
    ):
        assert f"{name}: {what}" in refused(name)
