"""What TensorBoard shows of a run: figures over iterations, grouped charts, histograms, transcripts, options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams as hparams_summaries

from gigpo_lightning.callbacks.anchor_library import AnchorLibrary
from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.callbacks.exploration import Exploration
from gigpo_lightning.callbacks.lambda_decay import LambdaDecay
from gigpo_lightning.callbacks.seam import is_resumed_check, require_after, rollouts
from gigpo_lightning.policy.base import BasePolicy

# Charts of the "custom scalars" tab; the tags are regular expressions, so that a chart takes what a run has.
LAYOUT: dict[str, dict[str, list[Any]]] = {
    "rollout": {
        "success": ["Multiline", [r"rollout/success$", r"curriculum/average"]],
        "success on unseen tasks": ["Multiline", [r"val/.*success"]],
        "success by task type": ["Multiline", [r"rollout/success_"]],
        "return and length": ["Multiline", [r"rollout/return", r"rollout/length"]],
        "end reasons": ["Multiline", [r"rollout/end_"]],
        "bad answers": ["Multiline", [r"rollout/(invalid|inadmissible)_actions", r"rollout/ill_formed_answers"]],
    },
    "anchors": {
        "density and coverage": ["Multiline", [r"anchors/density", r"anchors/coverage"]],
        "no spread": ["Multiline", [r"anchors/zero_spread", r"credit/zero_spread"]],
        "what the detector was steered to": ["Multiline", [r"anchors/threshold", r"anchors/min_count"]],
        "library": ["Multiline", [r"anchors/library_size", r"anchors/library_visits"]],
        "shares of the library": ["Multiline", [r"anchors/library_.*_frac"]],
    },
    "credit": {
        "λ": ["Multiline", [r"credit/lambda"]],
        "spread of the advantages": ["Multiline", [r"credit/.*_std"]],
    },
    "loss": {
        "policy, value, KL, entropy": ["Multiline", [r"loss/(policy|value|kl|entropy|total)$"]],
        "clipping and ratio": ["Multiline", [r"loss/(clip|dual_clip|value_clip|ratio)"]],
        "approximate KL of an update": ["Multiline", [r"loss/approx_kl"]],
        "gradient norm": ["Multiline", [r"loss/(critic_)?gradient_norm"]],
        "rollout against update": ["Multiline", [r"loss/mismatch", r"mismatch/(probe|kl_k3)"]],
    },
    "critic": {
        "explained variance": ["Multiline", [r"critic/explained_variance"]],
        "value and target": ["Multiline", [r"critic/(value|target)_mean"]],
    },
    "replay": {
        "share of borrowed episodes": ["Multiline", [r"replay/share"]],
        "ratio to the old policy": ["Multiline", [r"replay/(ratio_mean|truncated_frac)"]],
        "age and size": ["Multiline", [r"replay/(age|cache_size)"]],
    },
    "curriculum": {
        "stage": ["Multiline", [r"curriculum/stage$"]],
        "turn limit": ["Multiline", [r"curriculum/max_turns"]],
        "exploration": ["Multiline", [r"rollout/temperature", r"loss/entropy_coef"]],
    },
    "time": {
        "seconds of an iteration": ["Multiline", [r"time/[a-z]+_s$"]],
        "throughput": ["Multiline", [r"time/.*_per_s$"]],
    },
}
_VALIDATION = "val/"
_OUTCOMES = ("rollout/success", "curriculum/stage")  # what the hparams tab compares runs by


class TensorBoardViews(Callback):
    """Log each iteration under its number: all figures, and now and then histograms and transcripts.

    List it after the callbacks that add figures (`Curriculum`, `LambdaDecay`, `Exploration`, `AnchorLibrary`).

    Args:
        histograms_every: Iterations from one set of histograms to the next, ≥ 1.
        transcripts_every: Iterations from one set of transcripts to the next, ≥ 1.
        transcripts: How many transcripts a set has, ≥ 0.

    Raises:
        ValueError: A number out of range.
    """

    def __init__(self, histograms_every: int = 5, transcripts_every: int = 10, transcripts: int = 3) -> None:
        for name, value in (("histograms_every", histograms_every), ("transcripts_every", transcripts_every)):
            if value < 1:
                raise ValueError(f"TensorBoardViews.{name}={value}: must be ≥ 1")
        if transcripts < 0:
            raise ValueError(f"TensorBoardViews.transcripts={transcripts}: must be ≥ 0")
        self.histograms_every, self.transcripts_every = histograms_every, transcripts_every
        self.transcripts = transcripts

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse an order in which figures would be missed."""
        require_after(trainer, self, Curriculum, LambdaDecay, Exploration, AnchorLibrary)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the chart layout and the hyperparameters."""
        rollouts(trainer, self)
        for logger in _boards(trainer):
            logger.experiment.add_custom_scalars(layout(pl_module, trainer.datamodule))  # type: ignore[attr-defined]
            values = hyperparameters(pl_module, trainer.datamodule)  # type: ignore[attr-defined]
            _write_hparams(logger, values | _rates(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the iteration: what the module measured and what the rollouts report."""
        data = rollouts(trainer, self)
        # Lightning keeps the figures of the latest validation: they belong to the iteration in which it was made.
        own = {name: value for name, value in trainer.callback_metrics.items() if not name.startswith(_VALIDATION)}
        _log(trainer, {**own, **data.report.metrics}, data.iteration)
        for logger in _boards(trainer):
            self.write(logger.experiment, data.report.histograms, data.report.transcripts, data.iteration)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log a validation; the sanity check before the first iteration is the curve's first point, at 0."""
        data = rollouts(trainer, self)
        if is_resumed_check(trainer, data):
            return
        # Lightning keeps the figures of stages that earlier validations played: they are not this validation's.
        played = tuple(f"{_VALIDATION}{row['stage']}/" for row in getattr(pl_module, "results", ()))
        own = played or (_VALIDATION,)
        found = {name: value for name, value in trainer.callback_metrics.items() if name.startswith(own)}
        _log(trainer, found, data.iteration)

    def write(self, writer: Any, histograms: Mapping[str, np.ndarray], transcripts: Any, iteration: int) -> None:
        """Histograms and transcripts, where it is their turn (always after the first iteration), to a SummaryWriter."""
        if (iteration - 1) % self.histograms_every == 0:
            for name, values in histograms.items():
                if len(values):
                    writer.add_histogram(name, np.asarray(values), iteration)
        if (iteration - 1) % self.transcripts_every == 0:
            for number, text in enumerate(transcripts[: self.transcripts]):
                writer.add_text(f"transcripts/{number}", _as_code(text), iteration)
        writer.flush()


