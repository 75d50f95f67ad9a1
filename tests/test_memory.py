from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hostdev import Feature, HostTable, LazyAdam, RowWiseAdagrad, Runtime, UserError
from hostdev.cache.planner import planner_bytes
from hostdev.core import memory
from hostdev.core.memory import TableShape
from hostdev.host.snapshot import Budget
from hostdev.runtime.placement import GroupSize, kept
from hostdev.runtime.spec import CacheSpec, TableSpec
from hostdev.train import room


def group(folder, limit, used, cache, *, v1=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    prefix = "total_" if v1 else ""
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cache - 1}\n{prefix}active_file 1\n")


@pytest.mark.parametrize("v1", [False, True])
def test_a_containers_limit_counts_without_its_page_cache(tmp_path, monkeypatch, v1):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    whole = memory.available_bytes()
    group(tmp_path / "memory" if v1 else tmp_path, 10_000, 9_000, 8_000, v1=v1)
    assert memory.available_bytes() == 10_000 - 1_000 < whole
    group(tmp_path / "memory" if v1 else tmp_path, "max", 9_000, 8_000, v1=v1)
    assert memory.available_bytes() > 10_000
    group(tmp_path / "memory" if v1 else tmp_path, 10_000, 9_000, 8_000, v1=v1)
    read = Path.read_text
    own = Path("/proc/self/cgroup")
    monkeypatch.setattr(Path, "read_text", lambda path: read(Path("/nowhere") if path == own else path))
    assert memory.available_bytes() == 10_000 - 1_000


def test_what_a_cache_may_take():
    assert memory.cache_room(10 << 30) == 9 << 30
    assert memory.cache_room(1 << 30) == (1 << 30) - (256 << 20)
    assert memory.cache_room(10 << 30, beside=2 << 30) == 7 << 30
    assert memory.cache_room(100) == 0


def test_what_the_dense_layers_need():
    """Weights, gradients and Adam's moments; the input thrice, and each layer's output, activation and gradients."""
    parameters = (6 * 5 + 5) + (5 * 2 + 2) + (2 * 1 + 1)
    assert memory.dense_bytes(10, 6, (5, 2)) == 16 * parameters + 4 * 10 * (3 * 6 + 4 * (5 + 2))


