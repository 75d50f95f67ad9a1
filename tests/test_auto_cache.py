"""--cache-rows auto: the cache that advise would choose, decided before the training, and printed."""

import json
import re

import pytest
import torch

from hostdev import SGD, UserError
from hostdev.cache.prices import Costs
from hostdev.core import cli
from hostdev.data import manifest
from hostdev.device import backend
from hostdev.ext.advice import auto as auto_cache
from hostdev.ext.advice import curves as cache_advice
from hostdev.ext.advice.curves import TableGroup
from hostdev.ext.training import cli as train
from hostdev.runtime import placement as runtime_room
from hostdev.train import room, trainer
from hostdev.train.options import TrainConfig

LINE = re.compile(
    r"^cache    auto: ([\d,]+) rows, (\w+), [\d.]+ \w+ of the [\d.]+ \w+ (.*); over (\d+) batches, "
    r"[\d.]+ MiB per step instead of [\d.]+, [\d.]+ ms of host time instead of [\d.]+, [\d.]+% of lookups hit$",
    re.M,
)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Run the command in an empty folder, where the host takes so long for rows that no plan's time matters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache_advice, "host_costs", lambda *arguments: Costs(1e6, 5e5, 5e5))

    def run(data, *more, device="cpu", run_dir="run"):
        options = ["--data", data, "--device", device, "--batch-size", 200, "--emb-dim", 4, "--max-steps", 6]
        options += ["--host-device-mix", "--run-dir", run_dir, *more]
        return cli.run(train.PROG, train.main, list(map(str, options)))

    return run


def of_run(path):
    return tuple(json.loads((path / name).read_text()) for name in ("summary.json", "config.json"))


