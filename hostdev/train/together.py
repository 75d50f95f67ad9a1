"""What the ranks of a training do with their predictions."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.parallel.ranks import Ranks


def of_all(ranks: Ranks, sizes: list[int], *arrays: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Return the values of all ranks in the order of the rows: batch by batch, each by rank.

    sizes  of this rank's parts of the batches, end to end in each array
    """
    edges = [np.cumsum(each)[:-1] for each in ranks.control.gather(np.array(sizes, np.int64))]
    found = []
    for array in arrays:
        parts = [np.split(each, edge) for each, edge in zip(ranks.control.gather(array), edges, strict=True)]
        found.append(np.concatenate([part[batch] for batch in range(len(sizes)) for part in parts] or [array]))
    return found
