"""What a detector is: turns in, step groups out; and what it may remember between iterations.

Knows nothing of advantages or of how turns were played. Every detector stays inside the task groups it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gigpo_lightning.trajectory import Turn

Embed = Callable[[Sequence[str]], Tensor]
"""From texts to the policy's embeddings of them, [texts, width]."""

Gather = Callable[[Any], list[Any]]
"""From a value of this process to those of all processes, in order of rank."""


@dataclass(frozen=True, slots=True)
class TurnTable:
    """Turns of whole task groups, laid flat.

    Attributes:
        turns: The turns, [S], in the order groups, then episodes, then turns.
        group_ids: Task group of every turn, int64 [S].
        task_ids: The task's own name of every turn, [S]; the same in other iterations.
        instructions: What the turn's episode was told to do, [S].
        iteration: The iteration they were played in.
        embed: The policy's embeddings on demand, under the weights that played; None where there is no policy.
    """

    turns: Sequence[Turn]
    group_ids: Tensor
    task_ids: Sequence[str]
    instructions: Sequence[str]
    iteration: int = 0
    embed: Embed | None = None

    @property
    def keys(self) -> list[Hashable]:
        """The environment's anchor keys."""
        return [turn.anchor for turn in self.turns]

    @property
    def observations(self) -> list[str]:
        """What was read before the action."""
        return [turn.observation for turn in self.turns]

    @property
    def names(self) -> list[str]:
        """The keys as texts that tell tasks apart."""
        return [f"{task}|{turn.anchor}" for task, turn in zip(self.task_ids, self.turns, strict=True)]

    def take(self, places: Sequence[int]) -> TurnTable:
        """The turns at these places."""
        return TurnTable(
            [self.turns[i] for i in places],
            self.group_ids[list(places)],
            [self.task_ids[i] for i in places],
            [self.instructions[i] for i in places],
            self.iteration,
            self.embed,
        )


class Detector(ABC):
    """Decides which turns of a task group left the same state.

    An iteration is one or several calls of `detect`, each with whole task groups, and then one of `end_iteration`. What
    is remembered changes only there, so that it does not matter how the groups were dealt out to the calls.
    """

    @property
    def kind(self) -> str:
        """What tells detectors apart that cannot take over each other's memory."""
        return type(self).__name__

    @abstractmethod
    def detect(self, table: TurnTable) -> Tensor:
        """Step group of every turn, int64 [S], each ≥ 0 and inside one task group.

        A turn that is no anchor has a step group of its own.
        """

    def metrics(self) -> dict[str, float]:
        """Figures of the iteration that is under way, for the log."""
        return {}

    def end_iteration(self, density: float, gather: Gather) -> None:
        """All groups of the iteration were seen.

        Args:
            density: States that recur ÷ states over all processes, a state being a step group.
            gather: To tell the processes of each other; all of them must call it equally often.
        """

    def state_dict(self) -> dict[str, Any]:
        """What is remembered: plain types and tensors only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
