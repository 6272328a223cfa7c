"""A tiny datamodule and module with the callbacks' seam, for real fits that take a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from gigpo_lightning.curriculum import Stage
from gigpo_lightning.rollout.library_baseline import Library
from gigpo_lightning.rollout.task_choice import ClassCount, TaskSignal


@dataclass
class Controls:
    lam: float = 1.0
    temperature: float = 1.0
    entropy_coef: float = 0.0
    stage: Stage | None = None
    rehearsal: tuple[Stage, ...] = ()
    turn_limit: int | None = None
    signal: TaskSignal | None = None
    library: Library | None = None


@dataclass
class CreditTable:
    tasks: list[str]
    anchors: list[str]
    step_returns: np.ndarray
    texts: list[str]
    stages: list[str]


@dataclass
class Report:
    metrics: dict[str, float] = field(default_factory=dict)
    success: dict[str, tuple[int, int]] = field(default_factory=dict)
    credit_tables: Callable[[], Sequence[CreditTable]] = tuple
    classes: dict[str, ClassCount] = field(default_factory=dict)
    histograms: dict[str, np.ndarray] = field(default_factory=dict)
    transcripts: list[str] = field(default_factory=list)


class _Rows(IterableDataset):
    """Collects in `__iter__`, once per epoch: at once (the earliest that Lightning can ask) or with the first row."""

    def __init__(self, owner: TinyRollouts) -> None:
        self.owner = owner

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.owner.collect()) if self.owner.eager else self._lazily()

    def _lazily(self) -> Iterator[torch.Tensor]:
        yield from self.owner.collect()


class TinyRollouts(pl.LightningDataModule):
    """Each iteration `rates[i]` of 10 episodes of the current stage succeed; what the callbacks had set is recorded."""

    def __init__(self, rates: list[float], seed: int = 0, eager: bool = True) -> None:
        super().__init__()
        self.rates, self.eager = rates, eager
        self.seed = seed
        self.iteration = 0
        self.controls = Controls()
        self.given: dict[str, float | None] = {"lam": None, "temperature": None, "entropy_coef": None}
        self.report = Report()
        self.seen: list[dict[str, Any]] = []

    def collect(self) -> torch.Tensor:
        index = self.iteration
        self.iteration += 1
        stage = self.controls.stage.name if self.controls.stage else ""
        self.seen.append(
            {
                "iteration": index,
                "lam": self.controls.lam,
                "temperature": self.controls.temperature,
                "entropy_coef": self.controls.entropy_coef,
                "stage": stage,
                "rehearsal": [item.name for item in self.controls.rehearsal],
                "turn_limit": self.controls.turn_limit,
            }
        )
        rng = np.random.default_rng([self.seed, index])
        rate = self.rates[index % len(self.rates)]
        turns = 40
        keys = [f"s{number}" for number in rng.integers(0, 12, turns)]
        table = CreditTable(
            ["t"] * turns, keys, rng.normal(size=turns), [f"You see {key}." for key in keys], [stage] * turns
        )
        self.report = Report(
            metrics={"rollout/success": rate, "rollout/env_steps": 40.0, "anchors/density": 0.2, "time/iteration": 1.0},
            success={stage: (round(10 * rate), 10)},
            credit_tables=lambda: [table],
            histograms={"anchors/group_size": rng.integers(1, 9, 30).astype(np.float64)},
            transcripts=["task: put a pan on the table\n> look"],
        )
        return torch.from_numpy(rng.normal(size=(2, 4)).astype(np.float32))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Rows(self), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(1, 4))

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.iteration = state_dict["iteration"]


class TinyModule(pl.LightningModule):
    """Four weights under Adam, so that an optimiser state has to survive a resume too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.steps = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        loss = self.layer(batch).square().mean() * self.trainer.datamodule.controls.lam
        self.log("loss/policy", loss, on_step=False, on_epoch=True, logger=False)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/success", float(self.trainer.datamodule.iteration), logger=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(
    root: Path,
    callbacks: list[pl.Callback],
    rates: list[float],
    epochs: int,
    ckpt_path: str | None = None,
    eager: bool = True,
    **options: Any,
) -> tuple[pl.Trainer, TinyModule, TinyRollouts]:
    """One CPU fit from seed 0; returns what a test looks at."""
    pl.seed_everything(0)
    module, data = TinyModule(), TinyRollouts(rates, eager=eager)
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "limit_val_batches": 0} | options
    if not any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks):
        settings["enable_checkpointing"] = False
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=root,
        max_epochs=epochs,
        callbacks=callbacks,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer, module, data
