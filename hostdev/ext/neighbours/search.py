"""Exact search for nearest rows, block by block, in float64."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.ext.neighbours.rows import NamedRows
from hostdev.kernels.arrays import LongIds

Scores = npt.NDArray[np.float64]


class Nearest(NamedTuple):
    """The nearest rows of Q queries, the nearest first; equal scores are in the order of the rows.

    Attributes:
        ids: int64 [Q, k].
        scores: float64 [Q, k]: cosines or dot products, descending; or distances, ascending.
        not_finite: Number of rows that were left out because a value is NaN or infinite.
    """

    ids: LongIds
    scores: Scores
    not_finite: int


def score(query: Scores, weights: Scores, metric: str) -> Scores:
    """Return the scores of rows for a query, float64 [n]; the nearest row has the largest.

    Args:
        query: float64 [D].
        weights: float64 [n, D].
        metric: "cosine" (0 for a row of zeros), "dot", or "l2", whose score is the negative distance.
    """
    if metric == "l2":
        found: Scores = -np.sqrt(np.square(weights - query).sum(1))
        return found
    products: Scores = weights @ query
    if metric == "dot":
        return products
    lengths = np.sqrt(np.square(weights).sum(1)) * np.sqrt(np.square(query).sum())
    cosines = np.zeros(len(products))
    np.divide(products, lengths, out=cosines, where=lengths > 0)
    return cosines


def find_nearest(rows: NamedRows, queries: npt.NDArray[np.float32], k: int, metric: str, without: LongIds) -> Nearest:
    """Return the k nearest rows of each query.

    Args:
        rows: The rows to compare, read once.
        queries: float32 [Q, D].
        k: Number of rows to return for each query.
        metric: As in `score`.
        without: Ids of rows to leave out, int64 [any].

    Raises:
        UserError: A query has a value that is not finite, or only zeros with "cosine"; or there are fewer than k rows.
    """
    wanted = queries.astype(np.float64)
    if not np.isfinite(wanted).all():
        raise UserError("the row has a value that is not finite, so no row is near it")
    if metric == "cosine" and not wanted.any(axis=1).all():
        raise UserError("the row has only zeros, which have no direction; use --metric l2")
    ids = [np.empty(0, np.int64) for _ in wanted]
    scores = [np.empty(0) for _ in wanted]
    left_out = 0
    for numbers, weights in rows.blocks():
        kept = np.logical_and.reduce(np.isfinite(weights), axis=1)
        left_out += len(kept) - int(np.count_nonzero(kept))
        kept &= ~np.isin(numbers, without)
        numbers, block = numbers[kept], weights[kept].astype(np.float64)
        for number, query in enumerate(wanted):
            found = score(query, block, metric)
            least = scores[number][-1] if len(scores[number]) == k else -np.inf
            better = np.flatnonzero(found > least)
            joined = np.concatenate([scores[number], found[better]])
            first = np.argsort(-joined, kind="stable")[:k]
            ids[number] = np.concatenate([ids[number], numbers[better]])[first]
            scores[number] = joined[first]
    if len(scores[0]) < k:
        has = f"{len(scores[0]):,} other" if len(without) else f"{len(scores[0]):,}"
        raise UserError(f"--k {k}: there are only {has} rows{' with finite values' if left_out else ''}")
    sign = -1.0 if metric == "l2" else 1.0
    return Nearest(np.stack(ids), sign * np.stack(scores) + 0.0, left_out)
