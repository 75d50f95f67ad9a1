"""Clients of a server, in one process: each sends a request, waits for the answer, and sends the next.

`python -m bench.serving_load PORT CLIENTS SECONDS REQUESTS` takes whole HTTP requests from a file (`write_requests`)
and prints one JSON object.
"""

import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP = 0.2  # of the time, at the beginning, is not counted


def write_requests(path: Path, requests: Sequence[bytes]) -> None:
    """Write requests into a file: the number of bytes of each, and all bytes."""
    lengths = json.dumps(list(map(len, requests))).encode()
    path.write_bytes(lengths + b"\n" + b"".join(requests))


def read_requests(path: Path) -> list[bytes]:
    """Return the requests of `write_requests`."""
    head, _, content = path.read_bytes().partition(b"\n")
    ends = np.cumsum(json.loads(head)).tolist()
    return [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class Client:
    """A connection, and the request that is in progress on it."""

    def __init__(self, port: int, requests: list[bytes], first: int) -> None:
        self._requests, self._next = requests, first
        self.connection = socket.create_connection(("127.0.0.1", port), 60)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received, self._missing = b"", -1
        self.start = 0.0

    def send(self) -> None:
        """Send the next request."""
        self._received, self._missing = b"", -1
        self.start = time.perf_counter()
        self.connection.sendall(self._requests[self._next % len(self._requests)])
        self._next += 1

    def receive(self) -> int | None:
        """Read what is there; return the answer's status once all of it is there."""
        part = self.connection.recv(1 << 18)
        if not part:
            raise ConnectionError("the server has closed a connection")
        self._received += part
        if self._missing < 0:
            head, found, _ = self._received.partition(b"\r\n\r\n")
            if not found:
                return None
            [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            self._missing = len(head) + 4 + int(length.partition(b":")[2])
        return int(self._received[9:12]) if len(self._received) >= self._missing else None


def run(port: int, clients: int, seconds: float, requests: list[bytes]) -> dict[str, Any]:
    """Return requests/s, and the latencies' median and 99th percentile in ms."""
    latencies: list[float] = []
    others = 0
    with selectors.DefaultSelector() as selector:
        made = [Client(port, requests, first) for first in range(clients)]
        for client in made:
            selector.register(client.connection, selectors.EVENT_READ, client)
            client.send()
        begin = time.perf_counter()
        counted = begin + WARM_UP * seconds
        end = counted + seconds
        while (now := time.perf_counter()) < end:
            for key, _ in selector.select(end - now):
                client = key.data
                if (status := client.receive()) is not None:
                    done = time.perf_counter()
                    if counted <= done < end:
                        latencies.append(done - client.start)
                        others += status != 200
                    client.send()
        for client in made:
            client.connection.close()
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3 if latencies else (float("nan"),) * 2
    return {"per_s": len(latencies) / seconds, "p50_ms": float(p50), "p99_ms": float(p99), "not_200": others}


if __name__ == "__main__":
    port, clients, seconds, path = sys.argv[1:]
    print(json.dumps(run(int(port), int(clients), float(seconds), read_requests(Path(path)))))
