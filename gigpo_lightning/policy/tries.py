"""Tries by admissible actions, remembered: the states of a group recur, their tries need not be built again."""

from __future__ import annotations

from gigpo_lightning.policy.base import PromptFormat
from gigpo_lightning.policy.constraint import ActionTrie

# Those of the groups that are played together; in large households a trie takes 20 KB.
TRIES_KEPT = 1_000
SPELLED_KEPT = 50_000


class TrieCache:
    """The tries of the last `TRIES_KEPT` sets of actions that were new."""

    def __init__(self, prompt: PromptFormat):
        self._prompt = prompt
        self._tries: dict[tuple[str, ...], ActionTrie] = {}
        self._spelled: dict[str, tuple[int, ...]] = {}

    def get(self, actions: tuple[str, ...]) -> ActionTrie:
        """The trie of these actions."""
        trie = self._tries.get(actions)
        if trie is None:
            if len(self._tries) >= TRIES_KEPT:
                del self._tries[next(iter(self._tries))]
            trie = self._tries[actions] = ActionTrie.build((action, self._spell(action)) for action in actions)
        return trie

    def _spell(self, action: str) -> tuple[int, ...]:
        token_ids = self._spelled.get(action)
        if token_ids is None:
            if len(self._spelled) >= SPELLED_KEPT:
                self._spelled.clear()
            token_ids = self._spelled[action] = self._prompt.action_ids(action)
        return token_ids
