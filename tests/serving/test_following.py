"""`hostdev serve --follow`: newer checkpoints are taken while requests are answered, each by one checkpoint."""

import http.client
import json
import random
import shutil
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch

import hostdev
from hostdev.checkpoint import folder
from hostdev.core.machine import available_cpus
from hostdev.ext.checkpoints.deliver import deliver
from tests import forks
from tests.conftest import environment
from tests.distributed.processes import wait_until
from tests.ports import free_port
from tests.serving.conftest import trained
from tests.serving.helpers import FILMS, Served, as_rows, bits
from tests.serving.test_processes import errors, started

PATIENCE = 60
KEEP = 400
KILLS = 20
LIVES = {"train": 12, "deliver": 4, "serve": 9}  # seconds within which a process is killed


def deliver_one(checkpoint, place):
    return deliver(folder.read_chain(checkpoint), place, KEEP)


def answers_of(checkpoints):
    """Return each checkpoint's predictions for FILMS by step, which all differ."""
    found = {}
    for name in folder.names_in(checkpoints):
        predict = hostdev.Predictor(checkpoints / name)
        found[predict.step] = bits(predict(FILMS))
    assert len(set(map(tuple, found.values()))) == len(found)
    return found


def test_a_newer_checkpoint_and_a_damaged_one(film_run, tmp_path, capsys):
    first, second, *_ = folder.names_in(film_run)
    place = tmp_path / "served"
    deliver_one(film_run / first, place)
    before, after = (hostdev.Predictor(film_run / name) for name in (first, second))
    with Served(place, follow=True) as served:
        capsys.readouterr()

        def version():
            return served.raw_json({"columns": FILMS})["step"]

        assert bits(served.raw_json({"columns": FILMS})["predictions"]) == bits(before(FILMS))
        damaged = place / f".partial-{second}"
        shutil.copytree(film_run / second, damaged)
        (damaged / "dense.safetensors").write_bytes(b"x")
        damaged.rename(place / second)
        told = []
        wait_until(lambda: told.append(capsys.readouterr().err) or "serve: warning: " in "".join(told))
        assert version() == before.step and served.ask("GET", "/v2/health/ready").json == {"ready": True}
        shutil.rmtree(place / second)
        deliver_one(film_run / second, place)
        wait_until(lambda: version() == after.step)
        assert bits(served.raw_json({"columns": FILMS})["predictions"]) == bits(after(FILMS))
        assert served.ask("GET", f"/v2/models/{served.name}").json["versions"] == [str(after.step)]
        old = served.ask("POST", f"/v2/models/{served.name}/versions/{before.step}/infer", {"inputs": []})
        assert old.status == 404 and f"version {after.step} is served" in old.error
        text = served.ask("GET", "/metrics").body.decode()
        assert "hostdev_model_changes_total 1.0" in text and "hostdev_model_problems_total 1.0" in text
        assert f"hostdev_model_step {after.step:.1f}" in text
        wait_until(lambda: told.append(capsys.readouterr().out) or f"serving  version {after.step}, " in "".join(told))
    assert "".join(told).count("warning: ") == 1


