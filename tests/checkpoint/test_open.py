"""`hostdev.open`: a saved model's tables for looking rows up, by name, from whatever has saved them."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import hostdev
from hostdev.checkpoint import folder
from hostdev.checkpoint.layers import SavedRows
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.core import cli
from hostdev.core.checksums import json_checksum
from hostdev.ext.checkpoints import cli as checkpoint


def saved(path, dtype="fp32", steps=3):
    """Save two tables after each of some steps, fully and incrementally; return the tables and the other values."""
    users = hostdev.HostTable(5000, 4, hostdev.LazyAdam(lr=0.1), name="users", dtype=dtype)
    items = hostdev.HostTable(70, 3, hostdev.RowWiseAdagrad(lr=0.1), name="items", dtype=dtype)
    runtime = hostdev.Runtime({"user": users, "item": items}, device="cpu")
    rng = np.random.default_rng(0)
    extra = {"epoch": 3, "top": torch.nn.Linear(4, 1).state_dict(), "mean": np.arange(3.0)}
    for step in range(steps):
        runtime.pipeline.steps = step
        runtime.save(path, extra={**extra, "epoch": step})
        for table in (users, items):
            table.apply(rng.integers(0, table.rows, 30), rng.random((30, table.dim), np.float32))
    runtime.pipeline.steps = steps
    runtime.save(path, extra=extra)
    return {"users": users, "items": items}, extra


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_are_those_that_were_saved(tmp_path, dtype):
    tables, extra = saved(tmp_path / "saved", dtype)
    model = hostdev.open(tmp_path / "saved")
    assert model.step == 3
    assert len(folder.read_chain(model.path)) > 1
    assert list(model) == ["items", "users"]
    for name, table in tables.items():
        ids = np.random.default_rng(1).integers(0, table.rows, (60, 3))
        found = model[name].lookup(ids)
        assert (found.dtype, found.shape) == (np.float32, (60, 3, table.dim))
        np.testing.assert_array_equal(found, table.lookup(ids.ravel()).reshape(60, 3, -1))
        np.testing.assert_array_equal(model.tables[name].lookup(torch.arange(5)), table.lookup(np.arange(5)))
        assert (len(model[name]), model[name].optimizer) == (table.rows, type(table.optimizer).__name__)
        with pytest.raises(hostdev.UserError, match=f"table '{name}': id {table.rows} at position 0 is outside"):
            model[name].lookup([table.rows])
        with pytest.raises(TypeError):
            model[name].lookup([0.5])
    both = model.lookup({"users": [1, 2], "items": 3})
    assert (both["users"].shape, both["items"].shape) == ((2, 4), (3,))
    assert model.extra["epoch"] == extra["epoch"]
    np.testing.assert_array_equal(model.extra["mean"], extra["mean"])
    torch.nn.Linear(4, 1).load_state_dict(model.extra["top"])
    model.verify()


def test_one_table_of_several_and_no_others(tmp_path):
    tables, _ = saved(tmp_path)
    model = hostdev.open(tmp_path, tables=["items"])
    assert list(model) == ["items"]
    with pytest.raises(KeyError, match="no table 'users' is open; the open tables are items"):
        model["users"]
    with pytest.raises(hostdev.UserError, match="has no table 'user'; it has items, users"):
        hostdev.open(tmp_path, tables=["user"])
    shutil.rmtree(tmp_path)  # it is mapped: no more of the folder is needed
    np.testing.assert_array_equal(model["items"].lookup([5]), tables["items"].lookup(np.array([5])))


def test_without_torch(tmp_path):
    saved(tmp_path)
    program = (
        "import sys, hostdev\n"
        f"model = hostdev.open({str(tmp_path)!r})\n"
        "assert model['users'].lookup([1, 2]).shape == (2, 4)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def rewritten(path, change):
    """Change a checkpoint's manifest, and correct its checksum."""
    file = path / "checkpoint.json"
    content = json.loads(file.read_text())
    change(content)
    del content["sha256"]
    file.write_text(json.dumps({**content, "sha256": json_checksum(content)}))


