"""What a server refuses: bodies that are too large or slow, other hosts, requests without its token."""

import asyncio
import gzip
import json
import time
import zlib

import pytest

import hostdev
from hostdev.ext.serving import app, columns, json_input, refused
from hostdev.ext.serving.body import BodyReader
from hostdev.ext.serving.refused import Limits
from tests.serving.helpers import FILMS, Served, as_rows, ask, bits, film_tensors, repeated, tensor

ROW = as_rows(FILMS)[0]


def test_limits(film_run):
    with Served(film_run, listens=False, max_request_bytes=4096, max_rows=10) as served:
        small = {"columns": FILMS}
        assert served.predict(small).status == 200
        assert served.ask("POST", "/v1/predict", small, chunks=5, length=False).status == 200
        large = json.dumps(small).encode() + b" " * 4096
        for options in ({}, {"length": False, "chunks": 9}):
            answer = served.ask("POST", "/v1/predict", large, **options)
            assert (answer.status, answer.headers["connection"]) == (413, "close")
            assert "4,096 bytes" in answer.error
        rows = repeated(FILMS, 11)
        assert "more than 10 rows" in served.infer({"inputs": [tensor("age", "FP64", [1.0] * 11)]}).error
        assert served.predict({"rows": [{}] * 11}).status == 413
        assert served.predict({"columns": {name: [] for name in rows}}).json["predictions"] == []
        for headers in ({"Content-Length": "x"}, {"Content-Length": "9" * 40}):
            assert served.ask("POST", "/v1/predict", small, headers).status in (400, 413)
        for headers in ({"Content-Type": "text/plain"}, {"Content-Encoding": "br"}):
            answer = served.ask("POST", "/v1/predict", small, headers)
            assert (answer.status, answer.headers["connection"]) == (415, "close")
        assert served.ask("POST", "/v1/predict", small, {"Content-Type": None}).status == 200


def test_limits_of_values(film_run, monkeypatch):
    monkeypatch.setattr(refused, "_LEAST", 1)
    monkeypatch.setattr(columns, "_MOST_ROW_VALUES", 40)
    monkeypatch.setattr("hostdev.ext.serving.app.PIECE_BYTES", 100)  # larger bodies are counted before they are parsed
    with Served(film_run, listens=False, max_rows=2) as served:
        for history, message in (
            (["m1"] * 41, "row 1, column 'history' has 41 values, more than 40"),
            ("m1 " * 41, "row 1, column 'history' has 42 values, more than 40"),
        ):
            answer = served.predict({"rows": [{**ROW, "history": history}]})
            assert answer.status == 413 and message in answer.error
        for bag in (["m1"] * 33, " ".join(["m1"] * 33)):
            answer = served.predict({"rows": [{**ROW, "history": bag}] * 2})
            assert answer.status == 413 and "the request has 70 values in lists, more than 64" in answer.error
        answer = served.infer({"inputs": [tensor("history", "BYTES", [], [2, 33])]})
        assert answer.status == 413 and "input 'history' has 66 values" in answer.error
        answer = served.predict({"rows": [{**ROW, "other": [{}] * 40}]})
        assert answer.status == 413 and "44 JSON objects and lists, more than 32" in answer.error
        assert served.predict({"rows": [{**ROW, "history": ["m1"] * 30, "other": [{}] * 20}]}).status == 200


def test_vectors_have_as_many_values_as_the_model_demands(typed_run, typed, monkeypatch):
    monkeypatch.setattr(refused, "_LEAST", 0)
    monkeypatch.setattr(columns, "_MOST_ROW_VALUES", 2)
    rows = typed.select(["shop", "price", "is_new", "emb"]).slice(0, 2).to_pydict() | {"tags": [[], []]}
    with Served(typed_run, listens=False, max_rows=2) as served:
        assert served.predict({"columns": rows}).status == 200


def test_large_bodies_one_after_the_other(film_run, monkeypatch):
    """Each is parsed in its turn, in small pieces, and waits while the values of others need too much memory."""
    active, most, pieces = [], [], []
    parse, load = app.parse_json, json_input._load

    def parse_slowly(*arguments, **options):
        active.append(None)
        most.append(len(active))
        time.sleep(0.02)  # long enough for the other requests to arrive
        found = parse(*arguments, **options)
        active.pop()
        return found

    def load_noted(piece, *rest):
        pieces.append(len(piece))
        return load(piece, *rest)

    monkeypatch.setattr(app, "parse_json", parse_slowly)
    monkeypatch.setattr(json_input, "_load", load_noted)
    with Served(film_run, listens=False) as served:
        columns = repeated(FILMS, 4000)
        expected = served.predictor(columns)

        async def all_at_once():
            wanted = [ask(served.app, "POST", "/v1/predict", {"rows": as_rows(columns)}) for _ in range(4)]
            return await asyncio.gather(*wanted)

        for answer in asyncio.run(all_at_once()):
            assert bits(answer.json["predictions"]) == bits(expected)
    assert most == [1] * 4 and len(pieces) > 4 * 4 and max(pieces) <= json_input.PIECE_BYTES + 2


