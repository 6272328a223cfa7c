"""The seam between the trainer and a world: text in, text out.

A world implements `TextEnv` (one running episode) and `TaskSet` (the problems). Nothing here knows about tokens,
policies or training; a world of one's own is these two classes and a `class_path` in YAML.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance with a fixed initial state.

    `difficulty` holds plain values by which a curriculum selects (for ALFWorld: `type`, `steps`, `receptacles`, ...).
    `payload` is the world's own; it must be picklable, as it is sent to worker processes.
    """

    id: str
    split: str
    difficulty: Mapping[str, Any]
    payload: Any


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent reads. `instruction` (the goal) comes with an episode's first observation and is empty later."""

    text: str
    instruction: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one action.

    `terminated`: the task ended (won or lost). `truncated`: the world's own limit cut it. `info` holds `won` (bool) and
    `valid` (bool: the world understood the action); other entries are not read.
    """

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = field(default_factory=dict)


class TextEnv(ABC):
    """One environment, reusable: `reset` starts an episode of any task of its world."""

    @abstractmethod
    def reset(self, task: Task) -> Observation:
        """Start an episode of `task`; the same task always starts in the same state."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Take one action. A bad action is answered by the world, it does not raise."""

    def admissible_actions(self) -> Sequence[str] | None:
        """The actions that are possible now, sorted and unique, or None where the world does not list them."""
        return None

    @abstractmethod
    def anchor(self) -> Hashable:
        """The anchor key of the present state: equal keys inside a group form a step group."""

    def snapshot(self) -> Any:
        """A copy of the state for `restore`. Worlds that cannot copy themselves raise `NotImplementedError`."""
        raise NotImplementedError(f"{type(self).__name__} cannot snapshot its state")

    def restore(self, snapshot: Any) -> None:
        """Return to the state of `snapshot`, which stays usable."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore a snapshot")

    def close(self) -> None:
        """Release what the environment holds. Called once; most worlds hold nothing."""


class Expert(Protocol):
    """A player that knows only what it has read."""

    def act(self, observation: Observation, admissible: Sequence[str]) -> str:
        """The next action; an observation with an instruction starts a new episode."""


class TaskSet(ABC):
    """The problems of a world by split and index; the same index gives the same task on every machine."""

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The names of the splits, e.g. `("train", "seen", "unseen")`."""

    @abstractmethod
    def len(self, split: str) -> int:
        """The number of tasks of `split`."""

    @abstractmethod
    def get(self, split: str, index: int) -> Task:
        """Task number `index`, `0 <= index < len(split)`."""

    @abstractmethod
    def narrow(self, difficulty: Mapping[str, Any]) -> TaskSet:
        """The tasks whose difficulty lies in the given ranges, as a task set of its own.

        Args:
            difficulty: Knob name to a value, a list of allowed values, or `[low, high]` for a numeric knob (inclusive).

        Raises:
            ValueError: An unknown knob, or no task is left.
        """

    @abstractmethod
    def make_env(self) -> TextEnv:
        """A fresh environment that plays these tasks."""

    def make_expert(self) -> Expert:
        """An expert for these tasks, for demonstrations and upper rows of tables."""
        raise NotImplementedError(f"{type(self).__name__} has no expert: leave WarmStart out")

    def vocabulary(self) -> Sequence[str]:
        """Words and fixed phrases of the world, for a policy that builds its own tokenizer."""
        raise NotImplementedError(f"{type(self).__name__} has no vocabulary: use a policy with a tokenizer of its own")
