"""--start-from: a new run on later data, whose vocabulary has grown, from the checkpoint of an earlier one."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import hostdev
from hostdev.checkpoint.folder import names_in, read_chain
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import fit_tables, load_shared
from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.earlier_vocabulary import read_earlier
from hostdev.data.preprocess.meaning import with_known_ids
from hostdev.data.shards import ShardReader
from hostdev.ext.predict import cli as predict
from hostdev.ext.predict.predictor import probabilities
from hostdev.ext.training import cli as train
from hostdev.ext.training import starting
from hostdev.models.wide_deep.network import WideDeep
from hostdev.train.build import model_of
from hostdev.train.options import TrainConfig
from tests.checkpoint.runs import MIX
from tests.conftest import SMALL
from tests.data import movies
from tests.trainers import make_trainer

COLUMNS = [
    *("--label", "liked", "--numeric", "age", "--categorical", "user,item"),
    *("--bag", "genres=|", "--bag", "history= ", "--share", "history=item"),
]


def prepare(files, out, *flags):
    preprocess.main(list(map(str, ["table", files, "--out", out, *flags])))
    return out


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Two days' films: the second has new users and films, and keeps the first one's ids."""
    folder = tmp_path_factory.mktemp("days")
    for day, users, items in ((1, 60, 50), (2, 150, 90)):
        movies.make(rows=2500, users=users, items=items, seed=day).write_csv(folder / f"{day}.csv")
    prepare(folder / "1.csv", folder / "one", *COLUMNS)
    prepare(folder / "2.csv", folder / "two", "--vocabulary", folder / "one")
    return folder


def run(*flags):
    return cli.run(train.PROG, train.main, list(map(str, flags)))


def flags_of(data, run_dir, *more):
    options = ["--batch-size", 500, "--emb-dim", 4, "--model", "deepfm", "--epochs", 1]
    return ["--data", data, "--device", "cpu", "--run-dir", run_dir, *options, *more]


@pytest.fixture(scope="module")
def first(days):
    """The first day's run, whose checkpoint has parents."""
    assert run(*flags_of(days / "one", days / "first", *MIX, "--checkpoint-every", 2)) == 0
    return days / "first"


def digest(run_dir):
    return json.loads((run_dir / "summary.json").read_text())["state_sha256"]


def test_two_days(days, first, trained, tmp_path, capsys):
    one, two = (manifest.read(days / name).schema.rows for name in ("one", "two"))
    assert two > one
    found = {}
    for name, more in (
        ("depth", [*MIX, "--checkpoint-every", 99]),
        ("cached", [*MIX, "--cache-rows", "20%"]),
        ("serial", [*MIX, "--pipeline-depth", 0, "--host-threads", 1]),
        ("device", []),
    ):
        code, out, err = trained(*flags_of(days / "two", tmp_path / name, *more), "--start-from", first)
        assert (code, err) == (0, "")
        found[name] = digest(tmp_path / name)
        path = first / "checkpoints" / names_in(first / "checkpoints")[-1]
        assert [line for line in out.splitlines() if line.startswith("start ")] == [
            f"start    from {path}, after step 5; steps of this run count from 0",
            *(
                f"start    table {table}: {one:,} rows with their slots; "
                f"{two - one:,} new rows have their initial values"
                for table in ("first_order", "vectors")
            ),
            "start    dense layers and their optimizer state are loaded; learning rates are those of this run",
        ]
    assert len(set(found.values())) == 1
    assert found["depth"] != digest(first)
    assert json.loads((tmp_path / "depth/config.json").read_text())["start_from"] == str(first)
    saved = read_chain(tmp_path / "depth/checkpoints" / names_in(tmp_path / "depth/checkpoints")[-1])
    assert len(saved) == 1  # whole: it adds to none of another folder
    assert (saved[-1].manifest.step, saved[-1].manifest.table("vectors").step) == (5, 10)
    predicted(tmp_path / "depth", days / "two", tmp_path / "p.parquet")
    auc = json.loads((tmp_path / "depth/summary.json").read_text())["auc"]
    assert f"AUC {auc:.4f}" in capsys.readouterr().out
    # The same rows as text, whose values the checkpoint's own vocabulary looks up.
    predicted(tmp_path / "depth", days / "2.csv", tmp_path / "q.parquet")
    assert len(pq.read_table(tmp_path / "q.parquet")) == 2500


def predicted(checkpoint, data, out):
    arguments = ["--checkpoint", checkpoint, "--data", data, "--out", out]
    assert cli.run("p", predict.main, list(map(str, arguments))) == 0
    return pq.read_table(out)


