"""Collectives for torch.distributed on the simulated device: through the host, in the current stream."""

import torch
import torch.distributed as dist

from .memory import NAME

calls: list[str] = []  # names of collectives, in order


class DeviceGroup(dist.ProcessGroup):
    """The counterpart of NCCL. The host waits for tensors to send; received tensors are queued."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._host = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):  # noqa: N802
        return NAME

    def alltoall_base(self, output, input, output_split_sizes, input_split_sizes, opts):
        calls.append("all_to_all")
        come = torch.empty(output.shape, dtype=output.dtype)
        self._host.alltoall_base(come, _host(input), output_split_sizes, input_split_sizes, opts).wait()
        output.copy_(come)
        return _Done()

    def allreduce(self, tensors, opts):
        calls.append("all_reduce")
        values = [_host(tensor) for tensor in tensors]
        self._host.allreduce(values, opts).wait()
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        return _Done()

    def shutdown(self):
        self._host.shutdown()


class _Done(dist.Work):
    """A collective that is complete in the current stream."""

    def wait(self, timeout=None):
        return True


def _host(tensor):
    if tensor.device.type != NAME:
        raise TypeError(f"the simulated device's collectives take its tensors, not one on {tensor.device}")
    return tensor.cpu()


def register():
    """Register the group as torch's backend for tensors on the simulated device."""
    dist.Backend.register_backend(
        NAME, lambda store, rank, size, timeout: DeviceGroup(store, rank, size, timeout), devices=[NAME]
    )
