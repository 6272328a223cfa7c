"""A trie over the token ids of the actions that are possible now: which tokens may come next.

Knows nothing about probabilities. A node with one continuation is forced: its token is not a choice, costs no forward
pass and does not count in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ActionTrie:
    """One node of the trie. Every action ends with the same end token, so that none is the prefix of another."""

    __slots__ = ("action", "allowed", "children")

    def __init__(self) -> None:
        self.children: dict[int, ActionTrie] = {}
        self.action: str | None = None
        self.allowed: tuple[int, ...] = ()

    @classmethod
    def build(cls, actions: Iterable[tuple[str, Sequence[int]]]) -> ActionTrie:
        """The trie of `(action text, token ids)` pairs.

        Raises:
            ValueError: Two actions have the same tokens, one is a prefix of another, or there is none.
        """
        root = cls()
        for text, token_ids in actions:
            node = root
            for token_id in token_ids:
                child = node.children.get(token_id)
                if child is None:
                    child = node.children[token_id] = cls()
                node = child
            if node.action is not None or node.children or node is root:
                raise ValueError(f"action {text!r} cannot be told from {node.action!r} by its tokens {list(token_ids)}")
            node.action = text
        if not root.children:
            raise ValueError("no admissible action: the environment must list at least one, or None")
        root._close()
        return root

    def _close(self) -> None:
        if self.action is not None and self.children:
            raise ValueError(f"action {self.action!r} is a prefix of another action by its tokens")
        self.allowed = tuple(sorted(self.children))
        for child in self.children.values():
            child._close()

    def follow_forced(self) -> tuple[list[int], ActionTrie]:
        """The tokens that have no alternative from here on, and the node after them (a choice or a leaf)."""
        forced: list[int] = []
        node = self
        while len(node.children) == 1:
            token_id, node = next(iter(node.children.items()))
            forced.append(token_id)
        return forced, node
