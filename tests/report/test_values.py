"""Names of runs, tables and labels on a page: cleaned, and still distinct."""

from hostdev.ext.report.reading import read_runs
from hostdev.ext.report.values import clean_name, numbers
from tests.report.runs import write_run


def test_different_names_stay_different():
    long = "table" * 100
    names = ["a b", "a\nb", "a\tb", "a\x1b", "a\\x1b", f"{long}1{long}", f"{long}2{long}", "\udcff", "\\udcff"]
    assert clean_name("a b") == "a b"
    for most in (60, 80, 300):
        assert len({clean_name(name, most) for name in names}) == len(names)
        assert max(len(clean_name(name, most)) for name in names) <= most
    assert sorted(numbers(dict.fromkeys(names, 1) | {names[-1]: 2}).values()) == [1] * (len(names) - 1) + [2]


def test_runs_of_the_same_name_in_long_folders(tmp_path):
    runs = [write_run(tmp_path / ("long" * 15) / middle / ("deep" * 15) / "run") for middle in "ab"]
    paths = [tmp_path / ("long" * 15) / middle / ("deep" * 15) / "run" for middle in "ab"]
    assert runs
    assert len({run.name for run in read_runs(paths)}) == 2
