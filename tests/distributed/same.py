"""Comparison of several processes' parts of a training, to the bit."""

import numpy as np

from tests.runtime.cases import differing


def rows_by_id(*parts):
    """Steps, and all rows in the order of their ids, of the parts of a table."""
    [step] = {part[0] for part in parts}
    order = np.argsort(np.concatenate([part[1] for part in parts]))
    return step, *(np.concatenate([part[place] for part in parts])[order] for place in (2, 3))


def assert_same(parts, wanted, *, since=0):
    """Predictions, losses, dense side and tables of `own_loop.train` by all ranks are those of one process.

    since  the step with which the ranks have gone on
    """
    predicted = {number: rows for part in parts for number, rows in part["predicted"].items()}
    assert predicted == {number: rows for number, rows in wanted["predicted"].items() if number[0] >= since}
    for part in parts:
        assert part["wrong"] is None
        assert part["losses"] == wanted["losses"][since:]
        assert differing(part["dense"], wanted["dense"]) == []
    assert_same_tables(parts, wanted, steps=sum(losses is not None for losses in wanted["losses"]))


def assert_same_tables(parts, wanted, *, steps):
    for name, table in wanted["tables"].items():
        step, block, row_slots = rows_by_id(*(part["tables"][name] for part in parts))
        wanted_step, wanted_block, wanted_slots = rows_by_id(table)
        assert step == wanted_step == steps
        assert (block.shape, row_slots.shape) == (wanted_block.shape, wanted_slots.shape)
        assert block.tobytes() == wanted_block.tobytes(), name
        assert row_slots.tobytes() == wanted_slots.tobytes(), name
