"""`Runtime.save` and `load` in a user's own loop: the run that goes on ends with the same bits."""

import sys

import numpy as np
import pytest
import torch

from hostdev import HostTable, LazyAdam, RowWiseAdagrad, Runtime, UserError
from hostdev.checkpoint import folder, manager, ranges, remote
from hostdev.checkpoint.loading import load_tables, verify
from hostdev.core.checksums import HashedFile
from hostdev.ext.checkpoints import compact
from tests import forks
from tests.conftest import environment
from tests.runtime.cases import BF16, BodyError, Case, batches_of, differing, tables_state

BATCHES = batches_of(12)
OPTIONS = {"serial": {"depth": 0}, "depth 2": {"depth": 2}, "cache": {"depth": 2, "cache": "30%"}}


def extra_of(case):
    return {
        "model": case.model.state_dict(),
        "adam": case.adam.state_dict(),
        "rates": case.runtime.optimizer.state_dict(),
    }


def go_on(case, path):
    """Load a checkpoint into a case; return the number of batches that it has had."""
    extra = case.runtime.load(path)
    case.model.load_state_dict(extra["model"])
    case.adam.load_state_dict(extra["adam"])
    case.runtime.optimizer.load_state_dict(extra["rates"])
    return extra["batches"]


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.slow_on_standin) for first in ("serial", "depth 2")] + ["cache"]
)
@pytest.mark.parametrize("then", OPTIONS)
def test_what_goes_on_ends_the_same(device, tmp_path, first, then):
    """Save within a loop, which continues; load in another program, in another mode."""
    expected = Case(device).train(BATCHES).state()
    case = Case(device, options=OPTIONS[first])
    for number, (label, rows) in enumerate(case.loop(BATCHES), 1):
        case.step(label, rows)
        if number in (2, 5, 7):
            case.runtime.save(tmp_path / "c", extra={**extra_of(case), "batches": number}, wait=number != 5)
    assert differing(case.state(), expected) == []  # saving changes nothing
    names = sorted(each.name for each in (tmp_path / "c").iterdir() if each.name.startswith("step"))
    assert names == ["step-0000000002", "step-0000000005", "step-0000000007"]
    for name in names:
        other = Case(device, options=OPTIONS[then])
        done = go_on(other, tmp_path / "c" / name)
        assert differing(other.train(BATCHES[done:]).state(), expected) == []


@pytest.mark.parametrize("copies", [1, 1 << 30])
def test_tables_on_the_device_and_on_the_host_share_checkpoints(device, tmp_path, monkeypatch, copies):
    """Device tables are copied, or read while they are written if there is no room for copies."""
    monkeypatch.setattr(manager, "COPIES_BYTES", copies)
    expected = Case(device).train(BATCHES).state()
    case = Case(device).train(BATCHES[:4])
    case.runtime.save(tmp_path / "c", extra={**extra_of(case), "batches": 4})
    on_device = Case(device, on_device=("users", "items", "first"))
    go_on(on_device, tmp_path / "c")
    on_device.train(BATCHES[4:8])
    on_device.runtime.save(tmp_path / "d", extra={**extra_of(on_device), "batches": 8})
    last = Case(device, options={"cache": "30%"})
    assert go_on(last, tmp_path / "d") == 8
    assert differing(last.train(BATCHES[8:]).state(), expected) == []


