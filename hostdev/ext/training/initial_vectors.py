"""Given vectors as initial values: a file with a vector for each value of a column, for --initial-vectors."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from hostdev.core.errors import UserError
from hostdev.core.initializers import GivenRows
from hostdev.core.progress import counted
from hostdev.data import manifest
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.files import TableFile, chunks, find_format
from hostdev.data.preprocess.inputs import open_input
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.opening import open_file
from hostdev.data.preprocess.reading import ReadSettings, own_settings
from hostdev.data.preprocess.vectors import WrongNumberError, require_numbers
from hostdev.data.schema import Schema
from hostdev.kernels.arrays import LongIds, Rows
from hostdev.models.model import Model
from hostdev.train.build import model_of
from hostdev.train.options import TrainConfig

_LARGEST = float(np.finfo(np.float32).max)


def make_model(settings: TrainConfig, schema: Schema) -> Model:
    """Return the model that the options select, with its initial vectors, as `model_of`."""
    return model_of(settings, schema, set_initial_vectors)


def set_initial_vectors(model: Model, settings: TrainConfig, schema: Schema) -> None:
    """Let the rows of a model's embedding tables begin with the vectors of --initial-vectors.

    The files are read when the tables are filled, once for all tables.

    Raises:
        UserError: A column does not exist or shares another column's ids, ids are hashed, there is no data set, or the
            model has a table whose rows are not the data's ids.
    """
    if settings.data is None:
        raise UserError("--initial-vectors needs a data set; give --data DIR")
    found = manifest.read(settings.data)
    by_name = {column.name: column for column in schema.columns}
    for name in settings.vector_files:
        if name not in by_name:
            raise UserError(
                f"--initial-vectors {name}: the data has no column of ids {name!r}; it has {listed(list(by_name))}"
            )
        if (owner := by_name[name].space) != name:
            raise UserError(f"--initial-vectors {name}: {name!r} shares the ids of {owner!r}; name {owner!r} instead")
        if own_settings(found.options).get(name, ReadSettings()).buckets is not None:
            raise UserError(
                f"--initial-vectors {name}: the values of {name!r} are hashed into buckets, which have no vectors of "
                "their own; preprocess the data without buckets"
            )
    if found.vocabulary is None:
        raise UserError("--initial-vectors needs a vocabulary, but the data's ids are hashed; leave out --hash-buckets")
    tables = {name: spec for name, spec in model.tables.items() if spec.dim > 1}
    for name, spec in tables.items():
        if spec.rows != schema.rows:
            raise UserError(
                f"--initial-vectors: table {name!r} of the model has {spec.rows:,} rows, which are not the data's "
                f"{schema.rows:,} ids; set the initial values in the model"
            )
    dims = sorted({spec.dim for spec in tables.values()})
    if len(dims) != 1:
        raise UserError(
            f"--initial-vectors needs embedding tables of one dimension above 1; the model's are {listed(dims)}"
        )
    load = cache(partial(_read_all, settings, found, dims[0]))  # read once for all tables
    model.tables = {
        name: replace(spec, init=GivenRows(spec.init, load)) if name in tables else spec
        for name, spec in model.tables.items()
    }


def _read_all(settings: TrainConfig, found: Manifest, dim: int) -> tuple[LongIds, Rows]:
    """Return the ids and vectors of all columns; values of a frozen column without a vector get zeros."""
    assert settings.data is not None and found.vocabulary is not None
    encoding = Encoding(found, settings.data / found.vocabulary)
    spaces = {space.name: space for space in found.schema.spaces}
    every_id, every_vector = [], []
    for name, path in settings.vector_files.items():
        ids, vectors = read_vectors(path, encoding, name, dim)
        space = spaces[name]
        about = "their rows begin as the model's others"
        known = counted(len(ids), "value")
        if name in settings.frozen_columns:
            about = "the others are zeros"
            every = np.concatenate([[space.oov], *(np.arange(first, first + size) for first, size in space.segments)])
            filled = np.zeros((len(every), dim), np.float32)
            filled[np.searchsorted(every, ids)] = vectors
            ids, vectors = every.astype(np.int64), filled
        print(f"vectors  {name}: {known} of {space.values:,} have a vector in {path}; {about}", flush=True)
        every_id.append(ids)
        every_vector.append(vectors)
    ids, vectors = np.concatenate(every_id), np.concatenate(every_vector)
    order = np.argsort(ids)
    return ids[order], np.ascontiguousarray(vectors[order])


def read_vectors(path: Path, encoding: Encoding, name: str, dim: int) -> tuple[LongIds, Rows]:
    """Read the vectors of a column's values.

    Args:
        path: A table in any format of `preprocess table`, with the column's values, and with a column of vectors or
            one column for each of their numbers.
        encoding: The data set's encoding, which maps values to ids.
        name: The column.
        dim: D, the number of numbers in a vector.

    Returns:
        The ids in the vocabulary, ascending, int64 [K], and their vectors, float32 [K, D]. Other values are left out.

    Raises:
        UserError: The file cannot be read, has other columns, or has a value twice; or a vector is missing, invalid,
            or of another length.
    """
    source = open_input(path)
    plain = {"columns": None, "delimiter": None, "quotes": True, "encoding": "utf-8", "skipped_lines": 0}
    file = open_file(source, find_format(source), **plain)  # type: ignore[arg-type]
    column = encoding.source(name)
    for one in file.names:
        if file.names.count(one) > 1:
            raise UserError(f"{path} has {file.names.count(one)} columns named {one!r}; keep one")
    if column not in file.names:
        raise UserError(f"{path} has no column {column!r} with the values of {name!r}; it has {listed(file.names)}")
    names, readings = _vector_columns(file, [one for one in file.names if one != column], dim)
    [out_of_vocabulary] = (space.oov for space in encoding.schema.spaces if space.name == name)
    every_id: list[LongIds] = []
    every_vector: list[Rows] = []
    for chunk in chunks(file, file.names):
        if len(chunk.rejected):
            raise UserError(f"{path} has malformed lines; correct them")
        try:
            numbers = require_numbers(names, readings, chunk.batch.column, len(chunk.batch))
        except WrongNumberError as error:
            raise UserError(
                f"{path}, row {chunk.number(error.row)}, column {error.column!r}: {error}; the tables have {dim} "
                "columns (--emb-dim)"
            ) from None
        if len(wrong := np.flatnonzero(~(np.abs(numbers) <= _LARGEST).all(1))):
            raise UserError(
                f"{path}, row {chunk.number(int(wrong[0]))}: the vector has a number that is missing or too large"
            )
        ids = encoding.find_ids(name, chunk.batch.column(column))
        known = ids != out_of_vocabulary
        every_id.append(ids[known])
        every_vector.append(numbers[known].astype(np.float32))
    ids = np.concatenate(every_id) if every_id else np.zeros(0, np.int64)
    vectors = np.concatenate(every_vector) if every_vector else np.zeros((0, dim), np.float32)
    if not len(ids):
        raise UserError(
            f"{path} has no vector for any value of {column!r} in the data; the values must be written as in the data"
        )
    order = np.argsort(ids, kind="stable")
    ids, vectors = ids[order], vectors[order]
    if len(twice := np.flatnonzero(ids[1:] == ids[:-1])):
        raise UserError(f"{path} has two vectors for the same value of {column!r} (id {ids[twice[0]]}); keep one")
    return ids, vectors


def _vector_columns(file: TableFile, others: Sequence[str], dim: int) -> tuple[list[str], dict[str, ReadSettings]]:
    """Return names of the D numbers of a vector, and how they are read from the file's columns."""
    if len(others) == 1 and arrow.classify_type(file.get_type(others[0])) in ("list", "text") and dim > 1:
        names = [f"{others[0]}[{i}]" for i in range(dim)]
        return names, {one: ReadSettings(column=others[0], length=dim, element=i) for i, one in enumerate(names)}
    if len(others) != dim:
        raise UserError(
            f"{file.input.name} has {counted(len(others), 'column')} beside the values, but the tables have {dim} "
            "columns; give one column of vectors, or one column for each number, and --emb-dim"
        )
    return list(others), {one: ReadSettings() for one in others}
