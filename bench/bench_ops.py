"""Claim: host kernels run near the memory's bandwidth, and their cost per row hardly depends on the table's size.

The benchmark times every op at several table sizes: milliseconds, ns per row, GB/s, and the share of the copy bandwidth
of the same run. It compares lookups and updates of random rows with weights and optimizer state in float32, bfloat16
and 8 bits, and optimizers whose steps change every row beside their lazy forms. Ops take turns, and the results are
medians. The benchmark writes JSON and a picture of two plots to bench/results/.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np

import hostdev
from bench.record import get_versions, make_parser, record
from bench.workload import draw_gradients, draw_ids
from hostdev.core.initializers import Normal
from hostdev.core.memory import available_bytes, table_bytes
from hostdev.core.table_primitives import UPDATES as PRIMITIVES
from hostdev.core.table_primitives import EmbeddingLookup
from hostdev.kernels.arrays import aligned_empty
from hostdev.kernels.bags import FeatureOccurrences, sum_uses
from hostdev.kernels.pool import host_threads, parallel_for

mpl.use("Agg")
import matplotlib.pyplot as plt

SIZES = [(184_965, 80), (5_000_000, 80), (500_000, 16), (50_000_000, 16)]
UPDATES = {
    "LazyAdam": hostdev.LazyAdam(),
    "FTRL": hostdev.FTRL(),
    "Adagrad": hostdev.Adagrad(),
    "RowWiseAdagrad": hostdev.RowWiseAdagrad(),
    "SGD": hostdev.SGD(),
}
EVERY_ROW = {
    "LazyAdam": hostdev.LazyAdam(),
    "Adam": hostdev.Adam(),
    "Adagrad": hostdev.Adagrad(),
    "Adagrad with weight decay": hostdev.Adagrad(weight_decay=0.01),
}
DTYPE_ROWS, DTYPE_USED = 2_000_000, 100_000
STORED = (("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "8bit"), ("bf16", "8bit"))
Op = tuple[Callable[[], object], int, int]  # the function, the number of items, the bytes moved


def make_ops(rows: int, dim: int) -> dict[str, Op]:
    """Return the ops at one table size."""
    ids = draw_ids(rows).astype(np.int32)
    found, inverse = hostdev.ops.unique(ids)
    n, u = len(ids), len(found)
    grads = aligned_empty((n, dim))
    grads[:] = draw_gradients(n, dim)
    sums, out = aligned_empty((u, dim)), aligned_empty((n, dim))
    sum_uses([FeatureOccurrences(inverse)], [grads], sums)
    deep = hostdev.HostTable(rows, dim, hostdev.LazyAdam(), name="deep")
    wide = hostdev.HostTable(rows, 1, hostdev.FTRL(), name="wide")
    grads1, sums1, block = grads[:, :1].copy(), sums[:, :1].copy(), deep.storage.block

    def host_side() -> None:
        rows_used, _ = hostdev.ops.unique(ids)
        deep.lookup(rows_used, out=out[: len(rows_used)])
        wide.lookup(rows_used)
        wide.update(rows_used, sums1)
        deep.update(rows_used, sums)

    row = dim * 4
    return {
        "unique": (lambda: hostdev.ops.unique(ids), n, 0),
        "lookup, unique rows": (lambda: deep.lookup(found, out=out[:u]), u, 2 * u * row),
        "lookup, all": (lambda: deep.lookup(ids, out=out), n, n * row + u * row),
        "gradient sum": (lambda: sum_uses([FeatureOccurrences(inverse)], [grads], sums), n, n * row + u * row),
        "LazyAdam, unique rows": (lambda: deep.update(found, sums), u, 7 * u * row),
        "LazyAdam, all": (lambda: deep.apply(ids, grads), n, n * row + 6 * u * row),
        "FTRL D = 1, unique rows": (lambda: wide.update(found, sums1), u, 7 * u * 4),
        "FTRL D = 1, all": (lambda: wide.apply(ids, grads1), n, n * 4 + 6 * u * 4),
        "host side of a step": (host_side, u, 9 * u * (row + 4)),
        "initial values": (
            lambda: Normal().fill(block[:100_000], 0, "x", np.zeros(2, np.float32)),
            100_000,
            min(rows, 100_000) * 3 * row,
        ),
    }


def other_updates(rows: int, dim: int) -> dict[str, Op]:
    """Return an update of unique rows for every optimizer, each on its own table."""
    found, _ = hostdev.ops.unique(draw_ids(rows).astype(np.int32))
    sums = aligned_empty((len(found), dim))
    sums[:] = draw_gradients(len(found), dim)
    ops: dict[str, Op] = {}
    for name, optimizer in UPDATES.items():
        table = hostdev.HostTable(rows, dim, optimizer, name=name)
        moved = (3 + 2 * len(optimizer.slots)) * dim * 4 + 8 * len(optimizer.row_slots)
        ops[f"{name} update"] = (lambda table=table: table.update(found, sums), len(found), len(found) * moved)
    return ops


def stored_as(dtype: str, slots: str, dim: int) -> dict[str, Op]:
    """Return lookups and updates of random rows with weights and slots in these dtypes."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(DTYPE_ROWS)[:DTYPE_USED].astype(np.int32)
    grads, out = aligned_empty((DTYPE_USED, dim)), aligned_empty((DTYPE_USED, dim))
    grads[:] = draw_gradients(DTYPE_USED, dim)
    ops: dict[str, Op] = {}
    for name in ("LazyAdam",) if slots != "fp32" else ("LazyAdam", "RowWiseAdagrad"):
        table = hostdev.HostTable(DTYPE_ROWS, dim, UPDATES[name], name=name, dtype=dtype, slots=slots)
        row = EmbeddingLookup.row_bytes(table), PRIMITIVES[UPDATES[name].primitive].row_bytes(table)
        title = f"{name} {dtype}/{slots}"
        ops[f"{title} lookup"] = (lambda t=table: t.lookup(ids, out=out), len(ids), len(ids) * row[0])
        ops[f"{title} update"] = (lambda t=table: t.update(ids, grads), len(ids), len(ids) * row[1])
    return ops


