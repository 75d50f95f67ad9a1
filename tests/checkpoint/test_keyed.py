"""Checkpoints of tables by key: one moment, resumed anywhere with the same bits, and without what was erased."""

import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

import hostdev
from hostdev.checkpoint import row_index
from hostdev.errors import UserError
from hostdev.ext.checkpoints.cli import main
from tests.runtime.test_keyed_tables import MODES, POLICIES, Program, batches

KEY, WAITING = 0x0123456789ABCDEF, 0x1123456789ABCDEF  # found in a file by their bytes


def with_many_keys(**policy):
    """Return a program whose table has so many keys that most of its checkpoints are increments."""
    program = Program(**policy)
    keys = np.arange(10_000, 13_000)
    for _ in range(2):
        program.keyed.apply(keys, np.zeros((len(keys), 4), np.float32))
    return program


def saved(program, path, **options):
    return program.runtime.save(path, extra={"model": program.model.state_dict()}, keep=1000, **options)


def resumed(path, mode=(0, None), seed=99, **policy):
    program = Program(mode, seed=seed, **policy)
    program.model.load_state_dict(program.runtime.load(path)["model"])
    return program


@pytest.mark.drawn
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_resumed_twenty_times_with_the_same_bits(policy, tmp_path):
    data = batches()
    expected = Program(**policy).train(data)
    rng, at = np.random.default_rng(5), 0
    stops = sorted(rng.choice(np.arange(1, len(data)), 20, replace=False).tolist())
    program = Program(**policy)
    for number, stop in enumerate([*stops, len(data)]):
        program.train(data[at:stop])
        at = stop
        saved(program, tmp_path, wait=False)
        digest = program.digest()[0]
        program.runtime.close()
        program = resumed(tmp_path, MODES[number % len(MODES)], **policy)
        assert program.digest()[0] == digest
    assert program.digest()[0] == expected.digest()[0]
    program.runtime.close()


def test_a_checkpoint_is_one_moment_while_training_goes_on(tmp_path):
    """As reported of DeepRec (#1023, #999)."""
    data = batches(60)
    for mode in MODES:
        program, digests = Program(mode, **POLICIES["count"]), {}

        def save(step, program=program, digests=digests, mode=mode):
            if step % 7 == 0:
                digests[step + 1] = program.digest()[0]
                saved(program, tmp_path / str(mode[0]), wait=False)

        program.train(data, save)
        program.runtime.close()
        for step, digest in digests.items():
            path = tmp_path / str(mode[0]) / f"step-{step:010d}"
            assert resumed(path, **POLICIES["count"]).digest()[0] == digest
        assert main(["verify", str(tmp_path / str(mode[0]))]) == 0
        shutil.rmtree(tmp_path / str(mode[0]))


def test_the_rows_written_before_the_writer_reads_them(tmp_path, monkeypatch):
    from hostdev.host.committed_keys import KeySnapshot

    program = Program(**POLICIES["count"]).train(batches(20))
    digest, read = program.digest()[0], KeySnapshot.read
    monkeypatch.setattr(
        KeySnapshot, "read", lambda self, *given: (program.train(batches(6, seed=9)), read(self, *given))
    )
    saved(program, tmp_path)
    monkeypatch.undo()
    assert program.digest()[0] != digest
    assert resumed(tmp_path, **POLICIES["count"]).digest()[0] == digest


