"""Indexes of FAISS over the rows of a checkpoint, each with a file of the ids and names of its positions."""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hostdev.checkpoint.folder import Chain
from hostdev.core.errors import HostdevError, UserError
from hostdev.core.memory import require_memory
from hostdev.core.printable import printable
from hostdev.core.progress import bar, counted
from hostdev.ext.neighbours.search import NamedRows, OpenedCheckpoint, find_nearest, open_source, score
from hostdev.kernels.arrays import Values

LIST = "indexes.json"
LINKS, BUILD_WIDTH, SEARCH_WIDTH = 32, 200, 64  # HNSW's parameters M, efConstruction and efSearch
BOUND = 1e-5  # maximum difference from exact scores, for rows of length 1
_CHECKED, _NEAREST = 16, 10  # rows that are searched for to check an index, and neighbours of each


class FaissOptions(NamedTuple):
    """The options of an export to FAISS; `table` None selects all embedding tables, `column` None all columns."""

    table: str | None
    column: str | None
    kind: str
    metric: str


def import_faiss() -> Any:
    """Return the module; raise UserError if it is not installed."""
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise UserError(
            f"--format faiss needs FAISS, and {error.name} is not installed; pip install 'hostdev[faiss]'"
        ) from None
    return faiss


def write(options: FaissOptions, chain: Chain, out: Path) -> list[str]:
    """Write an index and a file of names for each set of rows, and a list of the indexes; return lines to print."""
    faiss = import_faiss()
    source = open_source(chain[-1].path)
    chosen = choose_rows(source, options)
    entries, lines = [], []
    with bar(sum(map(len, chosen)), "exporting", "row", unit_scale=True) as progress:
        for rows in chosen:
            entry, recall = _write_index(faiss, options, rows, out, progress)
            about = {
                "table": rows.table,
                "column": rows.space if rows.has_names else None,
                "step": chain[-1].manifest.step,
            }
            entries.append(entry | about)
            what = rows.table if not rows.has_names else f"{rows.table}, {rows.space}"
            checked = f"recall@{min(_NEAREST, len(rows))} {recall:.3f}, " if options.kind == "hnsw" else ""
            lines.append(
                f"{printable(what)}: {counted(len(rows), 'row')} x {rows.dim}, {options.kind}, {options.metric}; "
                f"{checked}scores within {BOUND:g} of exact ones"
            )
    (out / LIST).write_text(json.dumps(entries, indent=2) + "\n")
    return lines


def choose_rows(source: OpenedCheckpoint, options: FaissOptions) -> list[NamedRows]:
    """Return the rows of each index: one for each id space with names, otherwise one for the whole table.

    Raises:
        UserError: There is no such table or column, or no rows.
    """
    tables = source.vector_tables() if options.table is None else [source.find_table(options.table)]
    column = None if options.column is None else source.find_column(options.column)
    found = []
    for table in tables:
        if column is not None:
            source.require_columns(table, f"--column {column.name}")
        if not source.has_columns(table):
            found.append(source.make_rows(table, None))
            continue
        spaces = [source.spaces[column.space]] if column is not None else list(source.spaces.values())
        if source.vocabulary is None:  # hashed ids: all columns have the same rows
            spaces = spaces[:1]
        found += [source.make_rows(table, space) for space in spaces]
    if not any(map(len, found)):
        raise UserError(f"{source.path} has no rows to export")
    return [rows for rows in found if len(rows)]


def _write_index(
    faiss: Any, options: FaissOptions, rows: NamedRows, out: Path, progress: Any
) -> tuple[dict[str, Any], float]:
    """Write the index and the names of `rows`, and check the index; return its entry in the list, and its recall."""
    need = len(rows) * (4 * rows.dim + (0 if options.kind == "flat" else 8 * LINKS + 16))
    require_memory(need, f"an index of {len(rows):,} rows", "choose a --column, or --index flat")
    name = quote(f"{rows.table}.{rows.space}" if rows.has_names else rows.table, safe=" ")
    if (out / f"{name}.faiss").exists():  # names with dots may have been joined to the same name
        name = f"{name}-{zlib.crc32(repr((rows.table, rows.space)).encode(errors='surrogatepass')):08x}"
    index, names = f"{name}.faiss", f"{name}.parquet"
    left_out = _fill(faiss, options, rows, out / index, out / names, progress)
    recall = _check(faiss, options, rows, out / index, out / names)
    entry: dict[str, Any] = {"index": index, "names": names, "rows": len(rows) - left_out, "dim": rows.dim}
    return entry | {"kind": options.kind, "metric": options.metric, "not_finite": left_out}, recall


