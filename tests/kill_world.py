"""A callback that kills its own process with signal 9 at a chosen moment, and the runs that are killed.

Loaded by the child processes of `test_resume.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from gigpo_lightning import __main__
from gigpo_lightning.callbacks import durable
from gigpo_lightning.callbacks.durable import DurableCheckpointIO
from gigpo_lightning.rollout.store import RolloutWriter
from tests.toy_world import BoxEnv

MOMENT = "GIGPO_TEST_KILL"  # "<phase> <iteration, from 1>"


class KillAt(pl.Callback):
    """Does nothing unless the environment variable `GIGPO_TEST_KILL` names a moment."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.phase, _, number = os.environ.get(MOMENT, "never 0").partition(" ")
        self.number = int(number)

        def due() -> bool:
            return bool(trainer.datamodule.iteration == self.number)

        if self.phase == "rollout":
            after_calls(BoxEnv, "step", due, count=7)
        if self.phase == "store":
            after_calls(RolloutWriter, "write", due, count=1)
        if self.phase == "checkpoint":
            half_write(due)
        if self.phase == "link":
            after_calls(DurableCheckpointIO, "save_checkpoint", due, count=1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.phase == "update" and trainer.datamodule.iteration == self.number and batch_idx == 1:
            kill()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after_calls(owner: type, name: str, due: Callable[[], bool], count: int) -> None:
    """Kill when `owner.name` returns for the `count`-th time while `due()`."""
    method, calls = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        calls[0] += due()
        if calls[0] == count:
            kill()
        return result

    setattr(owner, name, counted)


def half_write(due: Callable[[], bool]) -> None:
    """Kill when the first half of a checkpoint has been written."""
    save = durable.torch.save

    def cut_short(checkpoint: dict[str, Any], file: Any) -> None:
        save(checkpoint, file)
        if due():
            file.flush()
            os.ftruncate(file.fileno(), file.tell() // 2)
            kill()

    durable.torch.save = cut_short


def run(folder: str, moment: str, args: list[str]) -> None:
    """`python -m gigpo_lightning ARGS` in `folder`, killed at `moment`; what it says goes to the file `said`."""
    os.chdir(folder)
    os.environ[MOMENT] = moment or "never 0"
    with Path("said").open("a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    raise SystemExit(__main__.main(args))
