"""Options that the parser or Lightning takes and that then fail late, or with a text that does not name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from itertools import combinations
from pydoc import locate
from types import NoneType
from typing import Any, get_args, get_type_hints

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.model_helpers import is_overridden

from gigpo_lightning.callbacks.anchor_library import AnchorLibrary
from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.placement import precision_refused, strategy_refused
from gigpo_lightning.rollout.options import check_critic

_NO_FLOAT16 = ("16-mixed", "16-true", "16", 16)


def check_options(options: Mapping[str, Any], callbacks: Sequence[pl.Callback]) -> None:
    """Refuse numbers and strategies that a run cannot work with, and two limits of its time.

    Args:
        options: The options of the trainer.
        callbacks: Those that are listed.

    Raises:
        ValueError: An option out of its range, or a callback that is listed twice.
    """
    check_callbacks(callbacks)
    every = options.get("check_val_every_n_epoch")
    if every is not None and every < 1:
        raise ValueError(
            f"trainer.check_val_every_n_epoch={every}: must be at least 1; --trainer.limit_val_batches=0 leaves the "
            "validation out"
        )
    precision = options.get("precision")
    if precision in _NO_FLOAT16:  # on a CPU Lightning would take bfloat16 instead
        raise precision_refused(precision)
    strategy = options.get("strategy")
    if isinstance(strategy, str) and strategy != "fsdp2" and strategy.startswith(("deepspeed", "fsdp")):
        raise strategy_refused(strategy)
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


def check_parts(model: Any, data: Any, callbacks: Sequence[pl.Callback]) -> None:
    """Refuse a module, a datamodule and callbacks of ours that do not fit together, as soon as they are made.

    Warns of several passes without a ratio, which nothing holds back.

    Raises:
        ValueError: The estimator and the critic do not fit, or a library is read that nobody keeps.
    """
    if not isinstance(model, GiGPOModule) or not isinstance(data, RolloutDataModule):
        return
    rule = data.crediting.rule
    check_critic(model.loss.critic, rule, data.skip_zero_advantage)
    if model.loss.ratio == "none" and data.passes > 1:
        rank_zero_warn(
            f"model.ratio=none with data.passes={data.passes}: nothing holds the later passes back; set data.passes=1, "
            "or model.ratio=token"
        )
    rule.check_library(next((callback for callback in callbacks if isinstance(callback, AnchorLibrary)), None))


def check_nulls(made: Any, options: Any, key: str) -> None:
    """Refuse null where a value is needed, which the parser lets pass.

    Args:
        made: The class that the options are for.
        options: Its options by name, as they are parsed; of other types nothing is asked.
        key: Where they stand in the configuration.

    Raises:
        ValueError: The message names the option.
    """
    if not isinstance(options, Mapping):
        return
    for name, hint in _hints(made).items():
        if name not in options:
            continue
        value, allowed, full = options[name], (hint, *get_args(hint)), f"{key}.{name}"
        if value is None and NoneType not in allowed and Any not in allowed:
            raise ValueError(f"{full}=null: needs a value; leave it out for the default")
        if is_dataclass(hint) and not isinstance(value, Mapping):
            raise ValueError(f"{full}={value}: needs named options; leave it out for the defaults")
        if isinstance(value, Mapping) and "class_path" in value:
            check_nulls(locate(value["class_path"]), value.get("init_args"), full)
        elif isinstance(value, Mapping):
            for part in [part for part in allowed if isinstance(part, type)]:
                check_nulls(part, value, full)


def _hints(made: Any) -> dict[str, Any]:
    """The types of a class's options; none where they cannot be told, as for names that only a type checker imports."""
    try:
        return get_type_hints(made.__init__)
    except (NameError, TypeError, AttributeError):
        return {}
