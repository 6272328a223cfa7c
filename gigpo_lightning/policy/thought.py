"""Half-constrained answers: reason freely, then follow the admissible actions.

Only the thought and the action are chosen; the tags around them are put there. Works on the text that tokens spell, as
a tag may end in the middle of a token. Knows nothing about models or environments.
"""

from __future__ import annotations

from collections.abc import Sequence

from gigpo_lightning.policy.answering import ActionAnswer
from gigpo_lightning.policy.base import PromptFormat, Reading
from gigpo_lightning.policy.constraint import ActionTrie

THINK, END_THINK, ACT = "<think>", "</think>", "<action>"
# `</think>` is at most this many tokens long, one for each character.
_TAG_TOKENS = len(END_THINK)


def empty_thought(prompt: PromptFormat) -> list[int]:
    """The tokens of an answer that thinks nothing, up to its action."""
    opening = "" if prompt.opened else THINK
    return [token_id for tag in (opening, END_THINK, ACT) for token_id in _encode(prompt, tag)]


def thought_room(prompt: PromptFormat, longest_action: int, max_tokens: int) -> int:
    """Tokens of the longest thought in an answer of `max_tokens`: what tags and action leave of it, perhaps < 0."""
    return max_tokens - longest_action - len(empty_thought(prompt))


class ThoughtAnswer(ActionAnswer):
    """`<think>…</think><action>` and one of the actions of a trie.

    The thought ends where its text holds `</think>`. Where the room for it is used up, or the policy says the token
    that ends an answer, `</think>` is put there. What then lacks of `<action>` is put there as well: spaces, and tags
    begun within a token (`>\\n\\n`, `><`), stay. So the action is always admissible, and the answer is well-formed
    unless the thought spoils it: by a tag of its own, by text after `</think>`, or by the token that ends an answer.

    Args:
        prompt: A prompt that `reasons`.
        trie: The admissible actions, spelled by `prompt.action_ids`.
        max_tokens: Longest answer; where tags and action leave no room in it there is no thought, and it is longer.
    """

    __slots__ = ("_left", "_prompt", "_tail", "_trie", "_was_ended")

    def __init__(self, prompt: PromptFormat, trie: ActionTrie, max_tokens: int) -> None:
        super().__init__()
        self._prompt, self._trie = prompt, trie
        self._was_ended = False  # within the thought
        self._left = thought_room(prompt, trie.longest, max_tokens)
        self._tail: list[int] = []  # the last tokens of the thought

    def begin(self) -> list[int]:
        if self._left <= 0:
            return [*empty_thought(self._prompt), *self._descend(self._trie)]
        return [] if self._prompt.opened else _encode(self._prompt, THINK)

    def take(self, token_id: int) -> list[int]:
        if self._node is not None:
            return self._descend(self._node.child(token_id))
        self._left -= 1
        self._was_ended = token_id == self._prompt.end_id
        self._tail = [*self._tail[1 - _TAG_TOKENS :], token_id]
        _, tag, after = _decode(self._prompt, self._tail).partition(END_THINK)
        if tag:
            return self._act(after.lstrip())
        if self._was_ended or self._left <= 0:
            return [*_encode(self._prompt, END_THINK), *self._act("")]
        return []

    def reading(self, token_ids: Sequence[int]) -> Reading:
        end = self._prompt.end_id
        found = self._prompt.read([*(i for i in token_ids if i != end), end])
        action = (self._node.action if self._node else None) or ""
        return found._replace(action=action, well_formed=found.well_formed and not self._was_ended)

    def _act(self, begun: str) -> list[int]:
        """Open the action, of whose tag `begun` is there, up to its first choice."""
        lacking = ACT.removeprefix(begun) if ACT.startswith(begun) else ACT
        return [*_encode(self._prompt, lacking), *self._descend(self._trie)]


def _encode(prompt: PromptFormat, text: str) -> list[int]:
    return list(prompt.tokenizer.encode(text, add_special_tokens=False))


def _decode(prompt: PromptFormat, token_ids: Sequence[int]) -> str:
    return str(prompt.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
