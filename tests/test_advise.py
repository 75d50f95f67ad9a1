"""python -m hostdev.advise: the table, the picture, the advice, wrong options."""

import functools
import itertools
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from hostdev import FTRL, SGD, LazyAdam, UserError
from hostdev.cache.plan import Statistics
from hostdev.cache.prices import Costs
from hostdev.core import pictures
from hostdev.core.memory import parse_bytes
from hostdev.core.tables import Capabilities
from hostdev.data import manifest
from hostdev.data.shards import ShardReader
from hostdev.device import backend, clock
from hostdev.device.clock import Bus
from hostdev.ext.advice import advise
from hostdev.ext.advice import cli as command
from hostdev.ext.advice import curves as cache_advice
from hostdev.ext.advice.curves import CachePoint, TableGroup, recommend
from hostdev.ext.advice.simulation import Simulated
from hostdev.models.wide_deep.network import WideDeep
from hostdev.train.ending import get_host_costs
from tests import forks
from tests.conftest import ROOT


@pytest.fixture
def advised(in_process, monkeypatch):
    """The command, on a machine whose host takes so long for rows that no plan's time matters."""
    monkeypatch.setattr(cache_advice, "host_costs", lambda *arguments: Costs(1e6, 5e5, 5e5))
    return functools.partial(in_process, command)


