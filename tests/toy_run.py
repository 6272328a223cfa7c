"""Whole runs in the box world: the real module, datamodule and trainer, in a fraction of a second each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa
import torch

from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.evaluation import EvaluationRule
from tests.toy_world import BoxTasks

SMALL_EVALUATION = EvaluationRule(tasks=4, seeds=2, during_fit_tasks=4, predict_tasks=3)


def make_policy(hidden_size: int = 16, init_seed: int = 1) -> ScratchPolicy:
    """About 5,000 weights, large enough at the start for choices to be far from uniform and episodes unequally long."""
    return ScratchPolicy(hidden_size, layers=1, heads=2, kv_heads=1, initializer_range=0.2, init_seed=init_seed)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain descent with step 1: the change of the weights is the negative gradient."""
    return torch.optim.SGD(parameters, lr=1.0)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)


def make_data(**options: Any) -> RolloutDataModule:
    settings = {
        "tasks": BoxTasks(3),
        "groups": 4,
        "members": 4,
        "passes": 1,
        "minibatches": 2,
        "max_turns": 4,
        "segments": SegmentRule(max_tokens=200),
        "evaluation": SMALL_EVALUATION,
    }
    return RolloutDataModule(**{**settings, **options})  # type: ignore[arg-type]


def make_module(policy: BasePolicy | None = None, **options: Any) -> GiGPOModule:
    return GiGPOModule(policy or make_policy(), **{"optimizer": adam, "kl_coef": 0.0, **options})


def make_trainer(root: Path, epochs: int = 1, callbacks: Sequence[pl.Callback] = (), **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "limit_val_batches": 0} | options
    if not any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks):
        settings["enable_checkpointing"] = False
    return pl.Trainer(
        accelerator="cpu",
        default_root_dir=root,
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )


def fit(
    root: Path,
    epochs: int = 1,
    callbacks: Sequence[pl.Callback] = (),
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[pl.Trainer, GiGPOModule, RolloutDataModule]:
    """One fit on the CPU; `data` and `model` override options of the two, `options` those of the trainer."""
    trainer = make_trainer(root, epochs, callbacks, **options)
    module, datamodule = make_module(**(model or {})), make_data(**(data or {}))
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=True)
    return trainer, module, datamodule


def weights(module: GiGPOModule) -> torch.Tensor:
    """All weights of the policy as one line."""
    return torch.nn.utils.parameters_to_vector(module.policy.parameters()).detach().clone()


def initial_weights(**options: Any) -> torch.Tensor:
    """Those of a policy that was never trained."""
    policy = make_policy(**options)
    policy.prepare(BoxTasks(3))
    return torch.nn.utils.parameters_to_vector(policy.parameters()).detach().clone()


def rollouts(root: Path) -> list[list[dict[str, Any]]]:
    """The rows of every rollout file, oldest first."""
    files = sorted((root / "rollouts").glob("*.arrow"))
    return [pa.ipc.open_stream(pa.OSFile(str(file))).read_all().to_pylist() for file in files]
