"""What an evaluation leaves behind: `results.json` after `test`, readable transcripts after `predict`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from gigpo_lightning.rollout.evaluation import results_table

COLUMNS = ("stage", "split", "mode", "success", "95 % interval", "tasks", "turns")


class EvaluationFiles(Callback):
    """Write and show what `test` and `predict` found.

    Args:
        folder: Where the files go; null is the run's folder.
    """

    def __init__(self, folder: str | None = None):
        self.folder = folder
        self.written: list[Path] = []

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write `results.json` and show its rows."""
        if not trainer.is_global_zero:
            return
        rows: list[dict[str, Any]] = pl_module.results  # type: ignore[assignment]
        path = write_json(self._place(trainer) / "results.json", describe(trainer, pl_module, rows))
        self.written.append(path)
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
        """Write the transcripts of a batch, one file each."""
        folder = self._place(trainer) / "transcripts"
        folder.mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(outputs):
            path = folder / f"{batch.stage}-{batch.split}-{number:03d}-rank{trainer.global_rank}.txt"
            path.write_text(text + "\n", encoding="utf-8")
            self.written.append(path)

    def _place(self, trainer: pl.Trainer) -> Path:
        return Path(self.folder or trainer.log_dir or trainer.default_root_dir)


def describe(trainer: pl.Trainer, pl_module: pl.LightningModule, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of `results.json`: what was evaluated, and the rows."""
    tasks = trainer.datamodule.tasks  # type: ignore[attr-defined]
    return {
        "checkpoint": str(trainer.ckpt_path) if trainer.ckpt_path else None,
        "iteration": trainer.datamodule.iteration,  # type: ignore[attr-defined]
        "tasks": f"{type(tasks).__module__}.{type(tasks).__qualname__}",
        "note": "success over episodes; ci95 is the Wilson interval with the number of tasks as n",
        "results": rows,
    }


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write a file that is either whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path
