"""Tries by admissible actions, remembered: the states of a group recur, their tries need not be built again."""

from __future__ import annotations

from gigpo_lightning.policy.base import PromptFormat
from gigpo_lightning.policy.constraint import ActionTrie

# The lists of a hundred households or more; in large ones a trie takes 20 KB.
TRIES_KEPT = 1_000


class TrieCache:
    """The trie of every set of actions that was asked for, up to `TRIES_KEPT` of them."""

    def __init__(self, prompt: PromptFormat):
        self._prompt = prompt
        self._tries: dict[tuple[str, ...], ActionTrie] = {}
        self._spelled: dict[str, tuple[int, ...]] = {}

    def get(self, actions: tuple[str, ...]) -> ActionTrie:
        """The trie of these actions."""
        trie = self._tries.get(actions)
        if trie is None:
            if len(self._tries) >= TRIES_KEPT:
                self._tries.clear()
                self._spelled.clear()
            trie = self._tries[actions] = ActionTrie.build((action, self._spell(action)) for action in actions)
        return trie

    def _spell(self, action: str) -> tuple[int, ...]:
        token_ids = self._spelled.get(action)
        if token_ids is None:
            token_ids = self._spelled[action] = self._prompt.action_ids(action)
        return token_ids
