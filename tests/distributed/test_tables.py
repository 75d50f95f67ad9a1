"""Tables in the body of a loop on two processes: each reads and writes its part, to the bits of one process."""

import pickle

import numpy as np

from tests.distributed import tables_loop
from tests.distributed.same import assert_same


def joined(parts):
    """Return the rows of each table that all ranks saw after each step, by id."""
    found = {}
    for part in parts:
        for step, name, steps, ids, weights, looked_up in part["seen"]:
            np.testing.assert_array_equal(weights, looked_up)
            for row, values in zip(ids.tolist(), weights, strict=True):
                found[step, name, steps, row] = values.tobytes()
    return found


def test_two_processes_read_and_write_their_parts(processes, tmp_path):
    tables_loop.main(tmp_path)
    alone = pickle.loads((tmp_path / "rank0.pickle").read_bytes())
    processes.start_ranks(2, "-m", "tests.distributed.tables_loop", processes.folder)
    for process in processes.ended():
        assert process.code == 0, process
    parts = [pickle.loads((processes.folder / f"rank{rank}.pickle").read_bytes()) for rank in range(2)]
    for name, wanted in (
        ("serial", "serial"),
        ("overlapped", "serial"),
        ("serial, written", "serial, written"),
        ("with a cache, written", "serial, written"),
    ):
        mine = [part[name] for part in parts]
        assert_same(mine, alone[wanted])
        assert joined(mine) == joined([alone[wanted]])
        assert joined([alone[name]]) == joined([alone[wanted]])
        assert not any(part["refused"] for part in mine)
    assert joined([alone["overlapped, written"]]) == joined([alone["serial, written"]])
    for part in parts:
        assert "other ranks already have its rows for the next batches" in part["overlapped, written"]["refused"][0]
    assert_same([part["overlapped, written"] for part in parts], alone["serial"])
