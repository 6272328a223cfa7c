"""Many environments behind one call: the collector steps all live episodes at once and reads plain states.

Knows nothing about tokens or policies. `InProcessPool` runs them in this process; worker processes are the other kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gigpo_lightning.envs.base import StepResult, Task, TextEnv


@dataclass(frozen=True, slots=True)
class EnvState:
    """What an environment says after a reset or a step.

    `error` is the environment's failure in words, or None; with an error the other fields say nothing, except `lost`:
    the failure was another environment's, and took this one's process with it.
    """

    observation: str = ""
    instruction: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    won: bool = False
    valid: bool = True
    admissible: tuple[str, ...] | None = None
    anchor: Hashable = ""
    error: str | None = None
    lost: bool = False


class EnvPool(Protocol):
    """Slots, each with one environment."""

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[EnvState]:
        """Start `tasks[i]` in slot `slots[i]`."""

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> list[EnvState]:
        """Take `actions[i]` in slot `slots[i]`."""

    def close(self) -> None:
        """Release all environments."""


def first_state(env: TextEnv, task: Task) -> EnvState:
    """Reset `env` and describe where it stands. A failure of the world is recorded, never raised."""
    try:
        observation = env.reset(task)
        return EnvState(observation.text, observation.instruction, admissible=_admissible(env), anchor=env.anchor())
    except Exception as error:  # noqa: BLE001 - a world's code: any failure ends the episode as `error`
        return EnvState(error=f"reset of task {task.id}: {type(error).__name__}: {error}")


def next_state(env: TextEnv, action: str) -> EnvState:
    """Step `env` and describe where it stands. A failure of the world is recorded, never raised."""
    try:
        result = env.step(action)
        check_reward(result)
        over = result.terminated or result.truncated
        return EnvState(
            observation=result.observation.text,
            reward=float(result.reward),
            terminated=result.terminated,
            truncated=result.truncated,
            won=bool(result.info.get("won", False)),
            valid=bool(result.info.get("valid", True)),
            admissible=None if over else _admissible(env),
            anchor="" if over else env.anchor(),
        )
    except Exception as error:  # noqa: BLE001 - a world's code: any failure ends the episode as `error`
        return EnvState(error=f"step {action!r}: {type(error).__name__}: {error}")


def check_reward(result: StepResult) -> None:
    """A missing or infinite reward is an error, never 0."""
    if result.reward is None or not math.isfinite(result.reward):
        raise ValueError(f"the environment gave reward={result.reward}: every step needs a finite reward")


def _admissible(env: TextEnv) -> tuple[str, ...] | None:
    actions = env.admissible_actions()
    return None if actions is None else tuple(actions)


class InProcessPool:
    """Environments in this process, made when a slot is first used."""

    def __init__(self, make_env: Callable[[], TextEnv]):
        self._make_env = make_env
        self._envs: dict[int, TextEnv] = {}

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[EnvState]:
        return [first_state(self._env(slot), task) for slot, task in zip(slots, tasks, strict=True)]

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> list[EnvState]:
        return [next_state(self._env(slot), action) for slot, action in zip(slots, actions, strict=True)]

    def close(self) -> None:
        for env in self._envs.values():
            env.close()
        self._envs.clear()

    def _env(self, slot: int) -> TextEnv:
        if slot not in self._envs:
            self._envs[slot] = self._make_env()
        return self._envs[slot]
