"""The sections of docs/figures.md below its first table: what each shows of which recorded runs."""

from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any, NamedTuple

Run = dict[str, Any]  # the content of a file of bench/results
KERNELS = ("kernels 184965", "kernels 5000000")


class Section(NamedTuple):
    """A section of the page: its title, one sentence, the runs that it is made from, and the rows of its tables."""

    title: str
    about: str
    runs: tuple[str, ...]
    rows: Callable[..., list[list[str]]]


def format_ratio(value: float) -> str:
    """Return a ratio with as many digits as mean something."""
    return f"{value:.1f}" if value >= 1.95 else f"{value:.2f}"


def format_number(value: float) -> str:
    """Return a figure of any size with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_range(values: list[float]) -> str:
    least, most = format_ratio(min(values)), format_ratio(max(values))
    return least if least == most else f"{least} to {most}"


def _table(run: Run, columns: dict[str, str], rows: dict[str, str]) -> list[list[str]]:
    """Return the named figures of a run whose results are {column: {figure: number}}."""
    cases = [run["results"][key] for key in columns]
    body = [[title, *(format_number(case[key]) for case in cases)] for key, title in rows.items()]
    return [["", *columns.values()], *body]


def _peer_rows(run: Run, steps: Run) -> list[list[str]]:
    names = list(run["results"]["kernels 5000000"]["ratios"])
    parts = [run["results"][part]["ratios"] for part in KERNELS]
    rows = [["ratio", "V = 184,965", "V = 5,000,000"]]
    rows += [
        [name, *(f"{part[name]:.3g}%" if "bandwidth" in name else format_ratio(part[name]) for part in parts)]
        for name in names
    ]
    rows += [[], ["whole step, times of MindSpore's or torch's over ours", "first run", "second run"]]
    turns = [r["results"]["steps 184965"]["ratios"] for r in (run, steps)]
    rows += [[name, *(format_ratio(turn[name]) for turn in turns)] for name in turns[0] if "samples/s" not in name]
    return rows


def _dlrm_rows(run: Run) -> list[list[str]]:
    rows = [["batch, ids of a feature", "depth 0", "depth 2", "single rounds"]]
    for case, ratios in run["ratios"].items():
        zero, two = (ratios[f"torchrec / hostdev, depth {depth}"] for depth in (0, 2))
        batch, ids = case.split()
        rows.append(
            [f"{int(batch):,}, {ids}", format_ratio(median(zero)), format_ratio(median(two)), format_range(zero + two)]
        )
    return rows


def _ctr_rows(*runs: Run) -> list[list[str]]:
    rows = [["beside", "AUC", "AUC of hostdev", "samples a second of hostdev", "times as many"]]
    for run in runs:
        for name, case in run.items():
            if isinstance(case, dict) and "ratios" in case:
                peer = name.split()[0]
                speed = f"{case['samples_per_second']['hostdev']:,.0f}"
                auc = [f"{case['auc'][system]:.4f}" for system in (peer, "hostdev")]
                rows.append([name, *auc, speed, format_ratio(median(case["ratios"]))])
    return rows


def _bag_rows(run: Run) -> list[list[str]]:
    rows = [["D", "ids", "bags of 1", "bags of 10", "bags of 100"]]
    for dim, ids in product(("16", "64", "128"), ("uniform", "Zipf")):
        cases = [run["results"][f"{dim} {size} {ids}"]["ratios"] for size in (1, 10, 100)]
        rows.append([dim, ids, *(format_ratio(median(case)) for case in cases)])
    return rows


def _key_rows(keys: Run, steps: Run) -> list[list[str]]:
    columns = {"1000000": "1 million keys", "20000000": "20 million keys"}
    names = ("found a second, millions: hostdev", "found a second / FBGEMM's", "bytes a key, all in all")
    rows = _table(keys, columns, {name: name for name in names})
    return (
        rows
        + _table(steps, columns, {name: f"step {name}" for name in ("by key / by row", "by key / by row, depth 2")})[1:]
    )


def _disk_rows(*runs: Run) -> list[list[str]]:
    names = ["rows a second", "step / the larger of memory and reads", "rows read / the least", "reads / fio"]
    names += [
        "written / changed",
        "first checkpoint, s",
        "checkpoint 10 steps later, s",
        "lookup of 10,000 rows in it, s",
    ]
    names += ["rows a second / RocksDB's", "rows a second / memmap's"]
    cases = [run["results"] for run in runs]
    titles = ["20 million rows, 13% in memory", "the same, window of 256 batches", "34 million rows, 9% in memory"]
    return [
        ["", *titles],
        *([name, *(format_number(case[name]) if name in case else "" for case in cases)] for name in names),
    ]


def _pipeline_rows(run: Run) -> list[list[str]]:
    rows = [["ids, cache, forwarded", "0.5", "1", "2"]]
    cases: dict[str, list[str]] = {}
    for case in run["simulated"]:
        if "over_max" in case:
            title = f"{case['ids']}, {case['cache']}, {'yes' if case['forwarded'] else 'no'}"
            cases.setdefault(title, []).append(f"{case['over_max']:.2f}")
    return rows + [[title, *values] for title, values in cases.items()]


def _preparation_rows(text: Run, query: Run, cluster: Run) -> list[list[str]]:
    rates = [
        [f"{name}: rate over pyarrow's alone", f"{r['median']:.2f}"] for name, r in text["against_pyarrow"].items()
    ]
    shares = [
        [name.replace("_", " "), f"{value:.2f}"] for name, value in cluster["ratios"].items() if "memory" not in name
    ]
    seconds = ["`preprocess query` / DuckDB's sorted export", f"{query['results']['ratio']:.2f}"]
    return [["", "ratio"], *rates, seconds, *([f"cluster: {name}", value] for name, value in shares)]


def _stream_rows(*runs: Run) -> list[list[str]]:
    rows = [["", *(f"{run['files']:,} files" for run in runs)]]
    rows.append(["rows a second that arrive", *(f"{run['rows_per_second']:,.0f}" for run in runs)])
    for name in ("median", "p99", "max"):
        rows.append(
            [f"seconds from a file's arrival to its step, {name}", *(f"{run['lag_seconds'][name]:.1f}" for run in runs)]
        )
    rows.append(["resident memory, last quarter / first", *(f"{run['rss_growth']:.2f}" for run in runs)])
    return rows


def _store_rows(run: Run) -> list[list[str]]:
    return [["", "ratio"], ["samples a second from a store / from a local folder", f"{run['ratio']:.2f}"]]


def _serve_rows(run: Run) -> list[list[str]]:
    cases = {(c["server"], c["form"], c["rows"], c["clients"]): c for c in run["cases"]}
    rows = [
        ["clients, rows of a request", "requests/s, JSON", "p50, p99 ms", "times plain torch", "requests/s, binary"]
    ]
    for count, clients in product((1, 64), (1, 8, 64)):
        ours, torch, binary = (
            cases[server, form, count, clients]
            for server, form in (("hostdev", "columns"), ("torch", "columns"), ("hostdev", "binary"))
        )
        times = format_ratio(ours["per_s"] / torch["per_s"])
        tails = f"{ours['p50_ms']:.3g}, {ours['p99_ms']:.3g}"
        rows.append([f"{clients}, {count}", f"{ours['per_s']:,.0f}", tails, times, f"{binary['per_s']:,.0f}"])
    rows += [[], ["beside `Predictor` in its own process", "ratio"]]
    return rows + [[key, format_ratio(value)] for key, value in run["ratios"].items() if "Predictor" in key]


SECTIONS = [
    Section(
        "Host kernels and steps",
        "624,000 Zipf ids, D = 80, float32; `lookup` and `apply` take all ids, duplicates included.",
        ("peers", "peers-steps"),
        _peer_rows,
    ),
    Section(
        "A DLRM's training step",
        "TorchRec's time over ours: 26 tables, D = 64, row-wise Adagrad, on the CPU.",
        ("dlrm",),
        _dlrm_rows,
    ),
    Section(
        "Whole trainings",
        "The same split, network and epochs: ml-100k for RecBole, 100,000 rows of Criteo for FuxiCTR.",
        ("ctr-recbole-dropout", "ctr-fuxictr"),
        _ctr_rows,
    ),
    Section("Bags", "FBGEMM's time over ours for lookup, pooling and update.", ("bags",), _bag_rows),
    Section(
        "Tables by key",
        "The directory beside FBGEMM's, and a step by key beside the same step by row.",
        ("keys", "unbounded"),
        _key_rows,
    ),
    Section(
        "Tables on disk",
        "LazyAdam, D = 64, batches of 100,000 Zipf ids. The best values of lines 2 and 3 are 1.",
        ("disk", "disk-window", "disk-large"),
        _disk_rows,
    ),
    Section(
        "The pipeline",
        "V = 5,000,000, depth 2. The accelerator is simulated: its step waits 0.5, 1 or 2 times as long as the host "
        "works. The table has the time of a step over the longer of host and device.",
        ("pipeline",),
        _pipeline_rows,
    ),
    Section(
        "Preparation",
        "Criteo text beside pyarrow's parser; 100 million rows of SQL; Dask's workers.",
        ("preprocess", "query", "cluster"),
        _preparation_rows,
    ),
    Section("Streams", "`hostdev train --follow` while files arrive.", ("follow", "follow-hour"), _stream_rows),
    Section("Stores", "A data set in an S3 server on this machine, limited to 100 MB/s.", ("stores",), _store_rows),
    Section(
        "Serving",
        "Wide & Deep with 26 + 13 columns of Criteo, 5 million hashed rows, D = 16. The server has one core, all "
        "clients the other. Plain torch is the same model behind Starlette and uvicorn.",
        ("serve",),
        _serve_rows,
    ),
]