def test_a_checkpoint_predicts_data_with_more_or_fewer_of_its_ids(days, first, trained, tmp_path):
    """The second day's new values are out of vocabulary for the first day's checkpoint."""
    two = manifest.read(days / "two")
    assert predicted(first, days / "two", tmp_path / "of_ids.parquet").num_rows == two.rows("test")
    predictor = hostdev.Predictor(first)
    frame = pd.read_csv(days / "2.csv", keep_default_na=False)
    raw = predictor(
        {name: frame[name].tolist() for name in ("age", "user", "item")}
        | {
            name: [text.split(mark) if text else [] for text in frame[name]]
            for name, mark in (("genres", "|"), ("history", " "))
        }
    )
    of_ids = np.concatenate(
        [
            pq.read_table(tmp_path / "of_ids.parquet")["probability"].to_numpy(),
            *(
                predictor.logits_by_batch(with_known_ids(batch, two.schema, predictor.data.schema.rows))
                for batch in ShardReader(days / "two", two, "train").batches(10_000)
            ),
        ]
    )
    of_ids[two.rows("test") :] = probabilities(of_ids[two.rows("test") :])
    np.testing.assert_allclose(np.sort(of_ids), np.sort(raw), rtol=1e-5)
    flags = flags_of(days / "two", tmp_path / "run", *MIX, "--checkpoint-every", 9, "--start-from", first)
    assert trained(*flags)[0] == 0
    one = manifest.read(days / "one").rows("test")
    assert predicted(tmp_path / "run", days / "one", tmp_path / "p.parquet").num_rows == one


def test_frozen_ids_are_the_checkpoints(days, first, tmp_path):
    out = prepare(days / "2.csv", tmp_path / "frozen", "--vocabulary", days / "one", "--frozen-vocabulary")
    frozen = predicted(first, out, tmp_path / "frozen.parquet")
    grown = predicted(first, days / "two", tmp_path / "grown.parquet")
    assert frozen.equals(grown)


def trainer_of(settings, schema, *, mix=True):
    model = model_of(settings, schema)
    return make_trainer(model, host_device_mix=mix, device=torch.device("cpu"), seed=settings.seed, lr=settings.lr)


@pytest.mark.parametrize(
    ("model", "dtype", "mix"),
    [
        ("wide_deep", "fp32", True),
        ("deepfm", "bf16", False),
        ("tests.own_models:ThreeTables", "bf16", True),
        pytest.param("dlrm", "fp32", False, marks=pytest.mark.slow),
        pytest.param("dcn", "bf16", True, marks=pytest.mark.slow),
    ],
)
def test_earlier_rows_are_the_checkpoints_and_new_ones_initial(days, tmp_path, monkeypatch, model, dtype, mix):
    monkeypatch.setitem(WideDeep.__init__.__kwdefaults__, "layers", SMALL)
    how = ["--model", model, "--emb-dim", 16, "--table-dtype", dtype]
    flags = [*flags_of(days / "one", tmp_path / "run", "--checkpoint-every", 2, "--max-steps", 3), *how]
    assert run(*flags, *(MIX if mix else [])) == 0
    schema = manifest.read(days / "two").schema
    settings = TrainConfig(
        data=days / "two", model=model, emb_dim=16, table_dtype=dtype, lr=0.5, seed=7, start_from=tmp_path / "run"
    ).resolved()
    started, fresh = (trainer_of(settings, schema, mix=mix) for _ in range(2))
    origin = starting.find(settings, days / "two", manifest.read(days / "two"))
    starting.load(origin, started)
    layers = Layers(origin.chain)
    for name, table in started.tables.items():
        about = layers.manifest.table(name)
        rows = about.rows
        for column, values in table.columns().items():
            values = np.asarray(values[: table.rows])
            known = np.concatenate(list(layers.column(name, column)))
            np.testing.assert_array_equal(values[:rows], known)
            initial = np.asarray(fresh.tables[name].columns()[column][: table.rows])
            np.testing.assert_array_equal(values[rows:], initial[rows:])
        assert (table.step, table.seed) == (about.step, 7)
    assert started.adam.param_groups[0]["lr"] == 0.5
    weights = started.model.state_dict()
    for name, value in starting.values_of(origin.chain)["dense"]["model"].items():
        assert torch.equal(weights[name], value)
    state = next(iter(started.adam.state.values()))
    assert state["step"] == 3
    assert started.steps == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_go_by_their_ids_to_the_ranks_that_hold_them(days, first, tmp_path, ranks):
    """A row's position depends on the number of rows, which has grown."""
    from hostdev.ext.checkpoints.compact import rewrite

    chain = read_chain(first / "checkpoints" / names_in(first / "checkpoints")[-1])
    rewrite(chain, tmp_path / "spread", 2)
    spread = read_chain(tmp_path / "spread" / names_in(tmp_path / "spread")[-1])
    rows = manifest.read(days / "two").schema.rows
    layers = Layers(chain)
    known = np.concatenate(list(layers.column("vectors", "weights")))
    for source in (chain, spread):
        for rank in range(ranks):
            about = source[-1].manifest.table("vectors")
            optimizer = hostdev.LazyAdam(**about.hyperparameters)
            table, initial = (
                hostdev.HostTable(rows, 4, optimizer, name="vectors", part=(rank, ranks)) for _ in range(2)
            )
            fit = fit_tables(source, {"vectors": table})
            assert fit.taken == {"vectors": (about.rows, rows)}
            assert fit.left == ["first_order"]
            load_shared(source, {"vectors": table}, fit)
            ids = table.ids(0, table.rows)
            found = table.lookup(np.arange(table.rows))
            old = ids < about.rows
            assert 0 < old.sum() < len(ids)
            np.testing.assert_array_equal(found[old], known[ids[old]])
            np.testing.assert_array_equal(found[~old], initial.lookup(np.flatnonzero(~old)))


