"""--start-from CHECKPOINT: a new run that starts with the tables and layers of an earlier one.

A run on raw ids may start from a checkpoint with a vocabulary: each value's row goes to the value's raw id.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hostdev.checkpoint.fitting import fit_tables, load_shared
from hostdev.checkpoint.folder import Chain, read_chain
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import find_newest_valid, values_of
from hostdev.checkpoint.remote import fetch
from hostdev.checkpoint.state import find_file
from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError
from hostdev.core.keys import FormerIds, is_raw
from hostdev.data import manifest
from hostdev.data.manifest import FILE_NAME, Manifest
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.meaning import difference, different_columns
from hostdev.data.preprocess.stored_vocabulary import StoredVocabulary
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.train.options import TrainConfig
from hostdev.train.report import form_lines
from hostdev.train.trainer import Trainer

_MOST_USES = 2**32 - 1


def begins_with_vocabulary(there: Manifest, here: Manifest) -> bool:
    """Return whether a checkpoint's data set has a vocabulary, and a run's data set has raw ids instead."""
    return there.vocabulary is not None and is_raw(here.schema.rows)


def map_ids(folder: Path, there: Manifest, here: Manifest) -> FormerIds:
    """Return the raw ids of the ids of a vocabulary.

    Args:
        folder: Folder with the vocabulary of the checkpoint's data set.
        there: Manifest of the checkpoint's data set.
        here: Manifest of the run's data set, with the same columns.

    Raises:
        UserError: The vocabulary is damaged, or has values of other types than the data set.
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


_REMEDY = "prepare the data with preprocess ... --vocabulary FROM, where FROM is the checkpoint's data set"


class Origin(NamedTuple):
    """The checkpoint that a new run starts from.

    Attributes:
        notes: Lines about newer checkpoints that are damaged, and about ids that could not be compared.
        former: If the checkpoint has a vocabulary and the run raw ids, the raw ids of the vocabulary's values.
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
    changed = [] if theirs is None or theirs == frozen else [f"start    rows of {theirs}, frozen then, are trained now"]
    step = chain[-1].manifest.step
    return [
        *origin.notes,
        f"start    from {shown_place(origin.path)}, after step {step:,}; steps of this run count from 0",
        *(f"start    {line}" for line in (*fit.lines(), *form_lines(trainer.tables))),
        f"start    {layers}; learning rates are those of this run",
        *changed,
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
