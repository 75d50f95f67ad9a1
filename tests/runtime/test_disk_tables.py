"""Training with tables on disk has the bits of training in memory, whatever share of the rows is in memory."""

import gc
import sys
import time
from itertools import product

import numpy as np
import pytest
import torch

from hostdev import Adam, Disk, Feature, HostTable, LazyAdam, LeastRecent, MinCount, Runtime, Unused
from hostdev.cache.planner import Planner
from hostdev.core.digest import StateDigest
from hostdev.host.disk import readers, store
from hostdev.kernels import disk_records
from hostdev.kernels.pool import host_threads, set_host_threads
from hostdev.pipeline.scheduling import overlapped
from hostdev.runtime.digest import add_table

ROWS, DIM, BATCH, STEPS = 4_000, 8, 100, 26
EACH = 4 * DIM * 3 + 32  # bytes of a row in memory
BUFFERS = 4 << 14


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small chunks and segments, so that a short training fills, frees and collects many."""
    monkeypatch.setattr(disk_records, "_CHUNK", 1 << 14)
    monkeypatch.setattr("hostdev.host.disk.tier.SEGMENT_BYTES", 1 << 16)


def draw(zipf, random, n):
    """Return ids; `zipf` 0 stands for uniform ones."""
    if not zipf:
        return random.integers(0, ROWS, n)
    shares = np.arange(1, ROWS + 1) ** -float(zipf)
    found = np.searchsorted(np.cumsum(shares) / shares.sum(), random.random(n))
    return np.random.default_rng(99).permutation(ROWS)[np.minimum(found, ROWS - 1)]


def batches(zipf, seed=0, steps=STEPS):
    random = np.random.default_rng(seed)
    for _ in range(steps):
        ids = torch.from_numpy(draw(zipf, random, 3 * BATCH).reshape(BATCH, 3))
        yield ids, torch.from_numpy(random.standard_normal(BATCH).astype(np.float32))


def read_ids(batch):
    return {"user": batch[0][:, 0].contiguous(), "bag": batch[0][:, 1:].contiguous()}


def make_table(disk, keys=None, optimizer=LazyAdam, **options):
    storage = None if disk is None else Disk(*disk)
    rows = ROWS if keys is None else None
    return HostTable(rows, DIM, optimizer(), name="t", seed=3, storage=storage, **(keys or {}), **options)


def train(disk, *, zipf=1.05, depth=2, cache=0, until=None, saves=None, **options):
    """Train; return a digest of the table, and all losses and predictions."""
    torch.manual_seed(1)
    table = make_table(disk, **options)
    layer = torch.nn.Linear(2 * DIM, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    features = {"user": table, "bag": Feature(table, pooling="sum")}
    seen = []
    with Runtime(features, device="cpu", depth=depth, cache=cache) as runtime:
        for epoch in range(2):
            for step, (batch, rows) in enumerate(runtime.train(batches(zipf, epoch), ids=read_ids, read_ahead=True)):
                out = layer(torch.cat([rows["user"], rows["bag"]], 1))[:, 0]
                loss = (out - batch[1]).square().mean()
                optimizer.zero_grad()
                if step % 7 == 4:
                    continue  # without a step
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
                if step == 11:
                    seen.append(float(runtime.lookup(read_ids(batch))["bag"].sum()))
                if step == 13 and saves is not None:
                    runtime.save(saves, wait=False)
                if step == until:
                    break
            for _, rows in runtime.predict(batches(zipf, 7, 2), ids=read_ids, read_ahead=True):
                seen.append(float(rows["bag"].sum()))
    digest = StateDigest(host_threads())
    add_table(digest, table)
    return digest.hexdigest(), seen


def on(tmp_path, share, window=16):
    """Return the arguments of `Disk` for a share of the rows in memory."""
    return tmp_path / "disk", BUFFERS + max(int(share * ROWS), 1) * EACH, window


WAYS = {
    "by row": {},
    "uniform": {"zipf": 0},
    "zipf 1.2": {"zipf": 1.2},
    "bfloat16": {"dtype": "bfloat16", "slots": "8bit"},
    "steps that change all rows": {"optimizer": Adam},
    "a loop that ends early": {"until": 20},
    "by key": {"keys": {"capacity": ROWS}},
    "unused keys evicted": {"keys": {"capacity": ROWS, "evict": Unused(steps=5, every=2)}, "dtype": "bfloat16"},
    "down to a capacity": {"keys": {"capacity": 1_200, "evict": LeastRecent(every=3)}, "zipf": 1.2},
    "admitted at a count": {"keys": {"capacity": ROWS, "admit": MinCount(2), "unknown": "initial"}},
}


@pytest.mark.drawn
@pytest.mark.parametrize("way", WAYS)
def test_results_do_not_depend_on_what_is_in_memory(way, tmp_path):
    options = WAYS[way]
    expected = train(None, **options)
    for share, depth, cache, window in ((1, 2, 0, 16), (0.35, 0, 0, 16), (0.35, 3, "5%", 60), (0.35, 2, 0, 0)):
        how = share, depth, cache, window
        assert train(on(tmp_path, share, window), depth=depth, cache=cache, **options) == expected, how
        gc.collect()
        assert list((tmp_path / "disk").iterdir()) == []


def test_a_generator_that_the_loader_and_the_body_share(tmp_path):
    """A table on disk reads ahead even at depth 0, but with a window of 0."""

    def run(disk, **options):
        table, random, seen = make_table(disk), np.random.default_rng(5), []
        loader = (torch.from_numpy(random.integers(0, ROWS, 50)) for _ in range(20))
        with Runtime({"t": table}, device="cpu", depth=0) as runtime:
            for batch, rows in runtime.train(loader, ids=lambda batch: {"t": batch}, **options):
                rows["t"].backward(torch.full((50, DIM), random.random()))
                seen.append(batch.tolist())
        return seen, table.lookup(np.arange(ROWS)).tobytes()

    expected = run(None)
    assert run(on(tmp_path, 0.35, 0)) == run(on(tmp_path, 0.35), read_ahead=0) == expected
    with pytest.warns(UserWarning, match="does not read ahead"):
        assert run(on(tmp_path, 0.35)) == expected


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("place", ["restore", "join"])
def test_an_interrupt_at_the_end_of_a_loop_leaves_no_plan_and_no_pins(place, depth, tmp_path, monkeypatch):
    table, times = make_table(on(tmp_path, 0.35, 40)), []

    def interrupted(call):
        def run(*arguments):
            if place != "restore":
                call(*arguments)
            times.append(1)
            if len(times) == 1:
                raise KeyboardInterrupt
            if place == "restore":
                call(*arguments)

        return run

    with Runtime({"user": table, "bag": Feature(table, pooling="sum")}, device="cpu", depth=depth) as runtime:
        loop = runtime.train(batches(1.05), ids=read_ids, read_ahead=True)
        _, rows = next(loop)
        (rows["user"].sum() + rows["bag"].sum()).backward()
        next(loop)
        with monkeypatch.context() as patch:
            if place == "restore":
                patch.setattr(Planner, "restore", interrupted(Planner.restore))
            else:
                patch.setattr(overlapped, "uninterruptible", interrupted(overlapped.uninterruptible))
            if place == "join" and not depth:
                loop.close()
            else:
                with pytest.raises(KeyboardInterrupt):
                    loop.close()
        tier = table.storage.tier
        assert tier._pinned == 0 and not tier._pins.any()
        [planner] = [one._planner for one in runtime.pipeline._context.tiers]
        assert planner.is_settled
        for _, rows in runtime.train(batches(1.05), ids=read_ids, read_ahead=True):
            (rows["user"].sum() + rows["bag"].sum()).backward()


@pytest.mark.drawn
@pytest.mark.parametrize("way", ["uniform", "zipf 1.2", "unused keys evicted"])
def test_two_percent_of_the_rows_in_memory(way, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROWS", 100_000)
    options = WAYS[way]
    if "keys" in options:
        options = {**options, "keys": {"capacity": ROWS, "evict": Unused(steps=12, every=2)}}
    expected = train(None, **options)
    for share in (0.02, 0.1):
        assert train(on(tmp_path, share), **options) == expected, share


def test_a_slow_disk_only_takes_time(tmp_path, monkeypatch):
    """Writes and reads of some milliseconds each; a checkpoint begins meanwhile and ends after them."""
    write, work = store.write_all, readers.Read.work

    def write_slowly(*arguments):
        time.sleep(0.02)
        write(*arguments)

    def work_slowly(*arguments):
        time.sleep(0.004)
        work(*arguments)

    expected = train(None)
    monkeypatch.setattr(store, "write_all", write_slowly)
    monkeypatch.setattr(readers.Read, "work", work_slowly)
    assert train(on(tmp_path, 0.35), saves=tmp_path / "saved") == expected
    loaded = make_table(None)
    with Runtime({"user": loaded}, device="cpu") as runtime:
        runtime.load(tmp_path / "saved")
    assert loaded.step > STEPS  # the second checkpoint, of the second epoch


@pytest.mark.slow
@pytest.mark.parametrize("zipf", [0, 0.9, 1.05, 1.2])
@pytest.mark.parametrize("way", [way for way in WAYS if "zipf" not in WAYS[way]])
def test_results_do_not_depend_on_what_is_in_memory_in_all_modes(way, zipf, tmp_path):
    options = WAYS[way]
    expected = train(None, zipf=zipf, **options)
    try:
        for share, depth, cache, threads in product((1, 0.5, 0.35), (0, 2, 4), (0, "5%", "100%"), (1, 2)):
            set_host_threads(threads)
            found = train(on(tmp_path, share), zipf=zipf, depth=depth, cache=cache, **options)
            assert found == expected, (share, depth, cache, threads)
    finally:
        set_host_threads(2)


@pytest.mark.parametrize("first", ["disk", "memory"])
@pytest.mark.parametrize("way", ["by row", "unused keys evicted"])
def test_checkpoints_are_the_same_files_of_both(way, first, tmp_path):
    options = WAYS[way]
    disks = {"disk": on(tmp_path, 0.35), "memory": None}
    found = []
    for name in (first, "disk", "memory"):
        table = make_table(disks[name], **{k: v for k, v in options.items() if k != "zipf"})
        with Runtime({"user": table, "bag": Feature(table, pooling="sum")}, device="cpu") as runtime:
            if not found:
                for step, (_, rows) in enumerate(runtime.train(batches(1.05), ids=read_ids, read_ahead=True)):
                    (rows["user"].square().mean() + rows["bag"].mean()).backward()
                    if step in (9, 19):  # a full one, and one of changes
                        runtime.save(tmp_path / f"at {step}", wait=False)
            else:
                runtime.load(tmp_path / "at 19")
                digest = StateDigest(host_threads())
                add_table(digest, table)
                found.append(digest.hexdigest())
                continue
        found.append("")
    assert found[1] == found[2]


def test_prediction_inside_a_loop_has_frames_of_its_own(tmp_path):
    table = make_table(on(tmp_path, 0.35))
    with Runtime({"user": table, "bag": Feature(table, pooling="sum")}, device="cpu", depth=4) as runtime:
        for step, (_, rows) in enumerate(runtime.train(batches(0.9, steps=12), ids=read_ids, read_ahead=True)):
            (rows["user"].mean() + rows["bag"].mean()).backward()
            if step % 4 == 1:
                for _, inner in runtime.predict(batches(0.9, 5, 3), ids=read_ids, read_ahead=True):
                    assert torch.isfinite(inner["bag"]).all()