def place(content, table, name):
    content["tables"][table]["files"][0]["file"] = name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["tables"][0].update(dim=7), "is broken"),
        (lambda content: content["tables"][0].update(rows=10**9), "is broken"),
        (lambda content: content["tables"][0]["files"][0].update(rows=10**9), "is broken"),
        (lambda content: content["tables"][0]["files"][0].update(start=-5), "is broken"),
        (lambda content: content["tables"][0].update(dim="4"), "is broken"),
        (lambda content: place(content, 0, "../../x"), "is broken|is missing"),
        (lambda content: place(content, 0, "/etc/passwd"), "is broken"),
        (lambda content: content["tables"][0].update(files=[]), "is broken"),
    ],
)
def test_what_no_checkpoint_holds_is_refused(tmp_path, change, message):
    saved(tmp_path, steps=0)
    rewritten(tmp_path / folder.names_in(tmp_path)[0], change)
    with pytest.raises(BrokenCheckpointError, match=message) as error:
        hostdev.open(tmp_path)
    assert "\n" not in str(error.value)


def test_a_child_of_another_shape_than_its_parent(tmp_path):
    saved(tmp_path, steps=1)
    child = tmp_path / folder.names_in(tmp_path)[-1]
    rewritten(child, lambda content: content["tables"][1].update(dim=8, files=[]))
    with pytest.raises(BrokenCheckpointError, match="table 'users' differs in dim from"):
        hostdev.open(child)


def test_checksums_are_compared_when_asked_for(tmp_path):
    saved(tmp_path, steps=0)
    [name] = folder.names_in(tmp_path)
    file = tmp_path / name / "tables/1/000000.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    model = hostdev.open(tmp_path)
    with pytest.raises(BrokenCheckpointError, match="its checksum is wrong"):
        model.verify()
    with pytest.raises(BrokenCheckpointError, match="its checksum is wrong"):
        hostdev.open(tmp_path, verify=True)


def test_export_says_what_it_leaves_out(tmp_path, capsys):
    saved(tmp_path / "saved", steps=0)
    told = {}
    for name, options in (("a", []), ("b", ["--slots"])):
        arguments = ["export", tmp_path / "saved", "--out", tmp_path / name, *options]
        assert cli.run(checkpoint.PROG, checkpoint.main, list(map(str, arguments))) == 0
        told[name] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not exported")]
    extra = "not exported: the `extra` of Runtime.save; --slots writes it, and hostdev.open(...).extra returns it"
    slots = "not exported: the optimizer slots of items (accum), users (m, v); --slots writes them"
    assert told == {"a": [slots, extra], "b": []}


def test_no_checkpoint(tmp_path):
    with pytest.raises(hostdev.UserError, match="there is no"):
        hostdev.open(tmp_path / "nowhere")
    with pytest.raises(hostdev.UserError, match="has no checkpoint"):
        hostdev.open(tmp_path)


def test_a_chain_of_many(tmp_path):
    """A row comes from the newest layer that has it."""
    table = hostdev.HostTable(200_000, 3, hostdev.SGD(lr=1.0), name="t")
    runtime = hostdev.Runtime({"t": table}, device="cpu")
    rng = np.random.default_rng(1)
    for step in range(6):
        runtime.pipeline.steps = step
        runtime.save(tmp_path)
        ids = rng.choice(table.rows, 300, replace=False)
        table.update(ids, rng.random((300, 3), np.float32))
    runtime.pipeline.steps = 6
    runtime.save(tmp_path)
    chain = folder.read_chain(tmp_path / folder.names_in(tmp_path)[-1])
    assert len(chain) == 7
    ids = np.arange(table.rows)
    np.testing.assert_array_equal(SavedRows(chain, "t").lookup(ids), table.block[:, 0])
