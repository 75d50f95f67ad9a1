"""Trainers for tests, from flat arguments."""

from hostdev.train.trainer import StepSettings, Trainer


def make_trainer(model, *, device, **options):
    """Return a trainer; `options` are arguments of `Trainer`, and the fields of its `steps`."""
    steps = StepSettings(**{name: options.pop(name) for name in StepSettings._fields if name in options})
    return Trainer(model, device=device, steps=steps, **options)