@pytest.mark.parametrize("then", [{"on_device": ("users", "items", "first")}, {"options": {"cache": "30%"}}])
def test_bfloat16_weights_go_on_as_they_were_rounded(device, tmp_path, then):
    """The seed of the rounding is loaded; other dtypes are rejected before anything changes."""
    expected = Case(device, bf16=BF16).train(BATCHES).state()
    case = Case(device, bf16=BF16, options=OPTIONS["depth 2"])
    for number, (label, rows) in enumerate(case.loop(BATCHES), 1):
        case.step(label, rows)
        if number in (2, 5):
            case.runtime.save(tmp_path / "c", extra={**extra_of(case), "batches": number})
    assert differing(case.state(), expected) == []
    other = Case(device, bf16=BF16, seed=9, **then)
    assert go_on(other, tmp_path / "c") == 5
    assert differing(other.train(BATCHES[5:]).state(), expected) == []
    for wrong, message in (
        (
            Case(device),
            "was trained with bf16 weights in table '.*', not fp32; create the table with dtype=.bf16",
        ),
        (Case(device, bf16=(*BF16, "first")), "fp32 weights in table 'first', not bf16"),
    ):
        before = wrong.state()
        with pytest.raises(UserError, match=message):
            wrong.runtime.load(tmp_path / "c")
        assert differing(wrong.state(), before) == []


def test_learning_rates_come_back(tmp_path):
    case = Case()
    scheduler = torch.optim.lr_scheduler.LinearLR(case.runtime.optimizer, 0.1, total_iters=8)
    for number, (label, rows) in enumerate(case.loop(BATCHES), 1):
        case.step(label, rows)
        scheduler.step()
        if number == 4:
            case.runtime.save(tmp_path, extra={**extra_of(case), "batches": 4, "scheduler": scheduler.state_dict()})
    made_before = Case()  # with a scheduler that has set a rate of its own
    torch.optim.lr_scheduler.LinearLR(made_before.runtime.optimizer, 0.1, total_iters=8)
    rates = made_before.runtime.load(tmp_path)["rates"]["param_groups"]
    assert made_before.runtime.settings.learning_rates() == [group["lr"] for group in rates]
    other = Case()
    go_on(other, tmp_path)
    again = torch.optim.lr_scheduler.LinearLR(other.runtime.optimizer, 0.1, total_iters=8)
    extra = other.runtime.load(tmp_path)
    again.load_state_dict(extra["scheduler"])
    other.runtime.optimizer.load_state_dict(extra["rates"])
    for label, rows in other.loop(BATCHES[4:]):
        other.step(label, rows)
        again.step()
    assert differing(other.state(), case.state()) == []


def test_before_a_step_it_is_of_the_batch_before(tmp_path):
    case = Case().train(BATCHES[:3])
    expected = case.state()
    for label, rows in case.loop(BATCHES[3:5]):
        case.runtime.save(tmp_path, extra={**extra_of(case), "batches": 3})
        case.step(label, rows)
        break
    other = Case()
    go_on(other, tmp_path)
    assert differing(other.state(), expected) == []


def test_no_loading_within_a_loop(tmp_path):
    case = Case()
    case.runtime.save(tmp_path)
    for label, rows in case.loop(BATCHES[:2]):
        with pytest.raises(ValueError, match="loop over these tables is open"):
            case.runtime.load(tmp_path)
        case.step(label, rows)
    case.runtime.load(tmp_path)


def damage(checkpoint, table):
    """Change a byte of a table's rows."""
    file = next((checkpoint / "tables" / str(table)).iterdir())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("used", [False, True], ids=["new tables", "used tables"])
@pytest.mark.parametrize("bf16", [(), BF16], ids=["fp32", "bf16"])
def test_damaged_rows(tmp_path, used, bf16):
    """An older checkpoint is loaded; where none is whole the tables are as they were, though those that nobody has used
    yet are checked while they are loaded."""
    case = Case(bf16=bf16).train(BATCHES[:2])
    case.runtime.save(tmp_path)
    whole = case.state()
    case.train(BATCHES[2:5]).runtime.save(tmp_path)
    newest, table = tmp_path / "step-0000000005", len(case.tables) - 1
    damage(newest, table)  # of the last, after the others
    other = Case(bf16=bf16)
    if used:
        other.train(BATCHES[:1])
    with pytest.warns(UserWarning, match=f"{newest}/tables/{table}/.* checksum is wrong.*step-0000000002"):
        other.runtime.load(tmp_path)
    assert (
        differing(tables_state(other.tables.values()), {name: whole[name] for name in whole if name[0] != "dense"})
        == []
    )
    damage(tmp_path / "step-0000000002", table)
    last, expected = Case(bf16=bf16), Case(bf16=bf16)
    if used:
        last.train(BATCHES[:1])
        expected.train(BATCHES[:1])
    with pytest.raises(UserError, match="no checkpoint in .* is valid"):
        last.runtime.load(tmp_path)
    assert differing(last.state(), expected.state()) == []
    assert differing(last.train(BATCHES[5:7]).state(), expected.train(BATCHES[5:7]).state()) == []


