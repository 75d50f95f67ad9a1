"""What a run reported, read back; and callbacks for the tests, which name them as tests.tracking.cases:Class."""

import random
import shutil
import time

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hostdev
from hostdev.checkpoint.folder import names_in
from hostdev.core import run_files

FLAGS = ["--batch-size", 250, "--emb-dim", 4]
seen = []


class Recorder(hostdev.Callback):
    """Keeps the names of the methods that were called, and their arguments; draws random numbers."""

    raises = None

    def receive(self, name, info):
        torch.rand(3), np.random.rand(3), np.random.randn(), random.random()
        if self.raises is None:
            seen.append((name, info))
        elif name == self.raises and getattr(info, "step", 9) >= 5:
            raise LookupError("no such room")

    def on_start(self, run):
        self.receive("on_start", run)

    def on_step(self, step):
        self.receive("on_step", step)

    def on_epoch(self, epoch):
        self.receive("on_epoch", epoch)

    def on_checkpoint(self, checkpoint):
        self.receive("on_checkpoint", checkpoint)

    def on_end(self, end):
        self.receive("on_end", end)


class RaisesInStart(Recorder):
    raises = "on_start"


class RaisesInStep(Recorder):
    raises = "on_step"


class RaisesInEpoch(Recorder):
    raises = "on_epoch"


class RaisesInCheckpoint(Recorder):
    raises = "on_checkpoint"


class RaisesInEnd(Recorder):
    raises = "on_end"


class Sleeper(hostdev.Callback):
    def on_step(self, step):
        time.sleep(0.05)


class Misspelt:
    def on_steps(self, step):
        pass


class NeedsAnArgument(hostdev.Callback):
    def __init__(self, name):
        pass


def read_scalars(folder):
    """Return the values of each tag by step, as TensorBoard reads them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}
    return scalars, events


def keep_checkpoint(run, step):
    """Remove what a process has not that was killed after its checkpoint of this step."""
    for name in names_in(run / "checkpoints"):
        if name != f"step-{step:010}":
            shutil.rmtree(run / "checkpoints" / name)
    (run / "summary.json").unlink()


def read_losses(run):
    """Return the losses in loss.log, by step from 1: wide and deep."""
    return list(map(tuple, run_files.read_losses(run / "loss.log")[:, 2:].tolist()))


def read_evaluations(run):
    """Return the AUC and log loss of the lines in eval.log, with their steps."""
    return [
        (line.step, line.test["auc"], line.test["logloss"]) for line in run_files.read_evaluations(run / "eval.log")
    ]
