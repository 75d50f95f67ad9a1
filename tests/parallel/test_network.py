"""Networks without tables, in a loop of one's own: the same bits along data and pipe, slices to rounding."""

import copy
import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hostdev.core.errors import UserError
from hostdev.distributed.averages import Averages
from hostdev.distributed.world import Layout, Mesh, parse_plan
from hostdev.ext.parallel.network import Network
from hostdev.ext.parallel.plan import like, resolve_layout, sliced
from hostdev.ext.parallel.state import NetworkState
from hostdev.ext.parallel.tied import LocalParameters
from tests.conftest import ROOT

LOOP = ("-m", "tests.parallel.network_loop")


@pytest.fixture(scope="module")
def alone():
    """Return the results of one process by case."""
    found = {}

    def run(*cases):
        missing = [case for case in cases if case not in found]
        if missing:
            made = subprocess.run(
                [sys.executable, *LOOP, ",".join(missing)],
                cwd=ROOT,
                env={**os.environ},
                text=True,
                check=True,
                capture_output=True,
            )
            found.update(zip(missing, json.loads(made.stdout), strict=True))
        return [found[case] for case in cases]

    return run


def run(processes, cases, mesh, world, **options):
    processes.start_ranks(world, *LOOP, cases, mesh, OPTIONS=json.dumps(options))
    first, *others = processes.ended()
    for process in (first, *others):
        assert process.code == 0, process
        assert "Warning" not in process.err, process
    assert [process.out for process in others] == [""] * len(others)
    return json.loads(first.out)


