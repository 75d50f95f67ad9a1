"""One of the processes of `test_stages`: stages of a network without tables, compared to the whole network."""

import hostdev.core.environment  # isort: skip  # noqa: F401  (before torch)

import os
import sys

import torch
from torch import nn

from hostdev.core.micro_batches import cut as cut_rows
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import find_rank_environment
from hostdev.distributed.world import Mesh
from hostdev.ext.parallel.pieces import cut, get_pieces, trace
from hostdev.ext.parallel.stages import Stages

CPU = torch.device("cpu")
CUTS = {2: ["3"], 3: ["2", "4"], 4: ["1", "3", "6"], 6: ["1", "2", "3", "4", "6"]}  # by stages; some without parameters
CASES = [  # micro-batches and samples: of equal sizes, uneven, fewer than stages, one sample, none
    (4, 32),
    (4, 30),
    (8, 61),
    (5, 23),
    (4, 3),
    (4, 1),
    (2, 8),
    (3, 9),
    (6, 31),
    (7, 20),
    (4, 0),
    (8, 61),
    (4, 32),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    )


class Case:
    """Micro-batches with inputs that take gradients, as rows do."""

    def __init__(self, micro_batches, samples):
        torch.manual_seed(micro_batches * 100 + samples)
        values, self.wanted = torch.randn(samples, 8), torch.randn(samples, 1)
        self.spans = [span for span in cut_rows(samples, micro_batches) if span[1] > span[0]]
        self.inputs = [values[start:stop].clone().requires_grad_() for start, stop in self.spans]

    def given(self, number):
        torch.manual_seed(number)
        return (self.inputs[number],)

    def loss(self, number, output):
        return ((output - self.wanted[slice(*self.spans[number])]) ** 2).sum()


def alone(case):
    """Gradients of each micro-batch by the parameter's name, and of the inputs; and predictions."""
    whole, found = network(), {}
    for number in range(len(case.spans)):
        case.loss(number, whole(*case.given(number))).backward()
        found[number] = {name: parameter.grad for name, parameter in whole.named_parameters()}
        whole.zero_grad()
    whole.eval()
    grads = [given.grad for given in case.inputs]
    with torch.no_grad():
        return found, grads, [whole(given) for given in case.inputs]


def check(ranks, channel, schedule):
    whole = network()
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    parts = cut(get_pieces(whole), CUTS[ranks.size * (1 + (schedule == "interleaved"))])
    stages = Stages(parts, trace(parts, lambda n: (torch.zeros(n, 8),)), channel, schedule, CPU)
    for micro_batches, samples in CASES:
        wanted, grads, predicted = alone(Case(micro_batches, samples))
        case, found = Case(micro_batches, samples), {}
        sizes = [stop - start for start, stop in case.spans]

        def came(stage, number, found=found):
            module = stages.modules[stages.numbers.index(stage)]
            for parameter in module.parameters():
                found.setdefault(number, {})[names[id(parameter)]], parameter.grad = parameter.grad, None

        stages.train(1, sizes, case.given, case.loss, came)
        for number, of_number in found.items():
            for name, grad in of_number.items():
                assert torch.equal(grad, wanted[number][name]), (schedule, micro_batches, samples, number, name)
        held = [parameter for module in stages.modules for parameter in module.parameters()]
        assert sorted(found) == (list(range(len(sizes))) if held else [])
        if stages.numbers[0] == 0:
            assert all(torch.equal(given.grad, grad) for given, grad in zip(case.inputs, grads, strict=True))
        whole.eval()
        come = stages.predict(1, sizes, case.given)
        whole.train()
        assert len(come) == (len(sizes) if stages.numbers[-1] == stages.count - 1 else 0)
        assert all(torch.equal(*each) for each in zip(come, predicted, strict=False))


def main():
    torch.set_num_threads(1)
    place = find_rank_environment()
    ranks = Ranks(place, lambda rank, why: os._exit(2), mesh=Mesh(pipe=place.ranks))
    channel = ranks.channel("pipe")
    for schedule in sys.argv[1:]:
        check(ranks, channel, schedule)
    ranks.leave()
    print("the same")


main()