def test_the_choice_is_printed_and_trained_with(device, trained, small_data, tmp_path, capsys):
    """And changes no bit."""
    assert trained(small_data, device=device.type, run_dir="without") == 0
    capsys.readouterr()
    assert trained(small_data, "--cache-rows", "auto", device=device.type) == 0
    found = LINE.search(capsys.readouterr().out)
    rows, policy, where, batches = found.groups()
    expected = (
        "that a dense step leaves free on" if backend.is_accelerator(device) else "of host memory that the tables"
    )
    assert where.startswith(expected)
    summary, settings = of_run(tmp_path / "run")
    assert (summary["cache"]["rows"], summary["cache"]["policy"]) == (int(rows.replace(",", "")), policy)
    assert (settings["cache_rows"], settings["cache_policy"]) == (rows.replace(",", ""), policy)
    assert int(batches) == -(-manifest.read(small_data).rows("train") // 200)
    assert summary["state_sha256"] == of_run(tmp_path / "without")[0]["state_sha256"]


@pytest.mark.parametrize("policy", ["lookahead", "lfu"])
def test_a_policy_that_is_given_stays(trained, small_data, tmp_path, policy):
    assert trained(small_data, "--cache-rows", "auto", "--cache-policy", policy, "--cache-window", 3) == (
        0 if policy == "lookahead" else 2
    )
    if policy != "lookahead":
        assert trained(small_data, "--cache-rows", "auto", "--cache-policy", policy) == 0
    cache = of_run(tmp_path / "run")[0]["cache"]
    assert (cache["policy"], cache["window"]) == (policy, 3 if policy == "lookahead" else 0)


def test_only_what_fits_is_chosen(trained, small_data, tmp_path, monkeypatch, capsys):
    row = 4 * (3 * 4 + 3)
    monkeypatch.setattr(auto_cache, "_room", lambda *arguments: 100 * row)
    assert trained(small_data, "--cache-rows", "auto") == 0
    rows = int(LINE.search(capsys.readouterr().out)[1])
    assert 50 < rows <= 100
    monkeypatch.setattr(auto_cache, "_room", lambda *arguments: 3)
    assert trained(small_data, "--cache-rows", "auto", run_dir="other") == 0
    out = capsys.readouterr().out
    assert "cache    auto: none; no cache that fits in the 3 bytes of host memory that the tables leave" in out
    assert "cache" not in of_run(tmp_path / "other")[0]


def test_what_is_chosen_is_not_refused(trained, small_data, tmp_path, monkeypatch, capsys):
    """Beside all that a training keeps in host memory, not beside its tables alone."""
    found = []

    def noted(parts):
        found.append(room.make_host_budget(parts))
        return found[-1]

    monkeypatch.setattr(trainer, "make_host_budget", noted)
    more = ("--checkpoint-every", 2)
    assert trained(small_data, "--cache-rows", 1, *more, run_dir="first") == 0
    slots = 4 * manifest.read(small_data).vocabulary_size  # of the plan of a cache of all rows
    free = sum(found[0].parts.values()) + slots + 150 * 4 * (3 * 4 + 3)
    for module in (auto_cache, runtime_room, room):
        monkeypatch.setattr(module, "available_bytes", lambda: free)
    assert trained(small_data, "--cache-rows", "auto", *more) == 0
    assert 50 < int(LINE.search(capsys.readouterr().out)[1].replace(",", "")) <= 151  # the first run has 1


def test_a_step_that_does_not_fit_is_reported_in_words(trained, small_data, monkeypatch, capsys):
    def fail(*arguments):
        raise torch.OutOfMemoryError("the device has no more memory")

    monkeypatch.setattr(auto_cache, "measure_groups", fail)
    assert trained(small_data, "--cache-rows", "auto") == 2
    assert capsys.readouterr().err.splitlines() == [
        "hostdev.train: error: out of memory; use a smaller --batch-size or --emb-dim"
    ]


def test_sizes_are_shares_and_what_just_fits():
    group = TableGroup(("t",), 10_000, ((4, SGD()),))
    shares = [10, 50, 100, 200, 500, 1000, 2000, 5000, 10_000]
    assert cache_advice.choose_sizes([group], 10**9) == [shares]
    assert cache_advice.choose_sizes([group], 4321 * group.whole) == [sorted([*shares, 4321])]
    other = TableGroup(("u",), 20, ((8, SGD()),))
    both = cache_advice.choose_sizes([group, other], (10_000 * group.whole + 20 * other.whole) * 3 // 10)
    assert list(zip(*both, strict=True))[-3:] == [(3000, 6), (5000, 10), (10_000, 20)]


def test_no_cache_where_its_plan_takes_longer_than_it_saves(trained, small_data, monkeypatch, capsys):
    monkeypatch.setattr(cache_advice, "host_costs", lambda *arguments: Costs(1e-3, 1e-3, 1e-3))
    assert trained(small_data, "--cache-rows", "auto") == 0
    assert re.search("cache    auto: none; .* makes a step shorter", capsys.readouterr().out)


def test_tables_without_common_ids_get_a_share(trained, small_data, tmp_path):
    assert trained(small_data, "--cache-rows", "auto", "--model", "tests.own_models:ThreeTables", "--emb-dim", 3) == 0
    summary, settings = of_run(tmp_path / "run")
    assert settings["cache_rows"].endswith("%")
    assert len(summary["caches"]) > 1


def test_what_does_not_go_together(trained, small_data, capsys):
    for options, words in [
        (["--l2", "table"], "--cache-rows auto cannot be combined with --l2 table"),
        (["--staleness", 1], "--staleness cannot be combined with --cache-rows"),
    ]:
        assert trained(small_data, "--cache-rows", "auto", *options) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(UserError, match="--cache-rows auto has no effect without --host-device-mix"):
        TrainConfig(cache_rows="auto")


def test_a_dense_step_leaves_less_than_there_was(device, small_data):
    """On an accelerator; nobody tells before how much that is."""
    if not backend.is_accelerator(device):
        pytest.skip("on the CPU nothing is measured")
    from hostdev.data.shards import ShardReader
    from hostdev.train.build import model_of

    found = manifest.read(small_data)
    [sample] = list(ShardReader(small_data, found, "train").batches(10**6))[:1]
    left = []
    for samples in (10, 2000):
        model = model_of(TrainConfig(emb_dim=8), found.schema)
        before = backend.free_bytes(device)
        left.append(before - room.measure_free_after_step(model, sample, samples, device, None))
        assert backend.free_bytes(device) >= before - (1 << 20)  # nothing of it stays
    assert 0 < left[0] < left[1]
    torch.accelerator.synchronize(device)
