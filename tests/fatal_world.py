"""Box worlds that go wrong in every way an environment can. Loads nothing heavy, as worker processes load it."""

from __future__ import annotations

import os
import time
from typing import Any

from gigpo_lightning.envs.base import Observation, StepResult, Task
from tests.toy_world import BoxEnv


class TrickEnv(BoxEnv):
    """A box world in which some actions and tasks are fatal."""

    def reset(self, task: Task) -> Observation:
        if task.id == "refused":
            raise OSError("no such box")
        if task.id == "fatal":
            os._exit(9)
        return super().reset(task)

    def step(self, action: str) -> StepResult:
        if action == "sleep":
            time.sleep(60)
        if action == "exit":
            os._exit(7)
        if action == "raise":
            raise OSError("the lights went out")
        if action == "pid":
            return StepResult(Observation(str(os.getpid())), 0.0, False, False)
        return super().step(action)


class UnsendableEnv(BoxEnv):
    """Its anchors stay where they are."""

    def anchor(self) -> Any:
        return lambda: None


def impossible_env() -> BoxEnv:
    raise RuntimeError("no environment today")


class SlowEnv(BoxEnv):
    def step(self, action: str) -> StepResult:
        time.sleep(0.4)
        return super().step(action)
