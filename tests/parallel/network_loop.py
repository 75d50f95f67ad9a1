"""One of the processes of `test_network`: networks without tables, in a loop of one's own.

    python -m tests.parallel.network_loop CASE[,CASE...] [MESH [FOLDER]]

With FOLDER the state is saved there after three steps, in both ways; or, where it is there, read from it, and the
training goes on from there. The first rank prints the losses and norms, what the evaluation came to, the digest of the
state, and sums of its values, of each case, as JSON.
"""

import hostdev.core.environment  # isort: skip  (before torch)

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import hostdev
from hostdev.ext.parallel import auto
from hostdev.runtime.digest import state_sha256

SAMPLES = (48, 48, 47, 33, 48)  # of each step, of which the last ones do not divide


class Tied(nn.Module):
    """Two layers with one weight, and one of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, values):
        return self.last(torch.relu(self.middle(torch.relu(self.first(values)))))


def by_hand(ranks):
    """A network whose first layer is sliced over the ranks, and whole on one process."""
    count, at = (1, 0) if ranks is None else (ranks.mesh.model, ranks.at.model)

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            whole = 0.1 * torch.randn(16, 8)
            self.weight = hostdev.parallel.sliced(nn.Parameter(whole.chunk(count)[at].clone()))

        def forward(self, values):
            return nn.functional.linear(values, self.weight).square().sum(1, keepdim=True)

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, part, channel):
            total = part.clone()
            if channel is not None:
                channel.all_reduce(total)
            return total

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.channel = None if ranks is None else ranks.channel("model")

        def forward(self, part):
            return Summed.apply(part, self.channel)

    return nn.Sequential(Half(), Sum(), nn.Linear(1, 8))


def network(case, ranks):
    torch.manual_seed(0)
    if case == "by hand":
        return by_hand(ranks)
    if case == "tied":
        return Tied()
    if case == "averages":
        layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)]
    elif case == "dropout":
        layers = [nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)]
    else:
        layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers)


def main():
    cases, mesh = sys.argv[1].split(","), (sys.argv[2] if len(sys.argv) > 2 else "") or None
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    plans = options.pop("plans", {})
    torch.set_num_threads(1)
    auto._NEAR = 1e9  # several layouts take steps in turn, however long those of so small a network take
    with hostdev.join(mesh) as ranks:
        found = [
            trained(case, ranks, folder, **(options | ({"plan": plans[case]} if case in plans else {})))
            for case in cases
        ]
        if ranks is None or ranks.rank == 0:
            print(json.dumps(found))


def trained(case, ranks, folder, **options):
    steps = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in SAMPLES]
    options = options if ranks is not None else {}
    one = hostdev.parallel.Network(network(case, ranks), (steps[0],), ranks=ranks, micro_batches=4, **options)
    if "auto" in options:
        assert len({repr(found) for found in ranks.control.share([*one.choice[:2]])}) == 1, "all choose the same"
        measured = [found.measured for found in one.choice.tried]
        assert measured[1:4] == sorted(measured[1:4])
        assert measured[4:] == sorted(measured[4:])
        assert ranks.mesh == one.choice.mesh
    sgd = torch.optim.SGD(one.parameters, lr=0.05, momentum=0.9)
    losses = []
    goes_on = folder is not None and folder.is_dir()
    if goes_on:
        one.restore(folder, sgd)
    for number, values in enumerate(steps):
        if goes_on and number < 3:
            continue
        if number == 3 and folder is not None and not goes_on:
            one.save(folder.with_name("integrated"), sgd)
            one.save(folder.with_name("parts"), sgd, integrated=False)
        if number == 3:  # what has been saved goes on
            one.load(shared(one.state(sgd), ranks), sgd)
        loss = one.step(len(values), lambda part, x=values: (x[part],), lambda y, part, x=values: error(y, x[part]))
        losses += [loss, one.clip_grad_norm(0.4)]
        sgd.step()
        if number != 1:  # to which those of the next one are added
            sgd.zero_grad()
    values = steps[0]
    found = one.evaluate(len(values), lambda part: (values[part],), lambda y, part: y.double().sum())
    state = one.state(sgd)
    digest = state_sha256([], state)
    return losses, found, digest, {name: value.double().sum().item() for name, value in state.model.items()}


def error(output, values):
    return (output - values.flip(1)).square().mean()


def shared(state, ranks):
    """Share rank 0's results with all ranks."""
    found = [state]
    if ranks is not None:
        torch.distributed.broadcast_object_list(found, 0)
    return found[0]


if __name__ == "__main__":
    main()
