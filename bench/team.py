"""Processes that answer a benchmark's calls, one at a time; calls and answers are lines of JSON."""

import json
import sys
from collections.abc import Sequence
from typing import Any


class Team:
    """Processes that all answer the same call at the same time.

    Args:
        name: Name of the benchmark, for the error if a process ends.
        processes: Processes with text pipes for standard input and output. Each first prints "ready".
        ranks: Number of ranks of one training; several trainings may run at once.
    """

    def __init__(self, name: str, processes: Sequence[Any], ranks: int) -> None:
        self._name, self._processes, self.ranks = name, processes, ranks
        self._ready = False

    def ask(self, call: str, *, first: bool = False, **arguments: Any) -> list[Any]:
        """Send a call to all processes, or only to the first; return the answer of each."""
        if not self._ready:
            self._ready = bool(self._read(self._processes))
        asked = self._processes[: 1 if first else None]
        for process in asked:
            process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            process.stdin.flush()
        return self._read(asked)

    def most(self, call: str, **arguments: Any) -> float:
        """Send a call to all processes; return the largest of their answers, which are numbers."""
        return float(max(self.ask(call, **arguments)))

    def _read(self, asked: Sequence[Any]) -> list[Any]:
        lines = [process.stdout.readline() for process in asked]
        if not all(lines):
            sys.exit(f"{self._name}: a process has failed")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


def serve(worker: Any) -> None:
    """Answer a team's calls with the worker's methods until standard input ends; then close the worker."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(worker, asked.pop("call"))(**asked)), flush=True)
    worker.close()
