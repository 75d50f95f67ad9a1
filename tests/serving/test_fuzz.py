"""2,000 damaged requests over sockets: each gets 4xx or a closed connection, and others are served meanwhile."""

import gzip
import json
import random
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

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
    kind = rng.randrange(16)
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
    elif kind == 13:
        head[2] = rng.choice(
            ["Content-Type: text/plain", "Content-Encoding: gzip", "Content-Type: \t\t", "A: " + "b" * 99_999]
        )
    elif kind == 14:  # compressed, and then damaged
        name, squeeze = rng.choice([("gzip", gzip.compress), ("deflate", zlib.compress)])
        head.insert(3, f"Content-Encoding: {name}")
        body = bytearray(squeeze(rng.choice([body, bytes(4 << 20), b"[" * (1 << 20)])))
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        body = bytes(body[: rng.randint(len(body) // 2, len(body))])
    else:
        head[1] = rng.choice(["Host: evil.example", "Host: localhost.evil", "Host: [::", "Host:"])
    if kind in (0, 1, 2, 3, 5, 6, 7, 8, 10, 14):
        head[-1] = f"Content-Length: {len(body)}"
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body, rng.random() < 0.5


def send(port, content, *, is_cut, pause=0.0, timeout=60):
    """Send a request; return the answer's status, or 0 for a closed connection."""
    with socket.create_connection(("127.0.0.1", port), timeout) as connection:
        try:
            for start in range(0, len(content), 1000 if pause else len(content)):
                connection.sendall(content[start : start + (1000 if pause else len(content))])
                time.sleep(pause)
            if is_cut:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(timeout)
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


def filled(start, item, end, size=(16 << 20) - 100):
    """Return `start`, as many items as fit, with commas between them, and `end`."""
    return start + b",".join([item] * ((size - len(start) - len(end)) // (len(item) + 1))) + end


def bag_of(item):
    others = json.dumps({name: values[:1] for name, values in FILMS.items() if name != "history"})
    return filled(f'{{"columns":{others[:-1]},"history":[['.encode(), item, b"]]}}")


def data_of(datatype, item, *, wide=False):
    """Return a request with a tensor in JSON: a column of many rows, or one row of many values."""
    count = ((16 << 20) - 300) // (len(item) + 1)
    shape = [1, count] if wide else [count]
    about = json.dumps({"name": "history" if wide else "age", "datatype": datatype, "shape": shape})
    start, end = f'{{"inputs":[{about[:-1]},"data":['.encode(), b"]}]}"
    body = start + b",".join([item] * count) + end
    return body, len(body)


def tensor_of(datatype, content, count):
    """Return a request with a binary tensor, and the length of its JSON."""
    rows = {name: values[:1] for name, values in FILMS.items() if name != "history"}
    about = {"binary_data_size": len(content)}
    last = {"name": "history", "datatype": datatype, "shape": [1, count], "parameters": about}
    head = json.dumps({"inputs": [*film_tensors(rows), last]}).encode()
    return head + content, len(head)


LARGE = {
    "objects": lambda: filled(b"[", b'{"":0}', b"]"),
    "lists": lambda: filled(b'{"rows":[', b"[]", b"]}"),
    "nested": lambda: filled(b"[", b"[" * 200 + b"]" * 200, b"]"),
    "deep": lambda: b"[" * (16 << 20),
    "numbers": lambda: filled(b"[", b"0.1", b"]"),
    "400 digits": lambda: bag_of(b"1" * 400),
    "texts": lambda: filled(b"[", '"ሴ"'.encode(), b"]"),
    "bag": lambda: bag_of(b"1"),
    "bag of texts": lambda: bag_of(b'"ab"'),
    "a long text": lambda: b'["' + b"\\n" * 8_000_000 + b'"]',
    "a long text with an emoji": lambda: b'["' + "😀".encode() + b"a" * 16_000_000 + b'"]',
    "a column of rows": lambda: filled(b'{"columns":{"user":[', b'["u1"]', b"]}}"),
    "names": lambda: b"{" + b",".join(b'"%06d":1' % i for i in range(1_300_000)) + b"}",
    "a name twice": lambda: filled(b"{", b'"a":0', b"}"),
    "rows": lambda: json.dumps({"rows": as_rows(FILMS) * (65_536 // 4)}).encode(),
    "data": lambda: data_of("FP64", b"0"),
    "data of one row": lambda: data_of("FP64", b"0", wide=True),
    "texts in data": lambda: data_of("BYTES", b'"ab"', wide=True),
    "nested data": lambda: data_of("INT64", b"[1]", wide=True),
    "texts in binary": lambda: tensor_of("BYTES", b"\2\0\0\0ab" * 2_700_000, 2_700_000),
    "numbers in binary": lambda: tensor_of("UINT8", bytes(16_000_000), 16_000_000),
    "a bomb": lambda: gzip.compress(bytes(1 << 28), 1),
}


def test_twelve_large_bodies_at_once(film_run, tmp_path):
    """Memory stays below what the guide says, and small requests are answered; their longest time is printed."""
    work = tmp_path / "work"
    expected = hostdev.Predictor(film_run)(FILMS).tolist()
    with started(film_run, work) as (process, address):
        port, server = int(address.rpartition(":")[2]), psutil.Process(process.pid)
        assert ask(address, "/v1/predict", {"columns": FILMS})["predictions"] == expected
        before, most = server.memory_info().rss, 0
        for name, make in LARGE.items():
            body, length = made if isinstance(made := make(), tuple) else (made, None)
            path = "/v1/predict" if length is None else "/v2/models/deepfm/infer"
            head = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
            head += ["Content-Encoding: gzip"] if name == "a bomb" else []
            head += [] if length is None else [f"Inference-Header-Content-Length: {length}"]
            content = "\r\n".join(head).encode() + b"\r\n\r\n" + body
            longest = 0.0
            with ThreadPoolExecutor(12) as pool:
                sent = [pool.submit(send, port, content, is_cut=False, timeout=600) for _ in range(12)]
                while not all(one.done() for one in sent):
                    start = time.perf_counter()
                    assert ask(address, "/v2/health/live") == {"live": True}
                    longest = max(longest, time.perf_counter() - start)
                    most = max(most, server.memory_info().rss)
                    time.sleep(0.01)
            statuses = [one.result() for one in sent]
            print(f"{name}: {sorted(statuses)}, health {longest:.3f} s, {(most - before) >> 20} MiB")
            assert set(statuses) <= {0, 200, 400, 413, 503}, (name, statuses)
        assert most - before < 1 << 30
        assert ask(address, "/v1/predict", {"columns": FILMS})["predictions"] == expected
        process.terminate()
    assert "error" not in errors(work)
