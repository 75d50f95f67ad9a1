"""Ranks in different calls: all ranks end at once, and one line names both calls."""

import re
import time

import pytest

from hostdev.core.errors import UserError
from hostdev.distributed.agreement import LEFT, RankCalls, find_mismatch, format_calls, parse_calls
from tests.distributed.mismatched import AT

SOON = 40.0  # seconds on a busy machine, of which most are the start; the timeout is 60
ADVICE = ": all ranks must make the same calls in the same order (docs/guides/networks-in-parts.md)"
NEXT = f"step {AT + 1} of runtime.train()"


def calls_of(*kinds):
    made = RankCalls(0, 2)
    for kind in kinds:
        made.begin(kind, f"runtime.{kind}()")
    return made


def test_ranks_wait_in_calls_of_one_number_and_different_kinds():
    assert find_mismatch(calls_of("train", "train").recent, calls_of("train", "train").recent) is None
    assert find_mismatch(calls_of("train", "train").recent, calls_of("train").recent) is None, "one is slower"
    mine, other = find_mismatch(calls_of("train", "predict").recent, calls_of("train", "train").recent)
    assert (mine.text, other.text, mine.number) == ("runtime.predict()", "runtime.train()", other.number)
    left = calls_of("train")
    left.leave("runtime.train(), left after step 3")
    left.begin("end", "the end")
    mine, other = find_mismatch(left.recent, calls_of("train", "train").recent)
    assert (mine.kind, other.kind) == (LEFT, "train"), "also where a rank has gone further"


def test_what_all_were_known_to_do_is_forgotten():
    mine, other = calls_of("train", "lookup"), calls_of("train", "train", "lookup")
    for one in (mine, other):
        one.catch_up(3)
        one.begin("train", "step 2")
    assert find_mismatch(mine.recent, other.recent) is None
    assert (mine.last, len(mine.recent)) == (other.last, 2)


def test_what_a_heartbeat_carries():
    calls = calls_of("train", "predict")
    assert parse_calls(format_calls(calls.recent)) == calls.recent
    for wrong in ("", "x|y|z", "\x1b[31m", "9" * 40 + "|a|b", "-1|a|b"):
        assert parse_calls(wrong) == ()
    assert parse_calls("1|a|\x1b[31m")[0].text == "\\x1b[31m"


def test_nothing_is_begun_any_more():
    calls = calls_of("train")
    calls.wrong = "is in this, and rank 1 in that"
    with pytest.raises(UserError, match="rank 0 of 2 is in this, and rank 1 in that"):
        calls.begin("save", "runtime.save()")


def run(processes, what, rank=1):
    since = time.monotonic()
    processes.start_ranks(2, "-m", "tests.distributed.mismatched", what, rank)
    done = processes.ended()
    assert "does not answer" not in "".join(one.err for one in done)
    return done, time.monotonic() - since


def told(done):
    """Return the line of the monitors, which one of the processes prints."""
    lines = [line for one in done for line in one.err.splitlines() if re.match(r"error: rank \d of 2: ", line)]
    assert len(lines) == 1, done
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        ("predict", 1, f"rank 1 of 2: is in runtime.predict(), and rank 0 in {NEXT}"),
        pytest.param(
            "predict", 0, f"rank 1 of 2: is in {NEXT}, and rank 0 in runtime.predict()", marks=pytest.mark.slow
        ),
        pytest.param("lookup", 1, f"rank 1 of 2: is in runtime.lookup(), and rank 0 in {NEXT}", marks=pytest.mark.slow),
        pytest.param("save", 1, f"rank 1 of 2: is in runtime.save(), and rank 0 in {NEXT}", marks=pytest.mark.slow),
    ],
)
def test_one_rank_calls_something_else(processes, what, rank, words):
    done, seconds = run(processes, what, rank)
    assert [one.code for one in done] == [2, 2]
    assert told(done) == words + ADVICE
    assert seconds < SOON


@pytest.mark.slow
@pytest.mark.parametrize("what", ["break", "close", "exit0"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_leaves(processes, what, rank):
    done, seconds = run(processes, what, rank)
    assert all(one.code for one in done)
    text = "".join(one.err for one in done)
    assert re.search(rf"left after step {AT}|in sys.exit\(0\)|in the end of hostdev.join", text)
    assert NEXT in text
    assert "error: 0" not in text
    assert seconds < SOON


@pytest.mark.slow
def test_all_ranks_call_sys_exit(processes):
    done, _ = run(processes, "exit_all")
    assert [(one.code, one.err) for one in done] == [(0, "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("what", "words"), [("raise", "a program's own error"), ("exit3", "has called sys.exit(3)")])
def test_one_rank_ends_in_the_body(processes, what, words):
    """All ranks report the rank's own error, though the loop that it leaves waits for the others."""
    done, seconds = run(processes, what)
    assert told(done) == f"rank 1 of 2: {words}"
    assert (done[0].code, done[1].code) == (2, 3 if what == "exit3" else 1)
    assert seconds < SOON


@pytest.mark.slow
def test_one_rank_does_not_come(processes):
    """A rank that sleeps is alive, and is not reported as gone."""
    done, _ = run(processes, "sleep")
    assert told(done).startswith(f"rank 0 of 2: waits in {NEXT} for rank 1, which is alive and in ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("seed", "UserError: table 'a' has the seed "),
        (
            "name",
            "UnlikeError: hostdev.Runtime(...): the list of tables differs between processes: a on rank 0; b on rank 1",
        ),
        ("slots", "slots of table 'a' differs between processes: fp32 on rank 0; bf16 on rank 1"),
        (
            "storage",
            "the storage of tables differs between processes: no table on disk on rank 0; tables on disk that look 16 "
            "batches ahead on rank 1",
        ),
        (
            "micro_batches",
            "UnlikeError: runtime.train(): micro_batches differs between processes: 1 on rank 0; 2 on rank 1",
        ),
        (
            "weights",
            "UnlikeError: the first rows.reduce(): parameter 0 differs between processes: float32 [1, 4], values with",
        ),
        ("rate", "UnlikeError: step 4: the learning rates of the tables differ between ranks"),
        ("freeze", "UnlikeError: step 4: the frozen tables differ between ranks"),
        (
            "evaluate",
            "UnlikeError: rank 0 is in runtime.save(), and rank 1 is in runtime.lookup(): "
            "all ranks must make the same calls",
        ),
    ],
)
def test_all_ranks_raise_what_differs(processes, what, words):
    done, _ = run(processes, what)
    for one in done:
        assert one.code == 1
        assert words in one.err
