"""A log of bounded size: every line is in one file, and the oldest files are removed."""

import shutil

import pytest

from hostdev.core.run_files import RotatedFile


def files(path):
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, 20))]
    return [each.read_text() for each in names if each.exists()]


def lines_of(n, start=0):
    return [f"line {number:04}\n" for number in range(start, start + n)]


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_the_newest_lines_stay(tmp_path, at_once):
    path = tmp_path / "a.log"
    log = RotatedFile(path, 400)  # 4 files with 10 lines each
    lines = lines_of(95)
    for start in range(0, 95, at_once):
        log.writelines(lines[start : start + at_once])
    log.close()
    assert files(path) == ["".join(lines[start : start + 10]) for start in (90, 80, 70, 60)]
    assert log.dropped_bytes == 600
    again = RotatedFile(path, 400)  # appends
    again.writelines(lines_of(6, 95))
    again.close()
    assert files(path) == [
        "".join(lines_of(10, start))[: 10 * size] for start, size in ((100, 1), (90, 10), (80, 10), (70, 10))
    ]
    assert again.dropped_bytes == 100


def test_a_lower_limit_than_before(tmp_path):
    """The limit holds at once for files of any size and number, and removed bytes are counted."""
    path = tmp_path / "a.log"
    log = RotatedFile(path, 400)
    log.writelines(lines_of(36))
    log.close()
    before = files(path)
    RotatedFile(path, 100).close()
    assert files(path) == before  # nothing is removed before `fit`
    again = RotatedFile(path, 100)  # 4 files of 25 bytes, but existing ones have 100
    again.fit()
    assert (files(path), again.dropped_bytes) == (["", "".join(lines_of(6, 30))], 300)
    again.writelines(lines_of(7, 36))
    again.close()
    assert again.dropped_bytes == 360
    assert files(path) == ["".join(lines_of(n, start)) for start, n in ((42, 1), (40, 2), (38, 2), (36, 2))]
    (tmp_path / "a.log.9").write_text("x" * 20)
    (tmp_path / "a.log.old").write_text("another's")
    last = RotatedFile(path, 80)
    last.fit()
    last.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2", "a.log.3", "a.log.old"]
    assert last.dropped_bytes == 20


def test_a_log_that_fits_is_one_file(tmp_path):
    log = RotatedFile(tmp_path / "a.log", 400)
    log.writelines(lines_of(10))
    log.flush()
    assert files(tmp_path / "a.log") == ["".join(lines_of(10))]
    assert log.dropped_bytes == 0
    log.close()


def test_a_line_longer_than_a_file_is_whole(tmp_path):
    log = RotatedFile(tmp_path / "a.log", 400)
    log.writelines(["short\n", "x" * 150 + "\n", "end\n"])
    log.close()
    assert files(tmp_path / "a.log") == ["end\n", "x" * 150 + "\n", "short\n"]


def test_a_folder_that_is_removed_meanwhile(tmp_path):
    (tmp_path / "run").mkdir()
    log = RotatedFile(tmp_path / "run" / "a.log", 400)
    log.writelines(lines_of(5))
    shutil.rmtree(tmp_path / "run")
    log.writelines(lines_of(90))
    log.close()
    assert log.dropped_bytes == 900
    assert not (tmp_path / "run").exists()


def test_files_that_others_have_removed(tmp_path):
    path = tmp_path / "a.log"
    log = RotatedFile(path, 400)
    log.writelines(lines_of(35))
    (tmp_path / "a.log.2").unlink()
    log.writelines(lines_of(20, 35))
    log.close()
    assert [text[:9] for text in files(path)] == ["line 0050", "line 0040", "line 0030", "line 0020"][
        : len(files(path))
    ]
