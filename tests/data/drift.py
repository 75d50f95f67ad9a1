"""A stream of clicks whose rates drift, with known probabilities: the best possible AUC of each part is known.

Each item has a base rate and a phase; its logit moves along a sine, so that what was learned wears out. New items come
with each part, and replace old ones.
"""

import numpy as np
import pyarrow as pa

from hostdev.train import scores

ITEMS, USERS, NEW = 60, 40, 4  # items in use, users, and items that are replaced in each part
PERIOD = 16.0  # parts of a sine


def make(parts, rows, seed=0):
    """Yield `rows` rows for each part: a table with the columns user, item and clicked, and the best possible AUC."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(0, 0.5, USERS)
    first = 0
    base, phase = (rng.normal(0, 1, ITEMS + NEW * parts), rng.uniform(0, 2 * np.pi, ITEMS + NEW * parts))
    for part in range(parts):
        first = NEW * part
        item = first + np.minimum(rng.geometric(0.06, rows) - 1, ITEMS - 1)
        user = rng.integers(0, USERS, rows)
        logit = taste[user] + 0.6 * base[item] + 1.2 * np.sin(2 * np.pi * part / PERIOD + phase[item]) - 0.5
        clicked = rng.random(rows) < 1 / (1 + np.exp(-logit))
        names = pa.array([f"u{one}" for one in user]), pa.array([f"i{one}" for one in item])
        table = pa.table({"user": names[0], "item": names[1], "clicked": clicked.astype(np.int64)})
        yield table, scores.auc(logit.astype(np.float32), clicked.astype(np.float32))
