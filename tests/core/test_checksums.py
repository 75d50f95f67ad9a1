"""Reading with a checksum."""

import io
import json
import os
import threading
from hashlib import sha256

import pytest

from hostdev.core import checksums
from hostdev.core.errors import StoppedError


def test_a_stream_is_hashed_copied_and_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "_AT_ONCE", 8)
    for size in (0, 1, 8, 9, 100):
        content = os.urandom(size)
        (tmp_path / "file").write_bytes(content)
        assert checksums.checksum(tmp_path / "file") == sha256(content).hexdigest()
        for most in (None, 0, 3, 8, 1000):
            out = io.BytesIO()
            assert checksums.hash_stream(io.BytesIO(content), out=out, most=most) == sha256(content[:most]).hexdigest()
            assert out.getvalue() == content[:most]
        assert checksums.hash_stream(io.BytesIO(content), digest=checksums.NoDigest) == ""
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        checksums.hash_stream(io.BytesIO(b"content"), stop=stop)


def test_json_with_a_checksum():
    whole = {"a": [1, None]}
    with_checksum = json.dumps({**whole, "sha256": checksums.json_checksum(whole)}).encode()
    assert checksums.is_whole_json(with_checksum) and checksums.is_whole_json(with_checksum, without=True)
    assert not checksums.is_whole_json(b'{"a": 1}') and checksums.is_whole_json(b'{"a": 1}', without=True)
    for broken in (b'{"a": 1, "sha256": null}', b'{"sha256": "0"}', b"[]", b'["sha256"]', b"3", b"{", b"\xff"):
        assert not checksums.is_whole_json(broken) and not checksums.is_whole_json(broken, without=True)
