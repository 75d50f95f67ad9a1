"""A device report as Markdown."""

from typing import Any

from bench.report_parts import MODES, PRECISIONS


def format_summary(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    found = {part["name"]: part.get("found", {}) for part in report["parts"]}
    title = "# Device report" + (": a trial of the report itself on the CPU" if report["trial"] else "")
    done, planned = len(report["parts"]), len(report["planned"])
    lines = [
        title,
        "",
        f"{report['date']}, commit {report['commit'] or 'unknown'}, {report['size']}, {done} of {planned} parts",
        "",
    ]
    lines += _machine(found.get("machine", {}))
    lines += _parts(report)
    lines += _verified(found)
    lines += _trained(found)
    lines += _checks(report)
    lines += _operations(found.get("bench_device", {}))
    lines += _steps(found.get("bench_pipeline", {}))
    return "\n".join(lines) + "\n"


def _table(title: str, head: list[str], rows: list[list[Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["", f"## {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in rows)]


def _machine(facts: dict[str, Any]) -> list[str]:
    if not facts:
        return []
    memory = facts.get("memory_bytes") or facts.get("free_bytes") or 0
    capability = f", compute capability {facts['capability']}" if "capability" in facts else ""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    pinned = "pinned" if facts["pinned"] else "pageable"
    return [
        f"- {facts['name']}{capability}, {memory / 2**30:.1f} GiB, driver {facts.get('driver') or 'none'}, "
        f"link {facts.get('link') or 'unknown'}",
        f"- copies of {pinned} memory: {facts['to_device_gb_per_s']} GB/s to the device, "
        f"{facts['to_host_gb_per_s']} GB/s to the host",
        f"- {facts['processor']}, {facts['cpus']} CPUs, {facts['host_memory_bytes'] / 2**30:.1f} GiB",
        f"- {facts['platform']}",
        f"- {versions}",
    ]


def _parts(report: dict[str, Any]) -> list[str]:
    rows = []
    for part in report["parts"]:
        found = part.get("found", {})
        tests = f"{found['passed']} / {found['failed']} / {found['skipped']}" if "skip_reasons" in found else ""
        rows.append([part["name"], part["status"], part["seconds"], tests, part["problem"].replace("|", "\\|")])
    lines = _table("Parts", ["part", "status", "s", "tests passed / failed / skipped", "problem"], rows)
    for part in report["parts"]:
        failures = part.get("found", {}).get("failures", [])
        if failures:
            lines += ["", f"{part['name']}, failed:", "", *(f"- `{name}`" for name in failures)]
    return lines


def _verified(found: dict[str, Any]) -> list[str]:
    rows = []
    for name, verified in found.items():
        if name.startswith("verify ") and verified:
            digests = sorted(set(verified["digests"].values()))
            wrong = "; ".join(verified["different"] + verified["not_run"])
            rows.append([name.removeprefix("verify "), verified["modes"], ", ".join(digests), wrong])
    return _table("hostdev.verify", ["", "modes run", "digests", "different or not run"], rows)


def _trained(found: dict[str, Any]) -> list[str]:
    rows = []
    for precision in PRECISIONS:
        whole = found.get(f"train {precision}, device tables", {}).get("samples_per_second")
        for mode in MODES:
            run = found.get(f"train {precision}, {mode}")
            if run:
                rate = run["samples_per_second"]
                share = f"{rate / whole:.2f}" if whole else ""
                efficiency, digest = run["overlap_efficiency"], (run["state_sha256"] or "")[:16]
                rows.append([precision, mode, f"{rate:,.0f}", share, efficiency, run.get("hit_rate"), digest])
    head = ["", "", "samples/s", "of device tables", "overlap efficiency", "hit rate", "state_sha256"]
    return _table("Training", head, rows)


def _checks(report: dict[str, Any]) -> list[str]:
    rows = []
    for check in report["checks"]:
        kind = "must" if check["must"] else "target"
        ratios = ", ".join(f"{mode}: {ratio}" for mode, ratio in check["values"].get("ratios", {}).items())
        rows.append([check["check"], kind, "met" if check["met"] else "NOT MET", ratios])
    return _table("Checks", ["check", "", "", "ratios"], rows)


def _operations(bench: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    ways = [way.lower().replace(" ", "_") for way in bench.get("ways", [])]
    for title, rows in bench.get("results", {}).items():
        head = ["operation", *(f"{way}, us (of copy)" for way in bench["ways"]), "faster", "MB", "bits"]
        cells = [
            [
                row["op"],
                *(f"{row[f'{way}_us']:,.1f} ({row[f'{way}_of_copy']:.0%})" for way in ways),
                f"{row['speedup']}x",
                f"{row['bytes'] / 1e6:,.1f}",
                row["bits"],
            ]
            for row in rows
        ]
        lines += _table(f"Operations, {title} (copies {bench['copy_gb_per_s']} GB/s)", head, cells)
    return lines


def _steps(bench: dict[str, Any]) -> list[str]:
    rows = [
        [row["run"], row["step_ms"], f"{row['samples_per_s']:,}", row["of_device_tables"]]
        for row in bench.get("accelerator", [])
    ]
    return _table("Whole steps in the steady state", ["run", "ms", "samples/s", "of device tables"], rows)