@pytest.mark.parametrize(
    ("case", "mesh", "options"),
    [
        ("averages", "data=2", {}),
        ("averages", "pipe=2", {"schedule": "interleaved"}),
        pytest.param("dropout", "pipe=2", {"schedule": "gpipe", "stage_cut": "3"}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_have_the_bits_of_one(processes, alone, case, mesh, options):
    assert run(processes, case, mesh, 2, **options) == alone(case)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=4", "pipe=4", "data=2,pipe=2"])
def test_four_ranks_have_the_bits_of_one(processes, alone, mesh):
    cases = ("averages", "dropout", "plain")
    assert run(processes, ",".join(cases), mesh, 4) == alone(*cases)


SLICED = {
    "plain": "0=colwise,2=rowwise",
    "by hand": None,
    "tied": "first=colwise,middle=rowwise,last=colwise",
    "dropout": "0=colwise,3=rowwise,5=colwise",
    "averages": "*=rowwise",
}


def require_near(found, wanted):
    assert len(found) == len(wanted)
    for (losses, evaluated, _, state), (its_losses, its_evaluated, _, its_state) in zip(found, wanted, strict=True):
        assert losses == pytest.approx(its_losses, rel=1e-5)
        assert evaluated == pytest.approx(its_evaluated, rel=1e-5)
        assert state.keys() == its_state.keys()
        for name, value in state.items():
            assert value == pytest.approx(its_state[name], rel=1e-4, abs=1e-6), name


def require_slices(processes, alone, cases, mesh, world):
    found = run(processes, ",".join(cases), mesh, world, plans={case: SLICED[case] for case in cases})
    require_near(found, alone(*cases))


@pytest.mark.slow
def test_slices_come_to_the_same(processes, alone):
    require_slices(processes, alone, [*SLICED], "model=2", 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["model=4", "data=2,model=2", "model=2,pipe=2"])
def test_slices_of_four_ranks_come_to_the_same(processes, alone, mesh):
    # by hand: no nn.Sequential; tied: one whose parameters a stage would have to own whole
    cases = [case for case in SLICED if "pipe" not in mesh or case not in ("by hand", "tied")]
    require_slices(processes, alone, cases, mesh, 4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"plan": "0=colwise,2=rowwise"}, {}])
def test_what_was_found(processes, alone, options):
    """The search has sliced layers of its own before, and taken steps of copies; no weight has moved."""
    require_near(run(processes, "plain", "", 2, auto=48, **options), alone("plain"))


@pytest.mark.slow
def test_data_does_not_change_slices(processes):
    """Ranks along data add micro-batches up in the same order, sliced or not."""
    first = run(processes, "plain", "model=2", 2, plan="0=colwise,2=rowwise")
    processes.forget()
    assert run(processes, "plain", "data=2,model=2", 4, plan="0=colwise,2=rowwise") == first


def gone_on(processes, world, mesh, folder, **options):
    processes.start_ranks(world, *LOOP, "dropout", mesh, folder, OPTIONS=json.dumps(options))
    first, *others = processes.ended()
    assert [process.code for process in (first, *others)] == [0] * world, (first, others)
    processes.forget()
    return json.loads(first.out)[0]


PLAN = {"plan": "0=colwise,3=rowwise"}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_any_mesh_goes_on_from_what_was_saved(processes, tmp_path, world):
    """Brought together, or as the slices and stages that ranks have."""
    mesh = {2: "model=2", 4: "model=2,pipe=2"}[world]
    whole = gone_on(processes, world, mesh, tmp_path / "none", **PLAN)
    manifest = json.loads((tmp_path / "parts" / "manifest.json").read_text())
    assert len(manifest["files"]) == world
    assert len(manifest["tensors"]["model.0.weight"]) == 2
    assert [*json.loads((tmp_path / "integrated" / "manifest.json").read_text())["files"]] == ["state.safetensors"]
    again = [gone_on(processes, world, mesh, tmp_path / name, **PLAN) for name in ("parts", "integrated")]
    for one in again:
        assert one[0] == whole[0][6:]
        assert one[1:] == whole[1:]
    alone = gone_on(processes, 1, "", tmp_path / "parts")
    assert alone == gone_on(processes, 1, "", tmp_path / "integrated")
    assert alone == gone_on(processes, 2, "pipe=2", tmp_path / "parts")
    assert alone[0] == pytest.approx(whole[0][6:], rel=1e-5)


def test_slots_of_a_slice_are_as_if_they_had_been_made_here():
    """Optimizers take another path over a view of the whole state, and the bits after loading would differ."""

    wide, narrow = nn.Linear(66, 33, bias=False), nn.Linear(33, 33, bias=False)
    sliced(narrow.weight, 1)
    one, at = SimpleNamespace(model=2), SimpleNamespace(model=1)
    ranks = SimpleNamespace(mesh=one, at=at, rank=1, control=SimpleNamespace(share=lambda value: [value]))
    adam, its = (torch.optim.Adam(network.parameters(), lr=0.1) for network in (wide, narrow))
    wide(torch.randn(2, 66)).sum().backward()
    adam.step()
    NetworkState(narrow, [], LocalParameters(narrow, {}), ranks).load(wide.state_dict(), its, adam.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        slot = its.state[narrow.weight][key]
        assert torch.equal(slot, adam.state[wide.weight][key][:, 33:])
        assert slot.stride() == narrow.weight.stride()
        assert slot.untyped_storage().nbytes() == 4 * 33 * 33


@pytest.mark.slow
def test_a_file_that_one_rank_alone_reads_is_damaged(processes, tmp_path):
    """All ranks raise the same error, so that none that continues leaves the others waiting."""
    gone_on(processes, 2, "pipe=2", tmp_path / "none")
    file = tmp_path / "parts" / "rank1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    processes.start_ranks(2, *LOOP, "dropout", "pipe=2", tmp_path / "parts")
    for process in processes.ended():
        assert process.code == 1, process
        assert f"UserError: {file} is damaged" in process.err, process


def test_what_was_saved_and_is_damaged_is_named(tmp_path):
    def made(width):
        network = Network(nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width)), (torch.zeros(2, 4),))
        return network, torch.optim.Adam(network.parameters, lr=0.1)

    network, adam = made(4)
    network.step(4, lambda part: (torch.randn(4, 4)[part],), lambda output, part: output.square().mean())
    adam.step()
    for integrated in (True, False):
        folder = tmp_path / str(integrated)
        network.save(folder, adam, integrated=integrated)
        other, its = made(4)
        other.restore(folder, its)
        for name, value in network.module.state_dict().items():
            assert torch.equal(value, other.module.state_dict()[name]), name
        assert str(its.state_dict()) == str(adam.state_dict())
        with pytest.raises(UserError, match="exists; choose another folder"):
            network.save(folder, adam, integrated=integrated)
        with pytest.raises(UserError, match=r"another network: 0.weight has shape \[5, 4\] in the state"):
            wide, optimizer = made(5)
            wide.save(tmp_path / f"wide{integrated}", optimizer, integrated=integrated)
            other.restore(tmp_path / f"wide{integrated}", its)
        [file] = folder.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
        with pytest.raises(UserError, match="is damaged: its SHA-256 differs from manifest.json"):
            other.restore(folder, its)
        file.unlink()
        with pytest.raises(UserError, match="No such file or directory; the saved network is incomplete"):
            other.restore(folder, its)
    with pytest.raises(UserError, match="no saved network"):
        other.restore(tmp_path / "nothing", its)
    with pytest.raises(UserError, match=r"another network: the state (has|lacks) .*, unlike the network"):
        network = Network(nn.Sequential(nn.Linear(4, 4)), (torch.zeros(2, 4),))
        network.save(tmp_path / "small", torch.optim.SGD(network.parameters))
        other.restore(tmp_path / "small", its)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose a folder that can be written"):
        network.save(tmp_path / "file" / "folder", torch.optim.SGD(network.parameters))
    assert not list(tmp_path.glob(".*")), "nothing is left over"


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.two.weight = self.one.weight

    def forward(self, values):
        return self.three(torch.relu(self.two(torch.relu(self.one(values)))))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("one", "'one' is not LAYER=STRATEGY with one of colwise, rowwise, replicate"),
        ("one=", "'one=' is not LAYER=STRATEGY with one of"),
        ("one=cols", "'one=cols' is not LAYER=STRATEGY"),
        ("", "'nothing' is not LAYER=STRATEGY"),
        ("one=colwise,one=rowwise", "one is given twice"),
        ("four=colwise", "no layer has such a name; the layers are one, two, three"),
        ("f*=colwise", "no layer has such a name; the layers are one, two, three"),
        ("one=colwise", "one and two share a parameter, but one=colwise and two=replicate cut it differently"),
        ("one=colwise,two=rowwise", "one=colwise and two=rowwise cut it differently"),
        ("three=colwise", r"three.weight has shape \[3, 4\], but 3 cannot be cut into 2 equal slices"),
        ("t*=colwise,*o=rowwise", r"t\*=colwise and \*o=rowwise both match two; add two=STRATEGY"),
    ],
)
def test_a_wrong_plan_is_named(plan, says):
    with pytest.raises(UserError, match=says):
        resolve_layout(Shared(), Layout(plan=parse_plan(plan)), Mesh(model=2), like((torch.zeros(1, 4),)))


