"""hostdev's host side of a step, whole and in parts."""

import sys

from serve import serve  # isort: skip  (finds workload.py)
import hostdev.core.environment  # isort: skip  (as in a training process)
import numba
import numpy as np
from workload import DIM, draw_gradients, draw_ids

import hostdev
from hostdev.kernels.arrays import aligned_empty
from hostdev.kernels.pool import parallel_for

rows = int(sys.argv[1])
ids = draw_ids(rows).astype(np.int32)  # as a data set has them, and as MindSpore gets them
g, g1 = draw_gradients(len(ids), DIM), draw_gradients(len(ids), 1)
unique, _ = hostdev.ops.unique(ids)
sums, sums1 = g[: len(unique)].copy(), g1[: len(unique)].copy()  # gradients that the device has summed
deep = hostdev.HostTable(rows, DIM, hostdev.LazyAdam(), name="deep")
wide = hostdev.HostTable(rows, 1, hostdev.FTRL(), name="wide")
out_unique, out_wide, out_all = (aligned_empty(shape) for shape in ((len(ids), DIM), (len(ids), 1), (len(ids), DIM)))


def host_side():
    """Do the host's work of a step; the device sums duplicates' gradients."""
    found, _ = hostdev.ops.unique(ids)
    deep.lookup(found, out=out_unique[: len(found)])
    wide.lookup(found, out=out_wide[: len(found)])
    wide.update(found, sums1)
    deep.update(found, sums)


source, target = aligned_empty((50_000_000,)), aligned_empty((50_000_000,))
source[:] = target[:] = 1


def copy_range(start, stop):
    target[start:stop] = source[start:stop]


serve(
    {
        "host side": host_side,
        "unique": lambda: hostdev.ops.unique(ids),
        "lookup all": lambda: deep.lookup(ids, out=out_all),
        "lookup unique": lambda: deep.lookup(unique, out=out_unique[: len(unique)]),
        "lazy adam all": lambda: deep.apply(ids, g),
        "lazy adam unique": lambda: deep.update(unique, sums),
        "ftrl all": lambda: wide.apply(ids, g1),
        "ftrl unique": lambda: wide.update(unique, sums1),
        "copy 400 MB": lambda: parallel_for(copy_range, len(source), grain=1 << 20),
    },
    {"hostdev": hostdev.__version__, "numba": numba.__version__, "numpy": np.__version__, "unique": str(len(unique))},
)
