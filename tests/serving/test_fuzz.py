"""2,000 damaged requests over sockets: each gets 4xx or a closed connection, and others are served meanwhile."""

import json
import random
import socket
import threading
import time

import psutil
import pytest

import hostdev
from tests.serving.helpers import FILMS, as_rows, film_tensors, receive_all
from tests.serving.test_processes import ask, errors, started

pytestmark = pytest.mark.slow
REQUESTS, SLOW = 2000, 40


def whole(rng):
    """Return a right request: its head's lines, and its body."""
    if rng.random() < 0.5:
        path, content = "/v1/predict", {"rows": as_rows(FILMS)}
    else:
        path, content = "/v2/models/deepfm/infer", {"inputs": film_tensors()}
    body = json.dumps(content).encode()
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return head, body


def damage(rng, head, body):
    """Return a wrong request as bytes, and whether nothing follows it."""
    kind = rng.randrange(14)
    words = [b"NaN", b"Infinity", b"-1e999", b"9" * 5000, b"[" * 5000, b"{}", b'"\\ud800"', b"\xff\xfe", b"null", b"\0"]
    if kind < 4:  # some bytes are others
        body = bytearray(body)
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(len(body))
            body[at : at + rng.randint(0, 3)] = rng.choice(words) if kind < 2 else rng.randbytes(rng.randint(0, 4))
        body = bytes(body)
    elif kind == 4:
        body = body[: rng.randrange(len(body))]
    elif kind == 5:
        body = rng.randbytes(rng.randint(1, 5000))
    elif kind == 6:
        depth = rng.choice([100, 10_000, 200_000])
        body = b'{"rows": ' + rng.choice([b"[", b'{"a":']) * depth
    elif kind == 7:
        body = body.replace(b'"u1"', rng.choice(words), 1)
    elif kind == 8:
        body = body.replace(b"31.0", rng.choice([b"1e400", b"9" * 400, b'"x"', b"[1]", b"true", b"1e39"]), 1)
    elif kind == 9:  # wrong lengths
        head[3] = f"Content-Length: {rng.choice([-1, 'x', 10**30, 1 << 40, rng.randrange(len(body) + 500)])}"
    elif kind == 10:
        head.insert(3, f"Inference-Header-Content-Length: {rng.choice([-5, 'x', 10**12, rng.randrange(len(body))])}")
    elif kind == 11:
        head[3] = "Transfer-Encoding: chunked"
        body = rng.choice([b"zz\r\n", b"5\r\nab", b"ffffffffffffffff\r\n", b"1\r\n" * 50, b"4\r\nabcd\r\n0\r\n\r\n"])
    elif kind == 12:
        head[rng.randrange(4)] = rng.randbytes(rng.randint(1, 200)).decode("latin-1")
    else:
        head[2] = rng.choice(
            ["Content-Type: text/plain", "Content-Encoding: gzip", "Content-Type: \t\t", "A: " + "b" * 99_999]
        )
    if kind in (0, 1, 2, 3, 5, 6, 7, 8, 10) and head[3].startswith("Content-Length"):
        head[3] = f"Content-Length: {len(body)}"
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body, rng.random() < 0.5


def send(port, content, *, is_cut, pause=0.0):
    """Send a request; return the answer's status, or 0 for a closed connection."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        try:
            for start in range(0, len(content), 1000 if pause else len(content)):
                connection.sendall(content[start : start + (1000 if pause else len(content))])
                time.sleep(pause)
            if is_cut:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(60)
            received = connection.recv(1 << 16)
        except (BrokenPipeError, ConnectionResetError):
            return 0
    return int(received.split(b" ")[1]) if received else 0


def test_damaged_requests(film_run, tmp_path):
    work = tmp_path / "work"
    expected = hostdev.Predictor(film_run)(FILMS).tolist()
    with started(film_run, work, "--max-request-bytes", "1MB") as (process, address):
        port, server = int(address.rpartition(":")[2]), psutil.Process(process.pid)
        is_over, served = threading.Event(), []

        def others():
            while not is_over.is_set():
                served.append(ask(address, "/v1/predict", {"columns": FILMS})["predictions"])
                time.sleep(0.05)

        other = threading.Thread(target=others)
        other.start()
        waiting, statuses, memory = [], {}, []
        try:
            rng = random.Random(7)
            for number in range(REQUESTS):
                head, body = whole(rng)
                if number % (REQUESTS // SLOW) == 0:  # a slow sender: it begins, and never ends
                    one = socket.create_connection(("127.0.0.1", port), 60)
                    one.sendall(("\r\n".join(head) + "\r\n\r\n").encode()[: rng.randint(1, 300)])
                    waiting.append(one)
                    continue
                content, is_cut = damage(rng, head, body)
                # What lacks a part of its body must be cut: the server waits 30 seconds for the rest.
                announced = content.partition(b"\r\n\r\n")
                is_cut = is_cut or len(announced[2]) < len(body) + 1000
                status = send(port, content, is_cut=is_cut)
                statuses[status] = statuses.get(status, 0) + 1
                if number in (REQUESTS // 4 + 1, REQUESTS - 1):
                    memory.append(server.memory_info().rss)
            ends = {receive_all(one)[:12] for one in waiting}  # the server closes them after its limits
        finally:
            is_over.set()
            other.join()
            for one in waiting:
                one.close()
        assert ends <= {b"", b"HTTP/1.1 408"}
        assert ask(address, "/v1/predict", {"columns": FILMS})["predictions"] == expected
        process.terminate()
    print(statuses, [round(x / 1e6) for x in memory], len(served))
    assert set(statuses) <= {0, 200, *range(400, 500)}, statuses  # a change of a byte may leave a request right
    assert statuses.get(200, 0) < REQUESTS / 4
    assert sum(count for status, count in statuses.items() if status >= 400) > REQUESTS / 4
    assert len(served) > 3 and all(one == expected for one in served)
    assert errors(work) == ""
    assert memory[1] < memory[0] + 30e6
