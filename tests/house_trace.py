"""Traces a training step and a served request: how many files of the product run, and how many Python calls.

`python -m tests.house_trace step|request` prints the counts; `--list` adds each file's calls. The step is one of
`hostdev train` with a cache, in its steady state, with all of its threads; the request is one row to a model with bags.
"""

import argparse
import collections
import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

FIRST, LAST = 20, 24  # steps
REQUESTS = 20

_calls: collections.Counter[str] = collections.Counter()
_is_on = False


def _profile(frame: Any, event: str, _: Any) -> None:
    name = frame.f_code.co_filename
    if _is_on and event == "call" and name.startswith((f"{ROOT}/hostdev/", f"{ROOT}/data/", f"{ROOT}/models/")):
        _calls[name] += 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _train(data: Path, run: Path, *flags: object) -> None:
    from hostdev.core import cli
    from hostdev.ext.training import cli as train

    chosen = ["--data", data, "--run-dir", run, "--host-device-mix", "--device", "cpu", *flags]
    assert cli.run(train.PROG, train.main, list(map(str, chosen))) == 0


def _profiled_step(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    steps = 0

    def step(self: Any) -> Any:
        nonlocal steps
        global _is_on
        steps += 1
        if steps in (FIRST, LAST):
            _is_on = steps == FIRST
        return original(self)

    return step


def trace_step(folder: Path) -> int:
    """Train on Criteo's columns with a cache of 10%; trace from the 20th step to the 24th; return their number."""
    from hostdev.data.preprocess.build import Options, build
    from hostdev.data.preprocess.synthetic import Synthetic
    from hostdev.runtime.loop import TrainLoop

    with _quiet():
        build(Synthetic(40_000, 1), folder / "data", Options(threshold=1))
    original: Any = TrainLoop.__next__
    TrainLoop.__next__ = _profiled_step(original)  # type: ignore[method-assign]
    with _quiet():
        _train(folder / "data", folder / "run", "--cache-rows", "10%", "--batch-size", 1000, "--max-steps", 30)
    return LAST - FIRST


def trace_request(folder: Path) -> int:
    """Serve a DeepFM with bags; trace requests for one row after the first; return their number."""
    from hostdev.core import cli
    from hostdev.data.preprocess import cli as preprocess
    from tests.data import movies
    from tests.serving.helpers import FILMS, Served, as_rows

    global _is_on
    made = movies.make(rows=3000, users=80, items=60).write_csv(folder / "films.csv")
    flags = ["--label", "liked", "--numeric", "age", "--categorical", "user,item", "--bag", "genres=|"]
    flags += ["--bag", "history= ", "--share", "history=item"]
    with _quiet():
        command = ["table", made, "--out", folder / "data", *flags]
        assert cli.run(preprocess.PROG, preprocess.main, list(map(str, command))) == 0
        _train(
            folder / "data",
            folder / "run",
            "--model",
            "deepfm",
            "--batch-size",
            128,
            "--max-steps",
            5,
            "--checkpoint-every",
            5,
        )
        with Served(folder / "run/checkpoints", listens=False) as server:
            content = {"rows": as_rows(FILMS)[:1]}
            assert server.predict(content).status == 200
            _is_on = True
            for _ in range(REQUESTS):
                assert server.predict(content).status == 200
            _is_on = False
    return REQUESTS


def main() -> None:
    """Trace what the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["step", "request"])
    parser.add_argument("--list", action="store_true", help="also print each file's calls")
    options = parser.parse_args()
    threading.setprofile(_profile)
    sys.setprofile(_profile)
    with tempfile.TemporaryDirectory() as folder:
        times = {"step": trace_step, "request": trace_request}[options.kind](Path(folder))
    sys.setprofile(None)
    if options.list:
        for name, calls in sorted(_calls.items()):
            print(f"{calls / times:8.1f}  {Path(name).relative_to(ROOT)}")
    print(f"{options.kind}: {len(_calls)} files, {sum(_calls.values()) // times} calls")


if __name__ == "__main__":
    main()
