"""The search for a layout: what it must find where the costs are plain, and that it is as good as trying all."""

import itertools
import re

import pytest
import torch
from torch import nn

from hostdev.core.errors import UserError
from hostdev.distributed.world import Layout, Mesh
from hostdev.ext.parallel.auto import LayoutChoice, _order_measured, _pick_finalists, reason
from hostdev.ext.parallel.costs import LayerCost, Machine, PieceCost, Profile, measure_profile
from hostdev.ext.parallel.pieces import best_cut, get_pieces
from hostdev.ext.parallel.plan import like
from hostdev.ext.parallel.search import SearchOptions, SliceableLayers, candidates, meshes

FAST = Machine(bandwidth=1e12, latency=1e-7, memory=1e12, slicing=1e-7, available=1 << 40)
SLOW = Machine(bandwidth=1e6, latency=1e-3, memory=1e12, slicing=1e-3, available=1 << 40)


def layers(*pairs, able=lambda name, strategy, ranks: True, stages=True):
    return SliceableLayers(able, set(pairs), stages)


def profile(*seconds, parameters=1000, given=1000, saved=1000):
    pieces = [PieceCost(f"{i}", one, 1, parameters, saved, given) for i, one in enumerate(seconds)]
    found = [LayerCost(f"{i}", i, 1.0, parameters, given, given) for i in range(len(seconds))]
    return Profile(pieces, found, 0)


def test_all_meshes_of_eight():
    found = meshes(8)
    assert len(found) == len(set(found)) == 10
    assert all(mesh.size == 8 for mesh in found)


def test_data_where_parameters_are_few():
    [first, *_] = candidates(profile(0.1, 0.1, 0.1), SLOW, layers(), SearchOptions(2, 8))
    assert first.mesh == Mesh(data=2)


def test_stages_where_parameters_are_many_and_little_crosses():
    [first, *_] = candidates(profile(0.1, 0.1, parameters=10**8, given=8), SLOW, layers(), SearchOptions(2, 32))
    assert (first.mesh, first.begins) == (Mesh(pipe=2), ["1"])


def test_slices_where_one_layer_has_all_the_work():
    found = candidates(profile(1e-6, 0.5, 1e-6, parameters=10**9, given=8), FAST, layers(), SearchOptions(2, 1))
    assert found[0].mesh == Mesh(model=2)
    assert "1" in dict(found[0].plan)
    assert [one.mesh for one in found] == [Mesh(model=2)], "one micro-batch is for one stage, and one share"


def test_layers_in_pairs_where_an_exchange_costs():
    machine = FAST._replace(latency=0.01)
    [first, *_] = candidates(profile(0.1, 0.1), machine, layers(("0", "1")), SearchOptions(2, 1))
    assert first.plan == [("0", "colwise"), ("1", "rowwise")]


def test_what_is_given_is_kept():
    known = profile(0.1, 0.1, 0.1)
    found = candidates(known, FAST, layers(), SearchOptions(2, 8, strategies={"0": "rowwise", "1": "replicate"}))
    assert found
    for one in found:
        assert one.mesh.model == 2
        assert dict(one.plan)["0"] == "rowwise"
        assert "1" not in dict(one.plan)
    assert {one.mesh for one in candidates(known, FAST, layers(), SearchOptions(2, 8, Mesh(pipe=2)))} == {Mesh(pipe=2)}
    [one] = candidates(known, FAST, layers(), SearchOptions(2, 8, begins=["2"]))
    assert (one.mesh, one.begins) == (Mesh(pipe=2), ["2"])