def test_the_refusal_gives_the_sum():
    assert memory.require_table("t", 10, 4, LazyAdam(), 480, "host") == 480
    with pytest.raises(UserError, match=r"table 't' needs 10 rows x 4 x \(1 \+ 2 slots\) x 4 = 480 bytes .* 479 bytes"):
        memory.require_table("t", 10, 4, LazyAdam(), 479, "host")
    assert [memory.format_bytes(n) for n in (12, 2048, 3 << 20, 5 << 30)] == [
        "12 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    with pytest.raises(UserError, match=r"10 rows x 4 x \(1 \+ 0 slots\) x 4 \+ 10 rows x 1 x 4 = 200 bytes"):
        memory.require_table("t", 10, 4, RowWiseAdagrad(), 199, "host")


@pytest.fixture
def runtime():
    """Two tables that share ids and a cache of their rows, and another."""
    tables = [HostTable(1000, dim, LazyAdam(), name=f"t{dim}") for dim in (3, 1)]
    other = HostTable(77, 2, RowWiseAdagrad(), name="other", dtype="bf16")
    yield Runtime({"both": tuple(tables), "other": other}, device="cpu", cache={"t3": "10%"})


def test_what_is_kept_for_rows_is_what_is_allocated(runtime):
    """By the formula, before; by the arrays' sizes, after."""
    tables, [cache] = runtime.tables.values(), runtime.caches
    sizes = [
        GroupSize(1000, [TableShape(3, LazyAdam()), TableShape(1, LazyAdam())], True, CacheSpec("10%")),
        GroupSize(77, [TableShape(2, RowWiseAdagrad(), "bf16")], True),
        GroupSize(10**9, [TableShape(1, LazyAdam())], False),  # on the device
    ]
    parts = kept(sizes, depth=2, slots_on_host=True, uses=100, copies=1 << 20)
    assert parts["tables"] == sum(table.storage.nbytes for table in tables)
    assert parts["last writers of rows"] == 1077
    assert parts["cached rows"] == cache.nbytes
    assert parts["the cache's plan"] == cache.planner.nbytes + 4 * 100  # of the slots, as yet empty
    changes = [table.stored.note_changes() for table in tables]
    snapshots = [one.begin(Budget(1 << 20), everything=True) for one in changes]
    marks = sum(
        bits.nbytes
        for one, snapshot in zip(changes, snapshots, strict=True)
        for bits in (one.touched, snapshot.wanted, snapshot._pending)
    )
    assert abs(marks - parts["bitmaps of changed rows"]) <= 3 * 3 * 8  # whole words
    assert parts["batches in flight"] == 4 * 2 * 100 * 16 + 24 * 100 * (4 + 16)  # rows and gradients; ids
    assert parts["copies for checkpoints"] == 2 * parts["tables"]
    assert set(kept(sizes, depth=0, slots_on_host=False)) == {"tables", "the cache's plan"}


def test_a_plan_is_kept_for_its_batches_and_counts():
    """Of a large table it depends on the batches, for a policy that looks ahead on those of the window."""
    table, rows, uses = TableShape(8, LazyAdam()), 200_000_000, 200_000
    for policy, ahead in (("lookahead", 7), ("lru", 0)):
        cache = CacheSpec("1%", policy, 7, counts=np.broadcast_to(np.int64(1), rows))
        parts = kept([GroupSize(rows, [table], True, cache)], depth=2, slots_on_host=True, uses=uses)
        assert parts["the cache's plan"] == planner_bytes(rows, rows // 100, uses, ahead)
        assert parts["counts of uses"] == 8 * rows
        assert parts["batches in flight"] == 4 * 2 * 32 * uses + (4 + ahead) * 24 * uses
    assert parts["the cache's plan"] > planner_bytes(rows, rows // 100)
    with pytest.raises(UserError, match="at most 2,147,483,647 rows, not 2,147,483,648; leave out the cache"):
        kept([GroupSize(2**31, [table], True, CacheSpec(10))], depth=2, slots_on_host=True)


def test_counts_that_are_there_need_no_more_memory(runtime, monkeypatch):
    counts = np.ones(1000)
    table, spec = runtime.tables["t3"], CacheSpec(10, "static", counts=counts)
    beside = kept([GroupSize(1000, [TableShape(3, LazyAdam())], True, spec)], depth=0, slots_on_host=True)
    del beside["tables"]
    for free, fits in ((sum(beside.values()) - counts.nbytes, True), (sum(beside.values()) - counts.nbytes - 1, False)):
        monkeypatch.setattr("hostdev.runtime.placement.available_bytes", lambda free=free: free)
        if fits:
            Runtime({"t3": table}, device="cpu", depth=0, cache=spec)
        else:
            with pytest.raises(UserError, match="counts of uses 7.8 KiB"):
                Runtime({"t3": table}, device="cpu", depth=0, cache=spec)


def test_a_runtime_is_refused_before_it_allocates(runtime, monkeypatch):
    monkeypatch.setattr("hostdev.runtime.placement.available_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"the cache's plan .*, last writers of rows .* bytes .*, but 1000 bytes"):
        Runtime({"both": runtime.tables["t3"]}, device="cpu", cache="10%")


def test_a_training_is_refused_before_its_tables_are_there(monkeypatch):
    """Each table fits, and all of them, but not what else is kept of their rows."""
    model = SimpleNamespace(tables={"a": TableSpec(1000, 8, LazyAdam())}, features={"f": Feature("a")})
    tables = 1000 * 8 * 3 * 4
    how = {"device": torch.device("cpu"), "depth": 2, "uses": 0, "saves": True}
    for free, part in ((3 * tables + 1000 + 3 * 125, None), (3 * tables // 2 + 500 + 3 * 63, (1, 2))):
        monkeypatch.setattr("hostdev.runtime.placement.available_bytes", lambda free=free: free)
        found = room.make_host_budget(room.estimate_host_memory(model, None, part, **how))
        assert sum(found.parts.values()) == found.free == free
        assert found.describe().startswith(
            f"{memory.format_bytes(free)} of the host's {memory.format_bytes(free)} free: tables "
        )
        with pytest.raises(UserError, match="use fewer rows"):
            room.make_host_budget(room.estimate_host_memory(model, CacheSpec(10), part, **how))