class Client(threading.Thread):
    """Asks for the same rows again and again, over one connection as long as it lasts.

    Attributes:
        answers: The step and the predictions' bits of each answer, without repetitions.
        failed: What was not an answer.
        asked: The number of requests.
    """

    def __init__(self, port, may_refuse=False):
        super().__init__(daemon=True)
        self._port, self._may_refuse = port, may_refuse
        self._ends = threading.Event()
        self.answers, self.failed, self.asked = {}, [], 0

    def run(self):
        body = json.dumps({"rows": as_rows(FILMS)})
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        while not self._ends.is_set():
            try:
                connection.request("POST", "/v1/predict", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = json.loads(answer.read())
                self.asked += 1
                if answer.status != 200:
                    self.failed.append((answer.status, content))
                    continue
                self.answers[content["step"], tuple(bits(content["predictions"]))] = None
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not self._may_refuse:
                    self.failed.append(repr(error))
                time.sleep(0.05)
        connection.close()

    def end(self):
        self._ends.set()
        self.join(2 * PATIENCE)
        assert not self.is_alive()


@contextmanager
def asked(port, n, **options):
    """Let n clients ask within the block; each answer must be one of one checkpoint, by step."""
    clients = [Client(port, **options) for _ in range(n)]
    for client in clients:
        client.start()
    try:
        yield clients
    finally:
        for client in clients:
            client.end()


def require(clients, expected):
    for client in clients:
        assert client.failed == []
        for step, found in client.answers:
            assert list(found) == expected[step]
    return {step for client in clients for step, _ in client.answers}


def memory_of(process):
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_200_checkpoints_under_load(films, tmp_path, workers):
    """No request fails, each answer is of one checkpoint to the bit, and memory does not grow."""
    options = ["--model", "deepfm", "--epochs", 12, "--max-steps", 201, "--checkpoint-every", 1]
    made = trained(films, tmp_path / "run", *options, "--keep-checkpoints", KEEP)
    names = folder.names_in(made)
    assert len(names) >= 201
    torch.set_num_threads(max(1, available_cpus() // workers))  # as in a server's process: the last bits depend on it
    expected = answers_of(made)
    place = tmp_path / "served"
    deliver_one(made / names[0], place)
    # One request is a batch, so that its sums are those of Predictor.
    flags = ["--follow", "--max-batch", len(FILMS["user"]), "--workers", workers]
    memory, waits = [], []
    with started(place, tmp_path / "work", *flags) as (process, address):
        port = int(address.rpartition(":")[2])
        with asked(port, 8) as clients:
            for name in names[1:]:
                deliver_one(made / name, place)
                step = folder.read_chain(made / name)[-1].manifest.step
                start = time.monotonic()
                assert process.stdout.readline().startswith(f"serving  version {step}, ")
                waits.append(time.monotonic() - start)
                memory.append(memory_of(psutil.Process(process.pid)))
        process.terminate()
        assert process.wait(PATIENCE) == 0
    steps = require(clients, expected)
    print(f"{sum(client.asked for client in clients):,} requests, {len(steps)} checkpoints; switch: median", end=" ")
    print(f"{np.median(waits):.2f} s, at most {max(waits):.2f} s; MB {[m >> 20 for m in memory[:: len(memory) // 8]]}")
    assert len(steps) > 150 and errors(tmp_path / "work") == ""
    assert np.mean(memory[-20:]) < 1.05 * np.mean(memory[40:60])


def start(folder, log, *command):
    with log.open("ab") as out:
        return forks.Popen(
            [sys.executable, "-m", *map(str, command)], cwd=folder, env=environment(folder), stdout=out, stderr=out
        )


@pytest.mark.slow
def test_trainer_delivery_and_server_are_killed(films, tmp_path):
    """20 times each, with kill -9 at random moments: answers are those of one checkpoint, and the last one arrives."""
    options = ["--model", "deepfm", "--epochs", 400, "--max-steps", 4000, "--checkpoint-every", 20]
    options += ["--keep-checkpoints", KEEP]
    expected = answers_of(trained(films, tmp_path / "whole", *options))
    rng = random.Random(11)
    run_folder, place, work = tmp_path / "run", tmp_path / "served", tmp_path / "work"
    work.mkdir()
    train_flags = ["--data", films, "--host-device-mix", "--batch-size", 128, "--emb-dim", 4, "--device", "cpu"]
    train_flags += [*options, "--run-dir", run_folder]
    train_command = ["hostdev", "train", *train_flags]
    deliver_command = ["hostdev", "checkpoint", "deliver", run_folder, place, "--keep", 3]
    port = free_port()
    serve_command = ["hostdev", "serve", "--checkpoint", place, "--follow", "--port", port, "--max-batch", 4]
    commands = {"train": train_command, "deliver": deliver_command, "serve": serve_command}
    processes, kills = {}, dict.fromkeys(commands, 0)

    def begin(name):
        resumed = ["--resume"] if name == "train" and any(run_folder.glob("checkpoints/step-*")) else []
        if name == "train" and not resumed:
            shutil.rmtree(run_folder, ignore_errors=True)
        processes[name] = start(work, work / f"{name}.log", *commands[name], *resumed)

    try:
        with asked(port, 4, may_refuse=True) as clients:
            while min(kills.values()) < KILLS:
                for name in commands:
                    if name not in processes or processes[name].poll() is not None:
                        begin(name)
                chosen = rng.choice([name for name in commands if kills[name] < KILLS])
                time.sleep(rng.uniform(0, LIVES[chosen]))
                if processes[chosen].poll() is None:
                    processes[chosen].kill()
                    processes[chosen].wait()
                    kills[chosen] += 1
            for name in ("train", "deliver", "serve"):
                if name != "serve" or processes[name].poll() is not None:
                    processes[name].kill()
                    processes[name].wait()
                    begin(name)
                if name != "serve":
                    assert processes[name].wait(10 * PATIENCE) == 0, (work / f"{name}.log").read_text()
            wait_until(lambda: any(step == 4000 for client in clients for step, _ in list(client.answers)))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    steps = require(clients, expected)
    print(f"{sum(client.asked for client in clients):,} answers of {len(steps)} checkpoints; kills {kills}")
    assert "Traceback" not in "".join(each.read_text() for each in work.glob("*.log"))


def test_a_single_checkpoint_is_refused(film_run, in_process):
    from hostdev.ext.serving import cli as serve

    name = folder.names_in(film_run)[0]
    code, out, error = in_process(serve, "--checkpoint", film_run / name, "--follow", "--port", 0)
    assert (code, out, error.count("\n")) == (2, "", 1) and "a single checkpoint, which never changes" in error
