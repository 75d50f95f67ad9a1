"""Options that contradict several processes, or need them: a line says what to use instead."""

import socket
import threading

import numpy as np
import pytest
import torch

from hostdev import LazyAdam, UserError
from hostdev.distributed import rendezvous
from hostdev.distributed.exchange import Exchange
from hostdev.distributed.key_exchange import require_all
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import RankEnvironment
from hostdev.ext.training import cli as train
from hostdev.runtime.spec import TableSpec
from hostdev.train import room
from hostdev.train.options import TrainConfig
from hostdev.train.processes import resolve_batch
from tests.distributed.threads import with_ranks
from tests.ports import free_port

MIX = ("--host-device-mix",)


@pytest.fixture
def refused(in_process, small_data):
    """The one line that a command ends with, before it has met or started anybody."""

    def run(*flags):
        code, out, err = in_process(train, "--data", small_data, "--device", "cpu", *flags)
        assert (code, out) == (2, "")
        assert err.startswith("hostdev.train: error: ")
        assert err.count("\n") == 1
        return err

    return run


@pytest.fixture
def as_one_of(monkeypatch):
    """Set the environment of a launcher that has started this process as rank 0."""

    def be(ranks):
        where = {"RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for name, value in where.items():
            monkeypatch.setenv(name, str(value))

    return be


@pytest.mark.parametrize(("M", "ranks", "suggested"), [(1, 2, 2), (4, 3, 6), (6, 4, 8), (2, 8, 8)])
def test_micro_batches_that_processes_cannot_share_out_equally(refused, as_one_of, M, ranks, suggested):
    words = f"--micro-batches {M} cannot be divided equally among {ranks} processes; give --micro-batches {suggested},"
    assert words in refused(*MIX, "--micro-batches", M, "--spawn", ranks)
    as_one_of(ranks)
    assert words in refused(*MIX, "--micro-batches", M)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mesh pipe=3", "--mesh pipe=3 needs 3 processes, the product of its axes, but 2 were started"),
        ("--mesh data=2,data=2", "data is given twice"),
        (
            "--mesh pipe=2 --stage-cut deep.99",
            "--stage-cut deep.99: the network has no such piece; its pieces are input, deep.0,",
        ),
        ("--mesh pipe=2 --stage-cut deep.2,deep.4", "makes 3 stages, but --mesh pipe=2 needs 2"),
        (
            "--mesh pipe=2 --schedule interleaved --stage-cut deep.2",
            "makes 2 stages, but --schedule interleaved needs the same number",
        ),
        ("--mesh pipe=2 --model tests.own_models:FewRows", "FewRows cannot be cut into stages"),
        ("--mesh pipe=2 --dense-exchange tree", "--dense-exchange tree has no effect with --mesh pipe=2"),
        ("--mesh pipe=2 --schedule interleaved --micro-batches 5", "takes micro-batches in rounds of 2, but"),
        ("--mesh data=2 --schedule gpipe", "--schedule gpipe has no effect without --mesh pipe=N"),
        ("--stage-cut deep.2", "--stage-cut has no effect without --mesh pipe=N"),
    ],
)
def test_meshes_cuts_and_schedules(refused, as_one_of, options, words):
    """Before any process waits for another: this one has none."""
    as_one_of(2)
    assert words in refused(*MIX, "--micro-batches", 4, *options.split())


def test_more_stages_than_micro_batches(refused, as_one_of):
    as_one_of(4)
    words = (
        "--mesh data=2,pipe=2 has 2 stages, so each process needs at least 2 micro-batches; give --micro-batches 4 or "
        "more"
    )
    assert words in refused(*MIX, "--micro-batches", 2, "--mesh", "data=2,pipe=2")


def test_tables_on_the_device(refused, as_one_of):
    words = "2 processes can share tables only in host memory; give --host-device-mix"
    assert words in refused("--micro-batches", 2, "--spawn", 2)
    as_one_of(2)
    assert words in refused("--micro-batches", 2)


def test_spawn_under_a_launcher(refused, as_one_of):
    as_one_of(2)
    error = refused(*MIX, "--micro-batches", 2, "--spawn", 2)
    assert "--spawn has no effect in a process that a launcher started as one of several; leave out --spawn" in error


