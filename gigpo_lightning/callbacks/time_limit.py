"""The limit of a run's time: it ends with the iteration that is under way, and says so on a line of its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer


class TimeLimit(Timer):
    """Stop after the iteration in which the time is up.

    Args:
        duration: As Lightning's `Timer` takes it: `DD:HH:MM:SS`, or named parts such as `{minutes: 30}`.
    """

    def __init__(self, duration: Any = None) -> None:
        super().__init__(duration, interval="epoch", verbose=False)

    @property
    def state_key(self) -> str:
        """The timer's own, by which checkpoints know it."""
        return "Timer"

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop if the time is up."""
        stopped = trainer.should_stop
        super().on_train_epoch_end(trainer)
        if trainer.should_stop and not stopped:
            pl_module.print("Time limit reached: the training ends with this iteration")
