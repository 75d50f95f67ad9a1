"""Checkpoint files: values in JSON and safetensors, detection of damage, merged layers, and the folder."""

import ctypes
import gc
import json
import shutil
import subprocess
import time

import numpy as np
import pytest
import safetensors.torch
import torch

from hostdev import LazyAdam, RowWiseAdagrad, UserError
from hostdev.checkpoint import folder, loading, manifest, remote, segment_rows
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.checkpoint.ranges import HashedFile
from hostdev.checkpoint.state import from_tree, tensors_as_bytes, to_tree
from hostdev.core.checksums import json_checksum
from hostdev.host.rows import Changes
from hostdev.host.snapshot import Snapshot
from hostdev.host.table import HostTable
from hostdev.runtime.runtime import Runtime


def test_values_come_back(tmp_path):
    values = {
        "a": {"b": torch.arange(3), 1: [None, True, 2, 2.5, "x", float("inf")], (1, "y"): ()},
        "a.b": torch.ones(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "array": np.arange(4, dtype=np.uint8).reshape(2, 2),
        "number": np.float32(0.5),
        "$tensor": "a key that means something else inside",
        "pair": (torch.zeros(1), {"x": 1}),
    }
    tensors = {}
    tree = json.loads(json.dumps(to_tree(values, tensors)))
    path = tmp_path / "t.safetensors"
    path.write_bytes(tensors_as_bytes(tensors))
    found = from_tree(tree, safetensors.torch.load_file(path))
    assert found.keys() == values.keys()
    assert found["a"][1] == values["a"][1]
    assert found["a"][1, "y"] == ()
    for name in ("a.b", "scalar", "empty", "turned"):
        assert found[name].dtype == values[name].dtype
        assert torch.equal(found[name], values[name])
    assert torch.equal(found["a"]["b"], values["a"]["b"])
    np.testing.assert_array_equal(found["array"], values["array"])
    assert (found["number"], found["$tensor"]) == (0.5, values["$tensor"])
    assert isinstance(found["pair"], tuple)


def test_tensors_are_written_as_by_torch():
    every = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
    tensors = {}
    to_tree({str(dtype): torch.arange(12).to(dtype).reshape(3, 4).T for dtype in every}, tensors)
    to_tree({"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "array": np.arange(5)[::2]}, tensors)
    assert tensors_as_bytes(tensors) == safetensors.torch.save(tensors)


def test_no_type_is_left_for_each_size():
    sizes = range(12_340, 12_350)
    for size in sizes:
        tensors_as_bytes({"values": torch.zeros(size, dtype=torch.uint8)})
    kind = type(ctypes.c_byte * 1)
    assert not [each for each in gc.get_objects() if type(each) is kind and each._length_ in sizes]


def test_what_no_checkpoint_holds_is_named():
    with pytest.raises(TypeError, match=r"optimizer\.0 is of type Adam.*state_dict"):
        to_tree({"optimizer": [torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])]}, {})


def runtime_of(rows=300):
    tables = {
        "a": HostTable(rows, 4, LazyAdam(), name="a", seed=1),
        "b": HostTable(rows // 2, 3, RowWiseAdagrad(), name="b", seed=1),
    }
    return Runtime(tables, device="cpu", depth=0)


def change(runtime, rows, seed):
    for table in runtime.tables.values():
        ids = np.random.default_rng(seed).choice(table.rows, rows, replace=False)
        table.update(ids, np.ones((rows, table.dim), np.float32))


def get_dense_state(runtime):
    tables = {name: (table.step, table.storage) for name, table in runtime.tables.items()}
    return {name: (step, rows.block.tobytes(), rows.row_slots.tobytes()) for name, (step, rows) in tables.items()}


@pytest.fixture
def saved(tmp_path):
    """A folder with a full checkpoint and two increments, and the states that they hold."""
    runtime, states = runtime_of(), []
    for seed in range(3):
        change(runtime, 20, seed)
        runtime.pipeline.steps += 1
        runtime.save(tmp_path / "c", extra={"seed": seed})
        states.append(get_dense_state(runtime))
    return tmp_path / "c", states


def test_a_chain_is_one_state(saved):
    path, states = saved
    names = folder.names_in(path)
    assert names == ["step-0000000001", "step-0000000002", "step-0000000003"]
    parents = [manifest.read(path / name).parent for name in names]
    assert [parent and parent.name for parent in parents] == [None, *names[:-1]]
    assert [sum(file.rows for file in manifest.read(path / names[2]).table(t).files) for t in "ab"] == [20, 20]
    for name, state, seed in zip(names, states, range(3), strict=True):
        runtime = runtime_of()
        assert runtime.load(path / name) == {"seed": seed}
        assert get_dense_state(runtime) == state
        assert runtime.pipeline.steps == seed + 1
    layers = Layers(folder.read_chain(path / names[2]))
    rows = layers.read("a", *layers.ranges("a")[0], ["v"])
    runtime = runtime_of()
    runtime.load(path)
    np.testing.assert_array_equal(rows["v"], runtime.tables["a"].slots["v"])


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != ".lock")


def test_a_flipped_bit_anywhere_is_found(saved):
    """Damage is found in every file, at its ends and in between; the error names the checkpoint."""
    path, _ = saved
    rng = np.random.default_rng(0)
    for file in files_of(path):
        content = file.read_bytes()
        for place in {0, len(content) - 1, *rng.integers(0, len(content), 6).tolist()}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << int(rng.integers(8))
            file.write_bytes(flipped)
            if file.name == manifest.FILE_NAME and same_json(content, flipped):  # white space
                continue
            with pytest.raises(UserError, match="step-"):
                loading.verify(folder.read_chain(path / "step-0000000003"))
        file.write_bytes(content)


def same_json(one, other):
    try:
        return json.loads(one) == json.loads(bytes(other))
    except ValueError:
        return False


def test_truncated_and_missing_files_are_named_and_an_older_one_is_loaded(saved):
    path, states = saved
    newest = path / "step-0000000003"
    for file in files_of(newest):
        content = file.read_bytes()
        for damage in (lambda file: file.write_bytes(file.read_bytes()[:-9]), lambda file: file.unlink()):
            damage(file)
            runtime = runtime_of()
            before = get_dense_state(runtime)
            with pytest.raises(UserError, match=r"step-0000000003"):
                runtime.load(newest)
            assert get_dense_state(runtime) == before
            with pytest.warns(UserWarning, match=r"step-0000000003.*using an older one: .*step-0000000002"):
                assert runtime.load(path) == {"seed": 1}
            assert get_dense_state(runtime) == states[1]
            file.write_bytes(content)


def test_a_missing_link_breaks_those_that_add_to_it(saved):
    path, states = saved
    shutil.rmtree(path / "step-0000000002")
    with pytest.raises(BrokenCheckpointError, match=r"parent .*step-0000000002 is missing"):
        folder.read_chain(path / "step-0000000003")
    runtime = runtime_of()
    with pytest.warns(UserWarning, match="is missing"):
        runtime.load(path)
    assert get_dense_state(runtime) == states[0]
    shutil.rmtree(path / "step-0000000001")
    with pytest.raises(UserError, match="is incomplete"):
        runtime_of().load(path)


def test_a_damaged_parent_is_read_and_told_of_once(saved, monkeypatch):
    path, states = saved
    runtime = runtime_of()
    runtime.load(path / "step-0000000001")
    for step in (4, 5, 6):  # 4 has all rows, which 5 and 6 add to
        change(runtime, 20 if step > 4 else 150, step)
        runtime.pipeline.steps = step
        runtime.save(path, keep=9)
    names = folder.names_in(path)
    assert manifest.read(path / names[3]).parent is None
    assert manifest.read(path / names[5]).parent.name == names[4]
    damaged = path / names[3] / "tables/0/000000.arrow"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    looked, check_file = [], folder.check_file

    def look(file, *more):
        looked.append(file)
        check_file(file, *more)

    for module in (loading, folder, segment_rows):
        monkeypatch.setattr(module, "check_file", look)
    for again in (runtime_of(), runtime):  # whose tables are new, or not
        looked.clear()
        with pytest.warns(UserWarning) as told:
            assert again.load(path) == {"seed": 2}
        [line] = [str(each.message) for each in told]
        assert line == f"{damaged} is broken (its checksum is wrong); using an older one: {path / names[2]}"
        assert looked.count(damaged) == 1
        assert get_dense_state(again) == states[2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_no_rows_stay_of_what_was_not_loaded_whole(saved, monkeypatch, error):
    path, states = saved
    runtime, initial, loaded = runtime_of(), get_dense_state(runtime_of()), []

    def fail(*arguments, check):
        loaded.append(arguments)
        if len(loaded) == 3:
            raise error
        return segment_rows.read_chunk(*arguments, check=check)

    monkeypatch.setattr(loading, "read_chunk", fail)
    with pytest.raises(error):
        runtime.load(path)
    assert get_dense_state(runtime) == initial
    monkeypatch.undo()
    runtime.load(path)
    assert get_dense_state(runtime) == states[2]


def test_a_parent_of_another_history_is_none(saved):
    path, _ = saved
    other = runtime_of()
    change(other, 5, 9)
    other.pipeline.steps = 2
    shutil.rmtree(path / "step-0000000002")
    other.save(path)
    with pytest.raises(BrokenCheckpointError, match="is not its parent"):
        folder.read_chain(path / "step-0000000003")


def test_other_tables_are_refused(saved):
    path, _ = saved
    with pytest.raises(UserError, match=r"table 'a' has shape \(300, 4\), not \(302, 4\)"):
        runtime_of(302).load(path)
    tables = {"a": HostTable(300, 4, LazyAdam(beta1=0.8), name="a")}
    with pytest.raises(UserError, match=r"has the tables a, b, not a"):
        Runtime(tables, device="cpu").load(path)
    with pytest.raises(UserError, match="optimizer"):
        Runtime(tables | {"b": HostTable(150, 3, RowWiseAdagrad(), name="b")}, device="cpu").load(path)
    with pytest.raises(UserError, match=r"there is no .*nowhere"):
        runtime_of().load(path / "nowhere")


def test_another_version_is_refused_by_its_number(saved):
    path, _ = saved
    file = path / "step-0000000003" / manifest.FILE_NAME
    content = json.loads(file.read_text())
    content.pop("sha256")
    content["version"] = 99
    checksum = json_checksum(content)
    file.write_text(json.dumps({**content, "sha256": checksum}))
    with pytest.raises(UserError, match="format version 99, .* reads versions 1 to 4"):
        runtime_of().load(path / "step-0000000003")


@pytest.mark.parametrize("keep", [1, 2])
def test_old_ones_go_but_not_what_others_add_to(tmp_path, keep):
    runtime = runtime_of()
    for seed in range(12):
        change(runtime, 25, seed)
        runtime.pipeline.steps += 1
        runtime.save(tmp_path / "c", keep=keep)
        chains = [folder.read_chain(tmp_path / "c" / name) for name in folder.names_in(tmp_path / "c")[-keep:]]
        needed = {checkpoint.name for chain in chains for checkpoint in chain}
        assert set(folder.names_in(tmp_path / "c")) == needed
        again = runtime_of()
        again.load(tmp_path / "c")
        assert get_dense_state(again) == get_dense_state(runtime)
    whole = [name for name in folder.names_in(tmp_path / "c") if manifest.read(tmp_path / "c" / name).parent is None]
    assert whole != ["step-0000000001"]  # a new whole one when the others have grown


def test_a_failure_leaves_nothing_and_the_next_one_has_all(tmp_path, monkeypatch):
    runtime = runtime_of()
    runtime.save(tmp_path / "c")
    change(runtime, 30, 1)
    write, calls = HashedFile.write, []

    def full(self, data):
        calls.append(len(data))
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(HashedFile, "write", full)
    runtime.pipeline.steps = 1
    with pytest.raises(OSError, match="No space left"):
        runtime.save(tmp_path / "c")
    monkeypatch.undo()
    assert sorted(each.name for each in (tmp_path / "c").iterdir()) == [".lock", "step-0000000000"]
    change(runtime, 10, 2)
    runtime.save(tmp_path / "c")
    assert manifest.read(tmp_path / "c" / "step-0000000001").parent is not None
    again = runtime_of()
    again.load(tmp_path / "c")
    assert get_dense_state(again) == get_dense_state(runtime)


def test_one_process_writes_and_others_are_told(tmp_path):
    runtime_of().save(tmp_path / "c")
    other = runtime_of()
    with folder.locked(tmp_path / "c"):
        with pytest.raises(UserError, match="is in use: another process writes checkpoints there"):
            other.save(tmp_path / "c")
        other.load(tmp_path / "c")
    other.save(tmp_path / "c")


def test_rows_that_are_written_as_arrays_are_in_the_next_checkpoint(tmp_path):
    runtime = runtime_of()
    runtime.save(tmp_path / "c")
    assert not runtime.tables["a"].weights.flags.writeable
    with runtime.tables["a"].writing() as w:
        w.weights[5] = 7
    runtime.pipeline.steps = 1
    saving = runtime.save(tmp_path / "c")
    assert [
        sum(file.rows for file in table.files) for table in saving.checkpoint.manifest.tables if table.name == "a"
    ] == [1]
    again = runtime_of()
    again.load(tmp_path / "c")
    assert (again.tables["a"].weights[5] == 7).all()


def test_two_folders_do_not_share_their_changes(tmp_path):
    runtime = runtime_of()
    for name in "xyxyy":
        change(runtime, 10, ord(name) + runtime.pipeline.steps)
        runtime.pipeline.steps += 1
        runtime.save(tmp_path / name)
        again = runtime_of()
        again.load(tmp_path / name)
        assert get_dense_state(again) == get_dense_state(runtime)


def test_the_newest_is_the_one_written_last(tmp_path):
    """A run that resumes from an older checkpoint gets that one later, not the abandoned ones."""
    path, runtime = tmp_path / "c", runtime_of()
    for step in (100, 200, 300, 400):
        change(runtime, 10, step)
        runtime.pipeline.steps = step
        runtime.save(path, keep=9)
    other = runtime_of()
    other.load(path / "step-0000000200")
    change(other, 10, 7)
    other.pipeline.steps = 250
    other.save(path, keep=2)
    assert folder.names_in(path)[-1] == "step-0000000250"
    again = runtime_of()
    again.load(path)
    assert get_dense_state(again) == get_dense_state(other)
    for _ in range(6):  # without a step
        change(other, 5, 1)
        other.save(path, keep=2)
        again.load(path)
        assert get_dense_state(again) == get_dense_state(other)


def test_one_that_is_being_removed_is_no_damage(tmp_path):
    """Its manifest goes first. A folder without one after the newest may be a save that was lost, and is told."""
    path, runtime = tmp_path / "c", runtime_of()
    runtime.pipeline.steps = 300
    runtime.save(path)
    (path / "step-0000000100").mkdir()
    assert folder.names_in(path)[-1] == "step-0000000100"  # it has no number
    found = remote.newest(path)
    assert (found.chain[-1].path.name, found.broken) == ("step-0000000300", [])
    (path / "step-0000000400").mkdir()
    [line] = remote.newest(path).broken
    assert "step-0000000400 is not a complete checkpoint" in line


def test_another_checkpoint_of_the_same_name_is_no_parent(tmp_path):
    one, other = runtime_of(), runtime_of()
    change(one, 150, 1)
    one.save(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    other.save(tmp_path / "c")
    change(one, 5, 2)
    one.pipeline.steps = 1
    one.save(tmp_path / "c")
    again = runtime_of()
    again.load(tmp_path / "c")
    assert get_dense_state(again) == get_dense_state(one)


def test_a_save_that_cannot_begin_can_be_repeated(tmp_path, monkeypatch):
    runtime = runtime_of()
    begin, calls = Changes.begin, []

    def fail_once(self, *arguments, **options):
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError
        return begin(self, *arguments, **options)

    monkeypatch.setattr(Changes, "begin", fail_once)
    with pytest.raises(MemoryError):
        runtime.save(tmp_path / "c")
    change(runtime, 5, 1)
    runtime.save(tmp_path / "c")
    again = runtime_of()
    again.load(tmp_path / "c")
    assert get_dense_state(again) == get_dense_state(runtime)


def test_a_process_forked_meanwhile_holds_no_lock(tmp_path):
    with folder.locked(_made(tmp_path / "c")):
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        with folder.locked(tmp_path / "c"):
            pass
    finally:
        child.kill()
        child.wait()


def _made(path):
    path.mkdir()
    return path


def test_a_folder_made_anew_is_not_the_locked_one(tmp_path):
    path = _made(tmp_path / "c")
    with folder.locked(path) as file:
        assert folder.is_locked_here(path, file)
        shutil.rmtree(path)
        assert not folder.is_locked_here(path, file)
        with folder.locked(_made(path)):
            assert not folder.is_locked_here(path, file)


def test_rows_that_are_written_while_a_checkpoint_is_saved_are_not_in_it(tmp_path, monkeypatch):
    runtime = runtime_of()
    read, seen = Snapshot.read, []

    def slow(self, *arguments):
        time.sleep(0.2)
        read(self, *arguments)
        seen.append(self)

    monkeypatch.setattr(Snapshot, "read", slow)
    saving = runtime.save(tmp_path / "c", wait=False)
    with runtime.tables["a"].writing() as w:
        w.weights[:] = 9
    saving.wait()
    assert seen
    again = runtime_of()
    again.load(tmp_path / "c")
    assert not (again.tables["a"].block[:, 0] == 9).any()
