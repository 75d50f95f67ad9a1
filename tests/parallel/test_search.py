"""The search for a layout: which layouts it tries, and how it chooses among them."""

import pytest
import torch
from torch import nn

from hostdev.core.errors import UserError
from hostdev.distributed.world import Layout, Mesh
from hostdev.ext.parallel.auto import (
    LayoutChoice,
    enumerate_layouts,
    enumerate_plans,
    explain,
    meshes,
    order_measured,
    pick_finalists,
)
from hostdev.ext.parallel.pieces import count_saved, get_pieces
from hostdev.ext.parallel.plan import like

CPU = torch.device("cpu")


def layers(*widths, between=nn.ReLU):
    modules = [one for i, width in enumerate(widths[1:]) for one in (nn.Linear(widths[i], width), between())]
    return nn.Sequential(*modules[:-1])


def enumerated(network, ranks, micro_batches, given=Layout(), mesh=None, width=8):  # noqa: B008
    inputs = like((torch.zeros(1, width),))
    return enumerate_layouts(network, inputs, inputs(4), ranks, micro_batches, given, mesh, CPU)


def test_all_meshes_of_eight():
    found = meshes(8)
    assert len(found) == len(set(found)) == 10
    assert all(mesh.size == 8 for mesh in found)
    assert found[:3] == [Mesh(data=8), Mesh(data=4, pipe=2), Mesh(data=4, model=2)]


def test_all_layouts_of_two():
    found = enumerated(layers(8, 16, 16, 16, 4), 2, 4)
    assert [(one.mesh, one.begins, dict(one.plan)) for one in found] == [
        (Mesh(data=2), [], {}),
        (Mesh(pipe=2), ["4"], {}),
        (Mesh(model=2), [], {"0": "colwise", "2": "rowwise"}),
        (Mesh(model=2), [], {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"}),
    ]
    assert [str(one) for one in found[1:3]] == [
        "--mesh pipe=2 --stage-cut 4",
        "--mesh model=2 --plan 0=colwise,2=rowwise",
    ]


def test_plans_are_the_largest_layer_all_pairs_and_all_layers():
    inputs = like((torch.zeros(1, 8),))
    network = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(), nn.Linear(8, 6), nn.Linear(6, 64)
    )
    pair, others = (("0", "colwise"), ("2", "rowwise")), (("4", "colwise"), ("5", "rowwise"))
    assert enumerate_plans(network, {}, 2, lambda: inputs(2)) == [others, (*pair, *others)]
    # 64 outputs, but only 8, 16 and 64 are multiples of 4; a strategy that is given stays
    assert enumerate_plans(network, {}, 4, lambda: inputs(2)) == [
        (("5", "colwise"),),
        pair,
        (*pair, ("4", "rowwise"), ("5", "colwise")),
    ]
    assert enumerate_plans(network, {"0": "rowwise", "2": "replicate"}, 2, lambda: inputs(2)) == [
        (("0", "rowwise"),),
        (("0", "rowwise"), *others),
    ]
    assert enumerate_plans(nn.Sequential(nn.ReLU()), {}, 2, lambda: inputs(2)) == []


def test_layers_that_share_a_parameter_stay_whole():
    network = layers(8, 8, 8, 8)
    network[2].weight = network[0].weight
    assert enumerate_plans(network, {}, 2, lambda: (torch.zeros(2, 8),)) == [(("4", "colwise"),)]


def test_what_is_given_is_kept():
    network = layers(8, 16, 16, 8)
    found = enumerated(network, 2, 8, Layout(plan=[("0", "rowwise"), ("2", "replicate")]))
    assert found
    for one in found:
        assert one.mesh.model == 2
        assert dict(one.plan)["0"] == "rowwise"
        assert "2" not in dict(one.plan)
    assert [one.mesh for one in enumerated(network, 2, 8, mesh=Mesh(pipe=2))] == [Mesh(pipe=2)]
    [one] = enumerated(network, 2, 8, Layout(begins=["4"]))
    assert (one.mesh, one.begins) == (Mesh(pipe=2), ["4"])
    found = enumerated(network, 4, 8, Layout(begins=["4"]))
    assert {one.mesh for one in found} == {Mesh(data=2, pipe=2), Mesh(model=2, pipe=2)}, "two stages, on any mesh"


def test_a_mesh_that_is_given_has_slices():
    for mesh in (Mesh(model=2), Mesh(data=2, model=2), Mesh(model=2, pipe=2)):
        found = enumerated(layers(8, 16, 8), mesh.size, 8, mesh=mesh)
        assert found
        assert all(one.mesh == mesh and one.plan for one in found)
    with pytest.raises(UserError, match=r"divides layers among 3 processes \(model=3\), but no layer can be cut"):
        enumerated(layers(8, 16, 8), 3, 8, mesh=Mesh(model=3))
    with pytest.raises(UserError, match=r"0.weight has shape \[16, 8\], but 8 cannot be cut into 3 equal slices"):
        enumerated(layers(8, 16, 8), 3, 8, Layout(plan=[("0", "rowwise")]), Mesh(model=3))


def test_a_network_without_pieces_has_one_stage():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, values):
            return self.first(values)

    assert {one.mesh for one in enumerated(Own(), 2, 8)} == {Mesh(data=2), Mesh(model=2)}
    with pytest.raises(UserError, match="Own cannot be cut into stages"):
        enumerated(Own(), 2, 8, mesh=Mesh(pipe=2))


