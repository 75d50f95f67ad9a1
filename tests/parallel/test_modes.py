"""Every way to share out a network: Wide & Deep and ResNet-50 for 50 steps, the digits to their accuracy."""

import json
import re
import shutil
import sys

import pytest

from hostdev.core import cli
from hostdev.ext.training import cli as train
from tests.conftest import ROOT
from tests.distributed.processes import Processes

EXAMPLES = ROOT / "examples" / "parallel"
FEW = ("--epochs", "1", "--max-steps", "3", "--print-every", "1")
NARROW = ("--width", "8", "--micro-batches", "8", "--lr", "0.0005")  # at 0.01 rounding grows a hundredfold in ten steps
FIFTY = (*NARROW, "--max-steps", "50", "--print-every", "1")
EXACT, NEAR = 0.0, 1e-5  # of the losses, relative

RESNET = [
    (2, EXACT, "--parallel", "data"),
    (2, NEAR, "--parallel", "hybrid"),
    (2, NEAR, "--parallel", "semi", "--plan", "fc=rowwise"),
    (2, EXACT, "--parallel", "auto"),
    (2, EXACT, "--mesh", "pipe=2"),
    (2, EXACT, "--mesh", "pipe=2", "--schedule", "interleaved"),
    (4, EXACT, "--parallel", "data"),
    (4, NEAR, "--parallel", "hybrid"),
    (4, NEAR, "--mesh", "data=2,model=2", "--plan", "fc=colwise"),
    (4, EXACT, "--parallel", "auto"),
    (4, EXACT, "--mesh", "pipe=4", "--stage-cut", "layer2.0,layer3.0,layer4.0"),
    (4, EXACT, "--mesh", "data=2,pipe=2", "--schedule", "gpipe"),
    (4, NEAR, "--mesh", "model=2,pipe=2", "--plan", "fc=colwise"),
]
WIDE_DEEP = [
    (2, EXACT, "--parallel", "data"),
    (2, NEAR, "--model", "examples.parallel.by_hand:WideDeepByHand", "--mesh", "model=2"),
    (2, NEAR, "--parallel", "semi", "--plan", "deep.0=colwise,deep.2=rowwise,deep.4=colwise"),
    (2, EXACT, "--parallel", "auto"),
    (2, NEAR, "--parallel", "auto", "--mesh", "model=2"),
    (2, NEAR, "--parallel", "auto", "--mesh", "model=2", "--plan", "deep.0=rowwise"),
    (2, EXACT, "--mesh", "pipe=2"),
    (4, EXACT, "--parallel", "data"),
    (4, NEAR, "--model", "examples.parallel.by_hand:WideDeepByHand", "--mesh", "data=2,model=2"),
    (4, NEAR, "--mesh", "data=2,model=2", "--plan", "deep.*=colwise,deep.8=replicate"),
    (4, EXACT, "--parallel", "auto"),
    (4, EXACT, "--mesh", "data=2,pipe=2"),
    (4, NEAR, "--mesh", "model=2,pipe=2", "--plan", "deep.0=colwise,deep.2=rowwise"),
]


def name_of(case):
    return " ".join(map(str, case[:1] + case[2:])) if isinstance(case, tuple) else None


def generated(folder, kind, *more):
    made = Processes(folder.parent, folder.parent)
    with made:
        made.start(sys.executable, EXAMPLES / "generate.py", kind, folder, *more)
        [ended] = made.ended()
    assert ended.code == 0, ended
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder of each kind of files, made when it is asked for."""
    found = {}

    def make(kind):
        if kind not in found:
            more = () if kind == "digits" else ("--train", 320, "--test", 40)
            found[kind] = generated(tmp_path_factory.mktemp(kind) / "files", kind, *more)
        return found[kind]

    return make


def trained(processes, ranks, network, folder, *options, start=None):
    """The losses, the accuracy and the digest of a training of the examples' command."""
    command = [EXAMPLES / "train.py", network, folder, *options]
    if start is None:
        processes.start_ranks(ranks, *command)
    else:
        processes.start(*start, sys.executable, *command)
    ended = processes.ended()
    processes.forget()
    for process in ended:
        assert process.code == 0, process
    out = ended[0].out
    losses = [float(each) for each in re.findall(r"loss is (\S+)", out)]
    return losses, float(re.search(r"accuracy (\S+)", out)[1]), re.search(r"state_sha256 (\w+)", out)[1]


def require_near(found, expected, tolerance):
    losses, wanted = found[0], expected[0]
    assert len(losses) == len(wanted)
    if tolerance == EXACT:
        assert found == expected
    else:
        assert max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)) <= tolerance


