"""Log-probabilities and entropies of sampled tokens, over the whole vocabulary or over the allowed tokens only.

Allowed tokens come as compressed rows: `allowed_ids` holds the ids of all rows one after the other, `allowed_counts`
their number per row. All arithmetic is float32 whatever the model's type; everything is differentiable. Nothing here
knows how the allowed tokens were found or which model gave the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Stands for log 0 in p·log p: exp(-1e4) is 0 in float32, and 0 · -1e4 is 0 where 0 · -inf would be NaN.
_LOG_ZERO = -1.0e4


class TokenLogprobs(NamedTuple):
    """`logprobs`: of the given tokens, float32 [N]; `entropy`: of the distributions they came from, in nats, [N]."""

    logprobs: Tensor
    entropy: Tensor


def constrained_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    allowed_ids: Tensor | None = None,
    allowed_counts: Tensor | None = None,
    temperature: float = 1.0,
) -> TokenLogprobs:
    """Log-probability of each token under softmax(logits / temperature) restricted to the allowed tokens.

    log p(a) = z_a − log Σ_{b ∈ allowed} exp z_b with z = logits / temperature. All tokens allowed (or `allowed_counts`
    None) is the ordinary log-softmax; a single allowed token has log-probability and entropy 0.

    Args:
        logits: Scores [N, V], any floating type.
        token_ids: The tokens to rate, int64 [N]; each must be among its row's allowed ones.
        allowed_ids: Allowed token ids of all rows in order, int64 [sum(allowed_counts)], none twice in a row.
        allowed_counts: Number of allowed tokens of each row, int64 [N], at least 1; None: no restriction.
        temperature: Positive.

    Raises:
        ValueError: Shapes that do not fit, a temperature that is not positive, or a token that is not allowed.
    """
    _check_temperature(temperature)
    _check_rows("logits", logits, token_ids)
    if allowed_counts is None:
        log_p = F.log_softmax(logits.float() / temperature, dim=-1)
        entropy = -(log_p.exp() * log_p.clamp(min=_LOG_ZERO)).sum(-1)
        return TokenLogprobs(log_p.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1), entropy)
    allowed_ids, rows = _allowed_rows(token_ids, allowed_ids, allowed_counts)
    # a flat index_select: its gradient is one index_add, several times cheaper than that of logits[rows, ids]
    scores = logits.reshape(-1).index_select(0, rows * logits.shape[1] + allowed_ids)
    return _segment_logprobs(scores.float() / temperature, rows, token_ids, allowed_ids)


def constrained_logprobs_from_hidden(
    hidden: Tensor,
    embedding: Tensor,
    token_ids: Tensor,
    allowed_ids: Tensor,
    allowed_counts: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
) -> TokenLogprobs:
    """`constrained_logprobs` of logits = hidden · embeddingᵀ (+ bias), computing the allowed scores only.

    Costs O(sum(allowed_counts) · H) instead of O(N · V · H): the way to go when few tokens are allowed.

    Args:
        hidden: Final hidden states [N, H].
        embedding: Output embedding (the weight of the language-model head) [V, H].
        token_ids: The tokens to rate, int64 [N]; each must be among its row's allowed ones.
        allowed_ids: Allowed token ids of all rows in order, int64 [sum(allowed_counts)], none twice in a row.
        allowed_counts: Number of allowed tokens of each row, int64 [N], at least 1.
        temperature: Positive.
        bias: Bias of the head [V], or None.

    Raises:
        ValueError: As `constrained_logprobs`.
    """
    _check_temperature(temperature)
    _check_rows("hidden", hidden, token_ids)
    allowed_ids, rows = _allowed_rows(token_ids, allowed_ids, allowed_counts)
    scores = (hidden.float().index_select(0, rows) * F.embedding(allowed_ids, embedding).float()).sum(-1)
    if bias is not None:
        scores = scores + bias.float().index_select(0, allowed_ids)
    return _segment_logprobs(scores / temperature, rows, token_ids, allowed_ids)


def segment_logsumexp(values: Tensor, segment_ids: Tensor, n_segments: int) -> Tensor:
    """log Σ exp over the values of each segment.

    Args:
        values: Finite numbers [M].
        segment_ids: Segment of each value, int64 [M] in [0, n_segments), in any order.
        n_segments: Number of segments.

    Returns:
        [n_segments]; −inf for a segment without values. The gradient is the softmax inside the segment.
    """
    highest = values.new_full((n_segments,), -torch.inf)
    highest = highest.scatter_reduce(0, segment_ids, values.detach(), "amax")
    shift = torch.where(highest.isfinite(), highest, torch.zeros_like(highest))
    total = values.new_zeros(n_segments).index_add(0, segment_ids, (values - shift.index_select(0, segment_ids)).exp())
    return total.log() + shift


def _segment_logprobs(scores: Tensor, rows: Tensor, token_ids: Tensor, allowed_ids: Tensor) -> TokenLogprobs:
    """`scores` [M] are the tempered scores of the allowed tokens, `rows` [M] the row of each, rising."""
    n_rows = token_ids.shape[0]
    chosen = (allowed_ids == token_ids.index_select(0, rows)).nonzero().squeeze(-1)
    if chosen.shape[0] != n_rows or not torch.equal(rows[chosen], torch.arange(n_rows, device=rows.device)):
        hits = torch.bincount(rows[chosen], minlength=n_rows)
        bad = int((hits != 1).nonzero()[0])
        raise ValueError(
            f"token_ids: token {int(token_ids[bad])} of row {bad} occurs {int(hits[bad])} times among the row's "
            "allowed ids; rate only allowed tokens and list each of them once"
        )
    log_p = scores - segment_logsumexp(scores, rows, n_rows).index_select(0, rows)
    terms = log_p.exp() * log_p.clamp(min=_LOG_ZERO)
    entropy = -terms.new_zeros(n_rows).index_add(0, rows, terms)
    return TokenLogprobs(log_p.index_select(0, chosen), entropy)


def _allowed_rows(token_ids: Tensor, allowed_ids: Tensor | None, allowed_counts: Tensor) -> tuple[Tensor, Tensor]:
    """The allowed ids and the row of each of them."""
    if allowed_ids is None:
        raise ValueError("allowed_ids: missing although allowed_counts is given; give both or neither")
    if allowed_counts.shape != token_ids.shape:
        raise ValueError(f"allowed_counts: shape {tuple(allowed_counts.shape)}, expected {tuple(token_ids.shape)}")
    rows = torch.repeat_interleave(allowed_counts)
    if rows.shape != allowed_ids.shape:
        raise ValueError(f"allowed_ids: {tuple(allowed_ids.shape)} ids for counts that add up to {rows.shape[0]}")
    return allowed_ids, rows


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature} is not positive; for greedy choice take the argmax instead")


def _check_rows(name: str, scores: Tensor, token_ids: Tensor) -> None:
    if scores.dim() != 2 or token_ids.shape != scores.shape[:1]:
        raise ValueError(
            f"{name}: shape {tuple(scores.shape)} with token_ids {tuple(token_ids.shape)}; expected [N, …] and [N]"
        )
