"""`Predictor.follow` takes new checkpoints while it predicts: whole ones, at once, and never a damaged one."""

import contextlib
import shutil
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

import hostdev
from hostdev.checkpoint import folder
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.core.addresses import checkpoint_path
from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.data.shards import ShardReader
from hostdev.ext.checkpoints import deliver
from hostdev.ext.predict import following
from hostdev.ext.training import cli as train
from tests.distributed.processes import wait_until

SECONDS, PATIENCE = 0.02, 60


def train_run(data, path, *more):
    options = ["--data", data, "--device", "cpu", "--emb-dim", 4, "--batch-size", 20, "--run-dir", path]
    options += ["--max-steps", 24, "--checkpoint-every", 3, "--keep-checkpoints", 20, *more]
    assert train.main(list(map(str, options)), "train") in (None, 0)
    return path / "checkpoints"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run's checkpoints, full ones and increments; some rows; and each checkpoint's predictions by step."""
    path = tmp_path_factory.mktemp("run")
    build(Synthetic(4000, 1), path / "data", Options(threshold=1))
    run = train_run(path / "data", path / "run")
    batch = next(ShardReader(path / "data", manifest.read(path / "data"), "test").batches(50))
    predicted = {}
    for name in folder.names_in(run):
        predict = hostdev.Predictor(run / name)
        predicted[predict.step] = predict.predict(batch)
    return run, batch, predicted


class Served:
    """A folder of checkpoints that a predictor follows, and what it has said."""

    def __init__(self, run, place):
        self.run, self.place, self.problems = run, place, []
        self.names = folder.names_in(run)

    def deliver(self, number, keep=2):
        return deliver.deliver(folder.read_chain(self.run / self.names[number]), checkpoint_path(self.place), keep)

    def follow(self):
        return hostdev.Predictor.follow(self.place, seconds=SECONDS, on_problem=self.problems.append)

    def step(self, number):
        return folder.read_chain(self.run / self.names[number])[-1].manifest.step


@pytest.fixture(params=["folder", "store"])
def served(request, made, tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
    place = str(tmp_path / "served") if request.param == "folder" else "memory://followed/model"
    there = Served(made[0], place)
    there.deliver(0)
    yield there
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/followed", recursive=True)


@pytest.fixture
def here(made, tmp_path):
    there = Served(made[0], str(tmp_path / "served"))
    there.deliver(0)
    return there


def test_each_checkpoint_is_taken(made, served):
    _, batch, predicted = made
    copied = []
    with served.follow() as predict:
        for number in range(1, len(served.names)):
            copied.append(served.deliver(number).copied)
            assert predict.wait(served.step(number), PATIENCE)
            np.testing.assert_array_equal(predict.current.predict(batch), predicted[predict.step])
    assert served.problems == []
    assert min(copied) < max(copied) / 2  # an increment, and a full one
    np.testing.assert_array_equal(predict.current.predict(batch), predicted[predict.step])


def test_every_answer_is_of_one_checkpoint(made, here):
    _, batch, predicted = made
    answers, ended = [], threading.Event()

    def ask():
        while not ended.is_set():
            current = predict.current
            answers.append((current.step, current.predict(batch)))

    with here.follow() as predict:
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(1, len(here.names)):
            here.deliver(number)
            predict.wait(here.step(number), PATIENCE)
        ended.set()
        for thread in threads:
            thread.join()
    for step, answer in answers:
        np.testing.assert_array_equal(answer, predicted[step])
    assert here.problems == []


def place_damaged(there, number, change):
    """Deliver a checkpoint that `change` has damaged, at once; return the folder."""
    name = there.names[number]
    partial = Path(there.place) / f".partial-{name}"
    shutil.copytree(there.run / name, partial)
    change(partial)
    return partial.rename(partial.with_name(name))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damaged_rows_are_refused(made, here):
    _, batch, predicted = made
    with here.follow() as predict:
        first = predict.step
        found = place_damaged(here, 1, lambda path: flip(min(path.glob("tables/*/*"))))
        wait_until(lambda: here.problems)
        time.sleep(10 * SECONDS)  # in which a second line, or the damaged model, could come
        [said] = here.problems
        assert "checksum is wrong" in said and f"still those of {here.names[0]}" in said
        assert predict.step == first
        np.testing.assert_array_equal(predict.current.predict(batch), predicted[first])
        flip(min(found.glob("tables/*/*")))  # mended
        assert predict.wait(here.step(1), PATIENCE)
    np.testing.assert_array_equal(predict.current.predict(batch), predicted[predict.step])


def test_a_file_that_is_met_while_it_is_mended(made, here, monkeypatch):
    """Then it may be too short, an error that names no file to look at again."""
    met = []

    def open_checkpoint(*given, real=following.open_checkpoint):
        if not met:
            met.append(given)
            raise BrokenCheckpointError("it has 0 bytes")
        return real(*given)

    with here.follow() as predict:
        found = place_damaged(here, 1, lambda path: flip(min(path.glob("tables/*/*"))))
        wait_until(lambda: here.problems)
        monkeypatch.setattr(following, "open_checkpoint", open_checkpoint)
        flip(min(found.glob("tables/*/*")))  # mended
        assert predict.wait(here.step(1), PATIENCE)
    assert met


@pytest.mark.parametrize("name", ["checkpoint.json", "dense.safetensors"])
def test_other_damage_is_refused(made, here, name):
    with here.follow() as predict:
        place_damaged(here, 1, lambda path: flip(path / name))
        wait_until(lambda: here.problems)
        assert predict.step == here.step(0)
        here.deliver(2)
        assert predict.wait(here.step(2), PATIENCE)


def test_another_model_is_refused(made, here, tmp_path):
    run = train_run(made[0].parent.parent / "data", tmp_path / "other", "--model", "deepfm")
    with here.follow() as predict:
        shutil.copytree(run / folder.names_in(run)[-1], Path(here.place) / ".partial-new")
        shutil.move(Path(here.place) / ".partial-new", Path(here.place) / folder.names_in(run)[-1])
        wait_until(lambda: here.problems)
        assert "of a different model: model is 'deepfm'" in here.problems[0]
        assert predict.step == here.step(0)


def test_random_generators_of_the_program_are_left_alone(made, here):
    with here.follow() as predict:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        here.deliver(1)
        assert predict.wait(here.step(1), PATIENCE)
        assert torch.equal(torch.get_rng_state(), before)


def test_files_that_stay_are_mapped_once(made, here):
    with here.follow() as predict:
        for number in range(1, 4):
            here.deliver(number)
            predict.wait(here.step(number), PATIENCE)
        lines = Path("/proc/self/maps").read_text().splitlines()
        mine = [line.split()[-1] for line in lines if here.place in line]
        assert mine and len(mine) == len(set(mine))


def test_folders_that_cannot_be_followed(made, here):
    with pytest.raises(UserError, match="a single checkpoint, which never changes"):
        hostdev.Predictor.follow(made[0] / folder.names_in(made[0])[0])
    with pytest.raises(UserError, match="there is no file or folder"):
        hostdev.Predictor.follow(made[0] / "nothing")


def test_a_folder_that_goes_away(made, here):
    with here.follow() as predict:
        Path(here.place).rename(f"{here.place}.away")
        wait_until(lambda: here.problems)
        Path(f"{here.place}.away").rename(here.place)
        here.deliver(1)
        assert predict.wait(here.step(1), PATIENCE)
