"""A module and a datamodule that train in milliseconds, for tests of the command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from gigpo_lightning.cli import GiGPOCLI

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


class Marker(pl.Callback):
    """A callback with one checked option.

    Args:
        share: A share in [0, 1].
    """

    def __init__(self, share: float = 0.5) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}, but must be in [0, 1]")


class LineModule(pl.LightningModule):
    """A line through points.

    Args:
        width: Number of inputs.
        fault: What goes wrong in the first update: `full disk`, `bug`, `end` (the process is told to end) or nothing.
    """

    def __init__(self, width: int = 4, fault: str = "") -> None:
        super().__init__()
        self.line = torch.nn.Linear(width, 1)
        self.width, self.fault = width, fault

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.fault == "full disk":
            # The kernel's own "No space left on device": every write to this device fails with it.
            handle = os.open("/dev/full", os.O_WRONLY)
            os.write(handle, b"x")
        if self.fault == "end":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.fault == "bug":
            return torch.zeros(2).reshape(3)
        return self.line(batch).square().mean()

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test/loss", self.line(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LineData(pl.LightningDataModule):
    """Points.

    Args:
        width: Number of inputs.
        missing: Pretend that the data are not there.
    """

    def __init__(self, width: int = 4, missing: bool = False) -> None:
        super().__init__()
        self.width, self.missing = width, missing

    def setup(self, stage: str) -> None:
        if self.missing:
            raise FileNotFoundError("data_dir=/nowhere: there are no games; fetch them with alfworld-download")

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(4, self.width), batch_size=2)

    test_dataloader = train_dataloader


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, without what the developer or an earlier run has set, until the test ends."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIGPO_RUN_PLACE", "")
    monkeypatch.delenv("GIGPO_TRACEBACK", raising=False)
    return folder


def run_line(command: str, *args: str, epochs: int | None = None) -> GiGPOCLI:
    """Run a command on the small module."""
    extra = [] if epochs is None else [f"--trainer.max_epochs={epochs}"]
    return GiGPOCLI(command, [*QUIET, *extra, *args], LineModule, LineData)