def _make(faiss: Any, options: FaissOptions, rows: NamedRows) -> Any:
    """Return an empty index with memory reserved for all rows; otherwise, the index would copy its rows to grow."""
    metric = faiss.METRIC_L2 if options.metric == "l2" else faiss.METRIC_INNER_PRODUCT
    if options.kind == "flat":
        index = faiss.IndexFlat(rows.dim, metric)
        codes = index.codes
    else:
        index = faiss.IndexHNSWFlat(rows.dim, LINKS, metric)
        index.hnsw.efConstruction, index.hnsw.efSearch = BUILD_WIDTH, SEARCH_WIDTH
        codes = faiss.downcast_index(index.storage).codes
    codes.resize(len(rows) * 4 * rows.dim)
    codes.clear()  # this keeps the memory
    return index


def as_vectors(weights: Values, metric: str) -> Values:
    """Return rows as the index has them, float32 [n, D]: of length 1 for cosines (zeros stay zeros)."""
    if metric != "cosine":
        return np.ascontiguousarray(weights)
    wide = weights.astype(np.float64)
    lengths = np.sqrt(np.square(wide).sum(1, keepdims=True))
    return (wide / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def _fill(faiss: Any, options: FaissOptions, rows: NamedRows, path: Path, names: Path, progress: Any) -> int:
    """Write the index and the names, block by block; return how many rows were left out as they are not finite."""
    index, left_out = _make(faiss, options, rows), 0
    key = "key" if rows.is_by_key else "id"
    fields = [("position", pa.int64()), (key, pa.int64())]
    fields += [("column", pa.string()), ("value", pa.string())] if rows.has_names else []
    schema = pa.schema(fields)
    with names.open("xb") as file, pq.ParquetWriter(file, schema) as writer:
        for ids, weights in rows.blocks():
            kept = np.flatnonzero(np.logical_and.reduce(np.isfinite(weights), axis=1))
            left_out += len(ids) - len(kept)
            columns: dict[str, Any] = {"position": np.arange(index.ntotal, index.ntotal + len(kept)), key: ids[kept]}
            if rows.has_names:
                columns["column"] = pa.repeat(pa.scalar(rows.space, pa.string()), len(kept))
                columns["value"] = rows.names(ids).take(pa.array(kept))
            writer.write_table(pa.table(columns, schema))
            index.add(as_vectors(weights[kept], options.metric))
            progress.update(len(ids))
    with path.open("xb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # a file's name may be any bytes
    return left_out


def _check(faiss: Any, options: FaissOptions, rows: NamedRows, path: Path, names: Path) -> float:
    """Compare searches in the written index with exact ones for some rows; return the share of exact neighbours found.

    Raises:
        HostdevError: A score differs by more than `BOUND`, or a flat index finds other rows.
    """
    with path.open("rb") as file:
        index = faiss.read_index(faiss.PyCallbackIOReader(file.read))
    with names.open("rb") as file:
        ids = pq.read_table(file, columns=["key" if rows.is_by_key else "id"]).column(0).to_numpy()
    if not len(ids):
        return 1.0
    k = min(_NEAREST, len(ids))
    queries = rows.lookup(rows.pick(_CHECKED))
    queries = queries[np.isfinite(queries).all(axis=1) & queries.any(axis=1)]
    if not len(queries):
        return 1.0
    exact = find_nearest(rows, queries, k, options.metric, np.empty(0, np.int64))
    found, positions = index.search(as_vectors(queries, options.metric), k)
    wide, hits, bound = queries.astype(np.float64), 0, _bound(options.metric, queries)
    for number, (query, scores, at) in enumerate(zip(wide, found, positions, strict=True)):
        there = at >= 0  # HNSW may find fewer
        right = score(query, rows.lookup(ids[at[there]]).astype(np.float64), options.metric)
        best = exact.scores[number]
        if options.metric == "l2":  # FAISS returns squares
            right, best = np.square(right), np.square(best)
        hits += int(np.isin(ids[at[there]], exact.ids[number]).sum())
        is_wrong = np.abs(scores[there] - right) > bound
        if is_wrong.any() or (options.kind == "flat" and (np.abs(scores - best) > bound).any()):
            raise HostdevError(
                f"{path.name}: the index gives other scores than an exact search (a difference above {bound:g}); "
                "this is a fault of hostdev or of FAISS"
            )
    return hits / (k * len(queries))


def _bound(metric: str, queries: Values) -> float:
    """Return the largest difference allowed: BOUND, times the squared length of the longest query if above 1."""
    return BOUND if metric == "cosine" else BOUND * max(1.0, float(np.square(queries.astype(np.float64)).sum(1).max()))