def test_slots_that_are_written_are_saved(tmp_path):
    """Works for any optimizer, also for a table without per-row state."""
    table = HostTable(100, 4, LazyAdam(), name="t")
    runtime = Runtime({"t": table}, device="cpu")
    table.apply(np.arange(100), np.ones((100, 4), np.float32))
    runtime.save(tmp_path)
    with table.writing() as w:
        w.slots["m"][50] = 7
    table.apply(np.arange(3), np.ones((3, 4), np.float32))
    runtime.save(tmp_path)
    other = HostTable(100, 4, LazyAdam(), name="t")
    Runtime({"t": other}, device="cpu").load(tmp_path)
    assert (other.slots["m"] == table.slots["m"]).all()
    assert (other.slots["m"][50] == 7).all()


def test_after_a_failed_load_checkpoints_are_as_ever(tmp_path):
    """The first is full, the next are increments; rows that were loaded partially are not in them."""
    table, other = (HostTable(1000, 4, LazyAdam(), name="t") for _ in range(2))
    table.apply(np.arange(1000), np.ones((1000, 4), np.float32))
    Runtime({"t": table}, device="cpu").save(tmp_path / "damaged")
    damage(tmp_path / "damaged/step-0000000000", 0)
    runtime = Runtime({"t": other}, device="cpu")
    with pytest.raises(UserError, match="checksum is wrong"):
        runtime.load(tmp_path / "damaged")
    for _ in range(2):
        other.apply(np.arange(3), np.ones((3, 4), np.float32))
        runtime.save(tmp_path / "c")
    whole, adds = (folder.read_chain(tmp_path / "c" / name) for name in folder.names_in(tmp_path / "c"))
    assert [len(whole), len(adds)] == [1, 2]
    assert sum(file.rows for file in adds[-1].manifest.tables[0].files) == 3
    last = HostTable(1000, 4, LazyAdam(), name="t")
    Runtime({"t": last}, device="cpu").load(tmp_path / "c")
    assert (last.weights == other.weights).all()


def test_what_cannot_be_kept_is_named_and_nothing_is_written(tmp_path):
    case = Case()
    with pytest.raises(TypeError, match=r"extra\.adam is of type Adam"):
        case.runtime.save(tmp_path / "c", extra={"adam": case.adam})
    assert not (tmp_path / "c").exists()


def test_an_error_of_the_writing_is_raised_by_wait(tmp_path):
    case = Case().train(BATCHES[:2])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        case.runtime.save(tmp_path / "file" / "c")
    saving = case.runtime.save(tmp_path / "c", wait=False)
    assert saving.wait().manifest.step == 2
    assert not saving.is_running


def test_an_error_that_nobody_has_waited_for(tmp_path, monkeypatch):
    """The next call that saves or loads warns, once."""
    case = Case().train(BATCHES[:2])
    case.runtime.save(tmp_path / "c")
    full = Full(monkeypatch)
    told = "the checkpoint of step 2 was not saved: .*/d: No space left on device"
    for call in (lambda: case.runtime.save(tmp_path / "c"), lambda: case.runtime.load(tmp_path / "c")):
        full.is_full = True
        case.runtime.save(tmp_path / "d", wait=False).join()
        full.is_full = False
        with pytest.warns(UserWarning, match=told):
            call()
        case.runtime.save(tmp_path / "c")
    full.is_full = True
    with pytest.raises(OSError, match="No space left"):
        case.runtime.save(tmp_path / "d", wait=False).wait()
    full.is_full = False
    case.runtime.save(tmp_path / "c")  # no warning: who waited knows


