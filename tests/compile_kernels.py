"""Compile the kernels that most tests call, so that tests which run at the same time do not each compile them.

Each combination of an optimizer and formats takes seconds, and the first ones with a format more in each process.
"""

import itertools
import sys

import numpy as np

from hostdev import FTRL, SGD, Adagrad, Adam, HostTable, LazyAdam, Momentum, RowWiseAdagrad, RowWiseAdam
from hostdev.cache import planner
from hostdev.host.warm_up import warm_up_disk, warm_up_feature, warm_up_ids, warm_up_keys, warm_up_table

OPTIMIZERS = [LazyAdam(), FTRL(), FTRL(lr_power=-0.3), SGD(), Adagrad(), RowWiseAdagrad(), RowWiseAdam(), Momentum()]


# The kernels with slots of 8 bits are those that take longest.
BESIDE_FLOAT32 = [LazyAdam(), FTRL(), Adagrad()]


def warm_up(id_dtype, table_dtypes=("fp32", "fp32")):
    """Call every kernel once with ids of this dtype, on tables of these dtypes and of float32, as cached rows are."""
    for (optimizer, dim), stored in itertools.product(
        ((FTRL(), 1), (LazyAdam(), 32)), sorted({("fp32", "fp32"), table_dtypes})
    ):
        warm_up_table(id_dtype, stored, optimizer, dim)
    warm_up_ids(id_dtype)
    warm_up_feature(1)
    for bfloat16 in (False, True):
        warm_up_feature(32, weighted=True, bfloat16=bfloat16)


def compile_updates(dtypes, *, dim=4, optimizers=OPTIMIZERS):
    for optimizer in optimizers:
        table = HostTable(2, dim, optimizer, name="t", dtype=dtypes[0], slots=dtypes[1])
        table.apply(np.zeros(1, np.int32), np.zeros((1, dim), np.float32))


def compile_eight_bits():
    compile_updates(("bf16", "8bit"))
    compile_updates(("fp32", "8bit"), optimizers=BESIDE_FLOAT32)
    warm_up("int32", ("bf16", "8bit"))  # last: `compile_others` has compiled much of it by then


def compile_optimizers():
    for dtype, slots in itertools.product(("fp32", "bf16"), repeat=2):
        compile_updates((dtype, slots))
    for dtype in ("fp32", "bf16"):
        compile_updates((dtype, "fp32"), dim=16)  # `apply` calls the kernels for wide rows as functions


def compile_others():
    warm_up_keys()
    for id_dtype in ("int32", "int64"):
        planner.warm_up(id_dtype)
        warm_up_disk(id_dtype)
        for dtype in ("fp32", "bf16"):  # last: `compile_optimizers`, beside this, has compiled the updates by then
            warm_up(id_dtype, (dtype, "fp32"))
    warm_up("int32", ("bf16", "bf16"))


def compile_every_row():
    """Kernels of optimizers whose steps change every row."""
    for stored in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "8bit")):
        for optimizer in (Adam(weight_decay=0.1), Adagrad(weight_decay=0.1)):
            warm_up_table("int32", stored, optimizer, 4)


if __name__ == "__main__":
    {
        "8-bits": compile_eight_bits,
        "every-row": compile_every_row,
        "optimizers": compile_optimizers,
        "others": compile_others,
    }[sys.argv[1]]()