def test_what_cannot_be_cut_is_named():
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for plan, mesh, says in (
        ("1=colwise", Mesh(model=2), "1 is a ReLU; only Linear and Embedding layers can be sliced"),
        ("0=colwise", Mesh(data=2), "--plan has no effect without --mesh model=N"),
    ):
        with pytest.raises(UserError, match=says):
            resolve_layout(network, Layout(plan=parse_plan(plan)), mesh, like((torch.zeros(1, 4),)))
    sliced(network[2].weight)
    with pytest.raises(UserError, match="weight is already marked by hostdev.parallel.sliced; leave the layer out"):
        resolve_layout(network, Layout(plan=parse_plan("2=rowwise")), Mesh(model=2), like((torch.zeros(1, 4),)))
    with pytest.raises(UserError, match="--stage-cut 1 has no effect without --mesh pipe=N"):
        resolve_layout(network, Layout(begins=["1"]), Mesh(model=2), like((torch.zeros(1, 4),)))


def joined(network, plan, mesh=None):
    found = resolve_layout(network, Layout(plan=parse_plan(plan)), mesh or Mesh(model=2), like((torch.zeros(1, 4),)))
    return {name: one.joined for name, one in found.strategies.items()}


class Two(nn.Module):
    """Two layers, and how they are used."""

    def __init__(self, used):
        super().__init__()
        self.up, self.down, self.used = nn.Linear(4, 4), nn.Linear(4, 4), used

    def forward(self, values):
        return self.used(self.up, self.down, values)


def written(values):
    values[:, 1:] = 0
    return values


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, values):
        hidden = self.act(self.up(values))
        return self.down(hidden) + hidden


def test_slices_stay_apart_only_where_nobody_else_needs_them():
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Linear(4, 4))
    assert joined(plain, "0=colwise,2=rowwise") == {"0": False, "2": False}
    assert joined(plain, "0=colwise") == {"0": True}
    assert joined(plain, "2=colwise,4=rowwise") == {"2": True, "4": True}, "dropout would draw the same for each slice"
    assert joined(plain, "4=colwise,5=rowwise") == {"4": False, "5": False}
    assert joined(plain, "*=colwise,2=rowwise") == {"0": False, "2": False, "4": True, "5": True}
    assert joined(Residual(), "up=colwise,down=rowwise") == {"up": True, "down": True}
    for used in (
        lambda up, down, x: down(h := up(x)) * h.detach().mean(),
        lambda up, down, x: (down(h := up(x)), h),
        lambda up, down, x: down(h := up(x)) / h.shape[1],
        lambda up, down, x: down(written(up(x))),
    ):
        assert joined(Two(used), "up=colwise,down=rowwise") == {"up": True, "down": True}
    for used in (lambda up, down, x: down(up(x)), lambda up, down, x: down(up(x).float())):  # in float32: itself
        assert joined(Two(used), "up=colwise,down=rowwise") == {"up": False, "down": False}
    in_place = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    assert joined(in_place, "0=colwise,2=rowwise") == {"0": False, "2": False}
    assert joined(plain, "0=colwise,2=rowwise", Mesh(model=2, pipe=2)) == {"0": False, "2": False}
    layout = Layout(begins=["1"], plan=parse_plan("0=colwise,2=rowwise"))
    found = resolve_layout(plain, layout, Mesh(model=2, pipe=2), like((torch.zeros(1, 4),)))
    assert [one.joined for one in found.strategies.values()] == [True, True], "a stage ends between them"


