"""The files of examples/ run and learn, and README shows how they differ, and what they are."""

import difflib
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch

import hostdev
from hostdev.runtime import saving
from tests.conftest import ROOT
from tests.ports import free_port

EXAMPLES = ROOT / "examples"
SMALL = {"users": 240, "films": 120}
METRICS = {  # of plain torch: the epochs, the least that is learned, and how close hostdev comes
    "two_tower": (2, 0.40, 0.02),
    "sequence": (4, 0.30, 0.02),
    "several_tasks": (4, 0.60, 0.005),
    "hard_negatives": (3, 0.35, 0.06),  # a rounding decides which film is mined, and so what is learned
    "growing": (3, 0.58, 0.005),
}
FILES = [ROOT / "examples" / name for name in ("movies_torch.py", "movies.py")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_learns(file, capsys):
    losses = runpy.run_path(str(file))["main"](steps=300)
    assert np.mean(losses[-50:]) < np.mean(losses[:50]) - 0.02
    assert "over 300 steps" in capsys.readouterr().out


def test_the_readme_shows_the_difference():
    one, other = ([line.rstrip() for line in file.read_text().split('"""', 2)[2].splitlines()] for file in FILES)
    changed = [line for line in difflib.ndiff(one, other) if line[0] in "+-"]
    for page in ("README.md", "docs/tutorials/own-model.md"):
        shown = (ROOT / page).read_text().split("```diff\n")[1].split("```")[0].splitlines()
        shown = [line for line in shown if line[:1] in ("+", "-")]
        assert sorted(line[0] + line[2:] for line in changed if line[2:]) == sorted(line for line in shown if line[1:])


def test_what_was_saved_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = ROOT / "examples" / "save_and_load.py"
    main = runpy.run_path(str(file))["main"]
    for steps in (60, 120):
        main(steps)
        saving._await_all()  # as the end of the program does
    shutil.rmtree("saved")
    main(120)
    first, then, gone_on, plain = capsys.readouterr().out.splitlines()
    assert first.startswith("step 60: loss 0.")
    assert then == "resumes after step 50"
    assert gone_on == plain
    shown = (ROOT / "docs/guides/checkpoints.md").read_text()
    assert file.read_text().partition("def main(steps):")[2].partition("\n\n\nif")[0] in shown


@pytest.fixture
def example(monkeypatch):
    """Return what a file of examples/ defines; it may import those beside it."""
    warnings.filterwarnings("ignore", module="lightning.*")
    warnings.filterwarnings("ignore", "table 'user' has .* rows in .* and .* in the program; other rows are unchanged")
    for package in ("lightning", "accelerate"):  # or what is beside the example would be found in their place
        pytest.importorskip(package)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    yield lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", METRICS)
def test_it_reaches_what_plain_torch_does(example, name, capsys):
    epochs, least, close = METRICS[name]
    plain, found = example(name)["main"](epochs=epochs, **SMALL)
    assert np.min(plain) > least
    assert found == pytest.approx(plain, abs=close)
    assert "plain torch" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", METRICS)
def test_its_metric_depends_on_neither_depth_nor_cache(example, name):
    made = example(name)
    data, (epochs, _, _) = made["films"].make(**SMALL), METRICS[name]
    found = [
        made["train_hostdev"](data, epochs, **options) for options in ({"depth": 0}, {"depth": 4}, {"cache": "30%"})
    ]
    assert all(str(one) == str(found[0]) for one in found)


def test_a_table_that_grew_has_the_bits_of_a_large_one(example):
    made = example("growing")
    data = made["films"].make(**SMALL)
    (auc, rows), (wanted, whole) = (made["train_hostdev"](data, 1, whole=whole) for whole in (False, True))
    assert np.array_equal(rows, whole)
    assert auc == wanted


def test_a_loop_on_processes_reaches_what_plain_torch_does(example):
    made = example("processes")
    data = made["films"].make(**SMALL)
    assert made["train"](data, 3) == pytest.approx(made["train_torch"](data, 3), abs=0.005)


def test_a_loop_on_two_processes_has_the_bits_of_one(example, capsys):
    port = free_port()
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "error", str(EXAMPLES / "processes.py"), "--small"]
    started = [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    made = example("processes")
    made["train"](made["films"].make(users=400, films=200), 3)
    found, silent = (process.communicate(timeout=300)[0] for process in started)
    assert [process.returncode for process in started] == [0, 0]
    assert found == capsys.readouterr().out.replace("1 process", "2 processes")
    assert silent == ""


class Logged:
    """A writer that keeps the steps of each tag."""

    def __init__(self):
        self.steps = {}

    def add_scalar(self, tag, value, step):
        self.steps.setdefault(tag, []).append(step)

    add_histogram = add_scalar


def log_in(main):
    """Let the runtimes that an example makes from now on write to a writer, and return it."""
    names, writer = main.__globals__, Logged()
    make = names["make_runtime"]

    def make_logged(*arguments):
        runtime = make(*arguments)
        runtime.log_to(writer, every=2)
        return runtime

    names["make_runtime"] = make_logged
    return writer


def require_logged(writer):
    assert {"speed/samples_per_second", "ops/EmbeddingLookup_ms", "rows/user/norm"} <= set(writer.steps)
    steps = writer.steps["speed/samples_per_second"]
    distances = np.diff(steps)
    back = distances[distances != 2]  # a resumed run takes the steps after its checkpoint again
    assert steps[0] == 2 and len(back) <= 1 and (back > -steps[-1] + 2).all() and steps[-1] == max(steps) > 10


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*LeafSpec.*", "ignore:Checkpoint directory")
def test_lightning_learns_and_goes_on(example, tmp_path, capsys):
    main = example("lightning")["main"]
    straight = main(str(tmp_path / "straight"), 3, **SMALL)
    logged = log_in(main)
    main(str(tmp_path / "parts"), 2, **SMALL)
    then = main(str(tmp_path / "parts"), 3, resume=str(tmp_path / "parts" / "last.ckpt"), **SMALL)
    assert then.auc == straight.auc > 0.55
    require_logged(logged)
    assert "after epoch 3" in capsys.readouterr().out


def test_accelerate_learns_and_goes_on(example, tmp_path, capsys):
    made = example("accelerate")
    straight = made["main"](str(tmp_path / "straight"), 3, **SMALL)
    logged = log_in(made["main"])
    first = made["main"](str(tmp_path / "parts"), 2, **SMALL)
    then = made["main"](str(tmp_path / "parts"), 1, resume=str(tmp_path / "parts"), **SMALL)
    assert first + then == straight
    require_logged(logged)
    assert np.mean(straight[-10:]) < np.mean(straight[:10]) - 0.01


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
@pytest.mark.slow
def test_a_script_finds_the_package_and_not_itself(name, tmp_path):
    done = subprocess.run([sys.executable, f"{name}.py", "--small"], cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "AUC 0." in done.stdout


def test_the_list_of_examples_is_whole():
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{file.name}`" in listed for file in EXAMPLES.glob("*.py"))


def test_a_torch_checkpoint_goes_on_and_comes_back(capsys):
    file = ROOT / "examples" / "from_torch.py"
    straight, last = runpy.run_path(str(file))["main"]()
    assert last == pytest.approx(straight, rel=1e-3)
    page, source = (ROOT / "docs/guides/torch.md").read_text(), file.read_text()
    assert source[source.index("def to_hostdev") : source.index("\n\n\ndef batches")] in page
    for line in capsys.readouterr().out.splitlines():
        assert re.sub(r"\d\.\d+", "N", line) in re.sub(r"\d\.\d+", "N", page)


MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("make", "own", "slots"),
    [
        (torch.optim.SparseAdam, hostdev.LazyAdam(lr=0.1), MOMENTS),
        (torch.optim.Adagrad, hostdev.Adagrad(lr=0.1), {"accum": "sum"}),
        (torch.optim.SGD, hostdev.SGD(lr=0.1), {}),
        (torch.optim.Adam, hostdev.Adam(lr=0.1), MOMENTS),
        (partial(torch.optim.AdamW, weight_decay=0.5), hostdev.Adam(lr=0.1, weight_decay=0.5), MOMENTS),
    ],
)
def test_optimizers_of_torch_and_their_states(make, own, slots):
    """The rows of the table in docs/guides/torch.md."""
    is_sparse = not isinstance(own, hostdev.Adam)
    rows, table = torch.nn.Embedding(5, 2, sparse=is_sparse), hostdev.HostTable(5, 2, own, name="t")
    optimizer = make([rows.weight], lr=0.1)

    def step(number):
        optimizer.zero_grad()
        (rows(torch.tensor([number % 5, 3])) * torch.tensor([1.0, number])).sum().backward()
        optimizer.step()

    for number in range(3):
        step(number)
    state = optimizer.state_dict()["state"].get(0, {})
    with table.writing() as w:
        w.weights[:] = rows.weight.detach()
        for name, other in slots.items():
            w.slots[name][:] = state[other]
    table.step = int(state.get("step", 0))
    for number in range(3, 6):
        step(number)
        table.apply(np.array([number % 5, 3]), np.array([[1, number]] * 2, np.float32))
    np.testing.assert_allclose(table.weights, rows.weight.detach(), rtol=1e-4, atol=1e-6)
    for name, other in slots.items():
        np.testing.assert_allclose(table.slots[name], optimizer.state_dict()["state"][0][other], rtol=1e-4, atol=1e-6)


def test_the_home_page_learns():
    code = (ROOT / "docs/index.md").read_text().split("```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    names = {}
    exec(compile(code, "docs/index.md", "exec"), names)
    assert names["films"].step == 50
    assert names["loss"].item() < 0.69
