import pytest

from hostdev import LazyAdam, RowWiseAdagrad, UserError
from hostdev.core import memory


def group(folder, limit, used, cache, *, v1=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    prefix = "total_" if v1 else ""
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cache - 1}\n{prefix}active_file 1\n")


@pytest.mark.parametrize("v1", [False, True])
def test_a_containers_limit_counts_without_its_page_cache(tmp_path, monkeypatch, v1):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    whole = memory.available_bytes()
    group(tmp_path / "memory" if v1 else tmp_path, 10_000, 9_000, 8_000, v1=v1)
    assert memory.available_bytes() == 10_000 - 1_000 < whole
    group(tmp_path / "memory" if v1 else tmp_path, "max", 9_000, 8_000, v1=v1)
    assert memory.available_bytes() > 10_000


def test_what_a_cache_may_take():
    assert memory.cache_room(10 << 30) == 9 << 30
    assert memory.cache_room(1 << 30) == (1 << 30) - (256 << 20)
    assert memory.cache_room(10 << 30, beside=2 << 30) == 7 << 30
    assert memory.cache_room(100) == 0


def test_what_the_dense_layers_need():
    """Weights, gradients and Adam's moments; the input thrice, and each layer's output, activation and gradients."""
    parameters = (6 * 5 + 5) + (5 * 2 + 2) + (2 * 1 + 1)
    assert memory.dense_bytes(10, 6, (5, 2)) == 16 * parameters + 4 * 10 * (3 * 6 + 4 * (5 + 2))


def test_the_refusal_gives_the_sum():
    assert memory.require_table("t", 10, 4, LazyAdam(), 480, "host") == 480
    with pytest.raises(UserError, match=r"table 't' needs 10 rows x 4 x \(1 \+ 2 slots\) x 4 = 480 bytes .* 479 bytes"):
        memory.require_table("t", 10, 4, LazyAdam(), 479, "host")
    assert [memory.gib(n) for n in (12, 2048, 3 << 20, 5 << 30)] == ["12 bytes", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
    with pytest.raises(UserError, match=r"10 rows x 4 x \(1 \+ 0 slots\) x 4 \+ 10 rows x 1 x 4 = 200 bytes"):
        memory.require_table("t", 10, 4, RowWiseAdagrad(), 199, "host")