def test_averages_are_torchs_own():
    """One micro-batch after the other, they are what torch's layers have, to rounding."""
    for made in (lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3, momentum=None, affine=False)):
        plain, watched = made(), made()
        averages = Averages([watched], None)
        torch.manual_seed(1)
        for step in range(3):
            for number in range(4):
                values = torch.randn(5, 3) * (step + 1)
                with averages.watching(number):
                    torch.testing.assert_close(watched(values), plain(values), rtol=0, atol=0)
            averages.move()
        for name, value in plain.named_buffers():
            torch.testing.assert_close(dict(watched.named_buffers())[name], value)
        assert watched.momentum == plain.momentum


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_a_network_keep_their_own_averages(copy_of):
    layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    averages = Averages([layers], None)
    copied = copy_of(layers)
    before = layers[1].running_mean.clone()
    with averages.watching(0):
        copied(torch.ones(4, 3))
    averages.move()
    assert torch.equal(layers[1].running_mean, before)
    assert not torch.equal(copied[1].running_mean, before)


def test_wrong_arguments_are_named():
    network, example = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(1, 4),)
    for how, says in (
        ({"micro_batches": 0}, "0 micro-batches"),
        ({"gradients": "max"}, "gradients must be one of mean, sum, not 'max'"),
        ({"schedule": "2f2b"}, "schedule must be one of 1f1b, gpipe, interleaved"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16"),
        ({"plan": "0=colwise"}, "--plan has no effect"),
    ):
        with pytest.raises(UserError, match=says):
            Network(network, example, **how)
    with pytest.raises(UserError, match=r"layer '0' \(SyncBatchNorm\) exchanges statistics by itself"):
        Network(nn.Sequential(nn.SyncBatchNorm(4)), example)
    with pytest.raises(ValueError, match="a step needs at least one sample"):
        Network(network, example).step(0, lambda part: example, lambda output, part: output.sum())


def test_gradients_are_added_up_and_clipped_as_torch_does_it():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    network = Network(copy.deepcopy(plain), (torch.zeros(1, 8),))
    for values in torch.randn(3, 16, 8):
        plain(values).square().mean().backward()
        network.step(16, lambda part, x=values: (x[part],), lambda output, part: output.square().mean())
        for most in (1e9, 0.01):
            wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), most)
            assert network.clip_grad_norm(most) == wanted.item()
        for ours, theirs in zip(network.parameters, plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_a_state_of_another_optimizer_is_named(tmp_path):
    network = Network(nn.Linear(4, 4), (torch.zeros(2, 4),))
    network.save(tmp_path / "saved", torch.optim.SGD(network.parameters, lr=0.1))
    with pytest.raises(UserError, match="another network: the saved optimizer lacks the options amsgrad"):
        network.restore(tmp_path / "saved", torch.optim.Adam(network.parameters))
    groups = torch.optim.SGD([{"params": network.parameters[:1]}, {"params": network.parameters[1:]}], lr=0.1)
    for integrated in (True, False):
        with pytest.raises(UserError, match="with one parameter group"):
            network.save(tmp_path / "other", groups, integrated=integrated)


def test_the_sum_of_losses():
    """With sums, each micro-batch's mean has weight 1."""
    torch.manual_seed(0)
    network, values = nn.Sequential(nn.Linear(4, 4)), torch.randn(10, 4)
    one = Network(network, (values,), micro_batches=4, gradients="sum")
    loss = one.step(10, lambda part: (values[part],), lambda output, part: output.square().mean())
    parts = [network(part).square().mean() for part in (values[:2], values[2:5], values[5:7], values[7:])]
    assert loss == pytest.approx(sum(part.item() for part in parts), rel=1e-6)
    grad = torch.autograd.grad(sum(parts), network[0].weight)[0]
    torch.testing.assert_close(one.parameters[0].grad, grad)
