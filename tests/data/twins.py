"""The obvious twin of `preprocess table`: rows as Python values, dictionaries, one value at a time."""

import csv
import gzip
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hostdev.data import manifest
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.shards import ShardReader

SEPARATOR = "|"


def text_of(value):
    """A categorical value as text without blanks at its edges; "" where it is missing."""
    return "" if value is None or value != value else str(int(value) if isinstance(value, float) else value).strip()


def encode(columns, test, *, dense, ids, bags, share=(), threshold=0, mode="max"):
    """The data set of columns {name: values}; returns spaces {name: [value]}, counts, and the encoded rows.

    test  bool of each row
    """
    owners = dict(share)
    n = len(test)
    names = [*ids, *bags]
    counts = {owners.get(name, name): Counter() for name in names}
    for row in range(n):
        for name in names:
            if not test[row]:
                counts[owners.get(name, name)].update(values_of(columns[name][row], name in bags))
    kept = {space: [value for value, uses in found.items() if uses > threshold] for space, found in counts.items()}
    number, oov, numbers = len(dense) + len(kept), {}, {}
    for i, (space, values) in enumerate(kept.items()):
        oov[space] = len(dense) + i
        for value in values:
            numbers[space, value] = number
            number += 1

    def id_of(name, value):
        space = owners.get(name, name)
        return numbers.get((space, value), oov[space])

    rows = []
    scales = {name: scale(columns[name], test, mode) for name in dense}
    for row in range(n):
        numbers_of_row = [scales[name](columns[name][row]) for name in dense]
        ids_of_row = [id_of(name, values_of(columns[name][row], False)[0]) for name in ids]
        bags_of_row = [[id_of(name, value) for value in values_of(columns[name][row], True)] for name in bags]
        rows.append((float(columns["label"][row]), numbers_of_row, ids_of_row, bags_of_row))
    return kept, counts, number, rows


def values_of(value, is_bag):
    if is_bag:
        return [text_of(one) for one in value or () if text_of(one) != ""]
    return [text_of(value)]


def scale(values, test, mode):
    """A function that scales one value."""
    known = [float(v) for v, t in zip(values, test, strict=True) if not t and v is not None and v == v]
    if mode == "standard":
        mean = math.fsum(known) / max(1, len(known))
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in known) / max(1, len(known)))
        if len(set(known)) <= 1:
            mean, deviation = (known or [0.0])[0], 1.0
        return lambda v: 0.0 if v is None or v != v else (v - mean) / deviation
    most = max([abs(v) for v in known], default=0.0)
    if mode == "max":
        return lambda v: 0.0 if v is None or v != v else v / (most or 1.0)
    return lambda v: 0.0 if v is None or v != v else math.copysign(math.log1p(abs(v)), v) / (math.log1p(most) or 1.0)


# Tables {name: values} as files; a list of values is a bag.


def write_text(path, columns, delimiter=",", quoting=csv.QUOTE_MINIMAL, header=True):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator="\n")
        if header:
            writer.writerow(columns)
        writer.writerows(zip(*map(cells, columns.values()), strict=True))
    return path


def cells(values):
    return [SEPARATOR.join(map(str, v)) if isinstance(v, list) else "" if v is None else v for v in values]


def write_parquet(path, columns, **options):
    pq.write_table(arrow_table(columns), path, **options)
    return path


def write_arrow(path, columns, rows_per_batch=None, stream=False):
    table = arrow_table(columns)
    writer = (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema)
    with writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
    return path


def arrow_table(columns):
    return pa.table({name: pa.array(values, from_pandas=False) for name, values in columns.items()})


def build_table(files, out, *, options=None, **table):
    """Build a data set; the threshold is 0 unless the options say otherwise."""
    files = [files] if isinstance(files, Path) else files
    options = options or Options(threshold=0, test_fraction=None)
    return build(TableSource(files, TableOptions(**table)), out, options)


def read(folder, split):
    """All rows of a split: (label, numbers, ids, bags) each, as Python values."""
    reader = ShardReader(folder, manifest.read(folder), split)
    rows = []
    for batch in reader.batches(7):
        bags = [np.split(values, np.cumsum(lengths)[:-1]) for values, lengths in batch.bags.values()]
        for i in range(len(batch)):
            of_row = [bag[i].tolist() for bag in bags]
            rows.append((float(batch.label[i]), batch.dense[i].tolist(), batch.ids[i].tolist(), of_row))
    return rows


def vocabulary(folder):
    """The vocabulary's rows: (field, value, count)."""
    table = pa.ipc.open_file(pa.OSFile(str(folder / "vocabulary.arrow"))).read_all()
    return [tuple(row.values()) for row in table.to_pylist()]
