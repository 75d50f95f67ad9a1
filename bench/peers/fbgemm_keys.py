"""Finds unique keys of batches with FBGEMM's zero_collision_hash on the CPU, in a table at a load of 0.75.

The table is filled here by the op's own rule, murmur hash and linear probing, since the CPU has only the lookup.
"""

import sys
from functools import partial
from importlib.metadata import version

from serve import serve  # isort: skip  (finds workload.py)
import fbgemm_gpu  # noqa: F401  (registers the ops)
import numpy as np
import torch
from workload import draw_keys, make_keys

LOAD, PROBES = 0.75, 128
MASK = (1 << 64) - 1


def rotate(x, bits):
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


def mix(h):
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


def murmur(keys):
    """MurmurHash3 x64 of 64-bit keys, as FBGEMM computes it."""
    k = keys.astype(np.uint64) * np.uint64(0x87C37B91114253D5)
    h1 = rotate(k, 31) * np.uint64(0x4CF5AD432745937F)
    h1 = rotate(h1, 27) * np.uint64(5) + np.uint64(0x52DCE729)
    h2 = h1 * np.uint64(5) + np.uint64(0x38495AB5)
    h1, h2 = h1 ^ np.uint64(16), h2 ^ np.uint64(16)
    h1 = h1 + h2
    h2 = h2 + h1
    h1, h2 = mix(h1), mix(h2)
    h1 = h1 + h2
    h2 = h2 + h1
    return h1 ^ h2


def place(keys, slots):
    """Fill a table, in rounds: in each, every key that is left tries its next slot, and the first one gets it."""
    first = murmur(keys) % np.uint64(slots)
    table, left = np.full(slots, -1, np.int64), np.arange(len(keys))
    for probe in range(PROBES):
        at = ((first[left] + np.uint64(probe)) % np.uint64(slots)).astype(np.int64)
        free = table[at] == -1
        slot, chosen = np.unique(at[free], return_index=True)
        table[slot] = keys[left[free][chosen]]
        done = np.zeros(len(left), np.bool_)
        done[np.flatnonzero(free)[chosen]] = True
        left = left[~done]
    return table, len(left)


ops = {}
torch.set_num_threads(1)
for size in map(int, sys.argv[1:]):
    keys = make_keys(size)
    table, left = place(keys, int(size / LOAD))
    identities, _ = torch.ops.fbgemm.create_zch_buffer(
        size=len(table), support_evict=False, device=torch.device("cpu"), long_type=True
    )
    identities.numpy()[:, 0] = table
    batches = [torch.from_numpy(batch) for batch in draw_keys(size)]

    def find(identities, batch):
        return torch.ops.fbgemm.zero_collision_hash(
            input=batch,
            identities=identities,
            max_probe=PROBES,
            circular_probe=True,
            exp_hours=-1,
            readonly=True,
            disable_fallback=True,
        )[0]

    def find_all(identities, batches):
        for batch in batches:
            find(identities, batch)

    missed = sum(int((find(identities, batch) < 0).sum()) for batch in batches)
    assert missed <= left, f"{missed} keys are not found"  # or the table is not filled by the op's rule
    ops[f"{size}"] = partial(find_all, identities, batches)
serve(ops, {"torch": torch.__version__, "fbgemm-gpu-cpu": version("fbgemm-gpu-cpu")})
