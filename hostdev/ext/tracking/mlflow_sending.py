"""Sends values to MLflow from a thread of its own, so that a slow or missing server does not hold training up."""

import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from hostdev.core.errors import in_words
from hostdev.core.printable import printable
from hostdev.core.workers import Worker

MOST_WAITING = 100_000  # values that wait to be sent; more are dropped
_BATCH = 1000  # values in a request: MLflow's limit
_LONGEST = 250  # characters of a name: MLflow's limit
_PAUSE_SECONDS = 2.0  # between two requests with fewer values
_USER = re.compile(r"//[^/@\s]*@")
_OTHERS = re.compile(r"[^\w\-. /:]")  # characters that MLflow allows in no name


class Value(NamedTuple):
    """A value to send."""

    name: str
    value: float
    step: int
    milliseconds: int  # when it was logged, since 1970


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
        """Send the values that wait; return whether that was done within this time."""
        return self._worker.wait(self._worker.ask(), seconds)

    def close(self, end: Callable[[], object] | None, seconds: float) -> bool:
        """Send the values that wait, call `end` in the thread, and end it; return whether that was done in time."""
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
    """Turns names into names that MLflow takes: an underscore for each other character, and at most 250 characters.

    Different names stay different: if two become equal, the later one ends with a checksum of what it was.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def clean(self, name: str) -> str:
        """Return the name for MLflow, always the same one."""
        if name not in self._names:
            made = "/".join(map(_clean_part, name.split("/")))[:_LONGEST]
            if made in self._taken:
                made = f"{made[: _LONGEST - 9]}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
            self._names[name] = made
            self._taken.add(made)
        return self._names[name]


def _clean_part(part: str) -> str:
    made = _OTHERS.sub("_", part.encode(errors="replace").decode())
    return f"_{made}" if not made.strip(".") or made.startswith("..") else made  # refused, as parts of paths


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
    # MLflow prints the address of a run that ends, and tries for four minutes to reach a server.
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
