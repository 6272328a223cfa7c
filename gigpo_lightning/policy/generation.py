"""Choosing one token per row, and remembering tries: the sampling side of `functional.logprobs`.

The caller brings the random numbers, so that an episode's samples do not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gigpo_lightning.policy.base import PromptFormat
from gigpo_lightning.policy.constraint import ActionTrie

TRIES_KEPT = 20_000


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token and its log-probability under the constraint and the temperature (0 when greedy)."""

    token_id: int
    logprob: float


def choose_tokens(
    logits: Tensor, allowed: Sequence[Sequence[int] | None], uniforms: Sequence[float], temperature: float
) -> list[Choice]:
    """Sample one token per row by inverting the cumulative distribution at the given uniform numbers.

    Args:
        logits: float32 [N, vocabulary].
        allowed: For each row the ids to choose among, in ascending order, or None for all.
        uniforms: One number in [0, 1) per row.
        temperature: > 0, or 0 for the most likely token.
    """
    vocabulary = logits.shape[1]
    every = range(vocabulary)
    rows = [every if ids is None else ids for ids in allowed]
    widest = max(len(ids) for ids in rows)
    padded = torch.tensor([[*ids, *([-1] * (widest - len(ids)))] for ids in rows], device=logits.device)
    scores = logits.gather(1, padded.clamp(min=0)).masked_fill(padded < 0, -torch.inf)
    if temperature == 0:
        best = scores.argmax(1)
        return [Choice(i, 0.0) for i in padded.gather(1, best[:, None])[:, 0].tolist()]
    logprobs = torch.log_softmax(scores / temperature, dim=1)
    cumulative = logprobs.exp().double().cumsum(1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device) * cumulative[:, -1]
    # `right=True` finds the first entry whose cumulative value exceeds the target, never one of probability 0.
    index = torch.searchsorted(cumulative, target[:, None], right=True).clamp(max=widest - 1)
    ids = padded.gather(1, index)[:, 0].tolist()
    chosen = logprobs.gather(1, index)[:, 0].tolist()
    return [Choice(token_id, logprob) for token_id, logprob in zip(ids, chosen, strict=True)]


class TrieCache:
    """Tries by admissible actions: the states of a group recur, their tries need not be built again."""

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
