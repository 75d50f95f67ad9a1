"""Clients over sockets: NVIDIA's tritonclient and, in an environment of its own, kserve's; cut and slow requests."""

import json
import socket
import subprocess
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hostdev.ext.serving import connection
from tests.conftest import ROOT
from tests.serving.helpers import FILMS, Served, bits, receive_all, repeated

HEAD = "POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture
def triton():
    return pytest.importorskip("tritonclient.http")


def inputs_of(triton, rows, *, binary, numbers="FP64"):
    found = []
    for name, values in rows.items():
        is_number = name == "age"
        array = np.array(values, np.dtype({"FP64": "f8", "FP32": "f4"}[numbers]) if is_number else np.object_)
        found.append(triton.InferInput(name, list(array.shape), numbers if is_number else "BYTES"))
        found[-1].set_data_from_numpy(array, binary_data=binary)
    return found


def test_tritonclient(triton, film_server):
    rows = repeated({name: values[:2] for name, values in FILMS.items()}, 50)  # no missing number, which has no JSON
    expected = bits(film_server.predictor(rows))
    version = str(film_server.predictor.step)
    with triton.InferenceServerClient(film_server.url) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("deepfm", version)
        assert not client.is_model_ready("other")
        assert client.get_server_metadata()["name"] == "hostdev"
        metadata = client.get_model_metadata("deepfm")
        assert [one["name"] for one in metadata["inputs"]] == ["age", "user", "item", "genres", "history"]
        for binary_in in (True, False):
            for outputs in (None, True, False):
                wanted = outputs if outputs is None else [triton.InferRequestedOutput("liked", binary_data=outputs)]
                inputs = inputs_of(triton, rows, binary=binary_in)
                answer = client.infer("deepfm", inputs, outputs=wanted, request_id="r1")
                assert bits(answer.as_numpy("liked")) == expected
                assert answer.get_response()["model_version"] == version
                assert answer.get_response()["id"] == "r1"
        for options in (
            {"request_compression_algorithm": "gzip"},
            {"request_compression_algorithm": "deflate"},
            {"priority": 2, "timeout": 60_000_000},  # microseconds
        ):
            label = triton.InferInput("liked", [50, 1], "BOOL")
            label.set_data_from_numpy(np.zeros((50, 1), bool))
            answer = client.infer("deepfm", [*inputs_of(triton, rows, binary=True), label], **options)
            assert bits(answer.as_numpy("liked")) == expected
        many = repeated(rows, 5000)  # in pieces of the batch size, as the predictor computes them
        answer = client.infer("deepfm", inputs_of(triton, many, binary=True), model_version=version)
        assert bits(answer.as_numpy("liked")) == bits(film_server.predictor(many))
        single = {**rows, "age": np.float32(rows["age"]).tolist()}
        answer = client.infer("deepfm", inputs_of(triton, rows, binary=True, numbers="FP32"))
        assert bits(answer.as_numpy("liked")) == bits(film_server.predictor(single))
        for call, status, message in (
            (lambda: client.infer("deepfm", inputs_of(triton, rows, binary=True)[1:]), "400", "no column 'user'"),
            (lambda: client.infer("deepfm", inputs, model_version="99"), "404", "no version '99'"),
            (lambda: client.infer("other", inputs), "404", "there is no model 'other'"),
            (lambda: client.infer("deepfm", inputs, sequence_id=5), "400", "no parameter 'sequence_"),
            (lambda: client.get_model_repository_index(), "404", "Not Found"),
        ):
            with pytest.raises(triton.InferenceServerException) as refused:
                call()
            assert refused.value.status() == status
            assert message in refused.value.message()


