"""A writer for `Runtime.log_to` that writes to a run of MLflow."""

from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from hostdev.core.errors import UserError
from hostdev.ext.tracking.mlflow_sending import Sender, connect, describe_error, make_send

_SECONDS = 30.0  # that `flush` and `close` wait at most
_QUANTILES = {"p1": 1, "p50": 50, "p99": 99}


def add_quantiles(sender: Sender, tag: str, values: Any, step: int) -> None:
    """Send a distribution, for which MLflow has no type, as mean and quantiles."""
    sender.add(f"{tag}/mean", float(np.mean(values, dtype=np.float64)), step)
    for (name, _), value in zip(_QUANTILES.items(), np.percentile(values, list(_QUANTILES.values())), strict=True):
        sender.add(f"{tag}/{name}", float(value), step)


class MLflowWriter:
    """Writes values to a run of MLflow, with the methods of a SummaryWriter; needs mlflow or mlflow-skinny.

    Values are gathered, and sent by a thread every two seconds, so that the loop does not wait for the server. If
    100,000 values wait, more are dropped, and `close` says how many. Use it in a `with` statement, or call `close`.

    Args:
        run_id: The run; None for the active run of `mlflow.start_run()`.

    Raises:
        UserError: MLflow is not installed, or no run is active.
    """

    def __init__(self, run_id: str | None = None) -> None:
        try:
            client = connect()
            import mlflow
        except ImportError:
            raise UserError("MLflowWriter needs MLflow; run pip install mlflow-skinny, or pip install mlflow") from None
        active = mlflow.active_run() if run_id is None else None
        if run_id is None and active is None:
            raise UserError("no run of MLflow is active; call mlflow.start_run(), or give MLflowWriter(run_id)")
        self.run_id = str(run_id or active.info.run_id)  # type: ignore[union-attr]
        self._sender = Sender(partial(make_send, client, self.run_id))
        self._is_closed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Queue a value; raise UserError if earlier values could not be sent."""
        self._check()
        self._sender.add(tag, scalar_value, global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int) -> None:
        """Queue the mean, the median, and the 1st and 99th percentiles of values."""
        self._check()
        add_quantiles(self._sender, tag, values, global_step)

    def _check(self) -> None:
        try:
            self._sender.check()
        except Exception as error:
            raise UserError(f"MLflow: {describe_error(error)}") from None

    def flush(self) -> None:
        """Send what is queued; raise UserError if that fails, or takes more than 30 seconds."""
        self._finish(self._sender.flush)

    def close(self) -> None:
        """Send what is queued and end the thread, as `flush`; MLflow's run stays open. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._finish(partial(self._sender.close, None))
        if self._sender.dropped:
            raise UserError(f"MLflow: {self._sender.dropped:,} values were dropped, because the server is too slow")

    def _finish(self, how: Any) -> None:
        try:
            done = how(_SECONDS)
        except Exception as error:
            raise UserError(f"MLflow: {describe_error(error)}") from None
        if not done:
            raise UserError(f"MLflow: not all values could be sent within {_SECONDS:g} seconds")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
