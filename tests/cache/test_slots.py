"""A table's slots on the device: a row is owned by the host or by a slot, and optimizers update both alike."""

import numpy as np
import pytest
import torch

from hostdev import (
    FTRL,
    SGD,
    Adagrad,
    EmbeddingCache,
    HostTable,
    LazyAdam,
    Momentum,
    RowWiseAdagrad,
    RowWiseAdam,
    UserError,
)
from hostdev.cache import cache as cache_module
from hostdev.cache.plan import renumber
from hostdev.cache.slots import DeviceSlots, Places
from hostdev.device import backend, ops
from hostdev.device.ops import torch_operations
from hostdev.ops import unique
from tests.combinations import of_any_ids, pairs_first
from tests.device import twins

ROWS = 300
COMPILED = LazyAdam, FTRL, Adagrad  # for slots of 8 bits beside float32 weights; see tests/compile_kernels.py


def name_of(value):
    if isinstance(value, tuple):
        return "-".join(value)
    return str(value) if isinstance(value, int | str) else type(value).__name__


@pairs_first(
    "optimizer, dtypes, dim, operations",
    [LazyAdam(), FTRL(), SGD(), Adagrad(), RowWiseAdagrad(), RowWiseAdam(), Momentum()],
    [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "8bit"), ("fp32", "8bit")],  # of weights and slots
    [1, 5, 80],
    ["kernels", "torch"],
    cost=lambda optimizer, dtypes, dim, operations: 9 if dim == 1 and "8bit" in dtypes else 1,  # that is float32
    quick=lambda optimizer, dtypes, *_: dtypes != ("fp32", "8bit") or isinstance(optimizer, COMPILED),
    ids=name_of,
)
@of_any_ids
def test_rows_go_in_and_out_and_lose_no_update(device, optimizer, dim, operations, dtypes, id_dtype, monkeypatch):
    dtype, stored = dtypes
    if operations == "torch" and device.type == "cpu":
        monkeypatch.setattr(ops, "host_kernels", torch_operations)
        monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())))  # correctly rounded
    if operations == "kernels" and device.type == "standin":
        twins.register()
    monkeypatch.setattr(ops, "FUSED", {device.type} if operations == "kernels" else set())
    plain = HostTable(ROWS, dim, optimizer, name="t", dtype=dtype, slots=stored)
    table = HostTable(ROWS, dim, optimizer, name="t", dtype=dtype, slots=stored)
    cache = EmbeddingCache(table, 40, device=device, window=0)
    on_device = cache.slots[0]
    rng = np.random.default_rng(dim)
    for _ in range(12):
        ids, inverse = unique((rng.zipf(1.3, 200) % ROWS).astype(id_dtype))
        grads = rng.standard_normal((len(ids), dim), dtype=np.float32)
        cache.announce(ids, inverse)
        plan = cache.plan()
        at = Places(*(part.to(device) for part in Places.of(plan, plan.cached).tensors))
        width = 1 + len(optimizer.slots)
        admitted = np.empty((len(plan.admitted), width, dim), np.float32)
        row_slots = np.empty((len(plan.admitted), len(optimizer.row_slots)), np.float32)
        table.read_rows(ids[plan.admitted], admitted, row_slots)
        sent = torch.from_numpy(admitted).to(device), torch.from_numpy(row_slots).to(device)
        passed = torch.from_numpy(table.lookup(ids[plan.passed])).to(device)
        rows = on_device.rows(at, passed, *sent)
        order = plan.order
        np.testing.assert_array_equal(rows.cpu(), plain.lookup(ids[order]))
        np.testing.assert_array_equal(ids[order][renumber(inverse, plan.places)], ids[inverse])
        step = table.begin_step()
        there = torch.from_numpy(grads[order]).to(device)
        skip = torch.ones((), device=device)
        on_device.update(at, torch.full_like(there, torch.nan), *sent, step, skip)
        on_device.update(at, there, *sent, step, skip.zero_())
        passing = on_device.passed(at, there)
        np.testing.assert_array_equal(plan.admitted_slots[len(plan.admitted) - len(plan.evicted) :], plan.evicted_slots)
        left = on_device.exchange(at, len(plan.evicted), *sent)
        cache.stepped(plan, 0, lambda: None)
        cache.left(plan, 0)
        table.update(ids[plan.passed], passing.cpu().numpy(), step)
        table.write_rows(plan.evicted, *(part.cpu().numpy() for part in left))
        plain.update(ids, grads)
    assert cache.planner.statistics.evicted > 0
    cache.write_back()
    for name, values in plain.columns().items():
        np.testing.assert_array_equal(table.columns()[name][:], values[:])


def test_writing_back_in_parts(monkeypatch):
    monkeypatch.setattr(cache_module, "_AT_ONCE_BYTES", 100)
    how = torch.device("cpu"), LazyAdam(), 5, "kernels", ("fp32", "fp32"), "int32"
    test_rows_go_in_and_out_and_lose_no_update(*how, monkeypatch)


@pytest.mark.parametrize(("optimizer", "width"), [(LazyAdam(), 3), (SGD(), 1), (RowWiseAdagrad(), 1)])
def test_memory_of_the_slots(optimizer, width):
    table = HostTable(ROWS, 16, optimizer, name="t")
    made = DeviceSlots(50, table, torch.device("cpu"))
    assert made.block.shape == (50, width, 16)
    assert made.row_slots.shape == (50, len(optimizer.row_slots))
    assert EmbeddingCache(table, 50).nbytes == 50 * (16 * width + len(optimizer.row_slots)) * 4


def test_slots_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(backend, "free_bytes", lambda device: 1000)
    with pytest.raises(
        UserError, match="a cache of 50 rows needs 9600 bytes .* of cpu memory are free; use a cache of fewer rows"
    ):
        EmbeddingCache(HostTable(ROWS, 16, LazyAdam(), name="t"), 50)


def test_an_accelerator_keeps_memory_for_the_rest(monkeypatch):
    """The reserve is a tenth of the free memory, at least 256 MiB; checked before allocation."""
    table = HostTable(1000, 4, SGD(), name="t")
    monkeypatch.setattr(backend, "free_bytes", lambda device: (256 << 20) + 16 * 500)
    EmbeddingCache(table, 600)  # on the CPU all that is free
    monkeypatch.setattr(cache_module, "require", torch.device)
    message = r"needs 8016 bytes .*8000 bytes .*cuda:0 memory are free for it .*tenth.*256 MiB"
    with pytest.raises(UserError, match=message):
        EmbeddingCache(table, 501, device="cuda:0")