@pytest.mark.slow
def test_two_processes_begin_alike(days, first, tmp_path, command):
    flags = [*MIX, "--micro-batches", 2, "--start-from", first]
    for name, more in (("alone", []), ("two", ["--spawn", 2])):
        done = command("hostdev.train", *flags_of(days / "two", tmp_path / name, *flags, *more))
        assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "alone") == digest(tmp_path / "two")


def test_an_interrupted_run_goes_on_by_resume(days, first, trained, tmp_path):
    flags = [*MIX, "--checkpoint-every", 2, "--start-from", first]
    assert trained(*flags_of(days / "two", tmp_path / "whole", *flags))[0] == 0
    assert trained(*flags_of(days / "two", tmp_path / "parts", *flags), "--max-steps", 3)[0] == 0
    code, out, _ = trained(*flags_of(days / "two", tmp_path / "parts", *flags), "--resume")
    assert code == 0
    assert "start " not in out  # it goes on from its own checkpoint
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    code, out, _ = trained(*flags_of(days / "two", tmp_path / "new", *flags), "--resume")
    assert (code, digest(tmp_path / "new")) == (0, digest(tmp_path / "whole"))
    assert out.count("start    ") == 4


@pytest.fixture(scope="module")
def others(days):
    """Data sets of the second day that do not match the first day's checkpoint."""
    later = [*COLUMNS[:4], "--categorical", "item,user", *COLUMNS[6:]]
    prepare(days / "2.csv", days / "order", *later)
    prepare(days / "2.csv", days / "anew", *COLUMNS)
    prepare(days / "1.csv", days / "rarer", *COLUMNS, "--threshold", 60)
    prepare(days / "1.csv", days / "scaled", *COLUMNS, "--dense", "log")
    prepare(days / "1.csv", days / "hashed", *COLUMNS, "--hash-buckets", 300)
    return days


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        (
            "order",
            [],
            "order does not fit .* columns with ids .only the order differs.: user, item, g.* in the checkpoint",
        ),
        (
            "anew",
            [],
            "anew does not fit .* in the checkpoint, .* in the data set; prepare the data with .* --vocabulary",
        ),
        (
            "rarer",
            [],
            r"rarer does not fit .* id \d+ is '.*' value '.*' in the checkpoint, '.*' value '.*' in the data set",
        ),
        ("scaled", [], "scaled does not fit .* scaling of numbers: max, .* in the checkpoint, log, .* in the data set"),
        ("hashed", [], "hashed does not fit .* different hash buckets: none in the checkpoint, 300 in the data set"),
        ("two", ["--model", "dcn"], "was trained with --model deepfm, not --model dcn; give --model deepfm"),
        ("two", ["--emb-dim", 8], "table 'vectors' has dim 4, but 8 in the program"),
        (
            "two",
            ["--table-optimizer", "sgd"],
            r"table 'first_order' has optimizer LazyAdam\(b.*, but SGD in the program",
        ),
        ("two", ["--table-dtype", "bf16"], "the weights of table 'first_order' are fp32, but bf16 in the program"),
        ("two", ["--resume", "x"], "--start-from cannot be combined with --resume DIR"),
        ("two", ["--start-from", "nowhere"], "--start-from nowhere: there is no such checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused(others, first, trained, tmp_path, data, more, message):
    code, _, error = trained(*flags_of(others / data, tmp_path / "run", *MIX, "--start-from", first, *more))
    assert code == 2
    assert re.search(message, error), error
    assert (error.count("\n"), len(error) < 700) == (1, True)
    assert not (tmp_path / "run").exists()


def test_resume_on_other_data_names_it(days, first, trained, tmp_path):
    newest = first / "checkpoints" / names_in(first / "checkpoints")[-1]
    code, _, error = trained(*flags_of(days / "two", tmp_path / "run", *MIX), "--resume", newest)
    assert code == 2
    assert f"give --start-from {newest} instead of --resume" in error


def test_other_ids_are_named(days, first, tmp_path):
    """Both have the same number of ids; the error names the first that differs."""
    there = manifest.read(days / "one")
    lines = (days / "1.csv").read_text().splitlines(keepends=True)
    (tmp_path / "1.csv").write_text("".join([lines[0], *reversed(lines[1:])]))
    here = manifest.read(prepare(tmp_path / "1.csv", tmp_path / "reversed", *COLUMNS))
    here = replace(here, statistics=there.statistics)
    words = (
        r"reversed does not fit .* trained on different ids: id \d+ is '.*' value '.*' in the checkpoint, '.*' value '"
    )
    with pytest.raises(hostdev.UserError, match=words):
        starting.require_same_meaning(first, days / "one", there, tmp_path / "reversed", here)
    two = manifest.read(days / "two")
    starting.require_same_meaning(first, days / "one", there, days / "two", two)
    with pytest.raises(
        hostdev.UserError, match=r"first was trained with \d+ ids, but .*/one has only \d+; prepare the"
    ):
        starting.require_same_meaning(first, days / "two", two, days / "one", there)


def test_a_checkpoint_of_a_program_of_its_own_with_one_of_the_tables(days, trained, tmp_path):
    schema = manifest.read(days / "two").schema
    rng = np.random.default_rng(0)
    # as DeepFM has it, with fewer rows; and one that DeepFM has not
    model = model_of(TrainConfig(model="deepfm", emb_dim=4), schema)
    vectors = hostdev.HostTable(50, 4, model.tables["vectors"].optimizer, name="vectors")
    other = hostdev.HostTable(9, 2, hostdev.SGD(lr=1.0), name="other")
    runtime = hostdev.Runtime({"a": vectors, "b": other}, depth=0)
    for _, rows in runtime.train([rng.integers(0, 9, 20)], ids=lambda batch: {"a": batch, "b": batch}):
        (rows["a"].sum() + rows["b"].sum()).backward()
    runtime.save(tmp_path / "own", extra={"mine": 1})
    flags = flags_of(days / "two", tmp_path / "run", *MIX, "--max-steps", 1, "--start-from", tmp_path / "own")
    code, out, error = trained(*flags)
    assert (code, error) == (0, "")
    path = tmp_path / "own" / names_in(tmp_path / "own")[-1]
    assert [line for line in out.splitlines() if line.startswith("start ")] == [
        f"start    {path} has no vocabulary, so its ids cannot be compared with the data's",
        f"start    from {path}, after step 1; steps of this run count from 0",
        f"start    table vectors: 50 rows with their slots; {schema.rows - 50} new rows have their initial values",
        "start    table first_order: not in the checkpoint; all rows have their initial values",
        "start    table other: only in the checkpoint; not loaded",
        "start    dense layers have their initial values, as the checkpoint has no layers saved by hostdev train; "
        "learning rates are those of this run",
    ]


def test_damaged_and_none_of_its_tables(days, first, trained, tmp_path):
    table = hostdev.HostTable(9, 2, hostdev.SGD(lr=1.0), name="other")
    hostdev.Runtime({"b": table}, depth=0).save(tmp_path / "own")
    code, _, error = trained(*flags_of(days / "two", tmp_path / "run", *MIX), "--start-from", tmp_path / "own")
    assert code == 2
    assert "has none of the tables first_order, vectors; it has other" in error
    assert sys.getsizeof(error) < 700


def test_a_checkpoints_data_stands_for_the_data_set_that_is_gone(days, first, tmp_path):
    path = next(path for path in sorted((first / "checkpoints").iterdir()) if (path / "data").is_dir())
    assert read_earlier(path / "data").identity == read_earlier(days / "one").identity
    prepare(days / "2.csv", tmp_path / "two", "--vocabulary", path / "data")
    assert manifest.read(tmp_path / "two").identity == manifest.read(days / "two").identity