def test_a_mesh_that_is_given_has_slices():
    """Also where the network would be faster whole: those that cost the least."""
    known = profile(0.1, 0.3, 0.1, given=10**6)
    for mesh in (Mesh(model=2), Mesh(data=2, model=2), Mesh(model=2, pipe=2)):
        wanted = SearchOptions(mesh.size, 8, mesh, sliced=True)
        [one] = candidates(known, SLOW, layers(("0", "1")), wanted)
        assert (one.mesh, bool(one.plan)) == (mesh, True)
        plans = [{name: strategy} for name in "012" for strategy in ("colwise", "rowwise")]
        tried = [
            candidates(known, SLOW, layers(("0", "1")), wanted._replace(strategies=plan))[0].seconds
            for plan in [*plans, {"0": "colwise", "1": "rowwise"}]
        ]
        assert one.seconds == min(tried)
    [one] = candidates(
        known, SLOW, layers(), SearchOptions(2, 8, Mesh(model=2), strategies={"1": "replicate"}, sliced=True)
    )
    assert one.plan
    assert "1" not in dict(one.plan)


def test_a_mesh_that_is_given_and_nothing_can_be_cut():
    whole, wanted = layers(able=lambda *_: False), SearchOptions(2, 8, Mesh(model=2), sliced=True)
    with pytest.raises(UserError, match=r"divides layers among 2 processes \(model=2\), but no layer can be cut"):
        candidates(profile(0.1, 0.1), SLOW, whole, wanted)


def test_what_does_not_fit_comes_last():
    known = profile(0.1, 0.1, parameters=1000, saved=0)
    machine = FAST._replace(available=4500)  # of 8,000 on each rank along data
    found = candidates(known, machine, layers(able=lambda *_: False), SearchOptions(2, 8))
    assert [one.mesh for one in found] == [Mesh(pipe=2), Mesh(data=2)]
    chosen = LayoutChoice(found[0].mesh, Layout(), found, known, machine)
    assert "(does not fit)" in chosen.lines()[-2]
    assert chosen.lines()[-1].endswith("the only layout that fits")


def test_nothing_is_possible():
    with pytest.raises(UserError, match="no layout of 2 processes fits 1 micro-batches and the given options"):
        candidates(profile(0.1), FAST, layers(stages=False, able=lambda *_: False), SearchOptions(2, 1))
    with pytest.raises(UserError, match="no layout of 3 processes fits 4 micro-batches"):
        candidates(profile(0.1), FAST, layers(stages=False, able=lambda *_: False), SearchOptions(3, 4))


@pytest.mark.parametrize("seed", range(20))
def test_strategies_are_the_best_of_all(seed):
    """Every combination of three layers' strategies, priced by giving it, is no faster than what is found."""
    torch.manual_seed(seed)
    numbers = torch.rand(3, 3).tolist()
    known = Profile(
        [PieceCost(f"{i}", 0.02 * a, 1, int(1e6 * b), 0, int(1e5 * c)) for i, (a, b, c) in enumerate(numbers)],
        [LayerCost(f"{i}", i, 1.0, int(1e6 * b), int(1e5 * a), int(1e5 * c)) for i, (a, b, c) in enumerate(numbers)],
        0,
    )
    machine = Machine(1e8, 1e-3, 1e9, 1e-3, 1 << 40)
    may = layers(("0", "1"), ("1", "2"))
    [found] = candidates(known, machine, may, SearchOptions(2, 4, Mesh(model=2)))
    tried = []
    for combination in itertools.product(("replicate", "colwise", "rowwise"), repeat=3):
        strategies = {f"{i}": one for i, one in enumerate(combination)}
        [one] = candidates(known, machine, may, SearchOptions(2, 4, Mesh(model=2), strategies=strategies))
        tried.append(one.seconds)
    assert found.seconds == pytest.approx(min(tried))


@pytest.mark.parametrize("seed", range(5))
def test_cuts_are_the_best_of_all(seed):
    torch.manual_seed(seed)
    costs, crossing = torch.rand(2, 8).tolist()

    def worst(starts):
        edges = [0, *starts, 8]
        return max(
            sum(costs[a:b]) + (crossing[a - 1] if a else 0) + (crossing[b - 1] if b < 8 else 0)
            for a, b in itertools.pairwise(edges)
        )

    found = best_cut(costs, crossing, 3)
    assert found[0] == 0
    assert worst(found[1:]) == min(worst(each) for each in itertools.combinations(range(1, 8), 2))