def files_with(path, key):
    bytes_of = int(key).to_bytes(8, "little")
    return [file for file in path.rglob("*") if file.is_file() and bytes_of in file.read_bytes()]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_erased_keys_are_in_no_later_file(mode, tmp_path):
    data = batches(12)
    for batch in data[:3]:
        batch["item"][0] = KEY
    data[1]["item"][1] = WAITING
    program = Program(mode, admit=hostdev.MinCount(2))
    program.train(data[:3])
    assert program.keyed.key_rows.index.committed().waiting[0].tolist().count(WAITING) == 1
    saved(program, tmp_path / "before")
    assert files_with(tmp_path / "before", KEY) and files_with(tmp_path / "before", WAITING)
    program.train(data[3:5], lambda step: step == 0 and program.keyed.erase([KEY, WAITING, 10**15]))
    for _ in range(3):
        saved(program, tmp_path / "before")
        program.train(data[5:7])
    saved(program, tmp_path / "after")
    found = files_with(tmp_path, KEY) + files_with(tmp_path, WAITING)
    assert {file.relative_to(tmp_path).parts[1] for file in found} == {"step-0000000003"}
    unknown = program.keyed.lookup([10**15])
    np.testing.assert_array_equal(program.keyed.lookup([KEY]), unknown)
    np.testing.assert_array_equal(hostdev.open(tmp_path / "after")["keyed"].lookup([KEY]), unknown)
    for cache in program.runtime.caches:
        rows = np.concatenate(cache._resident)
        assert KEY not in program.keyed.key_rows.index.keys[rows[rows >= 0]]
    program.runtime.close()


@pytest.mark.parametrize("at_once", [0, 1 << 16])
def test_evicted_keys_are_gone_for_readers(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(row_index, "_AT_ONCE", at_once)
    program = with_many_keys(evict=hostdev.LeastRecent(keep=1.0, every=1), capacity=3_100)
    everything = np.concatenate([np.arange(-5, 900), np.arange(9_000, 13_010)])
    parents = []
    for part in range(8):
        program.train(batches(16)[2 * part : 2 * part + 2])
        checkpoint = saved(program, tmp_path).path
        parents.append((checkpoint / "checkpoint.json").read_text().count('"parent": {'))
        rows = program.keyed.key_rows.find_rows(everything)
        table = hostdev.open(tmp_path)["keyed"]
        assert len(table) == (rows >= 0).sum() == len(program.keyed)
        for name, unknown in program.keyed.unknown_rows.items():
            expected = program.keyed.storage.column(0)[np.where(rows < 0, unknown, rows)]
            np.testing.assert_array_equal(table.lookup(everything, unknown=name), expected)
        np.testing.assert_array_equal(table.lookup(everything.reshape(5, -1)).reshape(-1, 4), table.lookup(everything))
    assert sum(parents) > 3  # most of these are increments
    with pytest.raises(UserError, match="no out-of-vocabulary row 'x'; it has '', 'history'"):
        table.lookup([1], unknown="x")
    with pytest.raises(UserError, match="not a table by key"):
        hostdev.open(tmp_path)["fixed"].lookup([1], unknown="")
    with pytest.raises(TypeError, match="keys must be integers"):
        table.lookup([1.5])


def test_lookups_of_history_tables(tmp_path):
    program = Program(optimizer=hostdev.Adam, evict=hostdev.Unused(steps=4, every=1))
    for part in range(4):
        program.train(batches()[5 * part : 5 * part + 5])
        saved(program, tmp_path)
    keys = program.keyed.keys
    np.testing.assert_array_equal(hostdev.open(tmp_path)["keyed"].lookup(keys), program.keyed.weights)


def test_commands(tmp_path, capsys):
    program = Program(**POLICIES["count"]).train(batches(20))
    saved(program, tmp_path / "a")
    program.train(batches()[20:23])
    saved(program, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert main(["compact", str(tmp_path / "b")]) == 0
    assert main(["merge", str(tmp_path / "a"), "--out", str(tmp_path / "c")]) == 0
    capsys.readouterr()
    for other in "bc":
        assert main(["diff", str(tmp_path / "a"), str(tmp_path / other)]) == 0
        assert capsys.readouterr().out == "equal\n"
        assert resumed(tmp_path / other, **POLICIES["count"]).digest()[0] == program.digest()[0]
    program.keyed.erase([int(program.keyed.keys[0])])
    program.train(batches()[23:24])
    saved(program, tmp_path / "d")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "d")]) == 1
    lines = capsys.readouterr().out
    assert "keys are only in" in lines and "the last step of" in lines and "table keyed, weights:" in lines
    assert main(["info", str(tmp_path / "a")]) == 0
    lines = capsys.readouterr().out
    admit = "admit MinCount(n=2, sketch=None, expires=None), evict Unused(steps=5, every=3)"
    assert f"keys wait for a row; {admit}" in lines.replace("wait", "keys wait") and "keys x 4, LazyAdam" in lines


