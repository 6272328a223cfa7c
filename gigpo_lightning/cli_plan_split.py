"""How a run is split over processes, told from the trainer's options: `plan` counts one process and starts no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.sharding import NOT_SPREAD

# What chooses `sharding.FullyShardedStrategy`: its name in Lightning's registry, or its class.
_SPREADING = ("fsdp2", "FullyShardedStrategy")


@dataclass(frozen=True)
class Split:
    """`processes` of a run, each with all weights, or with its part of them where they are `spread`."""

    processes: int = 1
    spread: bool = False

    def share(self, count: int) -> int:
        """The most of `count` that one process has."""
        return -(-count // self.processes)


def split_of(trainer: Mapping[str, Any], elsewhere: bool) -> Split:
    """What `trainer.devices`, `num_nodes` and `strategy` come to.

    Args:
        trainer: The trainer's options, as they are parsed.
        elsewhere: Whether it is planned for another machine, whose devices cannot be counted.

    Raises:
        ValueError: The number of devices cannot be told.
    """
    strategy = trainer.get("strategy")
    name = strategy if isinstance(strategy, str) else str((strategy or {}).get("class_path", "")).rsplit(".")[-1]
    devices = _devices(trainer.get("devices"))
    if devices is None and elsewhere and name not in ("auto", ""):
        raise ValueError(
            f"trainer.devices={trainer.get('devices')} with --memory: the other machine's devices cannot be counted; "
            "give their number, such as --trainer.devices=8"
        )
    processes = (_counted(str(trainer.get("accelerator"))) if devices is None and not elsewhere else devices) or 1
    return Split(processes * int(trainer.get("num_nodes") or 1), name in _SPREADING)


def check_spreadable(split: Split, policy: BasePolicy) -> None:
    """Refuse quantized weights that a run would have to spread.

    Raises:
        ValueError: What `fit` says.
    """
    if split.spread and getattr(policy, "quantization", "none") != "none":
        raise ValueError(NOT_SPREAD.format(weights=policy.quantization))


def _devices(option: Any) -> int | None:
    """The number of devices that the option names; None for all that there are."""
    if isinstance(option, str) and option.strip().lstrip("-").isdigit():
        option = int(option)
    if isinstance(option, str):
        named = [part for part in option.split(",") if part.strip()]
        return None if option == "auto" else len(named)
    if isinstance(option, (list, tuple)):
        return len(option)
    return None if option in (None, -1) else int(option)


def _counted(accelerator: str) -> int:
    """The devices of this machine that Lightning would take for `auto`."""
    return torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else 1
