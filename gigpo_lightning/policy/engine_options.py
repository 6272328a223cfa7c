"""The seam of engines that are not the policy's own model: what the datamodule asks of their options.

Such an engine rounds differently, so its log-probs are never taken for the policy's own (rollout/rescore.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.engine import Engine


class ForeignEngine(Engine, Protocol):
    """An engine that is started and stopped."""

    figures: dict[str, float]
    """What it says of its last collection, by the names of the log."""

    def close(self) -> None:
        """Nothing more will be asked: give back memory and files."""


class EngineOptions(ABC):
    """Options of a foreign engine, which choose it by their class.

    Args:
        importance_cap: Largest importance weight of a token, at least 1.

    Raises:
        ValueError: The cap is smaller.
    """

    def __init__(self, importance_cap: float = 2.0):
        if not importance_cap >= 1:
            raise ValueError(
                f"data.engine.importance_cap={importance_cap}: must be at least 1, the weight of a token that engine "
                "and policy rate alike; 2 is usual"
            )
        self.importance_cap = importance_cap

    @abstractmethod
    def check(self, policy: BasePolicy) -> None:
        """Refuse what cannot work, before the policy is prepared.

        Raises:
            ValueError: A package is missing, or the policy cannot be sampled from by this engine.
        """

    def check_policy(self, policy: BasePolicy) -> None:
        """The part of `check` that holds on any machine; `plan` may ask it for another one.

        Raises:
            ValueError: The policy cannot be sampled from by this engine.
        """

    def check_processes(self, processes: int) -> None:
        """Refuse so many processes of a run.

        Raises:
            ValueError: The engine cannot be used by so many.
        """

    def memory_bytes(self, device_bytes: int) -> int:
        """What it takes of a device with so much memory, its own weights, keys and values included."""
        return 0

    def rests(self, on_gpu: bool) -> bool:
        """Whether it gives its memory back between collections."""
        return False

    @abstractmethod
    def make(self, policy: BasePolicy, capacity: int, rows: int) -> ForeignEngine:
        """The engine.

        Args:
            policy: Prepared, in evaluation mode whenever the engine is asked.
            capacity: Longest conversation, in tokens.
            rows: Conversations under way at once, at most.
        """
