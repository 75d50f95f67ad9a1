"""Check of a source of rows."""

import itertools

import pyarrow as pa

from hostdev.data.preprocess.row_source import RecordBatches

_MOST_ROWS = 100_000


def check_source(rows: RecordBatches) -> None:
    """Check what `RowSource.open` returns.

    The rows must be the same each time, from any row on, and with any of the columns; the manifest's entry must be
    plain values.

    Raises:
        AssertionError: A promise is broken.
    """
    import json

    assert isinstance(rows, RecordBatches), f"{rows!r} must be a RecordBatches of hostdev.data.preprocess.row_source"
    assert rows.names and len(set(rows.names)) == len(rows.names), f"{rows.name}: names occur twice: {rows.names}"
    json.dumps(rows.describe()), json.dumps(rows.fingerprint())
    whole = _read(rows, rows.names, 0)
    assert len(whole), f"{rows.name} has no rows"
    assert whole.schema.equals(rows.schema), f"{rows.name}: batches have the schema {whole.schema}, not {rows.schema}"
    for first in sorted({0, 1, len(whole) // 2, len(whole) - 1, len(whole)}):
        rest = _read(rows, rows.names, first)
        assert rest.equals(whole.slice(first)), f"{rows.name}: batches from row {first} on differ from those of before"
    for names in (rows.names[:1], rows.names[::-1]):
        some = _read(rows, names, 0)
        assert some.equals(whole.select(list(names))), f"{rows.name}: batches of the columns {names} have other values"
    again = rows.fingerprint()
    assert again == rows.fingerprint(), f"{rows.name}: the fingerprint changes though the rows do not"


def _read(rows: RecordBatches, names: tuple[str, ...], first: int) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    for batch in itertools.islice(rows.batches(names, first), _MOST_ROWS):
        assert isinstance(batch, pa.RecordBatch), f"{rows.name}: batches must yield pyarrow.RecordBatch, not {batch!r}"
        assert tuple(batch.schema.names) == tuple(names), f"{rows.name}: a batch has {batch.schema.names}, not {names}"
        batches.append(batch)
        if sum(map(len, batches)) > _MOST_ROWS:
            break
    return pa.Table.from_batches(batches, pa.schema([rows.schema.field(name) for name in names])).slice(0, _MOST_ROWS)
