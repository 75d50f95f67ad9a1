"""Writes runs of `hostdev train`, with parameters, metrics and files, and the values of `Runtime.log_to` to MLflow.

A separate thread sends the values, so that a slow or missing server does not delay training.
"""

import logging
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

import numpy as np

from hostdev.core import json_files
from hostdev.core.errors import HostdevError, UserError, in_words
from hostdev.core.outputs import write_json
from hostdev.core.printable import printable
from hostdev.core.run_files import CONFIG, CURVE, MLFLOW, REPORT, SUMMARY
from hostdev.core.workers import Worker
from hostdev.ext.tracking.tracker import EndInfo, Norms, RunInfo, Tracker, clean, files_of, final_figures, flatten

MOST_WAITING = 100_000  # maximum number of values that wait to be sent; more are dropped
_BATCH = 1000  # MLflow's limit of values in a request
_LONGEST = 250  # MLflow's limit of characters in a name
_PAUSE_SECONDS = 2.0  # the pause after a request, unless `_BATCH` values wait
_USER = re.compile(r"//[^/@\s]*@")
_OTHERS = re.compile(r"[^\w\-. /:]")  # characters that MLflow does not allow in names
_SECONDS = 30.0  # the longest time that `flush` and `close` wait
_QUANTILES = {"p1": 1, "p50": 50, "p99": 99}
EXPERIMENT = "hostdev"
END_SECONDS, INTERRUPTED_SECONDS = 30.0, 5.0  # the longest wait at the end of training, finished or not
_ABANDON_SECONDS = 1.0
_PARAMS = 100  # MLflow's limit of parameters in a request
_PARAM_CHARACTERS = 500  # the limit of earlier versions of MLflow; it is 6,000 today
_FILES = (CONFIG, SUMMARY, CURVE, REPORT)
_STATUS = {"finished": "FINISHED", "stopped early": "FINISHED", "interrupted": "KILLED"}


class Value(NamedTuple):
    """A value to send."""

    name: str
    value: float
    step: int
    milliseconds: int  # time when the value was logged, since 1970


class Sender:
    """Gathers values, and sends them from a thread.

    Args:
        begin: Called first, in the thread; returns a function that sends at most 1,000 values.

    Attributes:
        dropped: The number of values that were dropped because too many waited.
    """

    def __init__(self, begin: Callable[[], Callable[[list[Value]], object]]) -> None:
        self._begin = begin
        self._send: Callable[[list[Value]], object] | None = None
        self._names, self._waiting = Names(), deque[Value]()
        self.dropped = 0
        self._worker = Worker("hostdev-mlflow", self._work, seconds=_PAUSE_SECONDS, drains=True)
        self._worker.ask()

    def add(self, name: str, value: float, step: int) -> None:
        """Queue a value; it is dropped if 100,000 already wait."""
        with self._worker.changed:
            if len(self._waiting) >= MOST_WAITING:
                self.dropped += 1
                return
            self._waiting.append(Value(self._names.clean(name), float(value), step, int(time.time() * 1000)))
            if len(self._waiting) >= _BATCH:
                self._worker.ask()

    def check(self) -> None:
        """Raise the error that ended the thread, if there is one."""
        self._worker.check()

    def flush(self, seconds: float) -> bool:
        """Send the values that wait; return whether that was done within `seconds`."""
        return self._worker.wait(self._worker.ask(), seconds)

    def close(self, end: Callable[[], object] | None, seconds: float) -> bool:
        """Send the values that wait, call `end` in the thread, and end the thread; return whether all was in time."""
        return self._worker.close(seconds, end)

    def _work(self) -> None:
        if self._send is None:
            self._send = self._begin()
        while some := self._take():
            self._send(some)

    def _take(self) -> list[Value]:
        with self._worker.changed:
            return [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]


class Names:
    """Converts names to names that MLflow takes: other characters become underscores, and 250 characters are kept.

    Different names stay different: if two become equal, the later one ends with a checksum of the original name.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def clean(self, name: str) -> str:
        """Return MLflow's name for a name; it is the same at each call."""
        if name not in self._names:
            made = "/".join(map(_clean_part, name.split("/")))[:_LONGEST]
            if made in self._taken:
                made = f"{made[: _LONGEST - 9]}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
            self._names[name] = made
            self._taken.add(made)
        return self._names[name]


def _clean_part(part: str) -> str:
    made = _OTHERS.sub("_", part.encode(errors="replace").decode())
    return f"_{made}" if not made.strip(".") or made.startswith("..") else made  # MLflow refuses such parts of paths


def describe_error(error: BaseException) -> str:
    """Return an error as one line without the user names, passwords and tokens with which MLflow may be reached."""
    text = _USER.sub("//", in_words(error))
    uri = urlsplit(os.environ.get("MLFLOW_TRACKING_URI", ""))
    secrets = [uri.password, uri.query, os.environ.get("MLFLOW_TRACKING_TOKEN")]
    secrets.append(os.environ.get("MLFLOW_TRACKING_PASSWORD"))
    for secret in secrets:
        for form in {secret or "", unquote(secret or "")} - {""}:
            text = text.replace(form, "***")
    return printable(text)


def connect() -> Any:
    """Import MLflow, which takes seconds, and return its client."""
    # By default, MLflow prints the address of a run that ends, and tries for four minutes to reach a server.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    from mlflow.tracking import MlflowClient

    return MlflowClient()


def make_send(client: Any, run_id: str) -> Callable[[list[Value]], object]:
    """Return a function that sends values to a run."""
    from mlflow.entities import Metric

    def send(values: list[Value]) -> None:
        metrics = [Metric(one.name, one.value, one.milliseconds, one.step) for one in values]
        client.log_batch(run_id, metrics=metrics)

    return send


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
        """Send what is queued, and end the thread; MLflow's run stays open. A second call does nothing.

        Raises UserError like `flush`, or if values were dropped.
        """
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

    def __exit__(self, *error: object) -> None:
        self.close()


class MLflowError(HostdevError):
    """MLflow cannot be reached, or refuses a request."""


class MLflowTracker(Tracker):
    """Writes a run to MLflow from a thread: steps never wait for MLflow, and the end of training at most 30 seconds.

    mlflow.json in the run directory has the id of MLflow's run, and for each metric the last step that was sent.
    """

    name = "mlflow"

    def __init__(self) -> None:
        self._sender: Sender | None = None
        self._client: Any = None  # untyped
        self._run_id = ""
        self._sent: dict[str, int] = {}  # for each metric, the last step that was sent
        self._before: dict[str, int] = {}  # for each metric, the last step that an earlier process sent

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
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it prints a line for each attempt that fails
        self._sender = Sender(self._begin)

    def _begin(self) -> Callable[[list[Value]], object]:
        """Create MLflow's run, or reopen the run of the process that is resumed; called in the thread."""
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
        """Send the values that still wait, the final figures and the files, and end MLflow's run."""
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
