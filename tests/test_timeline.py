"""The timeline: sums, and a trace that Perfetto can open."""

import itertools
import json

import pytest
import torch

from hostdev.core.timeline import PHASES, STAGES, STEP_PARTS, Timeline
from tests.test_train import small, trained  # noqa: F401  (a fixture)


def read(path):
    events = json.loads(path.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    arrows = [event for event in events if event["ph"] in "stf"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return spans, arrows, names


def test_the_trace_of_a_run(trained, small_data, tmp_path, capsys):  # noqa: F811
    options = small(small_data, "--host-device-mix", "--max-steps", 6, "--trace", "trace.json", "--pipeline-depth", 2)
    assert trained(*options) == 0
    assert "summary.json, curve.png; trace.json\n" in capsys.readouterr().out
    spans, arrows, names = read(tmp_path / "trace.json")
    assert len(names) == len(STAGES + STEP_PARTS + PHASES)
    assert {*STAGES, *PHASES, "forward", "backward", "dense update"} == set(names.values())
    by_stage = {stage: [span for span in spans if span["name"] == stage] for stage in names.values()}
    assert all(names[span["tid"]] == span["name"] for span in spans)
    for stage in ("unique", "plan", "lookup", "step", "update"):
        assert [span["args"]["batch"] for span in by_stage[stage]][:6] == [1, 2, 3, 4, 5, 6], stage
        assert all(span["args"]["rows"] > 0 for span in by_stage[stage])
    assert by_stage["lookup"][0]["args"]["bytes"] > 0
    assert any(span["args"]["conflicts"] for span in by_stage["plan"])  # the dense columns' rows are in every batch
    for stage, of_stage in by_stage.items():  # a track is one thing at a time
        for first, second in itertools.pairwise(sorted(of_stage, key=lambda span: span["ts"])):
            assert first["ts"] + first["dur"] <= second["ts"] + 0.01, stage
    [epoch], [evaluation] = by_stage["epoch"], by_stage["evaluation"]
    assert epoch["args"] == evaluation["args"] == {"epoch": 1}
    steps = sorted(by_stage["step"], key=lambda span: span["ts"])
    assert epoch["ts"] < steps[0]["ts"]
    assert steps[5]["ts"] + steps[5]["dur"] < epoch["ts"] + epoch["dur"] < evaluation["ts"] < steps[6]["ts"]
    assert steps[-1]["ts"] + steps[-1]["dur"] < evaluation["ts"] + evaluation["dur"]
    for part in ("forward", "backward", "dense update"):
        assert [span["args"]["batch"] for span in by_stage[part]][:6] == [1, 2, 3, 4, 5, 6]
    for first, then in itertools.pairwise(("forward", "backward", "dense update")):
        for before, after in zip(by_stage[first], by_stage[then], strict=False):  # evaluations may have the first only
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01
    batch = [arrow for arrow in arrows if arrow["id"] == 3]
    assert min(batch, key=lambda arrow: arrow["ts"])["ph"] == "s"
    assert sum(arrow["ph"] == "s" for arrow in batch) == 1
    assert sum(arrow["ph"] == "f" for arrow in batch) == 1
    at = {(span["tid"], span["ts"]) for span in spans}
    assert all((arrow["tid"], arrow["ts"]) in at for arrow in arrows)


def test_a_trace_is_not_overwritten(trained, small_data, tmp_path, capsys):  # noqa: F811
    (tmp_path / "trace.json").write_text("mine")
    assert trained(*small(small_data, "--host-device-mix", "--trace", "trace.json")) == 2
    assert "--trace trace.json exists; choose another file" in capsys.readouterr().err
    assert (tmp_path / "trace.json").read_text() == "mine"
    assert not (tmp_path / "run").exists()


def test_sums():
    timeline = Timeline()
    assert timeline.summary()["overlap_efficiency"] is None
    with timeline.run(), timeline.span("lookup", 1), timeline.span("update", 1), timeline.stall("step"):
        sum(range(100_000))
    summary = timeline.summary()
    assert summary["busy_us"]["lookup"] >= summary["busy_us"]["update"] > 0
    assert summary["host_busy_us"] <= summary["wall_us"]  # work at the same time counts once
    assert summary["stall_us"]["step"] > 0
    assert summary["overlap_efficiency"] > 0.5


def test_parts_and_phases_are_in_the_trace_alone(tmp_path):
    """A part of the step, or an evaluation, is not the host's work, and keeps nobody waiting."""
    timeline = Timeline()
    timeline.write_to((tmp_path / "trace.json").open("w"))
    with timeline.run(), timeline.span("epoch", 2), timeline.span("step", 7):
        for part in STEP_PARTS:
            with timeline.span(part, 7, rows=5):
                sum(range(10_000))
    with timeline.span("evaluation", 2):
        pass
    timeline.close()
    spans, arrows, names = read(tmp_path / "trace.json")
    assert [(span["name"], span["args"]) for span in spans] == [
        ("forward", {"batch": 7, "rows": 5}),
        ("backward", {"batch": 7, "rows": 5}),
        ("dense update", {"batch": 7, "rows": 5}),
        ("step", {"batch": 7}),
        ("epoch", {"epoch": 2}),
        ("evaluation", {"epoch": 2}),
    ]
    assert all(names[span["tid"]] == span["name"] for span in spans)
    assert [(arrow["id"], names[arrow["tid"]]) for arrow in arrows] == [(7, "step")]
    summary = timeline.summary()
    assert set(summary["busy_us"]) == set(summary["stall_us"]) == set(STAGES)
    assert summary["host_busy_us"] == 0
    with pytest.raises(KeyError), timeline.span("foward", 1):
        pass


def test_the_profiler_has_the_stages_names():
    timeline = Timeline()
    with torch.profiler.profile() as profiled, timeline.span("lookup", 1):
        pass
    assert "lookup" in {event.key for event in profiled.key_averages()}
