"""The anchor library: what is remembered of anchor states across iterations and stages.

The rows and their arithmetic are `AnchorTable`'s; here they are fed, logged, saved and loaded, and lent to the
credit of the next iteration as a baseline (`data.credit.singleton_baseline`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.callbacks.anchor_table import FILE, SCOPES, AnchorTable, keys_of
from gigpo_lightning.callbacks.output_place import check_file
from gigpo_lightning.callbacks.projector import project
from gigpo_lightning.callbacks.seam import Rollouts, rollouts
from gigpo_lightning.rollout.library_baseline import KnownReturns
from gigpo_lightning.rollout.processes import gathered

# Forgetting a quarter at a time makes it rare; sorting a full library every iteration would cost more than the rest.
_KEPT_FRAC = 0.75


class AnchorLibrary(Callback):
    """Remember each anchor state: visits, mean and variance of its step return, when and in which stage it was seen.

    The library is part of every checkpoint and is written to a file of its own when training ends.

    Args:
        load_from: A library file of an earlier run to start from; a resumed run goes on with its checkpoint's instead.
        save_to: The file to write; null is `anchors.arrow` in the trainer's `default_root_dir`.
        max_anchors: The most states to remember, ≥ 1; when there are more, those seen longest ago are forgotten. Null
            is no limit. Each costs about 200 bytes in every checkpoint.
        text_chars: Characters kept of a state's observation.
        reset_every: Start the running statistics anew after so many iterations, ≥ 1; null never. Old returns come from
            an old policy.
        scope: What one anchor is: equal keys of one `task`; equal keys in the whole `world`, if they mean the same in
            every task; or equal observations (`text`). Where tasks hardly ever come twice, `task` never knows a state
            again, and `world` only if keys name nothing that is the task's own (those of ALFWorld do).
        projector_every: Iterations between two views of the library in TensorBoard's embedding projector, ≥ 1; null for
            none. Points are the mean hidden states in which the policy reads the kept texts.
        projector_anchors: The most states in a view, the most visited ones, ≥ 1.

    Raises:
        ValueError: An option out of range, or `load_from` cannot be read or has another scope; in `setup`, `save_to`
            cannot be written; when fitting starts, the checkpoint's library has another scope.
    """

    def __init__(
        self,
        load_from: str | None = None,
        save_to: str | None = None,
        max_anchors: int | None = 20_000,
        text_chars: int = 80,
        reset_every: int | None = None,
        scope: str = "task",
        projector_every: int | None = None,
        projector_anchors: int = 500,
    ) -> None:
        if max_anchors is not None and max_anchors < 1:
            raise ValueError(f"AnchorLibrary.max_anchors={max_anchors}: must be ≥ 1, or null for no limit")
        if text_chars < 0:
            raise ValueError(f"AnchorLibrary.text_chars={text_chars}: must be ≥ 0")
        if reset_every is not None and reset_every < 1:
            raise ValueError(f"AnchorLibrary.reset_every={reset_every}: must be ≥ 1, or null for never")
        if scope not in SCOPES:
            raise ValueError(f"AnchorLibrary.scope={scope!r}: must be one of {', '.join(SCOPES)}")
        if projector_every is not None and projector_every < 1:
            raise ValueError(f"AnchorLibrary.projector_every={projector_every}: must be ≥ 1, or null for never")
        if projector_anchors < 1:
            raise ValueError(f"AnchorLibrary.projector_anchors={projector_anchors}: must be ≥ 1")
        self.table = AnchorTable.load(Path(load_from)) if load_from is not None else AnchorTable(scope)
        self.scope, self.projector_every, self.projector_anchors = scope, projector_every, projector_anchors
        self._check_scope(f"load_from={load_from}")
        self.save_to, self.text_chars = save_to, text_chars
        self.max_anchors, self.reset_every = max_anchors, reset_every

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a place that cannot be written now, not when training ends."""
        if stage == "fit" and trainer.is_global_zero:
            check_file(self._path(trainer), f"AnchorLibrary.save_to={self.save_to}")
        # Itself, so that what a checkpoint restores is lent, too. Before any hook that may check the options of credit.
        rollouts(trainer, self).controls.library = self

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse the library of a checkpoint that counts anchors in another way."""
        self._check_scope("the checkpoint")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the iteration's turns and log the library's figures."""
        data = rollouts(trainer, self)
        data.report.metrics.update(self.add(data))
        if self.projector_every and data.iteration % self.projector_every == 0:
            project(trainer, pl_module.policy, self.table, self.projector_anchors, data.iteration)  # type: ignore[arg-type]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the library's own file."""
        if trainer.is_global_zero:
            self.table.save(self._path(trainer))

    def add(self, data: Rollouts) -> dict[str, float]:
        """Merge the reported turns of all processes, and return the figures `anchors/library_*`."""
        iteration = data.iteration - 1
        own = AnchorTable()
        for turns in data.report.credit_tables():
            keys = keys_of(self.scope, turns.tasks, turns.anchors, turns.texts)
            own.merge(
                AnchorTable.of_turns(keys, turns.step_returns, turns.texts, turns.stages, iteration, self.text_chars)
            )
        batch = _of_all_processes(own)
        new = sum(key not in self.table for key in batch.keys)
        if self.reset_every and iteration > 0 and iteration % self.reset_every == 0:
            self.table.forget_statistics()
        self.table.merge(batch)
        if self.max_anchors is not None and len(self.table) > self.max_anchors:
            self.table.shrink(math.ceil(_KEPT_FRAC * self.max_anchors))
        return figures(self.table) | {"anchors/library_new_frac": new / max(len(batch), 1)}

    def look_up(self, task_ids: Sequence[str], anchors: Sequence[str], texts: Sequence[str]) -> KnownReturns:
        """What earlier iterations know of these states: the present one is added only when its update is done."""
        return self.table.look_up(keys_of(self.scope, task_ids, anchors, texts))

    def _check_scope(self, source: str) -> None:
        if self.table.scope != self.scope:
            raise ValueError(
                f"AnchorLibrary.scope={self.scope}, but {source} has a library of scope {self.table.scope}: its "
                "anchors are others; choose that scope, or start without it"
            )

    def _path(self, trainer: pl.Trainer) -> Path:
        return Path(self.save_to) if self.save_to else Path(trainer.default_root_dir) / FILE

    def state_dict(self) -> dict[str, Any]:
        """The whole table."""
        return self.table.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the table of a checkpoint over, in place of a loaded file."""
        self.table.load_state_dict(state_dict)


def figures(table: AnchorTable) -> dict[str, float]:
    """The size of a library, how its visits are spread, and the spread of the step return inside an anchor.

    `library_return_std` is pooled over anchors, √(Σ M2 / Σ (n − 1)): what an anchor's baseline leaves unexplained.
    """
    freedom = int(np.maximum(table.visits - 1, 0).sum())
    return {
        "anchors/library_size": float(len(table)),
        "anchors/library_visits": float(table.visits.mean()) if len(table) else 0.0,
        "anchors/library_recurring_frac": float((table.visits > 1).mean()) if len(table) else 0.0,
        "anchors/library_return_std": float(np.sqrt(table.m2.sum() / freedom)) if freedom else 0.0,
    }


def _of_all_processes(own: AnchorTable) -> AnchorTable:
    """The tables of all processes merged in order of rank, so that every process keeps the same library."""
    if not (dist.is_available() and dist.is_initialized()):
        return own
    together = AnchorTable()
    for state in gathered(own.state_dict(), dist.get_world_size()):
        table = AnchorTable()
        table.load_state_dict(state)
        together.merge(table)
    return together
