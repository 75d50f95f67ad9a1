"""Finds unique keys of batches in hostdev's directory."""

import sys
from functools import partial

from serve import serve  # isort: skip  (finds workload.py)
import numpy as np
from workload import draw_keys, make_keys

import hostdev
from hostdev.kernels.key_directory import KeyDirectory

sizes = [int(size) for size in sys.argv[1:]]
ops = {}
for size in sizes:
    directory, keys = KeyDirectory(), make_keys(size)
    for start in range(0, size, 100_000):
        part = keys[start : start + 100_000]
        directory.insert(part, np.arange(start, start + len(part), dtype=np.int32))
    batches = draw_keys(size)

    def find(directory, batches, threads):
        hostdev.ops.set_host_threads(threads)
        for batch in batches:
            assert (directory.find(batch) >= 0).all()

    ops[f"{size}"] = partial(find, directory, batches, 1)
    ops[f"{size} two threads"] = partial(find, directory, batches, 2)
serve(ops, {"hostdev": hostdev.__version__})
