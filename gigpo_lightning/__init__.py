"""GiGPO on PyTorch Lightning: the names that users import. Loaded on first use, so that `--help` stays quick."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gigpo_lightning.datamodule import RolloutDataModule
    from gigpo_lightning.module import GiGPOModule

__version__ = "0.1.0"
__all__ = ["GiGPOModule", "RolloutDataModule", "__version__"]

_HOME = {"GiGPOModule": "gigpo_lightning.module", "RolloutDataModule": "gigpo_lightning.datamodule"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
