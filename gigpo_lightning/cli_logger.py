"""TensorBoard's logger, without a file that would say nothing."""

from __future__ import annotations

from lightning.fabric.loggers.tensorboard import TensorBoardLogger as FabricLogger
from lightning.pytorch.loggers import TensorBoardLogger


class RunLogger(TensorBoardLogger):
    """Writes `hparams.yaml` only where there are hyperparameters: a run's options are in its `config.yaml`."""

    def save(self) -> None:
        """Write what is there."""
        super().save() if self.hparams else FabricLogger.save(self)