@pytest.mark.parametrize(
    "flags",
    [
        ("--dist-timeout", 5),
        ("--dist-backend", "gloo"),
        ("--dist-url", "env://"),
        ("--batch-per-rank", 100),
        ("--exchange-levels", 1),
    ],
    ids=lambda flags: flags[0],
)
def test_what_has_no_effect_in_one_process(refused, flags):
    assert f"{flags[0]} has no effect in one process; leave out {flags[0]}, or start several" in refused(*MIX, *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--batch-per-rank", 100, "--batch-size", 200),
            "--batch-per-rank cannot be combined with --batch-size",
        ),
        (("--dist-timeout", 0), "--dist-timeout must be a number above 0, not 0.0"),
        (("--dist-timeout", "nan"), "--dist-timeout must be a number above 0, not nan"),
        (("--dist-backend", "mpi"), "invalid choice: 'mpi'"),
        (("--exchange-levels", 3), "invalid choice: 3"),
        (("--micro-batches", 0), "--micro-batches must be at least 1, not 0"),
        (("--spawn", 0), "--spawn must be at least 1, not 0"),
        (("--batch-per-rank", 0), "--batch-per-rank must be at least 1, not 0"),
        (("--torch-threads", 0), "--torch-threads must be at least 1, not 0"),
        (("--gradients", "sum"), "--gradients sum has no effect without --micro-batches"),
        (("--l2", "table", "--micro-batches", 2), "--micro-batches cannot be combined with --l2 table"),
    ],
    ids=str,
)
def test_wrong_options(refused, flags, words):
    assert words in refused(*MIX, *flags)


def test_the_batch_of_all_is_that_of_each_times_their_number():
    settings = resolve_batch(TrainConfig(batch_per_rank=100, micro_batches=4), 4)
    assert (settings.batch_size, settings.batch_per_rank) == (400, None)
    assert settings.resolved() == TrainConfig(batch_size=400, micro_batches=4).resolved()


def test_a_place_that_is_none(refused, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK is 3, but it must be below WORLD_SIZE (2): ranks are numbered from 0" in refused(
        *MIX, "--micro-batches", 2
    )


def test_ranks_that_do_not_come(refused, as_one_of):
    as_one_of(4)
    assert "ranks 1, 2, 3 of 4 did not reach 127.0.0.1:" in refused(*MIX, "--micro-batches", 4, "--dist-timeout", 1)


def test_nobody_is_where_rank_0_should_be():
    port = free_port()
    with pytest.raises(UserError, match=f"rank 1 of 2 cannot reach rank 0 at 127.0.0.1:{port} within 1 s"):
        Ranks(RankEnvironment(1, 2, 1, 2, "127.0.0.1", port, "test"), lambda *_: None, meeting=1)


def test_torch_tries_for_longer_than_it_was_told(monkeypatch):
    """Nobody listens: that is said, and not that another program has the port."""
    env, ended = RankEnvironment(1, 2, 1, 2, "127.0.0.1", free_port(), "test"), threading.Event()
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *_, **__: ended.wait())
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"cannot reach rank 0 at 127.0.0.1:\d+ within 0.1 s"):
        Ranks(env, lambda *_: None, meeting=0.1)
    ended.set()


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"rank 0 cannot listen at 127.0.0.1:{port}: .*choose another MASTER_PORT"):
            Ranks(RankEnvironment(0, 2, 0, 2, "127.0.0.1", port, "test"), lambda *_: None, meeting=1)


def test_ranks_with_different_numbers_of_steps():
    """All ranks raise it at the first step that some do not take."""

    def work(ranks):
        exchange = Exchange(ranks, [50, 20], [[4], [1, 2]])
        for _ in range(3 if ranks.rank == 1 else 2):
            exchange.ids([np.arange(9), np.arange(3)])
        exchange.end()

    for error in with_ranks(3, work):
        assert isinstance(error, ValueError)
        assert "ranks 0, 2 have no more batches, but rank 1 has" in str(error)
    assert with_ranks(3, lambda ranks: Exchange(ranks, [9], [[1]]).end()) == [None, None, None]


def test_memory_for_the_part_of_a_table(monkeypatch):
    """A process is to have room for its own rows, and not for all."""
    tables = {"deep": TableSpec(1000, 8, LazyAdam())}
    monkeypatch.setattr(room, "available_bytes", lambda: 60_000)
    cpu = torch.device("cpu")
    assert room.require_room(tables, True, cpu, (1, 2)) == 60_000 - 500 * 8 * 3 * 4
    with pytest.raises(UserError, match="table 'deep' needs 1000 rows x 8 x"):
        room.require_room(tables, True, cpu, None)


def test_a_rank_that_asks_for_rows_beyond_the_part():
    """Rows beyond the owner's part, as of a larger table, would make its kernels read out of bounds."""

    def work(ranks):
        exchange = Exchange(ranks, [50, 400 if ranks.rank == 1 else 20], [[4], [1, 2]])
        return exchange.ids([np.arange(9), np.arange(20) + (380 if ranks.rank == 1 else 0)])

    first, second = with_ranks(2, work)
    assert isinstance(first, ValueError)
    assert str(first).startswith("rank 1 requests local row ")
    assert "rank 0, which has only 10 of the tables' 20 rows;" in str(first)
    assert not isinstance(second, ValueError)
    [(ids, _)], _ = with_ranks(2, lambda ranks: Exchange(ranks, [9], [[1]]).ids([np.arange(9)]))
    assert sorted(ids) == [0, 1, 2, 3]


def test_a_rank_that_asks_for_a_negative_number_of_rows():
    with pytest.raises(ValueError, match="rank 1 requests a negative number of rows: -7"):
        require_all(np.array([[3], [-7]]))
