"""Checkpoints of Adam from before it had `epsilon_hat`: what loads one continues in its form, to the bit."""

import json

import numpy as np
import pytest

import hostdev
from hostdev import Adam, Disk, HostTable, Runtime, UserError
from hostdev.checkpoint import folder, manifest, remote
from hostdev.core import optimizers
from hostdev.core.checksums import json_checksum
from hostdev.ext.checkpoints import diff
from hostdev.ext.training import cli as train
from tests.conftest import digest_of

ROWS, DIM = 300, 3


def strip_form(path):
    """Make a manifest what an earlier version wrote: Adam's hyperparameters without `epsilon_hat`."""
    file = path / manifest.FILE_NAME
    content = json.loads(file.read_text())
    del content["sha256"]
    for table in (each for each in content["tables"] if each["optimizer"] == "Adam"):
        assert table["hyperparameters"].pop("epsilon_hat") is True
    file.write_text(json.dumps({**content, "sha256": json_checksum(content)}))


def newest(path):
    return remote.newest(path).chain[-1].path


def make(optimizer, name="t", **given):
    return HostTable(given.pop("rows", ROWS), DIM, optimizer, name=name, seed=1, **given)


def take_steps(table, steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = np.unique(np.minimum(rng.pareto(0.7, 4).astype(np.int32), 299))
        table.update(ids, (rng.normal(size=(len(ids), DIM)) * 1e-6).astype(np.float32))


def state_of(table):
    return {"weights": table.lookup(np.arange(ROWS)), **{name: np.array(v[:]) for name, v in table.slots.items()}}


@pytest.fixture
def earlier(tmp_path):
    """A checkpoint of an earlier version after 40 steps, and the state of its table after 80."""
    table = make(Adam(lr=0.01, epsilon_hat=True))
    with Runtime({"t": table}) as runtime:
        take_steps(table, 40, 0)
        runtime.save(tmp_path / "c", extra=0, wait=True)
        strip_form(newest(tmp_path / "c"))
        take_steps(table, 40, 1)
    return tmp_path / "c", state_of(table)


@pytest.mark.parametrize("stored", ["memory", "disk"])
def test_a_table_continues_in_the_form_of_its_checkpoint(earlier, tmp_path, stored):
    path, wanted = earlier
    optimizer = Adam(lr=0.5)
    table = make(optimizer, **({"storage": Disk(tmp_path / "d", memory="8MiB")} if stored == "disk" else {}))
    with Runtime({"t": table}) as runtime:
        runtime.load(path)
        assert table.optimizer is optimizer and optimizer == Adam(lr=0.01, epsilon_hat=True)
        read = hostdev.open(path)["t"]
        assert read.hyperparameters["epsilon_hat"] is True
        np.testing.assert_array_equal(read.lookup(np.arange(ROWS)), table.lookup(np.arange(ROWS)))
        take_steps(table, 40, 1)
        for name, values in state_of(table).items():
            np.testing.assert_array_equal(values, wanted[name], err_msg=name)
        runtime.save(path, extra=0, wait=True)
    again = make(Adam())  # a second time: the checkpoint names the form now
    with Runtime({"t": again}) as runtime:
        runtime.load(path)
        np.testing.assert_array_equal(again.lookup(np.arange(ROWS)), wanted["weights"])
    table.close()


def test_another_form_than_a_checkpoint_is_refused_where_it_was_asked_for(tmp_path):
    table = make(Adam(lr=0.01))
    with Runtime({"t": table}) as runtime:
        take_steps(table, 5, 0)
        runtime.save(tmp_path / "c", extra=0, wait=True)
    with Runtime({"t": make(Adam(epsilon_hat=True))}) as runtime, pytest.raises(UserError, match="epsilon_hat"):
        runtime.load(tmp_path / "c")


def test_a_load_that_fails_leaves_the_programs_form(earlier):
    path, _ = earlier
    file = next(each for each in newest(path).rglob("*") if each.is_file() and each.name != manifest.FILE_NAME)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    table, wanted = make(Adam(lr=0.01)), make(Adam(lr=0.01))
    with Runtime({"t": table}) as runtime, pytest.raises(UserError):
        runtime.load(path)
    assert table.optimizer == Adam(lr=0.01)
    for each in (table, wanted):
        take_steps(each, 20, 1)
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), wanted.lookup(np.arange(ROWS)))


def test_a_table_that_is_not_loaded_keeps_its_form(earlier):
    path, _ = earlier
    shared = Adam(lr=0.01)
    tables = {name: make(shared, name) for name in ("t", "new")}
    with Runtime(tables) as runtime, pytest.raises(UserError, match="'new'.* has the same optimizer object"):
        runtime.load(path, strict=False)
    tables["new"] = make(Adam(lr=0.01), "new")
    with Runtime(tables) as runtime, pytest.warns(UserWarning, match="has no table 'new'"):
        runtime.load(path, strict=False)
    assert (tables["t"].optimizer.epsilon_hat, tables["new"].optimizer.epsilon_hat) == (True, False)


def test_a_run_of_an_earlier_version_ends_with_its_digest(small_data, tmp_path, run, monkeypatch):
    flags = ["--data", small_data, "--host-device-mix", "--table-optimizer", "adam", "--batch-size", 500]
    flags += ["--emb-dim", 4]
    with monkeypatch.context() as patch:
        patch.setitem(optimizers.OPTIMIZERS, "adam", lambda **given: Adam(epsilon_hat=True, **given))
        run(train, *flags, "--max-steps", 12, "--run-dir", tmp_path / "whole")
        run(train, *flags, "--max-steps", 6, "--run-dir", tmp_path / "r", "--checkpoint-every", 6)
    checkpoints = tmp_path / "r" / "checkpoints"
    strip_form(newest(checkpoints))
    out = run(train, *flags, "--max-steps", 12, "--run-dir", tmp_path / "r", "--checkpoint-every", 6, "--resume")
    assert out.count("Adam(epsilon_hat=True), the form of the checkpoint") >= 1
    assert digest_of(tmp_path / "r") == digest_of(tmp_path / "whole")
    first, *_, last = sorted(each for each in checkpoints.iterdir() if each.name.startswith("step"))
    assert not [
        line
        for line in diff.differences(*(folder.read_chain(each) for each in (first, last)))
        if "hyperparameters" in line
    ]
