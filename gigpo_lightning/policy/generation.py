"""Choosing one token per row from hidden states: the sampling side of `functional.logprobs`.

The caller brings the random numbers, so that an episode's samples do not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gigpo_lightning.functional.products import sums_in_float32


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token and its log-probability under the constraint and the temperature (0 when greedy)."""

    token_id: int
    logprob: float


class OutputLayer:
    """Scores of next tokens in float32, whatever the type of the weights: rounded ones would not be the update's.

    Made anew for every collection: where short products cannot be added up in float32 it holds such a copy of weights.

    Args:
        layer: The output layer, with `weight` [vocabulary, hidden] and perhaps `bias` [vocabulary].
    """

    def __init__(self, layer: nn.Module):
        self._weight: Tensor = layer.weight  # type: ignore[assignment]
        bias = getattr(layer, "bias", None)
        self._bias: Tensor | None = None if bias is None else bias.float()
        self._full: Tensor | None = None

    def all(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocabulary]."""
        weight = self._weight
        if weight.dtype == hidden.dtype and sums_in_float32(weight.device, weight.dtype):
            scores = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            return scores if self._bias is None else scores + self._bias
        if self._full is None:
            self._full = weight.float()
        with torch.autocast(hidden.device.type, enabled=False):
            return linear(hidden.float(), self._full, self._bias)

    def some(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, K] → [N, K]: costs K rows of the weights instead of all."""
        scores = (hidden.float()[:, None] * self._weight[token_ids].float()).sum(-1)
        return scores if self._bias is None else scores + self._bias[token_ids]


def choose_tokens(
    output: OutputLayer,
    hidden: Tensor,
    allowed: Sequence[Sequence[int] | None],
    uniforms: Sequence[float],
    temperature: float,
) -> list[Choice]:
    """Sample one token per row by inverting the cumulative distribution at the given uniform numbers.

    Args:
        output: The model's output layer.
        hidden: Final hidden state of each row's last token [N, hidden].
        allowed: For each row the ids to choose among, in ascending order, or None for all.
        uniforms: One number in [0, 1) per row.
        temperature: > 0, or 0 for the most likely token.
    """
    choices: dict[int, Choice] = {}
    free = [i for i, ids in enumerate(allowed) if ids is None]
    bound = [(i, ids) for i, ids in enumerate(allowed) if ids is not None]
    if free:
        scores = output.all(hidden if not bound else hidden[free])
        choices.update(zip(free, _choose(scores, None, [uniforms[i] for i in free], temperature), strict=True))
    if bound:
        rows = [i for i, _ in bound]
        widest = max(len(ids) for _, ids in bound)
        padded = torch.tensor([[*ids, *([-1] * (widest - len(ids)))] for _, ids in bound], device=hidden.device)
        scores = output.some(hidden if not free else hidden[rows], padded.clamp(min=0))
        scores = scores.masked_fill(padded < 0, -torch.inf)
        choices.update(zip(rows, _choose(scores, padded, [uniforms[i] for i in rows], temperature), strict=True))
    return [choices[i] for i in range(len(allowed))]


def _choose(scores: Tensor, token_ids: Tensor | None, uniforms: Sequence[float], temperature: float) -> list[Choice]:
    """One choice per row of `scores` [N, K]; `token_ids` [N, K] are the ids of the columns, None: 0, 1, …"""
    if temperature == 0:
        index = scores.argmax(1, keepdim=True)
        chosen = [0.0] * len(scores)
    else:
        logprobs = torch.log_softmax(scores / temperature, dim=1)
        cumulative = logprobs.exp().double().cumsum(1)
        target = torch.tensor(uniforms, dtype=torch.float64, device=scores.device) * cumulative[:, -1]
        # `right=True` finds the first entry whose cumulative value exceeds the target, never one of probability 0.
        index = torch.searchsorted(cumulative, target[:, None], right=True).clamp(max=scores.shape[1] - 1)
        chosen = logprobs.gather(1, index)[:, 0].tolist()
    ids = (index if token_ids is None else token_ids.gather(1, index))[:, 0].tolist()
    return [Choice(token_id, logprob) for token_id, logprob in zip(ids, chosen, strict=True)]
