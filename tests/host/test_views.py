"""Views of a table: reading them is as reading arrays, and writing to them says how to write."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from hostdev import Adam, HostTable, LazyAdam, RowWiseAdagrad

WRITES = {
    "all": lambda rows: rows.__setitem__(..., 0.5),
    "one": lambda rows: rows.__setitem__(3, 0.5),
    "mask": lambda rows: rows.__setitem__(np.asarray(rows) > 0, 0.5),
    "part": lambda rows: rows[2:4].__setitem__(slice(None), 0.5),
    "times": lambda rows: rows.__imul__(0.5),
    "out": lambda rows: np.multiply(rows, 0.5, out=rows),
    "at": lambda rows: np.add.at(rows, 3, 0.5),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(LazyAdam(), {}), (LazyAdam(), {"dtype": "bfloat16"}), (Adam(), {}), (RowWiseAdagrad(), {})],
)
def test_a_write_to_a_view_names_writing(write, optimizer, options):
    table = HostTable(10, 3, optimizer, name="t", seed=1, **options)
    before = np.array(table.weights)
    for view in (table.weights, *table.slots.values()):
        with pytest.raises(ValueError, match=r"table\.writing\(\)"):
            WRITES[write](view)
    np.testing.assert_array_equal(table.weights, before)


def test_a_view_reads_as_an_array():
    table = HostTable(10, 3, LazyAdam(), name="t", seed=1)
    weights, init = table.weights, np.array(table.weights)
    for result in (weights * 2, weights.sum(0), np.sqrt(np.abs(weights)), 1 - weights, np.add.reduce(weights)):
        assert type(result) is np.ndarray
        assert result.flags.writeable
    out = np.zeros((10, 3), np.float32)
    assert np.add(weights, 1, out=out) is out
    assert (weights == weights).all() and isinstance(weights, np.ndarray)
    copied = weights.copy()
    copied[3] = 0.5
    copied *= 2
    assert float(copied[3, 0]) == 1.0 and float(weights.mean()) == pytest.approx(np.array(weights).mean())
    assert torch.tensor(weights).equal(torch.from_numpy(np.array(weights)))
    with table.writing() as w:
        w.weights[:] = weights * 0.5
    assert table.weights.tobytes() == (np.array(init) * np.float32(0.5)).tobytes()


def test_a_pickled_view_needs_no_hostdev():
    table = HostTable(4, 2, LazyAdam(), name="t", seed=1)
    program = "import pickle, sys; a = pickle.load(sys.stdin.buffer); print(type(a), a.shape, 'hostdev' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(table.weights), capture_output=True)
    assert done.stdout.decode() == "<class 'numpy.ndarray'> (4, 2) False\n", done.stderr
