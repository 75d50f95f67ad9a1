"""python -m hostdev.verify: equal in every mode, and a broken rule is caught."""

import functools
import gc
import itertools
import re
import weakref

import numpy as np
import pytest

from hostdev.data import manifest
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.shards import ShardReader
from hostdev.ext.verify import cli as command
from hostdev.ext.verify import modes as verify
from hostdev.pipeline import rows
from hostdev.train import trainer
from hostdev.train.options import TrainConfig


@pytest.fixture
def verified(in_process):
    return functools.partial(in_process, command)


def small(data, *more, device=None):
    name = "cpu" if device is None else device.type
    return ["--data", data, "--device", name, "--batch-size", 200, "--emb-dim", 4, "--steps", 5, *more]


@pytest.mark.parametrize("l2", ["none", pytest.param("batch", marks=pytest.mark.slow), "table"])
def test_all_modes_agree(device, verified, small_data, tmp_path, l2):
    code, out, err = verified(*small(small_data, "--host-threads", 2, "--l2", l2, device=device))
    assert f"dense    fp32 on {device.type}" in out
    assert (code, err) == (0, "")
    digests = re.findall(r"^(host|device) tables +depth (\d) +(\d) host threads? +([0-9a-f]{16})  (.*)$", out, re.M)
    modes = {mode[:3] for mode in digests}
    without_cache = "--l2 table cannot be used with a cache: modes with a cache are skipped"
    assert out.splitlines().count(without_cache) == (l2 == "table")
    assert ("cache 10%" in out) == (l2 != "table")
    assert {(where, depth) for where, depth, _ in modes} >= {
        ("host", "0"),
        ("host", "1"),
        ("host", "2"),
        ("host", "4"),
        ("device", "0"),
        ("device", "2"),
    }
    assert {threads for _, _, threads in modes} == {"1", "2"}
    assert len({mode[3] for mode in digests}) == 1
    assert [mode[4] for mode in digests] == ["the reference"] + ["equal"] * (len(digests) - 1)
    assert "all modes agree in every bit of every step" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "stored",
    [
        ("--table-dtype", "bf16"),
        ("--table-dtype", "bf16", "--model", "deepfm", "--table-optimizer", "row_wise_adagrad"),
        ("--table-slots", "8bit"),
        ("--table-optimizer", "adam", "--table-weight-decay", "0.5"),
        ("--table-dtype", "bf16", "--table-slots", "8bit", "--table-optimizer", "adagrad"),
    ],
)
def test_all_modes_agree_with_rounded_tables(device, verified, small_data, stored):
    code, out, err = verified(*small(small_data, "--host-threads", 2, *stored, device=device))
    assert (code, err) == (0, "")
    found = re.findall(r"^(?:host|device) tables .* ([0-9a-f]{16})  (.*)$", out, re.M)
    assert len({state for state, _ in found}) == 1 < 10 < len(found)
    assert [said for _, said in found] == ["the reference"] + ["equal"] * (len(found) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("l2", ["none", "table"])
def test_all_modes_agree_on_the_real_sample(device, verified, criteo_sample, tmp_path, l2):
    """And a simulated device agrees with the CPU."""
    build(CriteoText([criteo_sample]), tmp_path / "data", Options(threshold=10, dense="log"))
    digests = set()
    for name in {device.type, "cpu" if device.type == "standin" else device.type}:
        options = ["--device", name, "--batch-size", 1000, "--steps", 20, "--l2", l2]
        code, out, _ = verified("--data", tmp_path / "data", *options)
        assert code == 0
        assert "all modes agree in every bit of every step" in out
        digests |= set(re.findall(r" ([0-9a-f]{16})  ", out))
    assert len(digests) == 1


@pytest.mark.slow_on_standin
def test_layers_that_draw_are_seeded_in_each_mode(device, verified, small_data):
    options = small(small_data, "--host-threads", 1, "--model", "tests.own_models:Dropout", device=device)
    code, out, err = verified(*options)
    assert (code, err) == (0, "")
    assert "all modes agree" in out


@pytest.mark.slow_on_standin
def test_an_injected_fault_is_caught(device, verified, small_data):
    code, out, _ = verified(*small(small_data, "--inject-fault", device=device))
    assert code == 1
    assert len(re.findall(r"first difference: step 2, \w+/weights, row \d+", out)) >= 3
    assert "the injected fault was caught" in out


MODEL = ["--model", "tests.own_models:ThreeTables"]


@pytest.mark.slow
def test_three_groups_some_of_them_cached(device, verified, films):
    code, out, err = verified(*small(films, *MODEL, "--steps", 4, "--host-threads", 2, device=device))
    assert (code, err) == (0, "")
    assert "model    tests.own_models:ThreeTables: first and weight; second; others" in out
    assert re.search(r"cache some and none +[0-9a-f]{16}  equal", out)
    assert "all modes agree in every bit of every step" in out


@pytest.mark.slow
def test_a_fault_in_each_of_three_groups_is_caught(device, verified, films):
    code, out, _ = verified(*small(films, *MODEL, "--steps", 3, "--inject-fault", device=device))
    assert code == 1
    for tables in ("first and weight", "second", "others"):
        [part] = re.findall(rf"^a fault in {tables}\n((?:host tables.*\n)+)", out, re.M)
        assert len(re.findall(r"first difference: step 2, \w+/weights, row \d+", part)) >= 3
    assert re.search(r"the injected fault was caught in every group of tables: \d+ and \d+ and \d+ modes differ", out)


def test_wrong_options(verified, small_data):
    for options, message in [
        (["--steps", 1], "--steps must be at least 2, not 1"),
        (["--batch-size", 10**6], "--batch-size 1000000 is larger than the"),
        (["--pipeline-depth", 1], "unrecognized arguments"),
        (["--tf32"], "--tf32 has no effect on cpu; leave out --tf32"),
    ]:
        code, _, err = verified(*small(small_data, *options))
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


def test_the_first_difference_is_named():
    ids = np.array([5, 3, 9])
    hashes = [np.array([1, 2, 3], np.uint64), np.array([1, 7, 8], np.uint64)]
    same = {"a": (ids, hashes[0])}
    one = verify.Record([same, {"deep/m": (ids, hashes[0])}], [(1.0,), (2.0,)], "x")
    other = verify.Record([same, {"deep/m": (ids, hashes[1])}], [(1.0,), (2.0,)], "y")
    assert verify.compare(one, one) is None
    assert verify.compare(one, other) == (2, "deep/m", 3)
    assert verify.compare(one, one._replace(losses=[(1.5,), (2.0,)])) == (1, "losses", None)
    assert verify.compare(one, one._replace(digest="z")).tensor == "a row that no batch uses"


@pytest.mark.parametrize("cache", [None, "10%"])
def test_the_tables_of_a_mode_go_with_it(small_data, cache, monkeypatch):
    """There are up to 16 modes, and memory for the tables of one."""
    made = []

    class Watched(trainer.HostTable):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr(trainer, "HostTable", Watched)
    monkeypatch.setattr(rows, "HostTable", Watched)
    found = manifest.read(small_data)
    batches = list(itertools.islice(ShardReader(small_data, found, "train").batches(100, seed=1, epoch=1), 3))
    settings = TrainConfig(device="cpu", emb_dim=4)
    how = (settings, verify.Mode(True, 2, 1, cache), batches, found.schema, None)
    verify.train(*how)  # torch's first steps in a process leave frames behind
    gc.collect()
    made.clear()
    gc.disable()
    try:
        verify.train(*how)
        assert [table() for table in made] == [None, None]
    finally:
        gc.enable()