def test_nothing_is_possible():
    with pytest.raises(UserError, match="no layout of 2 processes fits 1 micro-batches and the given options"):
        enumerated(nn.Sequential(nn.ReLU(), nn.ReLU()), 2, 1)
    with pytest.raises(UserError, match="no layout of 3 processes fits 4 micro-batches"):
        enumerated(layers(8, 8), 3, 4)


def test_the_memory_of_the_fullest_rank():
    network = layers(8, 32, 8)  # 1,152 and 1,056 bytes of parameters
    whole = 4 * 4 * (8 * 32 + 32 + 32 * 8 + 8)
    saved = count_saved(get_pieces(network), (torch.zeros(4, 8),), "cpu", None)
    memory = {str(one.mesh): one.memory for one in enumerated(network, 2, 4)}
    assert memory["data=2"] == whole + sum(saved)
    assert memory["pipe=2"] == max(4 * 4 * (8 * 32 + 32) + 2 * sum(saved[:2]), 4 * 4 * (32 * 8 + 8) + saved[2])
    assert memory["model=2"] == 4 * 4 * (8 * 32 // 2 + 32 // 2 + 32 * 8 // 2 + 8) + sum(saved)
    gpipe = {str(one.mesh): one.memory for one in enumerated(network, 2, 4, Layout("gpipe"))}
    assert gpipe["pipe=2"] == max(4 * 4 * (8 * 32 + 32) + 4 * sum(saved[:2]), 4 * 4 * (32 * 8 + 8) + 4 * saved[2])


def test_what_pieces_save_is_what_they_save_with_values():
    network = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state, values = torch.get_rng_state(), torch.zeros(16, 64)
    saved = count_saved(get_pieces(network), (values,), "cpu", None)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    own = {id(one) for one in network.parameters()}
    for module, count in zip(network, saved, strict=True):
        kept = {}

        def keep(one, kept=kept):
            if id(one) not in own:
                kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            values = module(values)
        assert count == sum(kept.values())
    assert saved[0] == 16 * 64 * 4, "its input"


def candidates(*seconds):
    """Layouts with these times."""
    found = enumerated(layers(8, 16, 16, 16, 4), 4, 8)
    return [one._replace(measured=second) for one, second in zip(found, seconds, strict=False)]


def test_what_does_not_fit_comes_last():
    found = enumerated(layers(8, 8), 2, 8, mesh=None)[:1] + enumerated(layers(8, 32, 8), 2, 8)[1:2]
    fitting = min(one.memory for one in found)
    found.sort(key=lambda one: one.memory)
    chosen = LayoutChoice(found[0].mesh, Layout(), found, fitting)
    assert "(does not fit)" in chosen.lines()[-2]
    assert chosen.lines()[-1].endswith("the only layout that fits")
    assert explain(found, fitting - 1).startswith("the layout with the least memory, although no layout fits into")


def test_the_lines():
    found = enumerated(layers(8, 16, 16, 16, 4), 8, 8)
    lines = LayoutChoice(found[0].mesh, Layout(), found, 1 << 40).lines()
    assert lines[0].split() == ["ms/step", "memory", "layout"]
    assert all(line.split()[0] == "-" for line in lines[1:9])
    assert lines[-2] == f"... and {len(found) - 8} slower layouts"
    assert lines[-1] == (
        f"chosen: --mesh {found[0].mesh}, the first of the layouts that fit, as no steps were timed: the network "
        "cannot be copied"
    )
    assert explain(found[:1], 1 << 40) == "the only possible layout"


def test_the_reason_is_what_was_measured():
    found = candidates(0.2, 0.25, 0.3)
    lines = LayoutChoice(found[0].mesh, Layout(), found, 1 << 40).lines()
    assert [line.split()[0] for line in lines[1:4]] == ["200.0", "250.0", "300.0"]
    assert lines[-1] == f"chosen: {found[0]}, because steps with --mesh {found[1].mesh} took 25% longer"


def test_between_what_takes_about_as_long_the_first_is_chosen():
    first, second, third = candidates(0.208, 0.2, 0.3)
    assert order_measured([first, second, third], []) == [first, second, third]
    assert explain([first, second, third], 1 << 40) == (
        f"because steps with --mesh {second.mesh} took about as long, and samples are preferred to stages, and stages "
        "to slices"
    )
    slower = first._replace(measured=0.22)
    assert order_measured([slower, second], [third]) == [second, slower, third]
    assert order_measured([third], [slower, second]) == [third, second, slower]


def test_more_steps_are_taken_of_what_is_near_and_fits():
    found = candidates(0.3, 0.2, 0.39, 0.5, 0.25, 0.21)
    near = [found[0], found[1], found[4], found[5]]
    assert pick_finalists(found, 1 << 40) == near
    assert pick_finalists(found[:4], 1 << 40) == found[:3], "more than twice as long"
    assert pick_finalists(found, found[1].memory) == [found[1]], "two would not fit at once"
