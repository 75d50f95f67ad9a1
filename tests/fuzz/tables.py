"""Changed inputs of `preprocess table` and `criteo`: text, Parquet and Arrow files, plain and compressed."""

import bz2
import gzip
import io
import shutil
import tarfile
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from hostdev.core import cli
from hostdev.data.preprocess import cli as preprocess
from tests.fuzz.datasets import TABLE, csv
from tests.fuzz.mutations import change_bytes

ROWS = 40
PIECES = [
    "liked",
    "age",
    "user",
    ",",
    "\n",
    "\r\n",
    '"',
    '""',
    "\t",
    "1",
    "0",
    "",
    " ",
    "1e400",
    "-1",
    "nan",
    "\0",
    "é",
    "'",
    "g1|g2",
    "|",
    "a" * 3000,
    ",," * 500,
    "\x1f",
    "2020-01-01",
    "\ufeff",
    ";",
    "\ud83d\ude00",
]
MORE = [[], [], ["--hash-buckets", 50], ["--positive", ">0"], ["--no-quotes"], ["--test-column", "kind=1"]]
FORMATS = {
    ".csv": None,
    ".tsv": None,
    ".parquet": None,
    ".arrow": None,
    ".stream": None,
    ".csv.gz": gzip.compress,
    ".csv.bz2": bz2.compress,
    ".csv.tar": None,
    ".txt": None,
}


def make(base: Path) -> None:
    """Write one table in each format."""
    text = csv(ROWS, 5).encode()
    table = arrow_csv.read_csv(io.BytesIO(text), convert_options=arrow_csv.ConvertOptions(strings_can_be_null=True))
    genres = pa.array([each.split("|") if each else [] for each in table["genres"].to_pylist()])
    table = table.set_column(table.schema.get_field_index("genres"), "genres", genres)
    for suffix, compress in FORMATS.items():
        path = base / f"t{suffix}"
        if suffix == ".parquet":
            pq.write_table(table, path, row_group_size=16)
        elif suffix in (".arrow", ".stream"):
            make_writer = pa.ipc.new_file if suffix == ".arrow" else pa.ipc.new_stream
            with make_writer(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=16)
        elif suffix == ".csv.tar":
            with tarfile.open(path, "w") as archive:
                member = tarfile.TarInfo("t.csv")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
        elif suffix == ".txt":
            line = "\t".join(["1", *map(str, range(13)), *(f"{i:08x}" for i in range(26))])
            path.write_text(f"{line}\n" * ROWS)
        else:
            content = text.replace(b",", b"\t") if suffix == ".tsv" else text
            path.write_bytes(compress(content) if compress else content)


def load(base: Path) -> None:
    """Prepare each file once."""
    for suffix in FORMATS:
        case = base.parent / f"load{suffix}"
        shutil.rmtree(case, ignore_errors=True)  # of a child before this one
        case.mkdir()
        assert _prepare(base / f"t{suffix}", suffix, case, []) == 0


def run(base: Path, case: Path, draw: Random) -> None:
    """Change one file, and prepare it."""
    suffix = draw.choice(list(FORMATS))
    content = (base / f"t{suffix}").read_bytes()
    if suffix in (".csv", ".tsv", ".txt") and draw.random() < 0.7:
        content = _change_text(content, draw)
    else:
        content = change_bytes(content, draw)
    if (compress := FORMATS[suffix]) and draw.random() < 0.5:
        content = compress(_change_text(csv(ROWS, 5).encode(), draw))
    path = case / f"in{suffix}"
    path.write_bytes(content)
    more = draw.choice(
        [[], [], ["--hash-buckets", 50], ["--positive", ">0"], ["--no-quotes"], ["--test-column", "kind=1"]]
    )
    _prepare(path, suffix, case, more if suffix != ".txt" else [])


def _change_text(content: bytes, draw: Random) -> bytes:
    lines = content.split(b"\n")
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(lines))
        values = lines[at].split(b"," if b"," in lines[at] else b"\t")
        values[draw.randrange(len(values))] = draw.choice(PIECES).encode(errors="surrogatepass")
        lines[at] = draw.choice([b",", b",", b"\t"]).join(values) if draw.random() < 0.9 else b""
    return b"\n".join(lines)


def _prepare(path: Path, suffix: str, case: Path, more: list) -> int:
    if suffix == ".txt":
        command = ["criteo", path, "--out", case / "out", "--threshold", 1]
    else:
        table = [each for each in TABLE if each != "genres=|"] if suffix in (".parquet", ".arrow", ".stream") else TABLE
        table = [*table[: table.index("--bag")], "--bag", "genres" if table is not TABLE else "genres=|"]
        counted = [] if "--hash-buckets" in more else ["--threshold", 1]
        command = ["table", path, "--out", case / "out", *table, *counted, *more]
    return cli.run(preprocess.PROG, preprocess.main, list(map(str, command)))
