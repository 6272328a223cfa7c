"""How many steps the environments have taken in training: a limit that is the same for every algorithm.

Evaluations do not count. Knows the figure of an iteration; nothing about episodes.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.callbacks.seam import rollouts


class StepBudget(Callback):
    """Count the environment steps of the training and end it with the iteration in which they are used up.

    A resumed run counts on. The sum is logged as `rollout/env_steps_total`. List it before `TensorBoardViews`.

    Args:
        env_steps: Environment steps of all processes together, ≥ 1; null only counts them.

    Raises:
        ValueError: `env_steps` is out of its range.
    """

    def __init__(self, env_steps: int | None = None) -> None:
        if env_steps is not None and env_steps < 1:
            raise ValueError(f"StepBudget.env_steps={env_steps}: must be ≥ 1, or null for no limit")
        self.env_steps = env_steps
        self.before = 0  # steps of all iterations before the present one
        self.total = 0  # the present one's, too

    @property
    def used_up(self) -> bool:
        """Whether the present iteration is the last."""
        return self.env_steps is not None and self.total >= self.env_steps

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run that had come to its end has nothing left to do."""
        rollouts(trainer, self)
        trainer.should_stop = trainer.should_stop or self.used_up

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the iteration as soon as it is played, so that its validation finds it counted."""
        if batch_idx == 0:
            self.before = self.total
            self.total += round(rollouts(trainer, self).report.metrics["rollout/env_steps"])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the sum, and stop where it is enough."""
        rollouts(trainer, self).report.metrics["rollout/env_steps_total"] = float(self.total)
        trainer.should_stop = trainer.should_stop or self.used_up

    def state_dict(self) -> dict[str, Any]:
        """The sum."""
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the sum over."""
        self.before = self.total = int(state_dict["total"])