def test_a_profile_says_what_a_network_has():
    network = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    cpu = torch.device("cpu")
    found = measure_profile(network, get_pieces(network), like((torch.zeros(1, 64),)), 16, cpu, None, looked_up=False)
    assert [piece.flops for piece in found.pieces] == [2 * 16 * 64 * 32, 0, 0, 2 * 16 * 32 * 8]
    assert [piece.given for piece in found.pieces] == [16 * 32 * 4] * 3 + [16 * 8 * 4]
    assert [piece.parameters for piece in found.pieces] == [4 * (64 * 32 + 32), 4 * 64, 0, 4 * (32 * 8 + 8)]
    assert found.pieces[0].saved == 16 * 64 * 4, "its input"
    assert [(layer.name, layer.piece, layer.share) for layer in found.layers] == [("0", 0, 1.0), ("3", 3, 1.0)]
    assert all(piece.seconds > 0 for piece in found.pieces)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not found.inputs


def test_the_lines():
    found = candidates(profile(0.1, 0.1, parameters=10**8, given=8), SLOW, layers(), SearchOptions(2, 32))
    lines = LayoutChoice(found[0].mesh, Layout(), found, profile(0.1, 0.1), SLOW).lines()
    assert lines[0].startswith("measured: 0.00 GB/s between processes, 1,000 us per exchange")
    assert " ".join(lines[1].split()) == "ms/step expected compute waiting exchange update memory layout"
    assert all(line.split()[0] == "-" for line in lines[2:-1])
    assert re.match(
        r"chosen: --mesh pipe=2 --stage-cut 1, because steps with --mesh .* would take \d+% longer, mostly due",
        lines[-1],
    )
    assert len(lines) == 3 + len(found)


def test_the_reason_is_what_was_measured_where_it_was():
    found = candidates(profile(0.1, 0.1, parameters=10**8, given=8), SLOW, layers(), SearchOptions(2, 32))
    measured = [found[0]._replace(measured=0.2), found[1]._replace(measured=0.25), *found[2:]]
    lines = LayoutChoice(found[0].mesh, Layout(), measured, profile(0.1, 0.1), SLOW).lines()
    assert [line.split()[0] for line in lines[2:5]] == ["200.0", "250.0", "-"]
    assert f"because steps with --mesh {found[1].mesh} took 25% longer, mostly due to" in lines[-1]
    other_way = [measured[1], measured[0], *found[2:]]
    assert reason(other_way, SLOW).endswith("% longer"), "the model has it the other way round, and so cannot say why"


def test_between_what_takes_about_as_long_the_expected_time_decides():
    first, second, third = candidates(profile(0.1, 0.1, 0.1), FAST, layers(), SearchOptions(2, 8))[:3]
    taken = [third._replace(measured=0.3), second._replace(measured=0.2), first._replace(measured=0.208)]
    assert [one.measured for one in _order_measured(taken)] == [0.208, 0.2, 0.3]
    assert reason(_order_measured(taken), FAST) == (
        f"because steps with --mesh {second.mesh} took about as long and are not expected to be faster"
    )
    taken[2] = first._replace(measured=0.22)
    assert [one.measured for one in _order_measured(taken)] == [0.2, 0.22, 0.3]


def test_steps_are_taken_of_what_is_near_and_fits():
    found = candidates(profile(0.1, 0.1, 0.1, parameters=10**6, given=8), FAST, layers(), SearchOptions(2, 8))
    near = _pick_finalists(found, FAST)
    assert 2 <= len(near) <= 4
    assert near == [one for one in found if one.seconds <= 2 * found[0].seconds][: len(near)]
    assert _pick_finalists(found, FAST._replace(available=found[0].memory)) == found[:1], "two would not fit at once"
