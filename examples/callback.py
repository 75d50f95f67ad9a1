"""Send losses and metrics to Weights & Biases, or another service with `init`, `log` and `finish`, by a callback.

pip install wandb
cd examples; hostdev train --callback callback:Wandb
"""

from typing import Any

import hostdev
from hostdev.tracking import CheckpointInfo, EndInfo, EpochInfo, RunInfo, StepInfo

EVERY = 10  # steps; a call for each step would slow down short steps


class Wandb(hostdev.Callback):
    """Logs every tenth step, each evaluation, checkpoints, and the summary."""

    def on_start(self, run: RunInfo) -> None:
        """Begin a run of the same name as the run directory."""
        import wandb

        self.run: Any = wandb.init(project="hostdev", name=run.run_dir.name, config=dict(run.config), resume="allow")

    def on_step(self, step: StepInfo) -> None:
        """Log the losses."""
        if step.step % EVERY == 0:
            self.run.log(dict(step.losses), step=step.step)

    def on_epoch(self, epoch: EpochInfo) -> None:
        """Log the metrics, such as "test/auc"."""
        metrics = {f"{split}/{name}": value for split, each in epoch.metrics.items() for name, value in each.items()}
        self.run.log({"epoch": epoch.epoch, **metrics}, step=epoch.step)

    def on_checkpoint(self, checkpoint: CheckpointInfo) -> None:
        """Record where the newest checkpoint is."""
        self.run.summary["checkpoint"] = str(checkpoint.path)

    def on_end(self, end: EndInfo) -> None:
        """Record the final figures, and end the run."""
        self.run.summary.update({name: end.summary[name] for name in ("auc", "logloss", "state_sha256")})
        self.run.finish(exit_code=0 if end.status in ("finished", "stopped early") else 1)
