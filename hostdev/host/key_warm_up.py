"""Warm-up of the kernels of tables by key: compile them, or load them from numba's cache."""

import numpy as np

from hostdev.core.admission import MinCount
from hostdev.core.eviction import Unused
from hostdev.core.optimizers import SGD
from hostdev.host.table import KeyTable
from hostdev.kernels.key_directory import parts_of
from hostdev.kernels.key_rows import number_rows
from hostdev.kernels.unique import unique


def warm_up_keys() -> None:
    """Call each kernel of the keys' directory and counts once, with one and with several threads' keys."""
    many = np.arange(1 << 14, dtype=np.int64)
    for sketch in (None, "64KiB"):
        admit, evict = MinCount(2, sketch=sketch, expires=None if sketch else 1), Unused(steps=1, every=1)
        table = KeyTable(None, 1, SGD(), name="warm-up", capacity=len(many), admit=admit, evict=evict)
        table.may_train = True  # so that one of several processes may update this table
        for keys in (many[:9], many, many, many[:9], many[:9]):
            table.apply(keys, np.zeros((len(keys), 1), np.float32))
        table.plan(many, np.ones(len(many), np.int32), may_read=True)
        table.find_rows(many)
        table.rollback()
        _ = table.keys
        table.erase(many[:3])
        _, inverse = unique(many)
        number_rows(np.full(len(many), -1, np.int32), inverse, [many], [[0]])
    parts_of(many)