class Full:
    """A disk that can be full."""

    def __init__(self, monkeypatch):
        self.is_full = False
        write = HashedFile.write

        def limited(file, data):
            if self.is_full:
                raise OSError(28, "No space left on device")
            return write(file, data)

        monkeypatch.setattr(HashedFile, "write", limited)


def test_the_end_of_the_program_waits_for_the_writing(tmp_path):
    """A failure is reported on a line."""
    (tmp_path / "program.py").write_text(
        "import time\n"
        "import hostdev\n"
        "from hostdev.core.checksums import HashedFile\n"
        "write = HashedFile.write\n"
        "def slow(file, data):\n"
        "    time.sleep(0.1)\n"
        "    if file.broken: raise OSError(28, 'No space left on device')\n"
        "    return write(file, data)\n"
        "HashedFile.write, HashedFile.broken = slow, property(lambda file: 'broken' in str(file._file.name))\n"
        "for name in ('whole', 'broken'):\n"
        "    tables = {n: hostdev.HostTable(1000, 4, hostdev.LazyAdam(lr=0.1), name=n) for n in 'abc'}\n"
        "    hostdev.Runtime(tables, device='cpu').save(name, extra={'a': 1}, wait=False)\n"
    )
    process = forks.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    line = f"hostdev: warning: the checkpoint of step 0 was not saved: {tmp_path / 'broken'}: No space left on device\n"
    assert (process.returncode, process.stderr) == (0, line)
    verify(folder.read_chain(tmp_path / "whole/step-0000000000"))
    assert list((tmp_path / "broken").glob("*step*")) == []


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_a_wrong_number_to_keep(tmp_path, keep):
    with pytest.raises(ValueError, match="keep .* number of checkpoints, 1 or more, not"):
        Case().runtime.save(tmp_path / "c", keep=keep)
    assert not (tmp_path / "c").exists()


def test_an_error_in_the_body_leaves_the_last_checkpoint(tmp_path):
    case = Case(options={"cache": "30%"})
    with pytest.raises(BodyError):
        for number, (label, rows) in enumerate(case.loop(BATCHES), 1):
            case.step(label, rows)
            if number == 3:
                saving = case.runtime.save(tmp_path, extra={**extra_of(case), "batches": 3}, wait=False)
            if number == 6:
                raise BodyError
    saving.wait()
    other = Case()
    assert go_on(other, tmp_path) == 3
    assert differing(other.train(BATCHES[3:]).state(), Case().train(BATCHES).state()) == []


def test_what_begins_with_the_parts_of_ranks_is_merged(tmp_path, monkeypatch):
    """Files begin at the ranks' parts; merged ones do not."""
    monkeypatch.setattr(ranges, "FILE_BYTES", 64 * 48)
    table = HostTable(1001, 4, LazyAdam(), name="t")
    Runtime({"t": table}, device="cpu").save(tmp_path / "a")
    compact.rewrite(remote.newest(tmp_path / "a").chain, tmp_path / "b", 2)
    chain = remote.newest(tmp_path / "b").chain
    assert 500 in [file.start for file in chain[0].manifest.tables[0].files]
    merged = folder.read_chain(compact.merge(chain, tmp_path / "b"))
    assert [file.start for file in merged[0].manifest.tables[0].files] == list(range(0, 1001, 64))
    verify(merged)
    other = HostTable(1001, 4, LazyAdam(), name="t", seed=1)
    Runtime({"t": other}, device="cpu").load(merged[0].path)
    np.testing.assert_array_equal(other.block, table.block)


