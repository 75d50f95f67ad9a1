"""Dense gradients that a stream of the caller's own computes: their sum waits for it."""

from contextlib import nullcontext

import torch

from hostdev.device import backend
from hostdev.distributed.channel import Channel
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


class _Alone(Channel):
    """A group of one, whose buffers are on its device."""

    def __init__(self, device):
        super().__init__(0, 1, None, lambda: None, device=device)

    def all_to_all(self, values, counts, receive, row=1, out=None):
        return values.clone() if out is None else out.copy_(values)


def test_sums_on_the_device_outlive_their_parts(device):
    """Memory is used again as soon as it is given up, and the host is far ahead of the device."""
    parameters = [torch.nn.Parameter(torch.zeros(n, device=device)) for n in (3000, 7)]
    dense = DenseGradients(_Alone(device), parameters, 3)  # not a power of two: two nodes, with memory of their own
    kept = []
    for step in range(4):
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, step, requires_grad=False) * 2
            has = dense.put()
        dense._worker.submit(int).result()  # the sums are queued, and their parts given up
        torch.ones(3000, device=device)  # may get the memory of a part
        dense.finish(has)
        kept.append([parameter.grad * 3 for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
        dense.small(torch.ones(3, device=device))
    for step, grads in enumerate(kept):
        assert all(grad.tolist() == [18.0 * step] * len(grad) for grad in grads)
    dense.close()
