"""One answer while it is being said: which tokens may come next, and when it is complete.

Whoever samples asks an `Answer` and tells it what was chosen; it needs to know nothing about formats or worlds. Knows
nothing about models, probabilities or environments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gigpo_lightning.policy.base import Reading


class Answer(ABC):
    """One answer under way.

    Attributes:
        allowed: The ids to choose among next, in ascending order; None for the whole vocabulary.
        is_complete: Whether nothing is left to choose.
    """

    __slots__ = ("allowed", "is_complete")

    def __init__(self) -> None:
        self.allowed: tuple[int, ...] | None = None
        self.is_complete = False

    @abstractmethod
    def begin(self) -> list[int]:
        """The tokens before the first choice, which have no alternative; they may complete the answer."""

    @abstractmethod
    def take(self, token_id: int) -> list[int]:
        """Go on with a chosen token; returns the tokens after it that have no alternative."""

    @abstractmethod
    def reading(self, token_ids: Sequence[int]) -> Reading:
        """What the complete answer says; `token_ids` are all of its tokens."""
