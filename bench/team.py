"""Processes that a benchmark asks for one thing at a time: a line of JSON each way."""

import json
import sys
from collections.abc import Sequence
from typing import Any


class Team:
    """Processes that do the same thing at the same time.

    Args:
        name: the benchmark's, for the error if a process ends.
        processes: Started with pipes for standard input and output as text. Each first says "ready".
        ranks: of one training; several trainings may run at once.
    """

    def __init__(self, name: str, processes: Sequence[Any], ranks: int) -> None:
        self._name, self._processes, self.ranks = name, processes, ranks
        self._ready = False

    def ask(self, call: str, *, first: bool = False, **arguments: Any) -> list[Any]:
        """Have all processes, or only the first, do something; return each one's answer."""
        if not self._ready:
            self._ready = bool(self._read(self._processes))
        asked = self._processes[: 1 if first else None]
        for process in asked:
            process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            process.stdin.flush()
        return self._read(asked)

    def most(self, call: str, **arguments: Any) -> float:
        """Have all processes do something; return the largest number of their answers."""
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
    """Answer a team's questions by the worker's methods, until standard input ends; then close the worker."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(worker, asked.pop("call"))(**asked)), flush=True)
    worker.close()