def layout(module: object, datamodule: object) -> dict[str, dict[str, list[Any]]]:
    """The charts of a run: without those of a critic and of borrowed episodes where it has none."""
    critic = getattr(getattr(module, "loss", None), "critic", None)
    replay = getattr(getattr(datamodule, "replay", None), "rule", None)
    absent = {"critic": critic is None, "replay": replay is None}
    return {group: charts for group, charts in LAYOUT.items() if not absent.get(group, False)}


def hyperparameters(module: object, datamodule: object) -> dict[str, int | float | str | bool]:
    """The plain public attributes that set up a run, those of their frozen dataclasses, and the policy's identity.

    Lightning's own attributes are left out.
    """
    lightnings = vars(pl.LightningModule()).keys() | vars(pl.LightningDataModule()).keys() | {"iteration"}
    found: dict[str, int | float | str | bool] = {}
    for prefix, owner in (("model", module), ("data", datamodule)):
        for name, value in vars(owner).items():
            if name not in lightnings and not name.startswith("_"):
                found |= _plain(f"{prefix}.{name}", value)
    policy = getattr(module, "policy", None)
    if isinstance(policy, BasePolicy):
        for name, value in policy.identity().items():
            found |= _plain(f"model.policy.{name}", value)
    return found


def _rates(trainer: pl.Trainer) -> dict[str, int | float | str | bool]:
    """The kind and the first learning rate of the optimiser."""
    return {
        key: value
        for optimizer in trainer.optimizers[:1]
        for key, value in (
            ("model.optimizer", type(optimizer).__name__),
            ("model.optimizer.lr", float(optimizer.param_groups[0]["lr"])),
        )
    }


def _plain(name: str, value: Any) -> dict[str, int | float | str | bool]:
    """A plain value under its name, a frozen dataclass as its fields, anything else as nothing."""
    if isinstance(value, (bool, int, float, str)):
        return {name: value}
    if dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen:  # type: ignore[union-attr]
        inner = [_plain(f"{name}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {key: item for part in inner for key, item in part.items()}
    return {}


def _write_hparams(logger: TensorBoardLogger, values: dict[str, Any]) -> None:
    """The hparams of this very run; `SummaryWriter.add_hparams` would open a second one for them."""
    for summary in hparams_summaries(values, dict.fromkeys(_OUTCOMES, 0)):
        logger.experiment.file_writer.add_summary(summary)


def _boards(trainer: pl.Trainer) -> list[TensorBoardLogger]:
    """The TensorBoard loggers; only process 0 writes."""
    if not trainer.is_global_zero:
        return []
    boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    if not boards:
        rank_zero_warn(
            "TensorBoardViews has no TensorBoardLogger in trainer.logger: no charts, histograms or transcripts"
        )
    return boards


def _log(trainer: pl.Trainer, figures: Mapping[str, Any], iteration: int) -> None:
    """All single numbers, to every logger."""
    numbers = {
        name: float(value) for name, value in figures.items() if not torch.is_tensor(value) or value.numel() == 1
    }
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=iteration)


def _as_code(text: str) -> str:
    """Markdown that shows the lines as they are: TensorBoard renders a block indented by four blanks verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())
