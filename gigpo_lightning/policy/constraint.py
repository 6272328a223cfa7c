"""A trie over the token ids of the actions that are possible now: which tokens may come next.

Knows nothing about probabilities. A node with one continuation is forced: its token is not a choice, costs no forward
pass and does not count in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_HINT = "spell it otherwise in the world, or answer freely: data.constrain: false"


class ActionTrie:
    """One node of the trie; what lies below it is made when it is asked for, as most of it never is.

    Attributes:
        allowed: The tokens that may come next, in ascending order; empty at a leaf.
        action: The action that is complete here; None above the leaves.
    """

    __slots__ = ("_below", "_children", "_depth", "action", "allowed")

    def __init__(self, actions: Sequence[tuple[str, Sequence[int]]], depth: int = 0) -> None:
        self._depth = depth
        self._below: dict[int, list[tuple[str, Sequence[int]]]] = {}
        self._children: dict[int, ActionTrie] = {}
        self.action: str | None = None
        for entry in actions:
            text, token_ids = entry
            if len(token_ids) > depth:
                self._below.setdefault(token_ids[depth], []).append(entry)
            else:
                self.action = text
        self.allowed = tuple(sorted(self._below))

    @classmethod
    def build(cls, actions: Iterable[tuple[str, Sequence[int]]]) -> ActionTrie:
        """The trie of `(action text, token ids)` pairs. The token that ends one action must end all, and only end them.

        Raises:
            ValueError: Two actions have the same tokens, one could be a prefix of another, or there is none.
        """
        entries = list(actions)
        if not entries:
            raise ValueError("no admissible action: the environment must list at least one, or None")
        end = entries[0][1][-1:]
        seen: dict[tuple[int, ...], str] = {}
        for text, token_ids in entries:
            if not end or token_ids[-1:] != end or end[0] in token_ids[:-1]:
                raise ValueError(
                    f"action {text!r} could be a prefix of another action by its tokens {list(token_ids)}; {_HINT}"
                )
            key = tuple(token_ids)
            if key in seen:
                raise ValueError(
                    f"action {text!r} cannot be told from {seen[key]!r} by its tokens {list(key)}; {_HINT}"
                )
            seen[key] = text
        return cls(entries)

    @property
    def longest(self) -> int:
        """Tokens of the longest action from here on."""
        return max((len(ids) - self._depth for below in self._below.values() for _, ids in below), default=0)

    def child(self, token_id: int) -> ActionTrie:
        """The node after one of the `allowed` tokens.

        Raises:
            KeyError: The token is not allowed here.
        """
        child = self._children.get(token_id)
        if child is None:
            child = self._children[token_id] = ActionTrie(self._below[token_id], self._depth + 1)
        return child

    def follow_forced(self) -> tuple[list[int], ActionTrie]:
        """The tokens that have no alternative from here on, and the node after them (a choice or a leaf)."""
        forced: list[int] = []
        node = self
        while len(node.allowed) == 1:
            forced.append(node.allowed[0])
            node = node.child(node.allowed[0])
        return forced, node
