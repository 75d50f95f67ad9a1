"""Claim: a data set of a query takes at most 1.5 times as long as DuckDB's own export of the same rows to Parquet.

The query joins a log with a table of items, each in Parquet, with less memory than they take. DuckDB exports the same
query, with its order completed as hostdev completes it, with the same memory and threads. Each is a process of its own,
whose peak memory is measured. The data set is made again with one thread, and once more after kill -9 in the middle.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.record import get_versions, make_parser, record
from hostdev.core.memory import format_bytes, parse_bytes
from hostdev.data import manifest
from hostdev.data.preprocess.query.engine import Engine
from hostdev.data.preprocess.query.source import QueryRows

QUERY = """
SELECT l.user, l.item, l.hour, l.clicked, i.category, i.price
FROM read_parquet('{log}') l JOIN read_parquet('{items}') i USING (item)
"""
FLAGS = ("--label", "clicked", "--categorical", "user,item,category,hour", "--numeric", "price", "--dense", "log")
WANTED = 1.5


def generate(folder: Path, rows: int, items: int) -> str:
    """Write the tables; return the query."""
    log, table = folder / "log.parquet", folder / "items.parquet"
    engine = Engine(2, 2 << 30, folder / "spill")
    engine.connection.execute(
        f"COPY (SELECT (hash(i) % {max(1, rows // 20)})::INTEGER AS user, "
        f"floor({items} * pow((hash(i + {rows}) % 1000003) / 1000003.0, 3))::INTEGER AS item, "
        f"(i % 24)::TINYINT AS hour, (hash(i * 7 + 3) % 4 = 0)::TINYINT AS clicked FROM range({rows}) t(i)) "
        f"TO '{log}' (FORMAT parquet)"
    )
    engine.connection.execute(
        f"COPY (SELECT i::INTEGER AS item, 'c' || (hash(i) % 997) AS category, "
        f"round(exp((hash(i * 3) % 1000) / 100.0), 2) AS price FROM range({items}) t(i)) TO '{table}' (FORMAT parquet)"
    )
    return QUERY.format(log=log, items=table)


def measure(command: list[str], kill_after: float | None = None) -> tuple[float, int]:
    """Run a command; return its seconds and the peak of its memory. `kill_after` seconds, it is killed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak, one = 0, psutil.Process(process.pid)
    while process.poll() is None:
        try:
            peak = max(peak, one.memory_info().rss - one.memory_info().shared)
        except psutil.Error:
            break
        if kill_after is not None and time.perf_counter() - start > kill_after:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.1)
    code, seconds = process.wait(), time.perf_counter() - start
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(process.stderr.read() if process.stderr else f"exit code {code}")
    return seconds, peak


def export(sql: str, out: Path, memory: int, threads: int) -> None:
    """Write the query's rows, in hostdev's order, as Parquet by DuckDB alone."""
    engine = Engine(threads, memory, out.parent / "export-spill")
    completed = QueryRows(sql, engine, threads)._sql
    engine.connection.execute(f"COPY ({completed}) TO '{out}' (FORMAT parquet)")


def main() -> None:
    """Measure."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000, help="of the log (default 20 million)")
    parser.add_argument("--items", type=int, default=2_000_000, help="of the table of items (default 2 million)")
    parser.add_argument("--query-memory", default="1GiB", help="of the query, in both (default 1GiB)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--once", action="store_true", help="leave out one thread and kill -9")
    parser.add_argument("--dir", type=Path, help="a folder for the tables")
    parser.add_argument("--export", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    memory = parse_bytes(arguments.query_memory)
    if arguments.export:
        export(Path(arguments.export[0]).read_text(), Path(arguments.export[1]), memory, arguments.threads)
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        folder = Path(name)
        sql = generate(folder, arguments.rows, arguments.items)
        query, found = folder / "query.sql", {}
        query.write_text(sql)
        size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
        print(f"{arguments.rows:,} rows joined with {arguments.items:,}, {format_bytes(size)} of Parquet\n")

        def run(title: str, command: list[Any], kill_after: float | None = None) -> float:
            seconds, peak = measure([sys.executable, *map(str, command)], kill_after)
            print(f"{title:<32}{seconds:8.1f} s   {format_bytes(peak)} at most", flush=True)
            found[title] = {"seconds": round(seconds, 1), "peak_bytes": peak}
            return seconds

        def prepare(out: str, threads: int) -> list[Any]:
            flags = ["--query", query, "--out", folder / out, "--query-memory", arguments.query_memory]
            return ["-m", "hostdev", "preprocess", "query", *flags, "--threads", threads, *FLAGS]

        exporting = ["-m", "bench", "query", "--export", query, folder / "rows.parquet"]
        exporting += ["--query-memory", arguments.query_memory, "--threads", arguments.threads]
        alone = run("DuckDB's export", exporting)
        ours = run("preprocess query", prepare("a", arguments.threads))
        found["ratio"] = round(ours / alone, 2)
        print(
            f"{'ratio':<32}{ours / alone:8.2f}     at most {WANTED}: {'met' if ours <= WANTED * alone else 'NOT MET'}"
        )
        shutil.rmtree(folder / "export-spill", ignore_errors=True)
        (folder / "rows.parquet").unlink()
        if not arguments.once:
            identity = manifest.read(folder / "a").identity
            run("with one thread", prepare("b", 1))
            run("until kill -9", prepare("c", arguments.threads), kill_after=0.6 * ours)
            run("again after it", prepare("c", arguments.threads))
            same = all(manifest.read(folder / out).identity == identity for out in "bc")
            found["equal"] = same
            print(f"equal bytes on one thread, and after kill -9: {'yes' if same else 'NO'}")
        about = {"rows": arguments.rows, "items": arguments.items, "parquet_bytes": size, "threads": arguments.threads}
        record("query", {**about, "versions": get_versions("duckdb", "pyarrow"), "results": found}, arguments.out)


if __name__ == "__main__":
    main()
