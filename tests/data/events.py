"""Events in time order, with items that come and go: python -m tests.data.events events.csv [--days N] [--rows N].

Each day has new items, which are used less and less; users come, too. Whether an event is a click depends on hidden
vectors of the user and of the item, and on the hour.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

USERS_A_DAY, ITEMS_A_DAY, DIM = 120, 60, 4
HALF_LIFE = 2.0  # days after which an item is used half as often


def make(days=15, rows=12_000, seed=0):
    """Return a table of `rows` events a day with the columns day, hour, user, item, device and clicked."""
    rng = np.random.default_rng(seed)
    known = 800
    users = rng.normal(0, 0.8, (known + days * USERS_A_DAY, DIM))
    items = rng.normal(0, 0.8, ((days + 10) * ITEMS_A_DAY, DIM))
    liked, popular = rng.normal(0, 0.7, len(items)), rng.exponential(1, len(items))
    begun = np.repeat(np.arange(-10, days), ITEMS_A_DAY)
    parts = []
    for day in range(days):
        weight = np.where(begun <= day, popular * 0.5 ** ((day - begun) / HALF_LIFE), 0)
        item = rng.choice(len(items), rows, p=weight / weight.sum())
        user = rng.integers(0, known + (day + 1) * USERS_A_DAY, rows)
        hour = np.sort(rng.integers(0, 24, rows))
        device = rng.choice(["phone", "tablet", "desktop"], rows, p=[0.6, 0.1, 0.3])
        score = (users[user] * items[item]).sum(1) + liked[item] + 0.02 * (hour - 12) - 0.8
        clicked = rng.random(rows) < 1 / (1 + np.exp(-score))
        names = pa.array([f"u{one:05d}" for one in user]), pa.array([f"i{one:05d}" for one in item])
        parts.append(
            pa.table(
                {
                    "day": np.full(rows, day),
                    "hour": hour,
                    "user": names[0],
                    "item": names[1],
                    "device": device,
                    "clicked": clicked.astype(np.int8),
                }
            )
        )
    return pa.concat_tables(parts)


def main():
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--days", type=int, default=15)
    parser.add_argument("--rows", type=int, default=12_000, help="rows a day")
    arguments = parser.parse_args()
    pyarrow.csv.write_csv(make(arguments.days, arguments.rows), arguments.out)


if __name__ == "__main__":
    main()