def compare_dtypes(rounds: int) -> dict[str, list[dict]]:
    """Measure tables of all dtypes in turn; print and return the results."""
    results = {}
    for dim in (16, 80):
        title = f"V = {DTYPE_ROWS:,} D = {dim}"
        print(f"\n{DTYPE_USED:,} random rows, {title}: dtypes of weights/slots\n")
        ops = {"copy": copy_op()}
        for dtypes in STORED:
            ops |= stored_as(*dtypes, dim)
        results[title] = report_ops(ops, ms := measure(ops, rounds))
        for kind in [op.removesuffix(" update") for op in ops if op.endswith(" update")]:
            plain = f"{kind.split()[0]} fp32/fp32"
            ratios = {op: ms[f"{plain} {op}"] / ms[f"{kind} {op}"] for op in ("lookup", "update")}
            print(f"{kind}: {ratios['lookup']:.2f} times the lookups and {ratios['update']:.2f} the updates of {plain}")
    return results


def compare_every_row(rounds: int) -> dict[str, dict[str, float]]:
    """Measure optimizers whose steps change every row beside their lazy forms; print and return the ratios.

    Rows have missed steps since their last update, as random rows of a large table have.
    """
    results: dict[str, dict[str, float]] = {}
    for dim in (16, 80):
        rng, tables = np.random.default_rng(0), {}
        for title, optimizer in EVERY_ROW.items():
            tables[title] = hostdev.HostTable(DTYPE_ROWS, dim, optimizer, name=title.replace(" ", "-"))
        grads, out = aligned_empty((DTYPE_USED, dim)), aligned_empty((DTYPE_USED, dim))
        grads[:] = draw_gradients(DTYPE_USED, dim)
        times: dict[str, list[float]] = {}
        for _ in range(rounds + 2):
            ids = rng.permutation(DTYPE_ROWS)[:DTYPE_USED].astype(np.int32)
            for title, table in tables.items():
                start = time.perf_counter()
                table.lookup(ids, out=out)
                middle = time.perf_counter()
                table.update(ids, grads)
                for op, seconds in (("lookup", middle - start), ("update", time.perf_counter() - middle)):
                    times.setdefault(f"{title} {op}", []).append(seconds * 1e9 / DTYPE_USED)
                for _ in range(50):  # steps of other rows
                    table.begin_step()
        ns = {name: statistics.median(values[2:]) for name, values in times.items()}
        print(f"\n{DTYPE_USED:,} random rows, V = {DTYPE_ROWS:,} D = {dim}: steps that change every row\n")
        found = {}
        for lazy, every in (("LazyAdam", "Adam"), ("Adagrad", "Adagrad with weight decay")):
            for op in ("lookup", "update"):
                found[f"{every} {op}"] = ns[f"{every} {op}"] / ns[f"{lazy} {op}"]
                print(
                    f"{every} {op}: {ns[f'{every} {op}']:.0f} ns a row, {found[f'{every} {op}']:.2f} times the "
                    f"{ns[f'{lazy} {op}']:.0f} of {lazy}"
                )
        results[f"D = {dim}"] = {name: round(ratio, 3) for name, ratio in found.items()}
    return results


def copy_op() -> Op:
    """Return the reference, a copy of 200 MB by all threads."""
    source, target = aligned_empty((50_000_000,)), aligned_empty((50_000_000,))
    source[:] = target[:] = 1

    def copy_range(start: int, stop: int) -> None:
        target[start:stop] = source[start:stop]

    return (lambda: parallel_for(copy_range, len(source), grain=1 << 20), len(source), 2 * source.nbytes)


