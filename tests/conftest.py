"""Fixtures for many tests: threads, devices, small data sets, the real sample, ways to run a command."""

import gc
import json
import os
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from hostdev.core import cli
from hostdev.core.locks import await_lock, unlock
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.device import backend
from hostdev.kernels.pool import host_threads, set_host_threads
from hostdev.models.wide_deep.network import WideDeep
from tests import drawn, durations, forks
from tests.data import movies

TORCH_THREADS = torch.get_num_threads()
SMALL = (32, 16)  # hidden layers of Wide & Deep
ROOT = Path(__file__).resolve().parent.parent

# A shell without job control makes its background jobs ignore Ctrl-C, and their children, the tests' processes, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    durations.configure(config)


def pytest_report_header():
    return f"{drawn.VARIABLE}={drawn.seed()}"


def pytest_unconfigure():
    forks.stop()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a worker of pytest-xdist the file of this run."""
    node.workerinput[durations.VARIABLE] = node.config.durations_file


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Exempt modules from garbage collections: with torch's, each takes a second."""
    import_module("torch._dynamo")  # which torch.optim imports when it is first used
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _restore_threads():
    """Some commands and fixtures set them for the process; the last bits of sums depend on torch's."""
    host = host_threads()
    torch.set_num_threads(TORCH_THREADS)
    yield
    set_host_threads(host)
    torch.set_num_threads(TORCH_THREADS)


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
    """A picture takes a good part of a small training's time; tests that look at it are marked `draws`."""
    draws = request.node.get_closest_marker("draws") is not None
    monkeypatch.setattr(forks, "pictures", draws)
    if not draws:
        monkeypatch.setattr("hostdev.train.quality.draw", lambda path, *of_run: path.write_bytes(b""))


def devices():
    """Return the simulated accelerator alone if it is loaded; else the CPU, and an accelerator if there is one."""
    if "tests.standin.plugin" in sys.modules:
        return ["standin"]
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if found is None else ["cpu", found.type]


def stand_in():
    """Return the simulated accelerator's package, in a run with its plugin. An import elsewhere would register it."""
    return sys.modules["tests.standin"]


@pytest.fixture(params=devices())
def device(request):
    """The device that `--device NAME` selects. `make test-device` runs all tests that take this fixture."""
    found = backend.select(request.param)
    with pytest.MonkeyPatch.context() as patch:
        if backend.is_accelerator(found):
            backend.make_deterministic(found)
        if found.type == "standin":  # it is slow, and a larger network would test no more
            patch.setitem(WideDeep.__init__.__kwdefaults__, "layers", SMALL)
        yield found
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("device")
        if "tests.standin.plugin" in sys.modules and item.get_closest_marker("slow_on_standin"):
            item.add_marker("slow")
    if "tests.standin.plugin" in sys.modules:
        drawn.mark_on_standin(items)
    drawn.mark(items)


def made_once(factory, name, make):
    """Return a folder that is filled by `make(folder)`, once for all workers of this run, which must not change it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / f"once-{name}"
    with (root / f"once-{name}.lock").open("w") as file:
        await_lock(file)
        if not (folder / ".made").exists():
            shutil.rmtree(folder, ignore_errors=True)  # it failed
            folder.mkdir()
            make(folder)
            (folder / ".made").touch()
        unlock(file)
    return folder


@pytest.fixture(scope="session")
def criteo_sample():
    """The file of real Criteo rows. Their terms do not allow us to ship it."""
    path = Path(os.environ.get("HOSTDEV_CRITEO_SAMPLE", ROOT.parent / "shared/data/criteo_100k.txt"))
    if not path.is_file():
        pytest.skip(f"no Criteo sample at {path}; set HOSTDEV_CRITEO_SAMPLE")
    return path


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """A synthetic data set of 4,000 rows in several shards. Tests must not change it."""

    def make(folder):
        build(Synthetic(4000, 1), folder / "data", Options(threshold=2, rows_per_shard=1500))

    return made_once(tmp_path_factory, "small", make) / "data"


@pytest.fixture(scope="session")
def films(tmp_path_factory):
    """A data set of films: columns, bags, and a history that shares the items' ids. Tests must not change it."""

    def make(folder):
        made = movies.make(rows=3000, users=80, items=60).write_csv(folder / "films.csv")
        table = ["table", made, "--out", folder / "data", "--label", "liked", "--numeric", "age"]
        flags = ["--categorical", "user,item", "--bag", "genres=|", "--bag", "history= ", "--share", "history=item"]
        preprocess.main(list(map(str, [*table, *flags])))

    return made_once(tmp_path_factory, "films", make) / "data"


@pytest.fixture
def own_data(tmp_path):
    """A synthetic data set of 600 rows that a test may damage."""
    folder = tmp_path / "data"
    build(Synthetic(600, 2), folder, Options(threshold=1, rows_per_shard=200))
    return folder


@pytest.fixture
def command(tmp_path):
    """Run `python -m MODULE ARGUMENTS` in an empty folder, with an empty cache folder."""

    def run(module, *arguments, cwd=tmp_path, **options):
        return forks.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=cwd,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            **options,
        )

    return run


@pytest.fixture
def in_process(capsys, tmp_path, monkeypatch):
    """Run a command's module in this process, in an empty folder; return its code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(module, *arguments):
        code = cli.run(module.PROG, module.main, list(map(str, arguments)))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run(in_process):
    """Run a command's module as `in_process` does; it must succeed. Return what it printed."""

    def run(module, *arguments):
        code, out, error = in_process(module, *arguments)
        assert code == 0, error
        return out

    return run


def digest_of(folder):
    """Return the digest in a run directory's summary."""
    return json.loads((folder / "summary.json").read_text())["state_sha256"]


def environment(tmp_path):
    """Return the environment for a command: this checkout, and an empty cache folder, which is not in the checkout."""
    assert ROOT not in (tmp_path, *tmp_path.parents)  # matplotlib's list of fonts there was committed once
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200"}
