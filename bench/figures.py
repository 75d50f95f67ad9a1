"""Claim: docs/figures.md and its chart show the newest recorded run of each benchmark, and nothing else.

`python -m bench figures` writes both from bench/results/; it measures nothing. A run recorded before
`SINCE` is listed by its name, without figures. To change a figure, record a new run and make the page again.
"""

import json
import math
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.figure_tables import KERNELS, SECTIONS, Run, format_range
from bench.record import RESULTS, make_parser

PAGE = RESULTS.parents[1] / "docs/figures.md"
CHART = PAGE.with_suffix(".svg")
SINCE = "2026-11-26"  # the first day on which runs of version 0.2.0 were recorded

HEAD = """# Figures

`python -m bench figures` makes this page from the newest recorded run of each benchmark in bench/results/; do not
edit it. No run used a real accelerator: each had two cores. A figure above 1 means that hostdev is faster. The systems
took turns within a run, and figures are medians; a range is over the sizes and modes of the section below. Compare
figures only within a run, because the machines of the runs differ.

![How many times as fast as other systems](figures.svg)
"""
END = """Their runs were recorded before {since}, by version 0.1.0: {names}. [The log](log.md) has what they showed
and what was measured later without a record."""


class Comparison(NamedTuple):
    """A row of the first table: how many times as fast as another system hostdev is."""

    what: str
    beside: str
    runs: tuple[str, ...]
    ratios: Callable[..., list[float]]


def find_runs(folder: Path = RESULTS) -> dict[str, Run]:
    """Return the newest run of each name, with the name of its file as "file"."""
    runs = {}
    for path in sorted(folder.glob("*.json")):  # a later date overwrites an earlier one
        runs[path.stem[11:]] = {**json.loads(path.read_text()), "file": path.name}
    return runs


def _peers(name: str, *parts: str) -> Callable[..., list[float]]:
    """Return a function that finds the ratios whose name contains `name`, in the named parts of runs of `peers`."""
    return lambda *runs: [
        value
        for run in runs
        for part in parts
        if part in run["results"]
        for key, value in run["results"][part]["ratios"].items()
        if name in key
    ]


def _dlrm(run: Run, depth: int) -> list[float]:
    return [median(case[f"torchrec / hostdev, depth {depth}"]) for case in run["ratios"].values()]


def _ctr(run: Run) -> list[float]:
    return [median(case["ratios"]) for case in run.values() if isinstance(case, dict) and "ratios" in case]


_STEPS = ("peers", "peers-steps")
COMPARISONS = [
    Comparison(
        "rows a second of a table on disk", "RocksDB", ("disk",), lambda r: [r["results"]["rows a second / RocksDB's"]]
    ),
    Comparison("host side of a Wide & Deep step", "MindSpore", ("peers",), _peers("host side", *KERNELS)),
    Comparison("LazyAdam on 624,000 gradients", "MindSpore", ("peers",), _peers("LazyAdam, all / MindSpore", *KERNELS)),
    Comparison(
        "LazyAdam on 624,000 gradients", "torch's SparseAdam", ("peers",), _peers("all / torch SparseAdam", *KERNELS)
    ),
    Comparison("FTRL on 624,000 gradients", "MindSpore", ("peers",), _peers("FTRL", *KERNELS)),
    Comparison("lookup of 624,000 rows", "torch's index_select", ("peers",), _peers("index_select", *KERNELS)),
    Comparison("step of Wide & Deep, bf16", "MindSpore, fp32", _STEPS, _peers("bf16: MindSpore", "steps 184965")),
    Comparison("step of Wide & Deep, fp32", "MindSpore", _STEPS, _peers("fp32: MindSpore", "steps 184965")),
    Comparison("step of Wide & Deep, fp32", "torch's SparseAdam", _STEPS, _peers("fp32: torch", "steps 184965")),
    Comparison("training of DeepFM and DCN-v2", "FuxiCTR", ("ctr-fuxictr",), _ctr),
    Comparison("training of DeepFM and DCN-v2", "RecBole", ("ctr-recbole-dropout",), _ctr),
    Comparison("training step of a DLRM", "TorchRec", ("dlrm",), lambda r: _dlrm(r, 0) + _dlrm(r, 2)),
    Comparison(
        "bags: lookup, pooling, update",
        "FBGEMM's CPU kernels",
        ("bags",),
        lambda r: [median(case["ratios"]) for case in r["results"].values()],
    ),
    Comparison(
        "look-up of 64-bit keys",
        "FBGEMM",
        ("keys",),
        lambda r: [case["found a second / FBGEMM's"] for case in r["results"].values()],
    ),
    Comparison(
        "serving of JSON requests",
        "plain torch",
        ("serve",),
        lambda r: [value for key, value in r["ratios"].items() if "plain torch" in key],
    ),
]


