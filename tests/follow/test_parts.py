"""The parts of `train --follow`: what is remembered of files, batches across files, spools, scores of windows."""

import json
import threading

import numpy as np
import pytest

from hostdev.core.errors import UserError
from hostdev.data.batch import ShardPiece
from hostdev.data.schema import SINGLE_LABEL, Targets
from hostdev.ext.streams import progressive
from hostdev.ext.streams.converting import BatchCutter, Converted, Spool, SpoolError, batches_of
from hostdev.ext.streams.folder import FileState, Folder, key_of
from hostdev.ext.streams.options import Until, parse_until
from hostdev.ext.streams.progressive import Histogram, OutputSums, ScoreWindow, merge
from hostdev.ext.streams.report import MOST_FILES, MOST_STEPS, RecentProgress, RecentQuality
from hostdev.ext.streams.seen import MOST_DIGESTS, Seen
from hostdev.ext.streams.state import FileLogs, FollowState
from hostdev.train import scores


def digest(number):
    return f"{number:064x}"


def test_what_is_remembered_is_bounded():
    """After a million files of which 50 are left in the folder, as after a hundred."""
    sizes = []
    for files in (3_000, 30_000):
        seen = Seen()
        for number in range(files):
            seen.take(f"{number}.csv", digest(number))
            if number % 1000 == 999:
                seen.keep([f"{kept}.csv" for kept in range(number - 49, number + 1)])
        values = seen.as_values()
        sizes.append(sum(each.nbytes for each in values.values() if isinstance(each, np.ndarray)))
        assert seen.size == 50 and seen.taken == files
        assert values["digests"].nbytes == 32 * MOST_DIGESTS
    assert sizes[1] < 1.2 * sizes[0]


def test_seen_files_survive_a_checkpoint():
    seen = Seen()
    for name, content in (("day2", 1), ("day10", 2)):
        seen.take(name, digest(content))
    seen.note("day99.txt")
    again = Seen.of(seen.as_values())
    for each in (seen, again):
        assert each.last == "day10" and each.taken == 2
        assert each.is_known("day2") and each.is_known("day99.txt") and not each.is_known("day3")
        assert each.is_late("day3") and not each.is_late("day11")
        assert each.find_same(digest(1)) == "day2" and each.find_same(digest(3)) is None
    assert Seen.of(Seen().as_values()).as_values()["last"] is None
    again.keep(["day2", "day99.txt"])
    assert not again.is_known("day10") and again.is_known("day99.txt") and again.is_late("day10")


def test_many_files_are_known():
    seen = Seen()
    for number in range(0, 5000, 2):
        seen.take(f"day{number}.txt", digest(number))
    assert all(seen.is_known(f"day{number}.txt") == (number % 2 == 0) for number in range(5000))
    assert len(seen.as_values()["known"]) == seen.size == 2500


def test_losses_of_the_last_steps_are_kept():
    progress = RecentProgress()
    for step in range(3 * MOST_STEPS + 100):
        progress.add(step, step, 3)
        assert min(step + 1, MOST_STEPS) <= len(progress.wide) < 2 * MOST_STEPS
    values = progress.as_values()
    assert len(values["wide"]) == MOST_STEPS and values["wide"][0] == 2 * MOST_STEPS + 100
    again = RecentProgress.of(values)
    again.add(0, 0, 4)
    assert again.samples == 3 * (3 * MOST_STEPS + 100) + 4 and again.steps == 3 * MOST_STEPS + 101
    assert again.as_values()["wide"][-2:].tolist() == [3 * MOST_STEPS + 99, 0]


def test_quality_of_the_last_files_is_kept():
    recent = RecentQuality()
    assert recent.points().shape == (0, 3)
    for number in range(1, 3 * MOST_FILES):
        recent.add(number, "RMSE", number / 2, -number)
    points = recent.points()
    assert points.shape == (MOST_FILES, 3) and recent.metric == "RMSE"
    assert points[:, 0].tolist() == list(range(2 * MOST_FILES, 3 * MOST_FILES))
    assert (points == points[:, :1] * [1, 0.5, -1]).all()


