"""The learning curve of a run as a file: success on unseen tasks against environment steps, iterations and seconds.

It chooses when the validations are made and keeps what they found; what they play is the datamodule's.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from gigpo_lightning.callbacks.output_place import check_folder
from gigpo_lightning.callbacks.seam import find, is_resumed_check, require_after, rollouts
from gigpo_lightning.callbacks.step_budget import StepBudget
from gigpo_lightning.files import write_json
from gigpo_lightning.memory import peak_memory

FILE = "curve.json"
_NEVER = sys.maxsize  # epochs between validations, where the next one is not due


class LearningCurve(Callback):
    """Write `curve.json`: a point for every validation, and what the training has cost so far.

    Validations are made at the first iteration that ends behind a multiple of `every_env_steps`, or begins its update
    behind one of `every_s`, and at the end of a `StepBudget`. The first point is the untrained policy, where
    `trainer.num_sanity_val_steps` is -1. A resumed run adds to the points that its checkpoint had. Needs `StepBudget`
    before it.

    Args:
        every_env_steps: Environment steps of the training from one validation to the next, ≥ 1.
        every_s: Seconds of training from one to the next, > 0. With both null `trainer.check_val_every_n_epoch` holds.
        folder: Where the file goes; null is the trainer's `default_root_dir`.

    Raises:
        ValueError: A number out of its range, or both are given; in `setup`: `StepBudget` is missing or comes later, or
            the folder cannot be written.
    """

    def __init__(
        self, every_env_steps: int | None = None, every_s: float | None = None, folder: str | None = None
    ) -> None:
        if every_env_steps is not None and every_env_steps < 1:
            raise ValueError(f"LearningCurve.every_env_steps={every_env_steps}: must be ≥ 1")
        if every_s is not None and not 0 < every_s < math.inf:
            raise ValueError(f"LearningCurve.every_s={every_s}: must be positive and finite, in seconds")
        if every_env_steps is not None and every_s is not None:
            raise ValueError(
                f"LearningCurve: every_env_steps={every_env_steps} and every_s={every_s}: give one of them"
            )
        self.every_env_steps, self.every_s, self.folder = every_env_steps, every_s, folder
        self.points: list[dict[str, Any]] = []
        self.peak_bytes = 0
        self._seconds = 0.0  # of training before this process
        self._begun_s = time.monotonic()
        self._decided_s = 0.0  # seconds of training at the latest decision
        self._steps: StepBudget | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training, over all processes that went on with it."""
        return self._seconds + time.monotonic() - self._begun_s

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the counter of steps, and refuse a folder that cannot be written."""
        require_after(trainer, self, StepBudget)
        self._steps = find(trainer, StepBudget)
        if self._steps is None:
            raise ValueError("trainer.callbacks: LearningCurve needs StepBudget before it, which counts the steps")
        check_folder(self._place(trainer), f"LearningCurve.folder={self.folder}")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._begun_s, self._decided_s = time.monotonic(), self._seconds

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Decide, once an iteration, whether a validation follows it; the same on every process."""
        if batch_idx == 0 and (self.every_env_steps is not None or self.every_s is not None):
            due = trainer.strategy.broadcast(self._due())
            trainer.check_val_every_n_epoch = 1 if due else _NEVER

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add a point."""
        rows: list[dict[str, Any]] = getattr(pl_module, "results", [])
        data = rollouts(trainer, self)
        if trainer.state.fn != TrainerFn.FITTING or is_resumed_check(trainer, data) or not rows:
            return
        assert self._steps is not None
        stage = data.controls.stage
        self.points.append(
            {
                "iteration": data.iteration,
                "env_steps": self._steps.total,
                "seconds": round(self.seconds, 3),
                "stage": stage.name if stage else None,
                "success": {row["stage"]: row["success"] for row in rows},
                "length": {row["stage"]: row["length"] for row in rows},
            }
        )
        self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The cost of all of it."""
        self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The points so far, the seconds and the most memory that was held."""
        return {
            "points": [dict(point) for point in self.points],
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from these points."""
        self.points = [dict(point) for point in state_dict["points"]]
        self._seconds, self.peak_bytes = float(state_dict["seconds"]), int(state_dict["peak_bytes"])

    def _due(self) -> bool:
        """Whether a multiple of the distance lies in the present iteration, or the budget is used up."""
        assert self._steps is not None
        if self._steps.used_up:
            return True
        if self.every_env_steps is not None:
            return is_due(self._steps.before, self._steps.total, self.every_env_steps)
        assert self.every_s is not None
        before, self._decided_s = self._decided_s, self.seconds
        return is_due(before, self._decided_s, self.every_s)

    def _write(self, trainer: pl.Trainer) -> None:
        self.peak_bytes = max(self.peak_bytes, peak_memory(trainer.strategy.root_device))
        if not trainer.is_global_zero:
            return
        assert self._steps is not None
        data = rollouts(trainer, self)
        content = {
            "iteration": data.iteration,
            "env_steps": self._steps.total,
            "seconds": round(self.seconds, 3),
            "peak_bytes": self.peak_bytes,
            "stage": data.controls.stage.name if data.controls.stage else None,
            "points": self.points,
        }
        write_json(self._place(trainer) / FILE, content)

    def _place(self, trainer: pl.Trainer) -> Path:
        return Path(self.folder or trainer.default_root_dir)


def is_due(before: float, after: float, every: float) -> bool:
    """Whether a multiple of `every` lies in (before, after]."""
    return after // every > before // every
