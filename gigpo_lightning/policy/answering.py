"""One answer while it is being said: which tokens may come next, and when it is complete.

Whoever samples asks an `Answer` and tells it what was chosen; it needs to know nothing about formats or worlds. Knows
nothing about models, probabilities or environments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gigpo_lightning.policy.base import PromptFormat, Reading
from gigpo_lightning.policy.constraint import ActionTrie


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


class ActionAnswer(Answer):
    """An answer whose action follows a trie."""

    __slots__ = ("_node",)

    def __init__(self) -> None:
        super().__init__()
        self._node: ActionTrie | None = None  # once the action has begun

    def _descend(self, node: ActionTrie) -> list[int]:
        """Go to a node; returns the tokens from there to the next choice, or to the end."""
        forced, self._node = node.follow_forced()
        self.allowed = self._node.allowed
        self.is_complete = self._node.action is not None
        return forced


class TrieAnswer(ActionAnswer):
    """One of the actions of a trie."""

    __slots__ = ("_trie",)

    def __init__(self, trie: ActionTrie) -> None:
        super().__init__()
        self._trie = trie

    def begin(self) -> list[int]:
        return self._descend(self._trie)

    def take(self, token_id: int) -> list[int]:
        assert self._node is not None
        return self._descend(self._node.child(token_id))

    def reading(self, token_ids: Sequence[int]) -> Reading:
        return Reading((self._node.action if self._node else None) or "", True)


class FreeAnswer(Answer):
    """Any tokens, until the one that ends an answer or until `max_tokens`; then the end is put after them."""

    __slots__ = ("_is_cut", "_left", "_prompt")

    def __init__(self, prompt: PromptFormat, max_tokens: int) -> None:
        super().__init__()
        self._prompt, self._left, self._is_cut = prompt, max_tokens, False

    def begin(self) -> list[int]:
        return []

    def take(self, token_id: int) -> list[int]:
        self._left -= 1
        ended = token_id == self._prompt.end_id
        self._is_cut = not ended and self._left <= 0
        self.is_complete = ended or self._is_cut
        return [self._prompt.end_id] if self._is_cut else []  # cut short: later turns see it ended

    def reading(self, token_ids: Sequence[int]) -> Reading:
        found = self._prompt.read(token_ids)
        return found._replace(well_formed=found.well_formed and not self._is_cut)