def format_table(rows: list[list[str]]) -> str:
    """Return rows as tables of Markdown; the first row is the head, and an empty row begins another table."""
    lines: list[str] = []
    begins = True
    for row in rows:
        if not row:
            lines, begins = [*lines, ""], True
            continue
        lines.append(f"| {' | '.join(row)} |")
        if begins:
            lines.append("|---" * len(row) + "|")
        begins = False
    return "\n".join(lines)


def describe(run: Run) -> str:
    """Return a run's command, date, processor, commit and file."""
    command = re.sub(r"python (bench/)?bench_(\w+)\.py", r"python -m bench \2", run["command"])
    command = re.sub(r" --(out|folder|dir) \S+", "", command)
    commit = run["commit"].replace("-dirty", " with changes")
    return f"- `{command}`: {run['date']}, {run['processor']}, commit {commit} ({run['file']})"


def compare(runs: dict[str, Run]) -> list[tuple[str, str, list[float], list[Run]]]:
    """Return what is compared, with what, the ratios and the runs, the best first."""
    rows = []
    for what, beside, names, ratios in COMPARISONS:
        if all(name in runs for name in names):
            rows.append((what, beside, ratios(*(runs[name] for name in names)), [runs[name] for name in names]))
    return sorted(rows, key=lambda row: -max(row[2]))


def make_page(folder: Path = RESULTS) -> str:
    """Return docs/figures.md."""
    every = find_runs(folder)
    runs = {name: run for name, run in every.items() if run["date"] >= SINCE}
    rows = [["what", "beside", "times as fast", "run", "processor"]]
    for what, beside, ratios, sources in compare(runs):
        rows.append([what, beside, format_range(ratios), sources[-1]["date"], sources[-1]["processor"]])
    parts = [HEAD, format_table(rows)]
    for title, about, names, make_rows in SECTIONS:
        if all(name in runs for name in names):
            chosen = [runs[name] for name in names]
            parts += [f"## {title}", about, "\n".join(map(describe, chosen)), format_table(make_rows(*chosen))]
    old = ", ".join(f"`{name}`" for name in sorted(every.keys() - runs.keys()))
    if old:
        parts += ["## Not measured since version 0.1.0", END.format(since=SINCE, names=old)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


LABELS, WIDTH, LEFT, RIGHT, STEP = 390, 330, math.log2(0.7), 5, 24  # pixels; the axis goes from 0.7 to 32


def make_chart(folder: Path = RESULTS) -> str:
    """Return docs/figures.svg: a bar from the least to the most of each comparison, on a logarithmic axis."""
    rows = compare({name: run for name, run in find_runs(folder).items() if run["date"] >= SINCE})
    bottom = 8 + STEP * len(rows)

    def x(times: float) -> float:
        return LABELS + (math.log2(times) - LEFT) / (RIGHT - LEFT) * WIDTH

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {bottom + 44}" font-family="sans-serif" '
        f'font-size="13"><rect width="820" height="{bottom + 44}" fill="#fff"/>'
    ]
    for times in (1, 2, 4, 8, 16, 32):
        color = "#333" if times == 1 else "#ddd"
        parts.append(f'<path d="M{x(times):.0f} 4V{bottom}" stroke="{color}"/>')
        parts.append(f'<text x="{x(times):.0f}" y="{bottom + 16}" text-anchor="middle">{times}x</text>')
    for number, (what, beside, ratios, _) in enumerate(rows):
        y, left, right = 8 + STEP * number, x(min(ratios)), x(max(ratios))
        parts.append(f'<text x="{LABELS - 8}" y="{y + 14}" text-anchor="end">{escape(f"{what} / {beside}")}</text>')
        parts.append(
            f'<rect x="{left:.0f}" y="{y + 3}" width="{max(right - left, 3):.0f}" height="14" fill="#3f51b5"/>'
        )
        parts.append(f'<text x="{right + 6:.0f}" y="{y + 14}">{format_range(ratios)}</text>')
    parts.append(f'<text x="{x(4):.0f}" y="{bottom + 36}" text-anchor="middle">times as fast</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write the page and the chart."""
    make_parser(__doc__, out=False).parse_args()
    PAGE.write_text(make_page())
    CHART.write_text(make_chart())
    print(f"written: {PAGE.name}, {CHART.name}")
