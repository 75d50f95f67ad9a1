"""What the log of ops says of a loop with a cache: how many bytes each op has moved."""

import numpy as np
import pytest
import torch

import hostdev
from hostdev.core.primitive import OpLog


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
@pytest.mark.parametrize(("dtype", "stored"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "8bit")])
def test_bytes_with_a_cache(device, policy, dtype, stored):
    """Serially no row is looked up twice: the ops moved what the cache says of its batches, to and fro."""
    V, D = 60, 5
    tables = [
        hostdev.HostTable(V, D, hostdev.LazyAdam(), name="adam", dtype=dtype, slots=stored),
        hostdev.HostTable(V, 1, hostdev.RowWiseAdagrad(), name="rowwise"),
    ]
    log = OpLog()
    cache = hostdev.CacheSpec(9, policy)
    runtime = hostdev.Runtime({"f": tuple(tables)}, device=device, depth=0, cache=cache, log=log)
    layer = torch.nn.Linear(D + 1, 1).to(device)
    rng = np.random.default_rng(1)
    batches = [torch.from_numpy((rng.zipf(1.3, 40) + 13 * (n // 3)) % V).int() for n in range(9)]
    for _, rows in runtime.train(batches, ids=lambda ids: {"f": ids}):
        layer(torch.cat(rows["f"], 1)).square().mean().backward()
    done = runtime.caches[0].planner.statistics
    assert min(done.passed, done.unique_hits, done.admitted, done.evicted) > 0
    ops = log.summary()
    size, of_slot = {"fp32": 4, "bf16": 2}, {"fp32": 4 * D, "bf16": 2 * D, "8bit": 8 + 4}
    for table, weights, slots, held in (
        ("adam", size[dtype], 2 * 4 * D, 2 * of_slot[stored]),
        ("rowwise", 4, 4, 4),
    ):
        dim = D if table == "adam" else 1
        between = dim * (weights + 4) + slots + held  # bytes of a row with its slots, from or to the host's
        on_device = 2 * (4 * dim + slots)
        wanted = {
            "EmbeddingLookup": done.passed * dim * (weights + 4),
            "CacheAdmit": done.admitted * between,
            "CacheEvict": done.evicted * between,
            "CacheLookup": done.unique * 2 * 4 * dim,
            "CacheUpdate": (done.unique_hits + done.admitted) * (4 * dim + on_device),
            "CacheExchange": (done.admitted + done.evicted) * on_device,
        }
        found = {name: ops[name]["by_scope"][table] for name in wanted}
        assert {name: op["bytes"] for name, op in found.items()} == wanted
        assert {op["count"] for op in found.values()} == {len(batches)}
    updates = {
        "FusedSparseLazyAdam": D * (4 + 2 * size[dtype]) + 2 * 2 * of_slot[stored],
        "FusedSparseRowWiseAdagrad": 20,
    }
    assert {name: ops[name]["bytes"] for name in updates} == {n: done.passed * one for n, one in updates.items()}
