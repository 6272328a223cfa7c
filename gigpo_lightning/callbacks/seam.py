"""What the callbacks see of the rollouts: three attributes of the datamodule.

The datamodule collects, these callbacks steer. They set `controls` in `on_fit_start` and `on_train_epoch_end` (not in
`on_train_epoch_start`: the first collection comes before it), read `report` and add their own figures to it in
`on_train_epoch_end`, and count by `iteration`, which a resume restores before `on_fit_start`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.curriculum import Stage
from gigpo_lightning.rollout.library_baseline import Library
from gigpo_lightning.rollout.task_choice import ClassCount, TaskSignal

SomeCallback = TypeVar("SomeCallback", bound=Callback)


class Controls(Protocol):
    """What the callbacks set for the next iteration."""

    lam: float
    temperature: float
    entropy_coef: float
    stage: Stage | None
    rehearsal: tuple[Stage, ...]
    stages: tuple[Stage, ...]
    turn_limit: int | None
    signal: TaskSignal | None
    library: Library | None


class CreditTable(Protocol):
    """Turns of the last iteration, one entry per turn."""

    tasks: Sequence[str]
    anchors: Sequence[str]
    step_returns: Sequence[float] | np.ndarray
    texts: Sequence[str]
    stages: Sequence[str]


class Report(Protocol):
    """What the last collection gave; figures are reduced over ranks, the credit tables are of this rank's own turns."""

    metrics: MutableMapping[str, float]
    success: Mapping[str, tuple[int, int]]
    credit_tables: Callable[[], Iterable[CreditTable]]
    classes: Mapping[str, ClassCount]
    histograms: Mapping[str, np.ndarray]
    transcripts: Sequence[str]


class Rollouts(Protocol):
    """The datamodule as the callbacks know it."""

    iteration: int
    controls: Controls
    given: Mapping[str, float | None]  # of the controls, what the user has set; None where it was left open
    report: Report


def rollouts(trainer: pl.Trainer, asker: object) -> Rollouts:
    """The trainer's datamodule, checked to be one that collects rollouts.

    Raises:
        TypeError: The datamodule is missing or of another kind; the message names the callback `asker`.
    """
    datamodule: Any = getattr(trainer, "datamodule", None)
    if not (hasattr(datamodule, "controls") and hasattr(datamodule, "iteration")):
        raise TypeError(
            f"{type(asker).__name__} needs a RolloutDataModule, but the trainer has {type(datamodule).__name__}; "
            "give fit a RolloutDataModule or leave the callback out"
        )
    return cast(Rollouts, datamodule)


def is_resumed_check(trainer: pl.Trainer, data: Rollouts) -> bool:
    """Whether this is the validation that begins a resumed run: no point of a curve, as nothing has been trained."""
    return bool(trainer.sanity_checking) and data.iteration > 0


def refuse_given(data: Rollouts, asker: object, *names: str) -> None:
    """Refuse controls that both the user's options of the datamodule and the callback `asker` set.

    Raises:
        ValueError: One of `names` was given.
    """
    for name in names:
        if data.given[name] is not None:
            raise ValueError(
                f"data.{name}={data.given[name]}: {type(asker).__name__} in trainer.callbacks sets this; set it there, "
                "or leave that callback out"
            )


def find(trainer: pl.Trainer, kind: type[SomeCallback]) -> SomeCallback | None:
    """The trainer's first callback of that kind, or None."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def require_after(trainer: pl.Trainer, callback: Callback, *kinds: type[Callback]) -> None:
    """Refuse a list of callbacks in which one of `kinds`, whose results `callback` uses, comes later.

    Raises:
        ValueError: The order is wrong; the message says how it must be.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    later = [type(other).__name__ for other in callbacks[callbacks.index(callback) + 1 :] if isinstance(other, kinds)]
    if later:
        name = type(callback).__name__
        raise ValueError(f"trainer.callbacks: list {' and '.join(later)} before {name}, which uses what they decide")
