"""Read: take the next request from the caller's iterator. Its ids are flat and have no padding."""

from collections.abc import Iterator

from hostdev.pipeline.batch_ids import ReadBatch, Request
from hostdev.pipeline.context import Context


def read(context: Context, source: Iterator[Request], number: int) -> ReadBatch | None:
    """Return the next batch, or None after the last."""
    context.before_stage("read", number)
    with context.timeline.span("read", number, flow="s") as span:
        request = next(source, None)
        span["rows"] = request.rows if request is not None else 0
    return None if request is None else ReadBatch(number, request)