def test_the_table_the_picture_and_the_advice(advised, small_data, tmp_path):
    code, out, err = advised("--data", small_data, "--batch-size", 200, "--emb-dim", 16)
    assert (code, err) == (0, "")
    rows = manifest.read(small_data).vocabulary_size
    lines = re.findall(r"^ +([\d,]+) +[\d.]+ \w+((?: +[\d.]+%?){5})(?:  <- recommended: \w+)?$", out, re.M)
    found = [[float(cell.rstrip("%")) for cell in line[1].split()] for line in lines]
    moved, host, rates = found[: len(found) // 3], found[len(found) // 3 : -len(found) // 3], found[-len(found) // 3 :]
    assert len(moved) == len(host) == len(rates)
    sizes = [int(line[0].replace(",", "")) for line in lines[: len(moved)]]
    assert sizes == sorted(sizes)
    assert sizes[-1] == rows
    for lookahead, *others, least in moved:
        assert least <= lookahead + 0.01
        assert lookahead <= min(others) + 0.02
    for *policies, most in rates:
        assert max(policies) <= most + 0.01
    for *policies, least in host:
        assert least < min(policies)  # without a plan
    for before, after in itertools.pairwise(rates):
        assert after[-1] >= before[-1]
    for table in (moved, host):
        for before, after in itertools.pairwise(table):
            assert after[-1] <= before[-1]
    rates = r"\d+ ns of host time per bypassing row, \d+ per admitted row, \d+ per evicted row"
    assert re.search(rf"^rates    {rates}; [\d.]+ GB/s for copies in host memory, as there is no bus$", out, re.M)
    assert out.count("<- recommended: ") == 3
    gains = r"[\d.]+ MiB per step instead of [\d.]+, [\d.]+ ms of host time instead of [\d.]+, [\d.]+% of lookups hit"
    assert re.search(rf"^advice   --cache-rows \d+(?: --cache-policy \w+)?: {gains}; ", out, re.M)
    assert (tmp_path / "advise.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "advise.png").read_bytes()) > 20_000


def test_what_does_not_fit_is_not_recommended(advised, small_data):
    code, out, _ = advised("--data", small_data, "--batch-size", 200, "--memory", "20KiB", "--out", "x.png")
    assert code == 0
    assert "does not fit" in out
    recommended = re.search(r"--cache-rows (\d+)", out)
    assert int(recommended[1]) * 4 * (3 * 80 + 3) <= 20 * 1024
    assert "a cache cannot help on this CPU" in out
    code, out, _ = advised("--data", small_data, "--batch-size", 200, "--memory", "1", "--out", "y.png")
    assert "no cache: no size that fits makes a step shorter" in out


def test_an_accelerators_memory_is_not_all_for_the_cache(advised, small_data, monkeypatch):
    """What the dense layers and the batches need comes off what is free; on the CPU it is as it was."""
    free = 2 << 30
    monkeypatch.setattr(backend, "free_bytes", lambda device: free)
    options = "--data", small_data, "--batch-size", 200, "--emb-dim", 16
    _, out, _ = advised(*options)
    assert re.search(
        r"device   2.0 GiB for the cache on cpu, and about [\d.]+ \w+ for the rows of in-flight batches$", out, re.M
    )
    monkeypatch.setattr(backend, "is_accelerator", lambda device: True)
    _, out, _ = advised(*options, "--out", "other.png")
    rest = "the dense layers, their activations and the rows of in-flight batches"
    found = re.search(rf"device   ([\d.]+) GiB for the cache on cpu, and about ([\d.]+) MiB for {rest}", out)
    assert float(found[1]) == pytest.approx(2 * 0.875 - float(found[2]) / 1024, abs=0.06)
    assert float(found[2]) > 20


def test_bytes_and_times_of_a_step():
    wide_deep = TableGroup(("wide", "deep"), 100, ((1, FTRL()), (80, LazyAdam())), Costs(400, 100, 50))
    users = TableGroup(("users",), 50, ((10, SGD()),), Costs(30, 20, 10))
    assert (wide_deep.passing, wide_deep.whole) == (4 * 81, 4 * (3 * 80 + 3))
    caches = [
        Simulated(Statistics(batches=2, unique=100, unique_hits=60, admitted=10, evicted=4), planning=6e-6),
        Simulated(Statistics(batches=2, unique=8, unique_hits=2, admitted=0, evicted=0)),
    ]
    both_ways = Bus(down=2e9, up=1e9)
    alone = CachePoint([10], caches[:1], [wide_deep], both_ways)
    assert alone.bytes == ((30 * 4 * 81 + 10 * 4 * 243) / 2, (30 * 4 * 81 + 4 * 4 * 243) / 2)
    assert alone.moved == sum(alone.bytes)
    assert (alone.without, alone.nbytes) == (2 * 4 * 81 * 50, 10 * wide_deep.whole)
    assert alone.host == pytest.approx((30 * 400 + 10 * 100 + 4 * 50) / 2 * 1e-9 + 3e-6)
    assert alone.host_without == pytest.approx(50 * 400e-9)
    assert alone.seconds == pytest.approx(alone.host + alone.bytes[0] / 2e9 + alone.bytes[1] / 1e9)
    assert alone.seconds_without == pytest.approx(50 * (400e-9 + 4 * 81 / 2e9 + 4 * 81 / 1e9))
    both = CachePoint([10, 5], caches, [wide_deep, users], both_ways)
    assert both.moved == alone.moved + 2 * 6 * 40 / 2
    assert both.host == pytest.approx(alone.host + 6 * 30e-9 / 2)
    assert (both.rows, both.nbytes, both.unique) == (15, alone.nbytes + 5 * 40, 54)
    assert both.total.unique_hits == 62
    best = CachePoint([10], [Simulated(caches[0].statistics, least=(500.0, 900.0))], [wide_deep], both_ways)
    assert (best.moved, best.host) == (250, 450e-9)


def test_a_cache_is_recommended_by_the_time_that_it_saves():
    """Not by its bytes alone: a plan that takes longer than it saves is worth nothing, nor is a slow host's work."""
    group = TableGroup(("t",), 1000, ((8, SGD()),), Costs(100, 100, 100))

    def point(size, hits, planning):
        return CachePoint([size], [Simulated(Statistics(batches=1, unique=1000, unique_hits=hits), planning)], [group])

    quick = {"lookahead": [point(10, 100, 1e-6), point(100, 900, 1e-6), point(500, 904, 1e-6)]}
    assert recommend(quick, 10**9) == ("lookahead", quick["lookahead"][1])  # the third saves hardly more
    assert recommend(quick, 10 * 32) == ("lookahead", quick["lookahead"][0])
    assert recommend(quick, 0) is None
    slow = {"lookahead": [point(100, 900, 1e-3)], "static": [point(100, 500, 1e-6)]}
    assert recommend(slow, 10**9) == ("static", slow["static"][0])
    assert recommend({"lookahead": slow["lookahead"]}, 10**9) is None


def test_what_rows_take_the_host_is_measured():
    """By the kernels, on a table like the model's; and in a run by its own ops."""
    tables = ((16, LazyAdam()), (1, FTRL()))
    batches = [np.arange(start, start + 3000, dtype=np.int32) for start in (0, 50_000)]
    for rows in (100_000, 2000):  # fewer than the ids say: they are taken by what is left over
        costs = cache_advice.host_costs(rows, tables, batches)
        assert min(costs) > 0
    assert cache_advice.host_costs(10, tables, [np.empty(0, np.int32)]) == (0, 0, 0)

    class Table:
        name, dim, optimizer, primitive_target = "t", 16, LazyAdam(), "CPU"
        dtype = slots_dtype = "fp32"
        fetched_width, capabilities = 16, Capabilities()

    lookup, update = {"total_us": 6.0, "bytes": 2 * 64 * 30}, {"total_us": 14.0, "bytes": 7 * 64 * 20}
    ops = {
        "EmbeddingLookup": {"total_us": 1e9, "bytes": 1, "by_scope": {"t": lookup, "u": {}}},
        "FusedSparseLazyAdam": update,
    }
    passed, admitted, evicted = get_host_costs(ops, [Table()])
    assert passed == pytest.approx(200 + 700)
    assert admitted == evicted == pytest.approx(3 * 200)
    ops["CacheAdmit"] = {"total_us": 3.0, "bytes": 6 * 64 * 10}
    assert get_host_costs(ops, [Table()]) == pytest.approx((200 + 700, 300, 3 * 200))
    assert get_host_costs({"EmbeddingLookup": lookup}, [Table()]) is None
    assert get_host_costs({}, [Table()]) is None


def test_the_rate_of_the_bus(device):
    found = clock.measure(device, nbytes=1 << 20, rounds=3)
    assert min(found) > 0


def test_several_groups(advised, small_data):
    """A share of each table, the same for all: what --cache-rows takes."""
    code, out, _ = advised("--data", small_data, "--batch-size", 200, "--model", "tests.own_models:ThreeTables")
    assert code == 0
    assert re.search(r"^advice   --cache-rows [\d.]+%|^advice   no cache", out, re.M)


def test_wrong_options(advised, small_data, tmp_path):
    (tmp_path / "old.png").write_text("mine")
    for options, message in [
        (["--out", "old.png"], "--out old.png exists"),
        (["--out", "x.foo"], "--out x.foo must be a .png, .pdf or .svg file in a folder that exists"),
        (["--out", "no/x.png"], "--out no/x.png must be"),
        (["--memory", "lots"], "a size must be a number of bytes, or a number with KiB, MiB, GiB or TiB, not 'lots'"),
        (["--cache-window", 33], "--cache-window must be in 0..32, not 33"),
        (["--batch-size", 10**6], "--batch-size 1000000 is larger than the"),
        (["--cache-rows", 5], "unrecognized arguments"),
    ]:
        code, _, err = advised("--data", small_data, *options)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1
    assert (tmp_path / "old.png").read_text() == "mine"


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(advised, small_data, monkeypatch):
    def fail(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        patch.setattr(advise, "simulate", None)
        code, _, err = advised("--data", small_data, "--out", "x.png")
    assert (code, err) == (
        2,
        "hostdev.advise: error: --out x.png: Permission denied; choose a file that can be written\n",
    )
    monkeypatch.setattr(Figure, "savefig", fail)
    code, out, err = advised("--data", small_data, "--batch-size", 200, "--out", "x.png")
    assert "lookahead" in out
    assert "--out x.png: Permission denied" in err


def test_passes_are_as_many_as_the_plans_memory_asks_for(small_data, monkeypatch):
    """What caches do is the same, in the same order, and the best that they could do is known."""
    found = manifest.read(small_data)
    model, reader = WideDeep(found.schema, 8, seed=1), ShardReader(small_data, found, "train")
    monkeypatch.setattr(cache_advice, "host_costs", lambda *arguments: Costs(1e6, 5e5, 5e5))
    monkeypatch.setattr(cache_advice, "SHARES", ("5%", "100%"))
    shown, passes = [], []
    for most in (3 << 30, 0):
        monkeypatch.setattr(cache_advice, "_MOST_BYTES", most)
        in_passes = cache_advice._passes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_advice, "_passes", lambda *args, of=in_passes: passes.append(of(*args)) or passes[-1])
            curves = cache_advice.simulate(
                model, small_data, found, reader, 500, seed=1, window=2, bus=Bus(1e10, 1e10), memory=1 << 16
            )
        shown.append({name: [(point.sizes, point.parts) for point in curve] for name, curve in curves.items()})
    assert [len(each) for each in passes] == [1, 12]
    assert list(itertools.chain(*passes[1])) == passes[0][0]
    assert shown[0] == shown[1]
    assert list(shown[0]) == ["lookahead", "lru", "lfu", "static", "optimum"]


def test_a_plan_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr("hostdev.core.memory.available_bytes", lambda: 1 << 20)
    group = TableGroup(("t",), 10_000_000, ((8, SGD()),), unique=100_000)
    with pytest.raises(UserError, match=r"a cache's plan needs [\d.]+ MiB, but 1.0 MiB of host memory are free"):
        cache_advice._passes([group], [[100_000]], 1000, 16, 0)


def curve_of(*misses):
    group = TableGroup(("t",), 1000, ((8, SGD()),))
    sizes = [10 ** (i + 1) for i in range(len(misses))]
    parts = [
        Statistics(batches=2, uses=1000, hits=round(1000 * (1 - miss)), unique=50, unique_hits=20) for miss in misses
    ]
    return [CachePoint([size], [Simulated(part, 1e-3)], [group]) for size, part in zip(sizes, parts, strict=True)]


@pytest.mark.parametrize(
    ("misses", "labels"),
    [
        ((0.31, 0.2, 0.053), ["5%", "10%", "20%"]),
        ((0.5, 0.1, 0.0), ["0%", "10%", "20%", "30%", "40%", "50%"]),  # a logarithmic axis has no zero
        ((0.9, 0.4, 0.02, 0.004), ["0.5%", "1.0%", "2.0%", "5.0%", "10.0%", "20.0%", "50.0%", "100.0%"]),
        ((0.06, 0.05), ["0.0%", "1.0%", "2.0%", "3.0%", "4.0%", "5.0%", "6.0%"]),
    ],
)
def test_the_picture(tmp_path, monkeypatch, misses, labels):
    """The axes' labels do not touch, the bytes' axis begins at 0, and the legend is over no line."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **options: figures.append(figure) or save(figure, *args, **options)
    )
    points = curve_of(*misses)
    advise.draw({"lookahead": points, "optimum": points}, 300, ("lookahead", points[1]), tmp_path / "x.png")
    [figure] = figures
    crossing, hosting, missing = figure.axes
    shown = [label for label in missing.get_yticklabels() if label.get_text()]
    inside = [label for label in shown if missing.get_ylim()[0] <= label.get_position()[1] <= missing.get_ylim()[1]]
    assert [label.get_text() for label in inside] == labels
    assert crossing.get_ylim()[0] == hosting.get_ylim()[0] == 0
    for axes in figure.axes:
        boxes = sorted(
            (label.get_window_extent() for label in axes.get_yticklabels() if label.get_text()), key=lambda box: box.y0
        )
        assert all(below.y1 < above.y0 for below, above in itertools.pairwise(boxes))
    [legend] = figure.legends
    assert legend.get_window_extent().y1 < min(axes.get_tightbbox().y0 for axes in figure.axes)
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == [
        "lookahead",
        "offline optimum (separate for each plot)",
        "no cache",
        "300 bytes of device memory",
        "recommended: 100 rows, lookahead",
    ]


def test_sizes_of_memory():
    sizes = {"16GiB": 16 << 30, "1.5 MiB": 3 << 19, "2KB": 2000, "3g": 3 << 30, "77": 77, "1e3": 1000}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GiB", "-1", "nan", "1 XB", "infGiB", "5GKB", "5 GiB MiB"):
        with pytest.raises(UserError, match="a size must be"):
            parse_bytes(text)


def test_an_earlier_picture_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("advise.png", "advise-2.png", "advise-3.png"):
        assert pictures.new_path("advise") == Path(name)
        (tmp_path / name).write_text("")


@pytest.mark.slow
def test_a_mesh_for_two_processes(tmp_path, small_data):
    """Two processes measure, and the first prints the table."""
    options = ["--data", small_data, "--mesh", 2, "--micro-batches", 4, "--batch-size", 200, "--emb-dim", 4]
    made = forks.run(
        [sys.executable, "-m", "hostdev.advise", *map(str, options), "--device", "cpu"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert made.returncode == 0, made
    first, *lines, last = made.stdout.splitlines()
    assert first.startswith("model    wide_deep: batches of 200 in 4 micro-batches, 2 processes of one thread on cpu")
    assert {"data=2", "pipe=2"} <= {found for line in lines for found in re.findall("  --mesh ([^ ]+)", line)}
    assert last.startswith("chosen: --mesh ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--mesh", 1], "--mesh must be at least 2 processes, not 1"),
        (["--mesh", 2, "--memory", "1GiB"], "--memory cannot be combined with --mesh: it is for caches"),
        (["--mesh", 2, "--shuffle-window", 2], "--shuffle-window has no effect with --mesh"),
        (["--micro-batches", 4], "--micro-batches has no effect without --mesh"),
        (["--mesh", 2, "--plan", "deep.99=colwise"], "--plan deep.99=colwise: no layer has such a name"),
    ],
)
def test_wrong_options_of_a_mesh(advised, small_data, options, says):
    code, _, err = advised("--data", small_data, *options)
    assert code == 2
    assert says in err