@pytest.mark.parametrize("slot", ["weights", "accum"])
def test_what_is_written_by_hand_is_saved(tmp_path, slot):
    table = HostTable(50, 3, RowWiseAdagrad(), name="t")
    runtime = Runtime({"t": table}, device="cpu")
    runtime.save(tmp_path / "c")
    with table.writing() as w:
        (w.weights if slot == "weights" else w.slots[slot])[7] = 5
    runtime.save(tmp_path / "c")
    other = HostTable(50, 3, RowWiseAdagrad(), name="t", seed=1)
    Runtime({"t": other}, device="cpu").load(tmp_path / "c")
    assert (other.columns()[slot][7] == 5).all()


def test_a_folder_stays_where_it_is(tmp_path, monkeypatch):
    """The program may change its working directory between two checkpoints, and while one is written."""
    runtime = Runtime({"t": HostTable(50, 3, LazyAdam(), name="t")}, device="cpu")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    saving = runtime.save("saved", wait=False)
    monkeypatch.chdir(tmp_path / "b")
    saving.wait()
    runtime.save(tmp_path / "a" / "saved")
    assert len(list((tmp_path / "a" / "saved").glob("step-*"))) == 2
    assert not list((tmp_path / "b").iterdir())


def test_tables_that_both_have_are_loaded(tmp_path):
    """Load into larger tables, into one of several, and with further ones; warnings name the rest; the next is full."""
    users, items = HostTable(30, 4, LazyAdam(), name="users"), HostTable(20, 2, LazyAdam(), name="items")
    for table in (users, items):
        table.apply(np.arange(20), np.ones((20, table.dim), np.float32))
    Runtime({"user": users, "item": items}, device="cpu").save(tmp_path / "c", extra={"epoch": 3})

    larger, others = HostTable(50, 4, LazyAdam(), name="users"), HostTable(9, 3, LazyAdam(), name="others")
    fresh = larger.block.copy()
    runtime = Runtime({"user": larger, "other": others}, device="cpu")
    with pytest.raises(UserError, match="it has the tables items, users, not others, users"):
        runtime.load(tmp_path / "c")
    with pytest.warns(UserWarning) as told:
        assert runtime.load(tmp_path / "c", strict=False) == {"epoch": 3}
    assert [str(one.message).replace(str(tmp_path), "T") for one in told] == [
        "T/c/step-0000000000 has no table 'others'; the program's table is unchanged",
        "table 'items' of T/c/step-0000000000 is not loaded: the program has no such table",
        "table 'users' has 30 rows in T/c/step-0000000000 and 50 in the program; other rows are unchanged",
    ]
    np.testing.assert_array_equal(larger.block[:30], users.block)
    np.testing.assert_array_equal(larger.block[30:], fresh[30:])
    assert (larger.step, others.step) == (1, 0)
    runtime.save(tmp_path / "c")
    assert len(folder.read_chain(tmp_path / "c" / folder.names_in(tmp_path / "c")[-1])) == 1

    parts = [HostTable(50, 4, LazyAdam(), name="users", part=(rank, 3)) for rank in range(3)]
    for part in parts:
        load_tables(folder.read_chain(tmp_path / "c" / folder.names_in(tmp_path / "c")[0]), {"users": part})
        np.testing.assert_array_equal(part.block, larger.block[part.ids(0, part.rows)])
    smaller = Runtime({"user": HostTable(10, 4, LazyAdam(), name="users")}, device="cpu")
    with pytest.raises(UserError, match="table 'users' has .* rows in .*, but only 10 in the program"):
        smaller.load(tmp_path / "c", strict=False)
    with pytest.raises(UserError, match="has none of the tables films"):
        Runtime({"x": HostTable(10, 4, LazyAdam(), name="films")}, device="cpu").load(tmp_path / "c", strict=False)
    with pytest.raises(UserError, match="table 'users' has dim 4, but 5 in the program"):
        Runtime({"x": HostTable(60, 5, LazyAdam(), name="users")}, device="cpu").load(tmp_path / "c", strict=False)
