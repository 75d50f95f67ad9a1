"""Send: copy a batch's rows, inverses and tensors to the device."""

import torch

from hostdev.pipeline.context import Context
from hostdev.pipeline.results import LookedUpBatch, SentBatch


def send(context: Context, batch: LookedUpBatch) -> SentBatch:
    """Begin to copy a batch to the device, and return the batch. Conflicting rows may be copied later."""
    number, position, request, groups, inverses, writes, rows, memory, early = batch
    context.before_stage("send", number)
    with context.timeline.span("send", number):
        arrays = [*inverses]
        arrays += [mine.ids for group, mine in zip(context.groups, groups, strict=True) if not group.on_host]
        tensors = [*(torch.from_numpy(array) for array in arrays), *request.tensors]
        sent, mark = context.staging.send(tensors, memory)
        left = iter(sent)
        on_device = [next(left) for _ in groups]
        device_ids = [None if group.on_host else next(left) for group in context.groups]
        for tables in rows.groups:
            for table in tables:
                table.send()
        for forwarded in rows.forwarded:
            if forwarded is not None:
                forwarded.send()
    return SentBatch(
        number, position, request, groups, writes, rows, memory, early, on_device, device_ids, list(left), sent, mark
    )
