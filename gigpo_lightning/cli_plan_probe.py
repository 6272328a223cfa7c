"""A few iterations to see how long one takes, and what that comes to for the whole run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer

from gigpo_lightning.callbacks.seam import rollouts

# Parts of an iteration, as the report names them, with words for the table.
PARTS = {
    "time/policy_s": "policy: reading and answering",
    "time/environment_s": "environment",
    "time/collector_s": "collector",
    "time/values_s": "values of the critic",
    "time/credit_s": "credit",
    "time/report_s": "report",
    "time/store_s": "rollout file",
    "time/update_s": "update",
    "rest": "callbacks and the rest",
}


class ProbeClock(pl.Callback):
    """Notes the seconds of every iteration, by part, and its tokens."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self._begun_s = self._batch_begun_s = self._update_s = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The first collection begins."""
        self._begun_s = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """An update begins."""
        self._batch_begun_s = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """An update has been made."""
        self._update_s += time.perf_counter() - self._batch_begun_s

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the iteration."""
        now_s, metrics = time.perf_counter(), rollouts(trainer, self).report.metrics
        parts = {name: metrics.get(name, 0.0) for name in PARTS if name.startswith("time/")}
        parts["time/update_s"] = self._update_s
        total_s = now_s - self._begun_s
        parts["rest"] = max(total_s - sum(parts.values()), 0.0)
        tokens = metrics.get("rollout/tokens_per_episode", 0.0)
        self.iterations.append({**parts, "total": total_s, "tokens_per_episode": tokens})
        self._begun_s, self._update_s = now_s, 0.0

    def seconds(self) -> dict[str, float]:
        """Mean over the iterations; the first, which warms up, counts only where it is alone."""
        counted = self.iterations[1:] or self.iterations
        return {name: sum(i[name] for i in counted) / len(counted) for name in counted[0]}


def whole_run(limits: Mapping[str, Any], updates: int, iteration_s: float) -> tuple[float | None, float | None]:
    """Iterations and seconds of a run; None for what nothing limits.

    Args:
        limits: `max_epochs`, `max_steps` and `max_time` of the trainer, as they were given.
        updates: Optimiser steps of an iteration.
        iteration_s: Seconds of an iteration.
    """
    epochs, steps, max_time = limits.get("max_epochs"), limits.get("max_steps"), limits.get("max_time")
    if epochs is None and max_time is None and steps in (None, -1):
        epochs = 1000  # Lightning's own limit where none is given
    counts = [epochs] if epochs is not None and epochs >= 0 else []
    counts += [steps / updates] if steps is not None and steps >= 0 else []
    if max_time is not None:
        seconds = Timer(max_time).time_remaining()
        counts += [seconds / iteration_s] if seconds is not None else []
    iterations = min(counts, default=None)
    return iterations, None if iterations is None else iterations * iteration_s