def test_exports(tmp_path):
    program = Program(**POLICIES["count"]).train(batches(20))
    saved(program, tmp_path / "run")
    for kind in ("parquet", "npy", "safetensors"):
        assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / kind), "--format", kind, "--slots"]) == 0
    found = pq.read_table(tmp_path / "parquet" / "keyed.parquet")
    keys = found["key"].to_numpy()
    np.testing.assert_array_equal(keys, program.keyed.keys)
    np.testing.assert_array_equal(np.array(found["weights"].to_pylist(), np.float32), program.keyed.weights)
    np.testing.assert_array_equal(np.array(found["v"].to_pylist(), np.float32), program.keyed.slots["v"])
    unknown = pq.read_table(tmp_path / "parquet" / "keyed.out_of_vocabulary.parquet")
    assert unknown["name"].to_pylist() == ["", "history"]
    rows = program.keyed.storage.column(0)[list(program.keyed.unknown_rows.values())]
    np.testing.assert_array_equal(np.array(unknown["weights"].to_pylist(), np.float32), rows)
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "safetensors" / "keyed.safetensors")
    arrays = {file.name[6:-4]: np.load(file) for file in (tmp_path / "npy").glob("keyed.*.npy")}
    assert tensors.keys() == arrays.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(values, arrays[name])
    np.testing.assert_array_equal(tensors["weights"], program.keyed.weights)
    np.testing.assert_array_equal(tensors["key"], keys)
    np.testing.assert_array_equal(tensors["out_of_vocabulary.weights"], rows)


def test_other_programs_are_refused(tmp_path):
    program = Program(admit=hostdev.MinCount(2, sketch="64KiB"), capacity=3_000).train(batches(20))
    saved(program, tmp_path / "key")
    by_row = hostdev.Runtime(
        {name: hostdev.HostTable(30, 4, hostdev.LazyAdam(lr=0.05), name=name, seed=1) for name in ("keyed", "fixed")},
        device="cpu",
    )
    with pytest.raises(UserError, match=r"'keyed' is by key in the checkpoint, but by row.*HostTable\(None, \.\.\.\)"):
        by_row.load(tmp_path / "key")
    by_row.save(tmp_path / "row", extra={})
    with pytest.raises(UserError, match=r"is by row in the checkpoint, but by key.*HostTable\(rows, \.\.\.\)"):
        resumed(tmp_path / "row")
    sketch = {"admit": hostdev.MinCount(2, sketch="64KiB")}
    with pytest.raises(
        UserError, match="counts keys that have no row in a sketch of 65,536 bytes, by parts, but .* exactly"
    ):
        resumed(tmp_path / "key", admit=hostdev.MinCount(2))
    with pytest.raises(
        UserError, match="in a sketch of 65,536 bytes, by parts, but .* in a sketch of 131,072 bytes, by parts"
    ):
        resumed(tmp_path / "key", admit=hostdev.MinCount(2, sketch="128KiB"))
    with pytest.raises(UserError, match=r"has \d+ keys, but the program's table has a capacity of 9; raise capacity"):
        resumed(tmp_path / "key", **sketch, capacity=9)
    with pytest.raises(UserError, match=r"begin with Normal\(std=0.01\), but .* Constant\(value=1.0\)"):
        resumed(tmp_path / "key", **sketch, init=hostdev.Constant(1))
    with pytest.raises(UserError, match="dtype|bf16"):
        resumed(tmp_path / "key", **sketch, dtype="bfloat16")
    other = resumed(
        tmp_path / "key", admit=hostdev.MinCount(3, sketch="64KiB"), evict=hostdev.Unused(9), capacity=9_000
    )
    assert other.digest()[0] == program.digest()[0]  # the number, the eviction and the capacity may differ


