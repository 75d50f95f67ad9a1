"""Dense gradients that a stream of the caller's own computes: their sum waits for it."""

from contextlib import nullcontext

import torch

from hostdev.device import backend
from hostdev.distributed.dense import DenseGradients
from tests.distributed.threads import with_ranks


def test_gradients_of_any_stream(device):
    def work(one):
        parameter = torch.nn.Parameter(torch.zeros(3000, device=device))
        dense = DenseGradients(one.channel(), [parameter], 1)
        factors = torch.arange(3000.0).to(device)
        own = nullcontext()
        if backend.is_accelerator(device):
            module = torch.get_device_module(device)
            stream = module.Stream(device)
            stream.wait_stream(module.current_stream(device))
            own = module.stream(stream)
        found = []
        with own:
            for step in range(3):
                parameter.grad = None
                (parameter * (factors * (step + one.rank))).sum().backward()
                dense.finish(dense.put())
                found.append(parameter.grad.tolist())
        dense.close()
        return found

    expected = [[(2 * step + 1) * value for value in range(3000)] for step in range(3)]
    assert with_ranks(2, work) == [expected] * 2
