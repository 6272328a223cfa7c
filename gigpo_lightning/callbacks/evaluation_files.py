"""What an evaluation leaves: `results.json` after `test` and `validate`, readable transcripts after `predict`.

The command line always adds this callback; list it only to choose another folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.table import Table

from gigpo_lightning.callbacks.output_place import check_folder
from gigpo_lightning.files import write_json
from gigpo_lightning.rollout.evaluation import results_table

COLUMNS = ("stage", "split", "mode", "success", "95 % interval", "tasks", "turns")


class EvaluationFiles(Callback):
    """Write and show what `test` and `predict` found.

    Args:
        folder: Where the files go; null is the trainer's `default_root_dir`.

    Raises:
        ValueError: In `setup`: `folder` cannot be written.
    """

    def __init__(self, folder: str | None = None):
        self.folder = folder
        self.results: Path | None = None
        self.transcripts: list[Path] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Nothing is written yet, but it must be possible: `fit`, too, ends with a test."""
        self.results, self.transcripts = None, []
        check_folder(self._place(trainer), f"EvaluationFiles.folder={self.folder}")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write `results.json` and show its rows."""
        self._write(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The same, unless the validation is part of a fit: those are points of a curve."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._write(trainer, pl_module)

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rows: list[dict[str, Any]] = getattr(pl_module, "results", [])
        if not trainer.is_global_zero or not rows:
            return
        self.results = write_json(self._place(trainer) / "results.json", describe(trainer, rows))
        table = Table(*COLUMNS, title="Evaluation on fixed tasks")
        for row in results_table(rows):
            table.add_row(*row)
        Console().print(table)

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the transcripts of a batch, one file each; each process writes those that it played."""
        folder = self._place(trainer) / "transcripts"
        folder.mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(outputs):
            path = folder / f"{batch.stage}-{batch.split}-{number:03d}-rank{trainer.global_rank}.txt"
            path.write_text(text + "\n", encoding="utf-8")
            self.transcripts.append(path)

    def _place(self, trainer: pl.Trainer) -> Path:
        return Path(self.folder or trainer.default_root_dir)


def describe(trainer: pl.Trainer, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of `results.json`: what was evaluated, and the rows."""
    tasks = trainer.datamodule.tasks  # type: ignore[attr-defined]
    return {
        "checkpoint": str(trainer.ckpt_path) if trainer.ckpt_path else None,
        "iteration": trainer.datamodule.iteration,  # type: ignore[attr-defined]
        "tasks": f"{type(tasks).__module__}.{type(tasks).__qualname__}",
        "note": "success over episodes; ci95 is the Wilson interval with the number of tasks as n",
        "results": rows,
    }