def make_piece(rng, first, n, *, bags=True):
    lengths = rng.integers(0, 4, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = rng.integers(0, 1 << 60, offsets[-1])
    ids = np.arange(first, first + n)[:, None] + np.arange(2) * 1000
    return ShardPiece(
        (np.arange(first, first + n) % 2).astype(np.float32),
        rng.random((n, 3), np.float32),
        ids,
        {"bag": (values, offsets)} if bags else {},
        rng.random(n, np.float32),
        {"bag": rng.random(offsets[-1]).astype(np.float32)} if bags else {},
    )


def make_file(folder, name, pieces):
    spool = Spool(folder)
    for piece in pieces:
        spool.write(piece)
    return Converted(name, digest(0), FileState(1, 1), 0, None, spool)


def test_a_spool_returns_what_was_written(tmp_path):
    rng = np.random.default_rng(0)
    pieces = [make_piece(rng, 0, 5), make_piece(rng, 5, 0), make_piece(rng, 5, 70)]
    file = make_file(tmp_path, "a", pieces)
    assert file.rows == 75 and not list(tmp_path.iterdir())  # the file has no name
    found = list(file.spool.read())
    assert [before for before, _ in found] == [0, 5]
    for (_, one), other in zip(found, [pieces[0], pieces[2]], strict=True):
        for name in ("label", "dense", "ids", "weight"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        for i in (0, 1):
            np.testing.assert_array_equal(one.bags["bag"][i], other.bags["bag"][i])
        np.testing.assert_array_equal(one.bag_weights["bag"], other.bag_weights["bag"])
    assert [before for before, _ in file.spool.read(5)] == [5]
    file.close()
    with pytest.raises(SpoolError, match="nowhere"):
        Spool(tmp_path / "nowhere")


@pytest.mark.parametrize("sizes", [[10, 3, 3, 40, 1], [5] * 9, [100], [1, 1, 1]])
def test_batches_continue_across_files(tmp_path, sizes):
    rng = np.random.default_rng(1)
    cutter, found, first = BatchCutter(8), [], 0
    for number, rows in enumerate(sizes):
        parts = [make_piece(rng, first, rows // 2), make_piece(rng, first + rows // 2, rows - rows // 2)]
        file = make_file(tmp_path, str(number), parts)
        planned = cutter.steps(rows)
        made = list(cutter.cut(file))
        assert len(made) == planned
        assert np.concatenate([each.ids for each in batches_of(file, 3)])[:, 0].tolist() == [
            *range(first, first + rows)
        ]
        found += made
        first += rows
        file.close()
    assert cutter.waiting == first % 8
    if cutter.waiting:
        found.append(cutter.rest())
    assert [len(each) for each in found[:-1]] == [8] * (len(found) - 1)
    assert np.concatenate([each.ids for each in found])[:, 0].tolist() == [*range(first)]
    assert sum(each.bags["bag"][1].sum() for each in found) == sum(len(each.bag_weights["bag"]) for each in found)


def test_a_cursor_belongs_to_the_rows_trained_on():
    state = FollowState(ScoreWindow(3, (False,)))
    for number, rows in enumerate([5, 2, 9]):
        state.take(f"{number}.csv", digest(number), rows)
    state.advance(6)
    assert [(each.name, each.done) for each in state.pending] == [("1.csv", 1), ("2.csv", 0)] and state.waiting == 10
    again = FollowState(ScoreWindow(3, (False,)))
    again.restore(state.as_values())
    again.advance(1)
    assert [(each.name, each.done) for each in again.pending] == [("2.csv", 0)]
    again.advance(9)
    assert not again.pending and again.seen.last == "2.csv"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("rows", [1, 500, 60_000])
def test_a_window_has_the_quality_of_its_rows(rows, scale):
    """Exact for few rows; close for many, however narrow the outputs are."""
    rng = np.random.default_rng(rows)
    window, kept = ScoreWindow(2, (False,)), []
    for _ in range(3):
        logits = (rng.normal(-1, 1, rows) * scale).astype(np.float32)
        labels = (rng.random(rows) < 1 / (1 + np.exp(-logits / scale))).astype(np.float32)
        collector = OutputSums(("label",), SINGLE_LABEL)
        for start in range(0, rows, 7_000):
            collector.add(logits[start : start + 7_000], labels[start : start + 7_000])
        window.add(collector.result())
        kept.append((logits, labels))
    again = ScoreWindow(2, (False,))
    again.restore(window.as_values())
    logits, labels = map(np.concatenate, zip(*kept[1:], strict=True))
    for each in (window, again):
        found, total = each.evaluation(), each.total()
        assert found.rows == total.rows == 2 * rows and len(each) == 2
        if 0 < labels.mean() < 1:
            exact = scores.auc(logits, labels)
            assert found.auc == exact if 2 * rows <= progressive.MOST_BINS else abs(found.auc - exact) < 1e-5
        assert found.logloss == pytest.approx(scores.log_loss(logits, labels))
        mean = (1 / (1 + np.exp(-logits.astype(np.float64)))).mean()
        if labels.any():
            assert total.calibration()[0] == pytest.approx(mean / labels.mean())
        assert len(total.bins[0].keys) <= progressive.MOST_BINS


def test_a_histogram_does_not_depend_on_the_batches():
    rng = np.random.default_rng(3)
    outputs, labels = rng.normal(0, 1, 50_000).astype(np.float32), (rng.random(50_000) < 0.2).astype(np.float32)
    whole = Histogram.of(outputs, labels)
    for size in (1_000, 17_000):
        parts = Histogram.empty()
        for start in range(0, len(outputs), size):
            parts = merge([parts, Histogram.of(outputs[start : start + size], labels[start : start + size])])
        assert parts.shift == whole.shift
        np.testing.assert_array_equal(parts.keys, whole.keys)
        np.testing.assert_array_equal(parts.counts, whole.counts)


def test_several_labels_and_numbers():
    rng = np.random.default_rng(4)
    outputs = rng.normal(0, 1, (300, 2)).astype(np.float32)
    labels = np.stack([rng.random(300) < 0.5, rng.normal(5, 1, 300)], 1).astype(np.float32)
    collector, window = OutputSums(("a", "b"), Targets(more=("b",), numeric=("b",))), ScoreWindow(2, (False, True))
    collector.add(outputs, labels)
    window.add(collector.result())
    found = window.evaluation()
    assert found.auc == scores.auc(outputs[:, 0], labels[:, 0])
    errors = outputs[:, 1].astype(np.float64) - labels[:, 1]
    assert found.rmse == pytest.approx(np.sqrt((errors**2).mean())) and found.mae == pytest.approx(
        np.abs(errors).mean()
    )
    calibration = collector.result().calibration()
    assert calibration[1] == pytest.approx(outputs[:, 1].mean() / labels[:, 1].mean(), rel=1e-5)


def test_logs_after_a_kill(tmp_path):
    """Lines of files that the checkpoint lacks name the files to take first; a cut line is dropped."""
    logs = FileLogs(tmp_path, 0)
    for number in (1, 2, 3):
        logs.write({"number": number, "file": f"{number}.csv", "sha256": digest(number)})
    assert logs.set_aside({"file": "x", "why": "late"}) and not logs.set_aside({"file": "x", "why": "late"})
    logs.close()
    for name in ("files.jsonl", "set_aside.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"number": 4, "fi')
    logs = FileLogs(tmp_path, 1)
    assert [each.name for each in logs.expected] == ["2.csv", "3.csv"] and logs.expected[1].sha256 == digest(3)
    assert not logs.set_aside({"file": "x", "why": "late"}) and logs.set_aside({"file": "y", "why": "late"})
    logs.write({"number": 2, "file": "2.csv", "sha256": digest(2)})
    logs.close()
    kept = [json.loads(line) for line in (tmp_path / "files.jsonl").read_text().splitlines()]
    assert [line["number"] for line in kept] == [1, 2]
    assert len((tmp_path / "set_aside.jsonl").read_text().splitlines()) == 2


def test_names(tmp_path):
    for name in ("b10", "b9", "a", "_x", ".y", "c.part", "c.partial", "c.tmp", "sub/inside", "_sub/inside"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    folder = Folder(tmp_path)
    assert folder.names() == ["a", "b9", "b10"] and folder.has_folders()
    assert folder.state("a").size == 1 and folder.state("gone") is None
    assert Folder(tmp_path, "mark").names() == []
    (tmp_path / "sub" / "mark").touch()
    (tmp_path / "sub" / "_hidden").touch()
    assert Folder(tmp_path, "_MARK").names() == []
    marked = Folder(tmp_path, "mark")
    assert marked.names() == ["sub/inside"] and not marked.must_settle
    assert key_of("day9") < key_of("day10") < key_of("day10b")
    with pytest.raises(UserError, match="no such folder"):
        Folder(tmp_path / "none")


def test_when_to_end():
    assert parse_until("end") == Until() and parse_until("end").trains_rest
    assert parse_until("idle:1.5") == Until(idle=1.5) and not parse_until("idle:1.5").trains_rest
    assert parse_until("a.csv") == Until(name="a.csv")
    for wrong in ("", "idle:", "idle:-1", "idle:inf"):
        with pytest.raises(UserError, match="--follow-until"):
            parse_until(wrong)


def test_no_thread_is_left():
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hostdev-follow")]
