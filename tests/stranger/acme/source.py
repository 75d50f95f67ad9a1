"""A source of rows: clicks that are made up."""

import numpy as np
import pyarrow as pa

from hostdev import RecordBatches, RowSource
from hostdev.errors import UserError

_BATCH = 1000


class MadeUp(RecordBatches):
    """`count` clicks; a click is a function of its number."""

    def __init__(self, count):
        self.count = count
        schema = pa.schema(
            {"clicked": pa.int8(), "price": pa.float64(), "shop": pa.string(), "seen": pa.list_(pa.int64())}
        )
        super().__init__("clicks", schema)
        self.most_rows = count

    def batches(self, columns, first):
        """See `RecordBatches`."""
        for start in range(first, self.count, _BATCH):
            numbers = np.arange(start, min(start + _BATCH, self.count))
            values = {
                "clicked": pa.array(numbers * 7919 % 11 < 4, pa.bool_()).cast(pa.int8()),
                "price": pa.array(numbers % 100 / 4),
                "shop": pa.array([f"shop {number % 17}" for number in numbers.tolist()]),
                "seen": pa.array([list(range(number % 5)) for number in numbers.tolist()], pa.list_(pa.int64())),
            }
            yield pa.RecordBatch.from_arrays([values[name] for name in columns], list(columns))

    def describe(self):
        """See `RecordBatches`."""
        return {"source": "acme clicks", "rows": self.count}

    def fingerprint(self):
        """See `RecordBatches`."""
        return [1, self.count]


class Clicks(RowSource):
    """`hostdev preprocess clicks N`."""

    help = "from made-up clicks"

    def add_options(self, to):
        """Add the number of rows."""
        to.add_argument("count", type=int, metavar="N", help="number of rows")

    def open(self, arguments):
        """Return the rows."""
        if arguments.count < 1:
            raise UserError(f"N must be at least 1, not {arguments.count}")
        return MadeUp(arguments.count)