@pytest.fixture(scope="session")
def one(tmp_path_factory, cache_folder, images):
    """Return the result of one process."""
    found = {}

    def run(network, kind, *options):
        key = (network, kind, *options)
        if key not in found:
            with Processes(tmp_path_factory.mktemp("one"), cache_folder) as made:
                found[key] = trained(made, 1, network, images(kind), *options)
        return found[key]

    return run


@pytest.mark.slow
def test_the_examples_run_as_stages(processes, images, one):
    found = trained(processes, 2, "mnist", images("digits"), "--mesh", "pipe=2", *FEW)
    assert found == one("mnist", "digits", *FEW)


@pytest.mark.slow
def test_a_slice_by_hand(processes, images, one):
    options = ("--width", "4", "--blocks", "1", "1", "1", "1", *FEW, "--lr", "0.001")
    found = trained(processes, 2, "resnet50", images("cifar10"), "--parallel", "hybrid", *options)
    require_near(found, one("resnet50", "cifar10", *options), NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("case", RESNET, ids=name_of)
def test_resnet(processes, images, one, case):
    ranks, tolerance, *options = case
    found = trained(processes, ranks, "resnet50", images("cifar10"), *options, *FIFTY)
    require_near(found, one("resnet50", "cifar10", *FIFTY), tolerance)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI here")
def test_resnet_by_mpirun(processes, images, one):
    start = ("mpirun", "--allow-run-as-root", "-bind-to", "none", "-n", "2")
    found = trained(processes, 2, "resnet50", images("cifar10"), "--mesh", "pipe=2", *FIFTY, start=start)
    require_near(found, one("resnet50", "cifar10", *FIFTY), EXACT)


DEEPER = ("--hidden", "64", "32", "--momentum", "0.9")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, DEEPER),
        (2, ("--parallel", "data", *DEEPER)),
        (2, ("--parallel", "hybrid", *DEEPER)),
        (2, ("--parallel", "semi", "--plan", "dense1=colwise,dense2=rowwise", *DEEPER)),
        (2, ("--parallel", "auto", *DEEPER)),
        (2, ("--mesh", "pipe=2", *DEEPER)),
        (4, ("--mesh", "data=2,model=2", "--plan", "dense1=colwise,dense2=rowwise", *DEEPER)),
        (4, ("--mesh", "pipe=4", *DEEPER)),
        (1, ()),
        (2, ("--parallel", "data")),
        (2, ("--parallel", "hybrid")),
        (2, ("--parallel", "semi", "--plan", "dense1=colwise")),
        (2, ("--parallel", "auto")),
        (2, ("--mesh", "pipe=2")),
    ],
    ids=str,
)
def test_the_digits(processes, images, ranks, options):
    """The documents' net of one layer, and a deeper one."""
    _, accuracy, _ = trained(processes, ranks, "mnist", images("digits"), *options, "--print-every", "9")
    assert accuracy >= 0.95


def flags(data, folder, *more):
    fixed = ["--data", data, "--host-device-mix", "--batch-size", 500, "--epochs", 1, "--max-steps", 50]
    return list(map(str, [*fixed, "--micro-batches", 8, "--emb-dim", 8, "--run-dir", folder, *more]))


def losses_of(folder):
    return [float(line.split()[-1]) for line in (folder / "loss.log").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("case", WIDE_DEEP, ids=name_of)
def test_wide_deep(processes, tmp_path, wide_deep_alone, case):
    ranks, tolerance, *options = case
    data, expected = wide_deep_alone
    processes.start_ranks(ranks, "-m", "hostdev.train", *flags(data, tmp_path / "run", *options), PYTHONPATH=ROOT)
    for process in processes.ended():
        assert process.code == 0, process
    found, wanted = ((one / "loss.log").read_bytes() for one in (tmp_path / "run", expected))
    if tolerance == EXACT:
        assert found == wanted
        digests = [
            json.loads((one / "summary.json").read_text())["state_sha256"] for one in (tmp_path / "run", expected)
        ]
        assert digests[0] == digests[1]
    else:
        pairs = zip(losses_of(tmp_path / "run"), losses_of(expected), strict=True)
        assert max(abs(a - b) / b for a, b in pairs) <= tolerance


@pytest.fixture(scope="session")
def wide_deep_alone(tmp_path_factory):
    """The look-alike's folder, and the run directory of one process."""
    from hostdev.data.preprocess import synthetic

    data, folder = synthetic.ensure_lookalike()[0], tmp_path_factory.mktemp("wide_deep") / "run"
    assert cli.run(train.PROG, train.main, flags(data, folder)) == 0
    return data, folder
