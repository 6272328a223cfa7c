"""Training without a curriculum: one of its stages from the first iteration to the last, for comparison with it."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.callbacks.seam import rollouts
from gigpo_lightning.curriculum import load_stages, stage_named


class DirectTraining(Callback):
    """Play one stage of a curriculum from the beginning, and none of the others.

    It takes the place of `Curriculum`; evaluations still know all stages.

    Args:
        curriculum: A curriculum file, or the name of a shipped one, e.g. `alfworld.yaml`.
        stage: The stage to play, by name; null for the last one.

    Raises:
        ValueError: The file is missing or bad, or has no such stage.
    """

    def __init__(self, curriculum: str, stage: str | None = None) -> None:
        self.stages = load_stages(curriculum)
        self.stage = self.stages[-1] if stage is None else stage_named(self.stages, stage, "DirectTraining.stage")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Tell evaluations which stages there are."""
        rollouts(trainer, self).controls.stages = self.stages

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hand the stage to the collector."""
        controls = rollouts(trainer, self).controls
        controls.stage, controls.rehearsal = self.stage, ()
