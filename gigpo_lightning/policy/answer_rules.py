"""Which kind of answer a turn asks for: free, one of the admissible actions, or a thought and then one of those."""

from __future__ import annotations

from gigpo_lightning.policy.answering import Answer, FreeAnswer, TrieAnswer
from gigpo_lightning.policy.base import PromptFormat
from gigpo_lightning.policy.thought import ThoughtAnswer, empty_thought
from gigpo_lightning.policy.tries import TrieCache


class AnswerRules:
    """Makes the answers of a collection.

    Args:
        prompt: The policy's prompt format.
        constrain: Follow the admissible actions where the world lists them.
        max_tokens: Longest free answer.
    """

    def __init__(self, prompt: PromptFormat, constrain: bool, max_tokens: int) -> None:
        self._prompt, self._constrain, self._max_tokens = prompt, constrain, max_tokens
        self._tries = TrieCache(prompt)
        self._tags = len(empty_thought(prompt)) if prompt.reasons else 0

    def start(self, admissible: tuple[str, ...] | None) -> Answer:
        """A new answer to a world that admits these actions (None: it does not say)."""
        if admissible is None or not self._constrain:
            return FreeAnswer(self._prompt, self._max_tokens)
        trie = self._tries.get(admissible)
        return ThoughtAnswer(self._prompt, trie, self._max_tokens) if self._prompt.reasons else TrieAnswer(trie)

    def longest(self, admissible: tuple[str, ...] | None) -> int:
        """Tokens of the longest answer to such a world."""
        if admissible is None or not self._constrain:
            return self._max_tokens
        action = self._tags + self._tries.get(admissible).longest
        return max(self._max_tokens, action) if self._prompt.reasons else action
