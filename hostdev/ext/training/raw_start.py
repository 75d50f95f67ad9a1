"""Starting a run on raw ids from a checkpoint with a vocabulary: each value's row goes to the value's raw id."""

from pathlib import Path

import numpy as np

from hostdev.core.errors import UserError
from hostdev.core.keys import FormerIds, is_raw
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.stored import StoredVocabulary

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
