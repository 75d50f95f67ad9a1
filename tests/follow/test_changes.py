"""Files are known by their content: cut ones are awaited; growth and replacement of taken ones are told and counted."""

import gzip
import hashlib
import json
import os
import shutil
import threading
import time

import fsspec
import pyarrow
import pyarrow.csv
import pytest

from hostdev.core.run_files import GROWN, REPLACED
from hostdev.ext.streams.folder import FileState, Folder, has_end
from hostdev.ext.streams.seen import SAME, UNSETTLED, Seen, Taken, digest_bits, examine
from hostdev.ext.training import cli as train
from tests.conftest import digest_of
from tests.follow.arriving import DAYS, END, MODEL, NAMES, QUICK, ROWS, RULES, day, lines, write


def changes(run_dir):
    """Return why each file that has changed was named, and the reasons."""
    found = [line for line in lines(run_dir, "set_aside.jsonl") if line["why"] in ("grown", "replaced")]
    return {line["file"]: line["why"] for line in found}, {line["file"]: line["reason"] for line in found}


def text(table):
    """Return rows as CSV without their header."""
    sink = pyarrow.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink, pyarrow.csv.WriteOptions(include_header=False))
    return sink.getvalue().to_pybytes()


def test_files_that_are_cut_are_awaited(in_process, example, arrived, whole, tmp_path):
    """A writer pauses in the middle of a line, of a number, of each format, and before the first byte."""
    folder = tmp_path / "in"
    folder.mkdir()
    contents = {name: (arrived / name).read_bytes() for name in NAMES}
    cuts = {name: len(content) // 2 for name, content in contents.items()}
    row = contents[NAMES[0]].rindex(b"\n", 0, cuts[NAMES[0]])
    cuts[NAMES[0]] = contents[NAMES[0]].rindex(b",", 0, row)  # behind a number, in a row that could be one
    cuts[NAMES[-1]] = 0
    for name, content in contents.items():
        (folder / name).write_bytes(content[: cuts[name]])

    def write_rest():
        time.sleep(2)  # several looks at the folder, which must leave the cut files alone
        for name in reversed(NAMES):
            with (folder / name).open("ab") as file:
                file.write(contents[name][cuts[name] :])

    writer = threading.Thread(target=write_rest)
    writer.start()
    every = ["--data", example, *MODEL, *RULES, "--follow-until", "end", "--follow-poll", 0.1]
    code, _, error = in_process(train, "--follow", "in", *every, "--run-dir", "run")
    writer.join()
    assert code == 0, error
    assert digest_of(tmp_path / "run") == digest_of(whole)
    assert not lines(tmp_path / "run", "set_aside.jsonl")


def test_a_file_without_a_last_end_of_line_is_taken_once_quiet(in_process, example, arrived, whole, tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(arrived, folder)
    (folder / NAMES[0]).write_bytes((arrived / NAMES[0]).read_bytes().rstrip(b"\n"))
    old = time.time() - 60  # has long been quiet
    (folder / NAMES[-1]).write_bytes((arrived / NAMES[-1]).read_bytes().rstrip(b"\n"))
    os.utime(folder / NAMES[-1], (old, old))
    code, _, error = in_process(train, "--follow", "in", "--data", example, *MODEL, *RULES, *END, "--run-dir", "run")
    assert code == 0, error
    assert digest_of(tmp_path / "run") == digest_of(whole)


def test_changes_of_known_files_are_told_and_counted(in_process, example, arrived, whole, table, tmp_path):
    folder, run_dir = tmp_path / "in", tmp_path / "run"
    shutil.copytree(arrived, folder)
    write(folder / "day1.columns.csv", day(table, 0).drop_columns(["item"]))
    (folder / "day1.empty.csv").touch()
    every = ["--follow", "in", "--data", example, *MODEL, *RULES, "--run-dir", "run", "--checkpoint-every", 4]
    assert in_process(train, *every, *END)[0] == 0
    assert digest_of(run_dir) == digest_of(whole)
    more = text(day(table, 1, 7))
    with (folder / "day1.csv").open("ab") as file:  # added to
        file.write(more)
    with (folder / "day6.csv").open("ab") as file:  # to the last one: a row that is cut
        file.write(more[:-9])
    content = bytearray((folder / "day2.parquet").read_bytes())
    content[len(content) // 2] ^= 1  # renamed over, of the same size and time
    (folder / ".new").write_bytes(content)
    about = (folder / "day2.parquet").stat()
    os.utime(folder / ".new", ns=(about.st_atime_ns, about.st_mtime_ns))
    (folder / ".new").replace(folder / "day2.parquet")
    os.truncate(folder / "day3.arrow", 500)
    (folder / "day4.csv.gz").write_bytes((arrived / "day4.csv.gz").read_bytes())  # the same again
    os.utime(folder / "day5.parquet")
    write(folder / "day1.columns.csv", day(table, 5))  # corrected
    write(folder / "day1.empty.csv", day(table, 5))
    code, out, error = in_process(train, *every, *END, "--resume")
    assert code == 0, error
    whys, reasons = changes(run_dir)
    assert whys == {
        "day1.csv": "grown",
        "day1.columns.csv": "replaced",
        "day1.empty.csv": "grown",
        "day2.parquet": "replaced",
        "day3.arrow": "replaced",
        "day6.csv": "grown",
    }
    for name, reason in reasons.items():
        assert name in reason and error.count(reason) == 1
    assert f"{len(more):,} bytes" in reasons["day1.csv"] and "--follow-grown" in reasons["day6.csv"]
    assert "shorter" in reasons["day3.arrow"] and "set aside" in reasons["day1.empty.csv"]
    assert json.loads((run_dir / "summary.json").read_text())["files"]["changed"] == 6
    assert "6 changed" in out
    code, _, error = in_process(train, *every, *END, "--resume")
    assert code == 0 and "changed" not in error  # told once
    assert digest_of(run_dir) == digest_of(whole)
    write(folder / "day1.csv", day(table, 5))  # and other changes again
    with (folder / "day6.csv").open("ab") as file:
        file.write(more[-9:])
    code, _, error = in_process(train, *every, *END, "--resume", "--follow-grown")
    assert code == 0 and changes(run_dir)[0]["day1.csv"] == "replaced" and error.count("day6.csv") == 0
    assert lines(run_dir)[-1]["file"] == "day6.csv" and lines(run_dir)[-1]["rows"] == 7
    assert json.loads((run_dir / "summary.json").read_text())["files"]["changed"] == 7


def test_new_lines_of_the_last_file_are_taken(in_process, example, arrived, whole, table, tmp_path):
    """Each row once, in the order of a replay, over resumed runs; a line that is cut is awaited."""
    folder, run_dir = tmp_path / "in", tmp_path / "run"
    shutil.copytree(arrived, folder)
    content = (folder / "day6.csv").read_bytes()
    edges = [content.index(b"\n", at) + 1 for at in (len(content) // 5, len(content) // 2)]
    every = ["--follow", "in", "--data", example, *MODEL, *RULES, "--run-dir", "run", "--checkpoint-every", 2]
    every += ["--follow-grown", "--resume", *QUICK, "--follow-quiet", 30]
    (folder / "day6.csv").write_bytes(content[: edges[0]])
    assert in_process(train, *every, "--follow-until", "idle:0")[0] == 0
    before = lines(run_dir)
    (folder / "day6.csv").write_bytes(content[: edges[1]])
    assert in_process(train, *every, "--follow-until", "idle:0")[0] == 0
    with (folder / "day6.csv").open("ab") as file:
        file.write(content[edges[1] : edges[1] + 20])
        file.flush()
        rest = threading.Timer(1.0, lambda: (file.write(content[edges[1] + 20 :]), file.flush()))
        rest.start()
        assert in_process(train, *every, "--follow-until", "end")[0] == 0
        rest.join()
    assert digest_of(run_dir) == digest_of(whole)
    found = lines(run_dir)
    assert found[: len(before)] == before and len(found) == DAYS + 2
    parts = [line for line in found if line["file"] == "day6.csv"]
    assert [line["after"] for line in parts] == [0, parts[0]["rows"], parts[0]["rows"] + parts[1]["rows"]]
    assert sum(line["rows"] for line in parts) == ROWS and parts[-1]["bytes"] == len(content)
    assert not changes(run_dir)[0]


@pytest.mark.parametrize("grown", [False, True])
def test_a_file_that_grows_while_its_rows_are_needed_again(in_process, example, arrived, whole, table, tmp_path, grown):
    """The run goes on with the bytes that were taken, whether the checkpoint or only files.jsonl knows of them."""
    folder, run_dir = tmp_path / "in", tmp_path / "run"
    shutil.copytree(arrived, folder)
    every = ["--follow", "in", "--data", example, *MODEL, *RULES, "--checkpoint-every", 1, "--run-dir", "run", *END]
    every += ["--follow-grown"] if grown else []
    assert in_process(train, *every, "--max-steps", 1, "--keep-checkpoints", 9)[0] == 0
    more = text(day(table, 1, 40))
    for name in ("day1.csv", "day6.csv"):
        with (folder / name).open("ab") as file:
            file.write(more)
    code, _, error = in_process(train, *every, "--resume")
    assert code == 0, error
    whys, _ = changes(run_dir)
    assert whys == ({} if grown else {"day1.csv": "grown"})  # day6 was not taken before
    other = tmp_path / "other"
    shutil.copytree(arrived, other)
    for name in ("day1.csv", "day6.csv") if grown else ("day6.csv",):
        shutil.copy(folder / name, other)
    replay = ["--follow", "other", "--data", example, *MODEL, *RULES, *END, "--run-dir", "replay"]
    assert in_process(train, *replay)[0] == 0
    assert digest_of(run_dir) == digest_of(tmp_path / "replay") != digest_of(whole)


def test_objects_that_are_replaced(in_process, example, arrived, table, tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
    memory = fsspec.filesystem("memory")
    for name in NAMES[:2]:
        memory.pipe(f"/replaced/{name}", (arrived / name).read_bytes())
    every = ["--follow", "memory://replaced", "--data", example, *MODEL, *RULES, "--run-dir", "run", *END, "--resume"]
    every += ["--checkpoint-every", 9]
    try:
        assert in_process(train, *every)[0] == 0
        memory.pipe(f"/replaced/{NAMES[0]}", (arrived / NAMES[0]).read_bytes() + text(day(table, 1, 3)))
        memory.pipe(f"/replaced/{NAMES[1]}", (arrived / NAMES[1]).read_bytes()[::-1])
        code, _, error = in_process(train, *every)
        assert code == 0, error
    finally:
        memory.rm("/replaced", recursive=True)
    assert changes(tmp_path / "run")[0] == {NAMES[0]: "grown", NAMES[1]: "replaced"}


def test_ends_of_files(tmp_path):
    path = tmp_path / "file"
    stream = pyarrow.BufferOutputStream()
    table = pyarrow.table({"a": [1, 2]})
    with pyarrow.ipc.new_stream(stream, table.schema) as file:
        file.write_table(table)
    arrow = stream.getvalue().to_pybytes()
    packed = gzip.compress(b"a,b")
    ended = [b"a\n", b"a\r\n", "a\n".encode("utf-16-le"), "a\n".encode("utf-16-be"), arrow, packed, packed[:9], b"PAR1"]
    for content in ended:
        path.write_bytes(content)
        assert has_end(path), content
    for content in [b"", b"a", b"a\r", b"\n1,u7", "a\n1".encode("utf-16"), arrow[:-8], arrow[:-1]]:
        path.write_bytes(content)
        assert not has_end(path), content


def test_changes_by_content(tmp_path):
    """Names may be any bytes."""
    name = os.fsdecode(b"a \xff b\n.csv")
    folder, path, stop = Folder(tmp_path), tmp_path / name, threading.Event()
    path.write_bytes(b"ab\ncd\n")
    state = folder.state(name)
    taken = Taken(6, state.stamp, digest_bits("1" * 64), 2)
    assert examine(folder, name, taken, state, stop).kind == REPLACED
    taken = taken._replace(digest=digest_bits(hashlib.sha256(b"ab\ncd\n").hexdigest()))
    assert examine(folder, name, taken, state, stop).kind == SAME
    for content, kind, about in (
        (b"ab\ncd\nef\n", GROWN, "3 bytes"),
        (b"ab\ncX\nef\n", REPLACED, "replaced"),
        (b"ab\n", REPLACED, "shorter"),
        (b"", REPLACED, "shorter"),
    ):
        path.write_bytes(content)
        change = examine(folder, name, taken, folder.state(name), stop)
        assert change.kind == kind and about in change.about
    assert examine(folder, name, taken, FileState(99, 0), stop).kind == UNSETTLED  # not the state of now
    cut = Taken(5, 0, digest_bits(hashlib.sha256(b"ab\ncd").hexdigest()), 2)
    path.write_bytes(b"ab\ncdef\n")
    assert "in the middle of row 2" in examine(folder, name, cut, folder.state(name), stop).about


def test_what_was_taken_survives_a_checkpoint():
    seen = Seen()
    for number in range(3_000):
        seen.take(f"{number}.csv", f"{number:064x}", Taken(number, 2 * number, 3 * number, 4 * number))
    seen.note("7.csv", Taken(70, 1, 2, 3))
    again = Seen.of(seen.as_values())
    for each in (seen, again):
        assert each.get("7.csv") == Taken(70, 1, 2, 3) and each.get("3000.csv") is None
        assert each.get("2999.csv") == Taken(2999, 5998, 8997, 11996)
    again.keep(["7.csv", "8.csv"])
    assert again.size == 2 and again.get("8.csv") == Taken(8, 16, 24, 32)
