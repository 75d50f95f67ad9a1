"""Fixtures of tables on disk."""

import pytest

from hostdev.kernels import disk_records


@pytest.fixture
def small(monkeypatch):
    """Small chunks and segments, so that few rows fill, free and collect many of them."""
    monkeypatch.setattr(disk_records, "_CHUNK", 1 << 14)
    monkeypatch.setattr("hostdev.host.disk.tier.SEGMENT_BYTES", 1 << 16)