def test_memory_of_parsed_values():
    async def run():
        reader = BodyReader(Limits(1000, 10, 1.0))
        with reader.holding() as first:
            await first.reserve_parsed(10**9)  # nothing else is in progress
            with reader.holding() as second:
                waiting = asyncio.ensure_future(second.reserve_parsed(1))
                await asyncio.sleep(0)
                assert not waiting.done()
                waiting.cancel()
        with reader.holding() as first, reader.holding() as second:
            await asyncio.wait_for(first.reserve_parsed(4000), 10)
            await asyncio.wait_for(second.reserve_parsed(4000), 10)
            with reader.holding() as third:
                waiting = asyncio.ensure_future(third.reserve_parsed(1))
                await asyncio.sleep(0)
                assert not waiting.done()
                with reader.holding():
                    pass  # something else has ended
                await asyncio.sleep(0)
                assert not waiting.done()
                waiting.cancel()

    asyncio.run(run())


def test_compressed_bodies(film_server, film_run):
    content = json.dumps({"columns": FILMS}).encode()
    plain = film_server.predict(content)
    for encoding, squeezed in (("gzip", gzip.compress(content)), ("Deflate", zlib.compress(content))):
        answer = film_server.ask("POST", "/v1/predict", squeezed, {"Content-Encoding": encoding})
        assert (answer.status, answer.body) == (200, plain.body)
        for wrong, message in (
            (squeezed[:-9], "the body ends within"),
            (squeezed + b"x", "the body has 1 bytes after"),
            (squeezed * 2, "bytes after"),
            (content, "the body is not in"),
            (b"", "the body ends within"),
        ):
            answer = film_server.ask("POST", "/v1/predict", wrong, {"Content-Encoding": encoding})
            assert answer.status == 400 and message in answer.error
    with Served(film_run, listens=False, max_request_bytes=4096) as served:
        answer = served.ask("POST", "/v1/predict", gzip.compress(bytes(1 << 20)), {"Content-Encoding": "gzip"})
        assert answer.status == 413 and "4,096 bytes" in answer.error


def test_timeouts(film_server, monkeypatch):
    """A request's timeout is in microseconds; what is not answered by then is refused."""
    content = {"inputs": film_tensors(), "parameters": {"timeout": 60_000_000, "priority": 1}}
    assert film_server.infer(content).status == 200

    async def never(*arguments):
        await asyncio.sleep(60)

    monkeypatch.setattr(film_server.serving.gatherer, "predict", never)
    answer = film_server.infer({**content, "parameters": {"timeout": 1000}})
    assert answer.status == 503 and "timeout of 0.001 s" in answer.error


def test_hosts(film_run):
    """Without a token, a web page must not reach a server of this machine by a name that it points there."""
    right = [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:80",
        "[::1]:8000",
        "[::1]",
        "10.1.2.3",
    ]
    with Served(film_run, listens=False, local_name="box") as served:
        for host in [*right, "box", "Box:8000", None]:
            assert served.ask("GET", "/v2", headers={"Host": host}).status == 200, host
        for host in (
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "[x]",
        ):
            answer = served.ask("GET", "/v2", headers={"Host": host})
            assert answer.status == 403 and "--host" in answer.error, host
            assert served.ask("POST", "/v1/predict", {"columns": FILMS}, {"Host": host}).status == 403
    with Served(film_run, listens=False) as served:
        assert served.ask("GET", "/v2", headers={"Host": "evil.example"}).status == 200


def test_a_token(film_run, tmp_path):
    (tmp_path / "token").write_text("s3cret-token\n")
    with Served(film_run, listens=False, token_file=tmp_path / "token") as served:
        for path in ("/v2", "/metrics", "/", "/openapi.json", "/v2/models/deepfm/ready", "/nowhere"):
            answer = served.ask("GET", path)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        for wrong in ("s3cret-token", "Bearer s3cret-toke", "Bearer ", "Basic s3cret-token", "Bearer s3cret-token2"):
            assert served.ask("GET", "/v2", headers={"Authorization": wrong}).status == 401
        assert served.ask("GET", "/v2", headers={"Authorization": "bearer s3cret-token"}).status == 200
        assert served.ask("GET", "/v2/health/live").status == 200
        assert served.ask("GET", "/v2/health/ready").status == 200
        assert "s3cret" not in repr(vars(served.serving)) + repr(served.settings)
    for content in ("", "two words", "\x80"):
        (tmp_path / "token").write_text(content)
        with pytest.raises(hostdev.errors.UserError, match="must have one token"):
            Served(film_run, token_file=tmp_path / "token").__enter__()