def measure(ops: dict[str, Op], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of every op."""
    times: dict[str, list[float]] = {name: [] for name in ops}
    for turn in range(rounds + 2):
        for name, (call, _, _) in ops.items():
            start = time.perf_counter()
            call()
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def report_ops(ops: dict[str, Op], ms: dict[str, float]) -> list[dict]:
    """Print and return a row per op."""
    copy = ops["copy"][2] / ms["copy"] / 1e6
    rows = []
    print(f"{'op':<28}{'ms':>10}{'ns/row':>10}{'GB/s':>8}{'of copy':>9}")
    for name, (_, items, moved) in ops.items():
        speed = moved / ms[name] / 1e6
        rows.append(
            {
                "op": name,
                "ms": round(ms[name], 4),
                "ns_per_row": round(ms[name] * 1e6 / items, 2),
                "gb_per_s": round(speed, 2),
                "of_copy": round(speed / copy, 3),
            }
        )
        share = f"{speed:>8.1f}{speed / copy:>9.0%}" if moved else ""
        print(f"{name:<28}{ms[name]:>10.3f}{ms[name] * 1e6 / items:>10.1f}{share}")
    return rows


def plot(results: dict[str, list[dict]], path: Path) -> None:
    """Draw each op's share of the copy bandwidth, and its cost per row against the table's size."""
    figure, axes = plt.subplots(1, 2, figsize=(17, 6), width_ratios=[3, 2])
    ops = [row["op"] for row in next(iter(results.values())) if row["gb_per_s"] and row["op"] != "copy"]
    for number, (size, rows) in enumerate(results.items()):
        shares = {row["op"]: row["of_copy"] * 100 for row in rows}
        places = np.arange(len(ops)) + 0.8 / len(results) * (number - (len(results) - 1) / 2)
        axes[0].barh(places, [shares.get(op, 0) for op in ops], 0.8 / len(results), label=size)
    axes[0].axvline(100, color="black", linewidth=0.8)
    axes[0].set_yticks(np.arange(len(ops)), ops)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("bytes moved, % of the copy bandwidth in the same run (black: the limit of DRAM)")
    axes[0].legend(loc="lower right")
    for op in ("host side of a step", "LazyAdam, unique rows", "lookup, unique rows", "unique"):
        points = [
            (int(size.split()[2].replace(",", "")), row["ns_per_row"], size.split()[-1])
            for size, rows in results.items()
            for row in rows
            if row["op"] == op
        ]
        for dim, style in (("80", "o-"), ("16", "s--")):
            chosen = sorted(point[:2] for point in points if point[2] == dim)
            if chosen:
                axes[1].plot(*zip(*chosen, strict=True), style, label=f"{op}, D = {dim}")
    axes[1].set_xscale("log")
    axes[1].set_ylim(bottom=0)
    axes[1].set_xlabel("rows of the table, V")
    axes[1].set_ylabel("ns per row")
    axes[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.suptitle(f"Host kernels, {host_threads()} threads, 624,000 Zipf({1.1}) ids")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, record and draw."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", action="store_true", help="only compare dtypes of tables; record nothing")
    parser.add_argument("--every-row", action="store_true", help="only compare steps that change every row, as above")
    arguments = parser.parse_args()
    if arguments.dtypes or arguments.every_row:
        (compare_dtypes if arguments.dtypes else compare_every_row)(arguments.rounds)
        return
    results: dict[str, list[dict]] = {}
    for rows, dim in SIZES:
        needed = table_bytes(rows, dim, 2) + table_bytes(rows, 1, 2) + (2 << 30)
        title = f"V = {rows:,} D = {dim}"
        if needed > available_bytes():
            print(f"\n{title}: skipped, it needs {needed / 1e9:.0f} GB")
            continue
        print(f"\n{title}\n")
        ops = {"copy": copy_op(), **make_ops(rows, dim)}
        results[title] = report_ops(ops, measure(ops, arguments.rounds))
    print("\nupdates of unique rows, V = 184,965 D = 80\n")
    ops = {"copy": copy_op(), **other_updates(184_965, 80)}
    updates = report_ops(ops, measure(ops, arguments.rounds))
    cost = {title: {row["op"]: row["ns_per_row"] for row in rows} for title, rows in results.items()}
    small, large = "V = 500,000 D = 16", "V = 50,000,000 D = 16"
    if large in cost:
        growth = cost[large]["host side of a step"] / cost[small]["host side of a step"]
        print(f"\nhost side of a step per unique row at V = 50,000,000 against V = 500,000, D = 16: {growth:.2f}x")
    versions = get_versions("numba", "numpy")
    found = {"results": results, "updates": updates, "dtypes": compare_dtypes(arguments.rounds)}
    found["every_row"] = compare_every_row(arguments.rounds)
    path = record("ops", {"threads": host_threads(), "versions": versions, **found}, arguments.out)
    plot(results, path.with_suffix(".png"))
