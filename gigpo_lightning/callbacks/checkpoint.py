"""A checkpoint at the end of every iteration that survives a kill at any moment; the last few and the best are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import ModelCheckpoint

from gigpo_lightning.callbacks.durable import (
    DurableCheckpointIO,
    iteration_of,
    link,
    move_aside,
    newest_complete,
    numbered_path,
    remove_partial,
    require_writable,
)
from gigpo_lightning.callbacks.seam import Rollouts, rollouts


class IterationCheckpoint(ModelCheckpoint):
    """Save a checkpoint at the end of every iteration and keep the last few and the best.

    The files are `iteration=000012.ckpt` (12 iterations done), and the links `last.ckpt` and `best.ckpt`. A run from
    scratch first moves the checkpoints of an earlier run in the folder into a subfolder `earlier-1`, `earlier-2`, …

    Args:
        folder: Where to write, on a local file system; null is `checkpoints` in the trainer's `default_root_dir`.
        keep_last: How many of the latest checkpoints to keep, ≥ 1.
        keep_best: How many of the best checkpoints to keep besides, ≥ 0.
        best_by: The figure that ranks checkpoints, higher is better; a later curriculum stage always ranks above an
            earlier one. With null the latest is the best.

    Raises:
        ValueError: A count out of its range.
    """

    def __init__(
        self,
        folder: str | None = None,
        keep_last: int = 3,
        keep_best: int = 1,
        best_by: str | None = "rollout/success",
    ) -> None:
        if keep_last < 1:
            raise ValueError(
                f"IterationCheckpoint.keep_last={keep_last}: must be ≥ 1: without a checkpoint no run can be resumed"
            )
        if keep_best < 0:
            raise ValueError(f"IterationCheckpoint.keep_best={keep_best}: must be ≥ 0")
        super().__init__(dirpath=folder, save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
        self.keep_last, self.keep_best, self.best_by = keep_last, keep_best, best_by
        self.scores: dict[str, list[float]] = {}  # file name → [stage, figure], [] where the figure was missing
        self._from_scratch = False
        self._whole = False

    @property
    def state_key(self) -> str:
        """One key whatever the options, so that they can be changed between runs."""
        return "IterationCheckpoint"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Settle the folder and write durably from now on."""
        self.dirpath = str(self.folder(trainer))
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = DurableCheckpointIO()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a folder that cannot be written, and note whether it may hold an earlier run's checkpoints."""
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            require_writable(self.folder(trainer))
        self._find_restored(self.folder(trainer))
        self._from_scratch = rollouts(trainer, self).iteration == 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save this iteration, then drop what need not be kept."""
        if self._whole and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save(trainer, pl_module, rollouts(trainer, self))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note whether the iteration is whole: one that `max_time` cuts short could not be resumed exactly."""
        self._whole = batch_idx + 1 >= trainer.num_training_batches

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the end of the iteration follows."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the end of the iteration was saved."""

    def folder(self, trainer: pl.Trainer) -> Path:
        """The folder of the checkpoints; the same for every run, so that `last` finds the run before."""
        return (Path(self.dirpath) if self.dirpath else Path(trainer.default_root_dir) / "checkpoints").absolute()

    def _find_restored(self, folder: Path) -> None:
        """Name the last and the best of a resumed run: it may have no iteration left that would."""
        there = {name: score for name, score in self.scores.items() if (folder / name).exists()}
        if there:
            last = max(there)
            self.last_model_path = str(folder / last)
            self.best_model_path = str(folder / (best_of(there) or last))

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, data: Rollouts) -> None:
        """The scores go into the checkpoint, so they are settled first; links and removals come when it is on disk."""
        folder = self.folder(trainer)
        path = numbered_path(folder, data.iteration)
        if self._from_scratch and trainer.is_global_zero:
            aside = move_aside(folder)
            if aside is not None:
                pl_module.print(f"The checkpoints of the earlier run in {folder} are now in {aside.name}")
        self._from_scratch = False
        self._rank(path, {**trainer.callback_metrics, **data.report.metrics})
        best = folder / (best_of(self.scores) or path.name)
        self.last_model_path, self.best_model_path = str(path), str(best)
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            link(folder / "last.ckpt", path.name)
            link(folder / "best.ckpt", best.name)
            self._prune(folder, data.iteration)

    def _rank(self, path: Path, figures: Mapping[str, Any]) -> None:
        """Score the checkpoint `path` and forget those that need not be kept or are not there (a resume elsewhere)."""
        figure = math.nan if self.best_by is None else float(figures.get(self.best_by, math.nan))
        if math.isnan(figure) and self.keep_best and self.best_by is not None:
            rank_zero_warn(
                f"best_by is {self.best_by!r}, which this iteration lacks; it has {', '.join(sorted(figures))}"
            )
        scores = {name: score for name, score in self.scores.items() if path.with_name(name).exists()}
        scores[path.name] = [] if math.isnan(figure) else [float(figures.get("curriculum/stage", 0.0)), figure]
        self.scores = {name: scores[name] for name in kept(scores, self.keep_last, self.keep_best)}

    def _prune(self, folder: Path, iteration: int) -> None:
        """Remove what is not kept. Later iterations stay: another branch, made before a resume from this one."""
        for path in folder.glob("*.ckpt"):
            number = iteration_of(path)
            if number is not None and number <= iteration and path.name not in self.scores:
                path.unlink()
        remove_partial(folder)

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        """What Lightning asks for `ckpt_path: last`."""
        newest = newest_complete(self.folder(trainer))
        return {str(newest)} if newest else set()

    def state_dict(self) -> dict[str, Any]:
        """The scores of the kept checkpoints."""
        return {"scores": {name: list(score) for name, score in self.scores.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the scores over."""
        self.scores = {name: list(score) for name, score in state_dict["scores"].items()}


def kept(scores: Mapping[str, list[float]], last: int, best: int) -> list[str]:
    """The names to keep, in order of iteration: the `last` latest and the `best` best scored."""
    names = sorted(scores)
    ranked = _ranked(scores)
    keep = {*names[-last:], *ranked[max(0, len(ranked) - best) :]}
    return [name for name in names if name in keep]


def best_of(scores: Mapping[str, list[float]]) -> str | None:
    """The name with the best score; None where nothing is scored."""
    ranked = _ranked(scores)
    return ranked[-1] if ranked else None


def _ranked(scores: Mapping[str, list[float]]) -> list[str]:
    """Scored names, best last; of equals the later iteration (its zero-padded name) ranks higher."""
    return sorted((name for name in scores if scores[name]), key=lambda name: (scores[name], name))
