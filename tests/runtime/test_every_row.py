"""Optimizers whose steps change every row: the bits of a serial loop in every mode, and torch's dense AdamW."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import hostdev
from hostdev.checkpoint import folder, manifest
from hostdev.ext.checkpoints import compact
from tests.checkpoint.test_runtime import OPTIONS, extra_of, go_on
from tests.runtime.cases import (
    BF16,
    CACHES,
    ROWS,
    Case,
    Twin,
    batches_of,
    differing,
    ids,
    tables_of,
    weights_of,
)

BATCHES = batches_of(14, size=5)  # many rows are not used for some steps


def adam():
    return hostdev.Adam(lr=0.02, weight_decay=0.5)


MAKERS = {"adam": adam, "adagrad": lambda: hostdev.Adagrad(lr=0.1, weight_decay=0.3)}


def train(case, batches=BATCHES, first=0):
    """Train with a rate that the body changes in every step."""
    for number, (label, rows) in enumerate(case.loop(batches), first):
        for table in case.tables.values():
            table.optimizer.lr = 0.02 * (1 + 0.5 * np.sin(number))
        case.step(label, rows)
    return case


BOTH = ("users", "words")  # on the device, without caches
MODES = [  # all pairs of values
    (0, None, "adam", (), BOTH),
    (0, "20%", "adam", BF16, ()),
    (3, None, "adam", BF16, BOTH),
    (2, "20%", "adam", (), ()),
    (4, CACHES[2], "adagrad", BF16, ()),
    (3, None, "adagrad", (), ()),
    (2, None, "adagrad", (), BOTH),
]


@pytest.mark.parametrize(("depth", "cache", "name", "bf16", "on_device"), MODES)
def test_all_modes_give_the_bits_of_a_serial_loop(device, depth, cache, name, bf16, on_device):
    expected = train(Case(device, optimizer=MAKERS[name], bf16=bf16, options={"depth": 0})).state()
    options = {"depth": depth, "cache": cache}
    found = train(Case(device, optimizer=MAKERS[name], bf16=bf16, on_device=on_device, options=options))
    assert differing(found.state(), expected) == []


def test_it_is_torchs_adamw_on_whole_tables():
    case = Case(optimizer=lambda: hostdev.Adam(lr=0.02, weight_decay=0.5), options={"depth": 2})
    twin, batches = Twin(case.tables), batches_of(60, size=3)
    model = type(case.model)()
    dense = torch.optim.Adam(model.parameters(), lr=0.02)
    tables = torch.optim.AdamW(twin.parameters(), lr=0.02, weight_decay=0.5, foreach=False)
    used = np.zeros(ROWS["users"], np.int64)
    for batch, (label, rows) in zip(batches, case.loop(batches), strict=True):
        case.step(label, rows)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model(twin(batch)), torch.from_numpy(batch["label"])
        )
        for optimizer in (dense, tables):
            optimizer.zero_grad(set_to_none=False)
        loss.backward()
        used[np.unique(batch["user"])] += 1
        for optimizer in (dense, tables):
            optimizer.step()
    assert 0 < used.min() < 10  # rows were brought up to date over several steps
    for name, table in case.tables.items():
        np.testing.assert_allclose(weights_of(table), twin.tables[name].detach(), rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(("depth", "cache"), [(0, "20%"), (3, None), (2, "20%")])
def test_reads_in_the_body_see_all_steps_and_change_nothing(device, depth, cache):
    """Of rows that the batch uses and of others: weights, lookups, predictions, whole rows."""
    expected, seen = Case(device, optimizer=adam, options={"depth": 0}), []
    for label, rows in expected.loop(BATCHES):
        expected.step(label, rows)
        seen.append(weights_of(expected.tables["users"]))
    case = Case(device, optimizer=adam, options={"depth": depth, "cache": cache})
    table = case.tables["users"]
    for number, (label, rows) in enumerate(case.loop(BATCHES)):
        case.step(label, rows)
        if number % 3 == 0:
            np.testing.assert_array_equal(weights_of(table), seen[number])
        if number % 3 == 1:
            np.testing.assert_array_equal(table.lookup(np.arange(ROWS["users"])), seen[number])
            block, row_slots = np.empty((2, 3, 4), np.float32), np.empty((2, 1), np.float32)
            table.read_rows(np.array([7, 2]), block, row_slots)
            np.testing.assert_array_equal(block[:, 0], seen[number][[7, 2]])
            assert (row_slots == number + 1).all()
        found = case.runtime.lookup(ids(BATCHES[-1]))["user"]
        np.testing.assert_array_equal(found.detach().cpu(), seen[number][BATCHES[-1]["user"]])
    assert differing(case.state(), expected.state()) == []


def write(table):
    with table.writing([1, 5]) as w:
        w.weights[0] = 2.0
    table.erase([3, 4])


@pytest.mark.parametrize(("depth", "cache", "bf16"), [(0, "20%", ("users",)), (3, None, ()), (2, "20%", ())])
def test_writes_in_the_body(device, depth, cache, bf16):
    """A row that is written is brought up to date first; an erased one begins anew at this step."""

    def run(**options):
        case = Case(device, optimizer=adam, bf16=bf16, **options)
        for number, (label, rows) in enumerate(case.loop(BATCHES)):
            case.step(label, rows)
            if number == 6:
                write(case.tables["users"])
                initial = tables_of(device, adam, bf16=bf16)["users"].weights[3]
                np.testing.assert_array_equal(weights_of(case.tables["users"])[3], initial)
                assert (weights_of(case.tables["users"])[1] == 2.0).all()
        return case.state()

    expected = run(options={"depth": 0})
    assert differing(run(options={"depth": depth, "cache": cache}), expected) == []
    assert differing(run(on_device=("users",), options={"depth": depth}), expected) == []


@pytest.mark.parametrize(("first", "then"), [("serial", "cache"), ("cache", "serial"), ("cache", "depth 2")])
def test_checkpoints(device, tmp_path, first, then):
    """What goes on ends with the same bits; lookups and exports of a checkpoint are those of the table."""
    expected = train(Case(device, optimizer=adam)).state()
    case = Case(device, optimizer=adam, options=OPTIONS[first])
    for number, (label, rows) in enumerate(case.loop(BATCHES)):
        for table in case.tables.values():
            table.optimizer.lr = 0.02 * (1 + 0.5 * np.sin(number))
        case.step(label, rows)
        if number in (3, 8):
            saved = {name: weights_of(table) for name, table in case.tables.items()}
            case.runtime.save(tmp_path / "c", extra={**extra_of(case), "batches": number + 1})
    assert differing(case.state(), expected) == []
    newest = sorted(folder.names_in(tmp_path / "c"))[-1]
    opened = hostdev.open(tmp_path / "c" / newest)
    for name, weights in saved.items():
        np.testing.assert_array_equal(opened[name].lookup(np.arange(ROWS[name])), weights)
    for step in folder.names_in(tmp_path / "c"):
        other = Case(device, optimizer=adam, options=OPTIONS[then])
        done = go_on(other, tmp_path / "c" / step)
        assert differing(train(other, BATCHES[done:], done).state(), expected) == []


def test_a_merged_and_a_resharded_checkpoint(tmp_path):
    expected = train(Case(optimizer=adam)).state()
    case = train(Case(optimizer=adam), BATCHES[:5])
    case.runtime.save(tmp_path / "c")
    train(case, BATCHES[5:9], 5).runtime.save(tmp_path / "c", extra={**extra_of(case), "batches": 9})
    saved = weights_of(case.tables["items"])
    chain = folder.read_chain(tmp_path / "c" / sorted(folder.names_in(tmp_path / "c"))[-1])
    compact.rewrite(chain, tmp_path / "parts", 3)
    compact.compact(chain)
    for path in ("c", "parts"):
        np.testing.assert_array_equal(hostdev.open(tmp_path / path)["items"].lookup(np.arange(60)), saved)
        other = Case(optimizer=adam)
        assert go_on(other, tmp_path / path) == 9
        assert differing(train(other, BATCHES[9:], 9).state(), expected) == []


def test_a_table_that_grows(tmp_path):
    """Rows of the checkpoint go on as they would have; new rows begin at the step of the checkpoint."""
    small = hostdev.HostTable(30, 4, adam(), name="t", seed=1)
    rng = np.random.default_rng(0)
    with hostdev.Runtime({"x": small}) as runtime:
        for _ in range(20):
            small.apply(rng.integers(0, 30, 4), rng.normal(size=(4, 4)).astype(np.float32))
        runtime.save(tmp_path / "c")
    large = hostdev.HostTable(50, 4, adam(), name="t", seed=1)
    initial = large.weights.copy()
    with hostdev.Runtime({"x": large}) as runtime, pytest.warns(UserWarning, match="30 rows"):
        runtime.load(tmp_path / "c", strict=False)
    np.testing.assert_array_equal(large.weights[:30], small.weights)
    np.testing.assert_array_equal(large.weights[30:], initial[30:])
    for table in (small, large):
        table.apply(np.array([1, 2]), np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(large.weights[:30], small.weights)
    assert (np.abs(large.weights[30:]) < np.abs(initial[30:])).all()  # they decay from here on


def test_an_average_of_rows_is_refused():
    with pytest.raises(ValueError, match="'users': EMA .* Adam"):
        hostdev.EMA(tables_of(torch.device("cpu"), adam)["users"], 0.9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"history": None},
        {"history": "AAAA"},
        {"hyperparameters": {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": float("nan")}},
        {"hyperparameters": {"lr": 0.1, "beta1": 0.99999999, "beta2": 0.9999999999, "eps": 1e-8}},
        {"hyperparameters": {"lr": 0.1, "unknown": 1}},
    ],
    ids=str,
)
def test_a_manifest_with_wrong_steps(tmp_path, wrong):
    """Its checksum is right; nothing is allocated for a beta1 next to 1."""
    case = train(Case(optimizer=adam), BATCHES[:2])
    path = case.runtime.save(tmp_path / "c").path
    found = manifest.read(path)
    tables = [replace(table, **wrong) if table.name == "users" else table for table in found.tables]
    (path / manifest.FILE_NAME).write_text(replace(found, tables=tables).to_text())
    with pytest.raises(manifest.BrokenCheckpointError, match="users"):
        hostdev.open(path)
    with pytest.raises(hostdev.UserError):
        Case(optimizer=adam).runtime.load(path)


def test_a_step_that_is_refused_is_not_counted():
    table = hostdev.HostTable(3, 2, hostdev.SGD(lr=0.5, weight_decay=1.0), name="t")
    table.optimizer.lr = 2.0
    with pytest.raises(ValueError, match="'t': lr 2.0 times weight_decay 1.0 must be below 1"):
        table.apply([0], np.ones((1, 2), np.float32))
    assert (table.step, table.history.steps) == (0, 0)
    table.optimizer.lr = 0.5
    table.apply([0], np.ones((1, 2), np.float32))
    assert (table.step, table.history.steps) == (1, 1)
