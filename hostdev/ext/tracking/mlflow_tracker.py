"""Writes a run of `hostdev train` to MLflow: parameters, metrics, the run's files, and its end."""

import logging
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from hostdev.core import json_files
from hostdev.core.errors import HostdevError, UserError
from hostdev.core.outputs import write_json
from hostdev.core.printable import printable
from hostdev.core.run_files import CONFIG, CURVE, MLFLOW, REPORT, SUMMARY
from hostdev.ext.tracking.callback import EndInfo, RunInfo
from hostdev.ext.tracking.mlflow_sending import Names, Sender, Value, connect, describe_error, make_send
from hostdev.ext.tracking.mlflow_writer import add_quantiles
from hostdev.ext.tracking.tracker import Norms, Tracker, clean, files_of, final_figures, flatten

EXPERIMENT = "hostdev"
END_SECONDS, INTERRUPTED_SECONDS = 30.0, 5.0  # that the end of training waits at most
_ABANDON_SECONDS = 1.0
_PARAMS = 100  # in a request: MLflow's limit
_PARAM_CHARACTERS = 500  # MLflow takes 6,000 today, and took 500
_FILES = (CONFIG, SUMMARY, CURVE, REPORT)
_STATUS = {"finished": "FINISHED", "stopped early": "FINISHED", "interrupted": "KILLED"}


class MLflowError(HostdevError):
    """MLflow cannot be reached, or refuses a request."""


class MLflowTracker(Tracker):
    """Writes a run to MLflow, from a thread: training never waits for it, and its end waits at most 30 seconds.

    mlflow.json in the run directory has the run of MLflow, and the last step of each metric that was sent.
    """

    name = "mlflow"

    def __init__(self) -> None:
        self._sender: Sender | None = None
        self._client: Any = None  # untyped
        self._run_id = ""
        self._sent: dict[str, int] = {}  # the last step of each metric
        self._before: dict[str, int] = {}  # the same, of an earlier process

    @classmethod
    def require(cls) -> None:
        """See `Tracker`."""
        if find_spec("mlflow") is None:
            raise UserError("--log-to mlflow needs a package; run pip install mlflow-skinny")
        if "MLFLOW_TRACKING_URI" not in os.environ and find_spec("sqlalchemy") is None:
            raise UserError(
                "--log-to mlflow: set MLFLOW_TRACKING_URI to a server, such as http://HOST:5000; a database file needs "
                "the full package: pip install mlflow"
            )

    def on_start(self, run: RunInfo) -> None:
        """Begin to connect."""
        self._run = run
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # a line for each attempt that fails
        self._sender = Sender(self._begin)

    def _begin(self) -> Callable[[list[Value]], object]:
        """Create the run, or find that of the process that is resumed; runs in the thread."""
        client = self._client = connect()
        state = self._read_state()
        if state is not None and self._run.first_step:
            self._run_id, self._sent = state["run_id"], dict(state["steps"])
            self._before = dict(self._sent)
            client.update_run(self._run_id, status="RUNNING")
        else:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
            found = client.get_experiment_by_name(experiment)
            number = client.create_experiment(experiment) if found is None else found.experiment_id
            self._run_id = client.create_run(number, run_name=clean(self._run.run_dir.resolve().name)).info.run_id
            self._write_state()
            self._send_params(flatten(self._run.config))
        send = make_send(client, self._run_id)

        def send_new(values: list[Value]) -> None:
            new = [one for one in values if one.step > self._before.get(one.name, -1)]
            if new:
                send(new)
                self._sent |= {one.name: one.step for one in new}
                self._write_state()

        return send_new

    def _send_params(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        names = Names()
        params = [
            Param(names.clean(name), clean(printable(str(value), _PARAM_CHARACTERS))) for name, value in values.items()
        ]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS])

    def _read_state(self) -> Any:
        try:
            found = json_files.read(self._run.run_dir / MLFLOW)
            return found if isinstance(found["run_id"], str) and isinstance(found["steps"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_state(self) -> None:
        write_json(self._run.run_dir / MLFLOW, {"run_id": self._run_id, "steps": self._sent})

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        """See `Tracker`."""
        assert self._sender is not None
        self._sender.add(tag, value, global_step)

    def add_histogram(self, tag: str, values: Norms, global_step: int) -> None:
        """See `Tracker`."""
        assert self._sender is not None
        add_quantiles(self._sender, tag, values, global_step)

    def check(self) -> None:
        """See `Tracker`."""
        if self._sender is not None:
            self._raise(self._sender.check)

    @staticmethod
    def _raise(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise MLflowError(describe_error(error)) from None

    def abandon(self, status: str) -> None:
        """See `Tracker`."""
        if self._sender is not None:
            self._sender.close(lambda: self._set_status(status), _ABANDON_SECONDS)

    def on_end(self, end: EndInfo) -> None:
        """Send the rest, the final figures and the files, and end MLflow's run."""
        assert self._sender is not None
        for name, value in final_figures(end).items():
            self._sender.add(f"summary/{name}", value, end.steps)

        def finish() -> None:
            for path in files_of(self._run.run_dir, _FILES):
                self._client.log_artifact(self._run_id, str(path))
            self._set_status(end.status)

        seconds = END_SECONDS if end.status in ("finished", "stopped early") else INTERRUPTED_SECONDS
        sender = self._sender
        if not self._raise(lambda: sender.close(finish, seconds)):
            raise MLflowError(f"not everything could be sent within {seconds:g} seconds after the end of training")
        if sender.dropped:
            raise MLflowError(f"{sender.dropped:,} values were dropped, because the server is too slow")

    def _set_status(self, status: str) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))
