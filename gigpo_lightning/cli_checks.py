"""Options of the trainer that Lightning takes and that then fail late, or with a text that does not name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.model_helpers import is_overridden


def check_options(options: Mapping[str, Any], callbacks: Sequence[pl.Callback]) -> None:
    """Refuse numbers and strategies that a run cannot work with, and two limits of its time.

    Args:
        options: The options of the trainer.
        callbacks: Those that are listed.

    Raises:
        ValueError: An option out of its range.
    """
    every = options.get("check_val_every_n_epoch")
    if every is not None and every < 1:
        raise ValueError(
            f"trainer.check_val_every_n_epoch={every}: must be at least 1; --trainer.limit_val_batches=0 leaves the "
            "validation out"
        )
    strategy = options.get("strategy")
    if isinstance(strategy, str) and any(way in strategy for way in ("spawn", "fork", "notebook")):
        raise ValueError(
            f"trainer.strategy={strategy}: such processes end with the training, and the evaluation after it would be "
            "left out; choose ddp"
        )
    if options.get("max_time") is not None and any(isinstance(callback, Timer) for callback in callbacks):
        raise ValueError(
            f"trainer.max_time={options['max_time']}: trainer.callbacks has a Timer, too; leave one of them out"
        )


def check_callbacks(callbacks: Sequence[pl.Callback]) -> None:
    """Refuse a callback that is listed twice: one of ours, or one whose states could not be told apart.

    Raises:
        ValueError: The message names the callback.
    """
    for one, other in combinations(callbacks, 2):
        kind = type(one)
        stateful = kind.__module__.startswith("gigpo_lightning.") or is_overridden("state_dict", one, pl.Callback)
        if kind is type(other) and one.state_key == other.state_key and stateful:
            raise ValueError(
                f"trainer.callbacks: {kind.__name__} is listed twice; list it once (+= appends to the configuration's "
                "list)"
            )