@pytest.mark.parametrize("unknown", ["zeros", "initial"])
@pytest.mark.parametrize(
    "options",
    [
        {"init": hostdev.Normal(np.float64(0.1))},
        {"optimizer": hostdev.Adam, "init": hostdev.Uniform(-1, 1)},
        {"dtype": "bfloat16", "init": hostdev.Constant(3)},
    ],
    ids=str,
)
def test_keys_without_a_row_in_files(unknown, options, tmp_path):
    policy = {"admit": hostdev.MinCount(3), "evict": hostdev.Unused(steps=6), "unknown": unknown, **options}
    data, found = batches(12), []
    program = Program(**policy).train(data[:6])
    saved(program, tmp_path)
    other = resumed(tmp_path, (2, 30), **policy)
    for one in program, other:
        one.train(data[6:])
        keys = np.array([-5, 2**60 + 3, -(2**61), *one.keyed.keys[:9]])
        found.append((one.digest()[0], one.keyed.lookup(keys).tolist()))
        assert (one.keyed.lookup(keys[:3]) == 0).all() == (unknown == "zeros")
        saved(one, tmp_path)
        assert hostdev.open(tmp_path)["keyed"].lookup(keys).tolist() == found[-1][1]
        rows = one.runtime.lookup({"item": keys, "history": keys[:, None], "fixed": np.zeros(12, int)})
        assert rows["item"].tolist() == rows["history"].tolist() == found[-1][1]
    assert found[0] == found[1]
    with pytest.raises(UserError, match=rf"read '{unknown}' values, but in the program 'shared' ones; use unknown="):
        resumed(tmp_path, **{**policy, "unknown": "shared"})


def test_damage(tmp_path):
    program = with_many_keys(admit=hostdev.MinCount(2))
    paths = []
    for part in range(4):
        program.train(batches()[3 * part : 3 * part + 3])
        paths.append(saved(program, tmp_path / "run").path)
    for name in ("waiting.arrow", "gone.arrow", "000000.arrow"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        file = next(file for file in (tmp_path / name / paths[-1].name).rglob(name) if "tables/1" in str(file))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.warns(UserWarning, match=f"{name} is broken"):
            found = resumed(tmp_path / name, admit=hostdev.MinCount(2))
        assert found.keyed.step == 11
    shutil.rmtree(paths[1])  # a gap
    with pytest.warns(UserWarning, match="missing|parent"):
        found = resumed(tmp_path / "run", admit=hostdev.MinCount(2))
    assert found.keyed.step == 5


@pytest.mark.parametrize("optimizer", [hostdev.LazyAdam, hostdev.Adam, hostdev.RowWiseAdagrad])
def test_a_table_by_row_becomes_one_by_key(optimizer, tmp_path):
    by_row = hostdev.HostTable(1_000, 4, optimizer(lr=0.05), name="keyed", seed=3)
    fixed = hostdev.HostTable(30, 4, optimizer(lr=0.05), name="fixed", seed=3)
    program = Program(optimizer=optimizer)
    history = hostdev.Feature(by_row, pooling="mean")
    program.runtime = hostdev.Runtime({"item": by_row, "history": history, "fixed": fixed}, device="cpu")
    program.train(batches(10))
    saved(program, tmp_path)
    other = Program(optimizer=optimizer, evict=hostdev.Unused(steps=100))
    other.model.load_state_dict(other.runtime.load(tmp_path, strict=False)["model"])
    assert len(other.keyed) == 1_000
    np.testing.assert_array_equal(other.keyed.lookup(np.arange(1_000)), by_row.weights)
    for one in (program, other):
        one.losses.clear()
        one.train(batches()[10:20])
    assert program.losses == other.losses
    np.testing.assert_array_equal(other.keyed.lookup(np.arange(1_000)), by_row.weights)
    small = Program(optimizer=optimizer, capacity=500)
    with pytest.raises(UserError, match="has 1,000 rows .* but a capacity of only 500"):
        small.runtime.load(tmp_path, strict=False)
