"""The initial tables and layers of a new run: an earlier run's (--start-from), or given vectors (--initial-vectors).

A run on raw ids may start from a checkpoint with a vocabulary: each value's row goes to the value's raw id. Given
vectors are in a file with a vector for each value of a column.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hostdev.checkpoint.folder import Chain, read_chain
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import find_newest_valid, fit_tables, load_shared, values_of
from hostdev.checkpoint.remote import fetch
from hostdev.checkpoint.state import find_file
from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError
from hostdev.core.initializers import GivenRows
from hostdev.core.keys import FormerIds, is_raw
from hostdev.core.progress import counted
from hostdev.data import manifest
from hostdev.data.manifest import FILE_NAME, Manifest
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.delimited import TextFormat
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.files import TableFile, chunks, find_format
from hostdev.data.preprocess.inputs import open_input
from hostdev.data.preprocess.lists import WrongNumberError, require_numbers
from hostdev.data.preprocess.meaning import difference, different_columns
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.reading import ReadSettings, own_settings
from hostdev.data.preprocess.stored import StoredVocabulary
from hostdev.data.preprocess.table import open_file
from hostdev.data.schema import Schema
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.kernels.arrays import LongIds, Rows
from hostdev.models.model import Model
from hostdev.train.build import model_of
from hostdev.train.options import TrainConfig
from hostdev.train.report import form_lines
from hostdev.train.trainer import Trainer

_LARGEST = float(np.finfo(np.float32).max)
_MOST_USES = 2**32 - 1
_REMEDY = "prepare the data with preprocess ... --vocabulary FROM, where FROM is the checkpoint's data set"


def make_model(settings: TrainConfig, schema: Schema) -> Model:
    """Return the model that the options select, as `model_of` does, with the vectors of --initial-vectors."""
    return model_of(settings, schema, set_initial_vectors)


def set_initial_vectors(model: Model, settings: TrainConfig, schema: Schema) -> None:
    """Set the vectors of --initial-vectors as initial values of a model's embedding tables.

    The files are read when the tables are filled, once for all tables.

    Raises:
        UserError: A column does not exist or shares another column's ids, ids are hashed, there is no data set, the
            model has a table whose rows are not the data's ids, or its embedding tables differ in dimension.
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
    """Return the ids, ascending, and vectors of all columns; in frozen columns, values without a vector get zeros."""
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
        path: A table in any format of `preprocess table`, with the column's values, and with either one column of
            vectors or D columns of numbers.
        encoding: The data set's encoding, which maps values to ids.
        name: The column.
        dim: D, the number of numbers in a vector.

    Returns:
        The ids of the file's values, ascending, int64 [K], and their vectors, float32 [K, D]. Values that are not in
        the vocabulary are left out.

    Raises:
        UserError: The file cannot be read, has other columns, has a value twice, or has no value of the vocabulary; or
            a vector is missing, invalid, or of another length.
    """
    source = open_input(path)
    file = open_file(source, find_format(source), TextFormat())
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


def begins_with_vocabulary(there: Manifest, here: Manifest) -> bool:
    """Return whether a checkpoint's data set has a vocabulary, and a run's data set has raw ids instead."""
    return there.vocabulary is not None and is_raw(here.schema.rows)


def map_ids(folder: Path, there: Manifest, here: Manifest) -> FormerIds:
    """Map the ids of a checkpoint's vocabulary to the raw ids of a run's data set.

    Args:
        folder: Folder with the vocabulary of the checkpoint's data set.
        there: Manifest of the checkpoint's data set.
        here: Manifest of the run's data set, with the same columns.

    Raises:
        UserError: The vocabulary is damaged, has values of other types than the data set, or has two values with the
            same raw id.
    """
    stored, encoding = StoredVocabulary(folder, there), Encoding(here, None)
    keys, known = np.zeros(there.schema.rows, np.int64), np.zeros(there.schema.rows, np.bool_)
    dense = len(there.schema.dense)
    keys[:dense], known[:dense] = np.arange(dense), True
    columns = {column.space: column.name for column in reversed(there.schema.columns)}
    for space in stored.spaces.values():
        found = encoding.find_ids(columns[space.name], stored.values(space).combine_chunks())
        first = 0
        for begin, size in space.segments:
            keys[begin : begin + size], known[begin : begin + size] = found[first : first + size], True
            first += size
    if len(np.unique(keys[known])) < np.count_nonzero(known):
        raise UserError(
            f"{folder}: two values of the vocabulary have the same raw id, so their rows cannot be told apart"
        )
    spaces = {space.name: space.oov for space in there.schema.spaces}
    unknown = {column.name: spaces[column.space] for column in there.schema.columns}
    return FormerIds(keys, known, np.minimum(stored.counts, _MOST_USES).astype(np.uint32), unknown)


class Origin(NamedTuple):
    """The checkpoint that a new run starts from.

    Attributes:
        chain: The checkpoint, last, after its parents.
        notes: Lines about newer checkpoints that are damaged, and about ids that could not be compared.
        former: If the checkpoint has a vocabulary and the run has raw ids, the raw ids of the vocabulary's values.
    """

    chain: Chain
    notes: list[str]
    former: FormerIds | None = None

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.chain[-1].path


def find(settings: TrainConfig, root: Path, data: Manifest, world: World = ALONE_WORLD) -> Origin:
    """Return the checkpoint that --start-from names; in a folder of checkpoints, this is the newest valid one.

    Rank 0 chooses for all ranks.

    Raises:
        UserError: There is no checkpoint, it is from another model, or ids, columns or scaled numbers have different
            meanings in the checkpoint and in the data.
    """

    def unpack(packed: list[Any]) -> Origin:
        path, notes = packed
        origin = Origin(read_chain(Path(path)), notes)
        file = find_file(Layers(origin.chain), f"data/{FILE_NAME}")
        return (
            origin if file is None else origin._replace(former=_map_ids(file.parent, manifest.read(file.parent), data))
        )

    return world.find_together(
        lambda: _find(settings, root, data), lambda origin: [str(origin.path.resolve()), origin.notes], unpack
    )


def _find(settings: TrainConfig, root: Path, data: Manifest) -> Origin:
    assert settings.start_from is not None
    fetch(settings.start_from)
    if not settings.start_from.exists():
        raise UserError(f"--start-from {shown_place(settings.start_from)}: there is no such checkpoint")
    found = find_newest_valid(settings.start_from)
    origin = Origin(found.chain, [f"start    {line}" for line in found.notes()])
    more = _values(origin).get("more")
    if isinstance(more, dict) and more["settings"]["model"] != settings.model:
        raise UserError(
            f"{origin.path} was trained with --model {more['settings']['model']}, not --model {settings.model}; give "
            f"--model {more['settings']['model']}"
        )
    layers = Layers(origin.chain)
    file = find_file(layers, f"data/{FILE_NAME}")
    if file is None:
        origin.notes.append(f"start    {origin.path} has no vocabulary, so its ids cannot be compared with the data's")
        return origin
    there = manifest.read(file.parent)
    require_same_meaning(origin.path, file.parent, there, root, data)
    return origin._replace(former=_map_ids(file.parent, there, data))


def load(origin: Origin, trainer: Trainer, frozen: str | None = None) -> list[str]:
    """Load rows, layers and optimizer state into a new run; return lines that describe what was loaded.

    `frozen` is the run's --frozen-vectors.

    Steps count from 0, learning rates are those of the new run, and rows that the checkpoint lacks keep their initial
    values.

    Raises:
        UserError: The checkpoint is from another model; no table was changed.
    """
    chain = origin.chain
    fit = fit_tables(chain, trainer.tables)
    dense = _values(origin).get("dense")
    if isinstance(dense, dict) and {"model", "optimizer"} <= set(dense):
        rates = [group["lr"] for group in trainer.adam.param_groups]
        trainer.load_dense(chain, dense)
        for group, lr in zip(trainer.adam.param_groups, rates, strict=True):
            group["lr"] = lr
        layers = "dense layers and their optimizer state are loaded"
    else:
        layers = "dense layers have their initial values, as the checkpoint has no layers saved by hostdev train"
    load_shared(chain, trainer.tables, fit, former=origin.former)
    more = _values(origin).get("more")
    theirs = more.get("settings", {}).get("frozen_vectors") if isinstance(more, dict) else None
    thawed = ", ".join(sorted(set(str(theirs or "").split(",")) - {"", *(frozen or "").split(",")}))
    step = chain[-1].manifest.step
    return [
        *origin.notes,
        f"start    from {shown_place(origin.path)}, after step {step:,}; steps of this run count from 0",
        *(f"start    {line}" for line in (*fit.lines(), *form_lines(trainer.tables))),
        f"start    {layers}; learning rates are those of this run",
        *([f"start    rows of {thawed}, frozen then, are trained now"] if thawed else []),
    ]


def require_same_meaning(path: Path, theirs: Path, there: Manifest, root: Path, here: Manifest) -> None:
    """Raise UserError unless a data set's ids, columns and scaled numbers have the same meaning as in a checkpoint.

    Args:
        path: The checkpoint.
        theirs: Folder with the vocabulary of the checkpoint's data set.
        there: Manifest of the checkpoint's data set.
        root: Folder of the data set.
        here: Manifest of the data set.
    """
    if begins_with_vocabulary(there, here):
        differs = different_columns(there, here)
        if differs is not None:
            raise UserError(f"{root} does not fit {path}, which was trained on {differs}; prepare the data likewise")
        return
    differs = difference(there, theirs, here, root)
    if differs is not None:
        raise UserError(f"{root} does not fit {path}, which was trained on {differs}; {_REMEDY}")
    if there.schema.rows > here.schema.rows:
        raise UserError(
            f"{path} was trained with {there.schema.rows:,} ids, but {root} has only {here.schema.rows:,}; {_REMEDY}"
        )


def _map_ids(folder: Path, there: Manifest, here: Manifest) -> FormerIds | None:
    return map_ids(folder, there, here) if begins_with_vocabulary(there, here) else None


def _values(origin: Origin) -> dict[str, Any]:
    values = values_of(origin.chain)
    return values if isinstance(values, dict) else {}