def test_the_guide(triton, film_server, capsys):
    """The guide's request and program give the predictor's answers."""
    guide = (ROOT / "docs/guides/serving.md").read_text()
    body = guide.partition(" -d '")[2].partition("}]}'")[0] + "}]}"
    row = json.loads(body)["rows"][0]
    expected = film_server.predictor(row)
    answer = film_server.raw_json(json.loads(body))
    assert bits(answer["predictions"]) == bits(expected)
    assert list(answer) == list(json.loads(guide.partition("}]}'\n    ")[2].partition("\n")[0]))
    exec(guide.partition("```python\n")[2].partition("```")[0].replace("127.0.0.1:8000", film_server.url))
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.slow
def test_kserve(film_server, tmp_path):
    """kserve's client needs other versions of pandas and psutil, so it has an environment of its own."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    install = [python, "-m", "pip", "install", "-q", "kserve==0.21.0"]
    subprocess.run(install, check=True, timeout=1200)
    given = {"url": f"http://{film_server.url}", "rows": {name: values[:2] for name, values in FILMS.items()}}
    script = Path(__file__).with_name("kserve_client.py")
    done = subprocess.run([python, script, json.dumps(given)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ready"] == [True, True, True]
    for values in found["values"]:
        assert bits(values) == bits(film_server.predictor(given["rows"]))
    assert "no column 'user'" in found["error"]


def connect(served):
    return socket.create_connection(("127.0.0.1", served.port), 30)


def test_heads(film_server, monkeypatch):
    """A head that is too large, too slow, or no HTTP ends with an answer or a closed connection."""
    assert film_server.raw(b"GET /v2 HTTP/1.1\r\n" + b"a: b\r\n" * 30_000).startswith(b"HTTP/1.1 431")
    assert film_server.raw(b"GET /v2 HTTP/1.1\r\nx: " + b"y" * 500_000).startswith(b"HTTP/1.1 431")
    assert film_server.raw(b"\0\1\2\3\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert film_server.raw(b"GET /\xff HTTP/1.1\r\n\r\n")[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 404")
    assert film_server.raw(b"GET /v2", is_cut=True) == b""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    assert film_server.raw(b"") == b""
    assert film_server.raw(b"GET /v2 HTTP/1.1\r\n") == b""
    with connect(film_server) as kept:  # a second head on a connection that was used
        kept.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(1000).startswith(b"HTTP/1.1 200")
        kept.sendall(b"GET /v2")
        assert receive_all(kept).count(b"HTTP") == 0


def test_bodies(film_run):
    """A body that is too slow, cut, or too large; meanwhile others are served."""
    with Served(film_run, limits={"body_seconds": 0.5}, max_request_bytes=10_000) as served:
        slow = f"{HEAD}Content-Length: 10\r\n\r\n{{".encode()
        with connect(served) as waiting:
            waiting.sendall(slow)
            assert served.raw_json({"columns": FILMS})["model"] == "deepfm"
            received = receive_all(waiting)
        assert received.startswith(b"HTTP/1.1 408") and b"within 0.5 seconds" in received
        assert served.raw(slow, is_cut=True) == b""
        chunked = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
        assert served.raw(chunked + b"2710\r\n" + b" " * 10_000 + b"\r\n1\r\nx\r\n").startswith(b"HTTP/1.1 413")
        assert served.raw(chunked + b"zz\r\n").startswith(b"HTTP/1.1 400")
        large = f"{HEAD}Content-Length: 3000000\r\n\r\n".encode() + b" " * 3_000_000
        assert served.raw(large).startswith(b"HTTP/1.1 413")
        expects = f"{HEAD}Content-Length: 3000000\r\nExpect: 100-continue\r\n\r\n".encode()
        with connect(served) as waiting:
            waiting.sendall(expects)
            assert receive_all(waiting).startswith(b"HTTP/1.1 413")


def test_a_client_that_does_not_read(film_run, monkeypatch):
    """It loses its connection; one that reads slowly does not."""
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.5)
    with Served(film_run) as served:
        served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # of its connections, too
        body = json.dumps({"columns": repeated(FILMS, 60_000)}).encode()
        asked = f"{HEAD}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

        def ask(client):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.connect(("127.0.0.1", served.port))
            client.settimeout(30)
            client.sendall(asked)
            client.recv(1, socket.MSG_PEEK)  # the answer has begun

        with socket.socket() as slow, socket.socket() as silent:
            ask(silent)
            ask(slow)
            parts = []
            for _ in range(20):
                time.sleep(0.1)  # together longer than the limit
                parts.append(slow.recv(1 << 14))
            assert json.loads((b"".join(parts) + receive_all(slow)).partition(b"\r\n\r\n")[2])["model"] == "deepfm"
            received = receive_all(silent)
        assert len(received) < 200_000  # what the kernel's buffers held


def test_memory_of_bodies(film_run):
    """Bodies in progress together have a limit; those beyond it are refused, and it counts what has ended."""
    with Served(film_run, max_request_bytes=10_000) as served:
        begun = f"{HEAD}Content-Length: 9000\r\n\r\n{{".encode()
        waiting = [connect(served) for _ in range(8)]
        for one in waiting:
            one.sendall(begun)
        time.sleep(0.5)  # until the server has read them
        received = served.raw(f"{HEAD}Content-Length: 9000\r\n\r\n".encode() + b" " * 9000)
        assert received.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in received.lower()
        for one in waiting:
            one.close()
        time.sleep(0.5)  # until it has noticed
        assert served.raw_json({"columns": FILMS})["model"] == "deepfm"


def test_the_end_answers_what_was_accepted(film_run):
    """Requests that wait for a batch when the server ends are answered."""
    served = Served(film_run, max_wait_ms=3000)
    with served, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(served.raw_json, {"columns": FILMS}) for _ in range(4)]
        time.sleep(0.5)  # until they wait for a batch
        served.ending.set()
        answers = [one.result() for one in asked]
    assert len({tuple(answer["predictions"]) for answer in answers}) == 1
