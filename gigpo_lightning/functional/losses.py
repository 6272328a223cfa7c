"""Token-level losses of the update: clipped surrogate, k3 KL, entropy.

Every loss is Σ weight · term / denominator over the counted tokens, with the denominator of the *whole minibatch*
given from outside (`token_weights`), so that the gradient does not depend on how a minibatch is cut into
micro-batches. Shapes are free ([T] ragged tokens without padding, or [B, T]) as long as they agree. Nothing here knows
a model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .masked import masked_max, masked_mean, masked_sum

AGGREGATIONS = ("token", "turn", "constant")
RATIOS = ("token", "sequence", "none")

# exp(20) ≈ 5e8: a log-ratio beyond it is a failure elsewhere; the bound keeps the loss finite in float32.
_MAX_LOG_RATIO = 20.0


class LossResult(NamedTuple):
    """`loss`: scalar with gradient; `metrics`: detached scalars by name."""

    loss: Tensor
    metrics: dict[str, Tensor]


class TokenWeights(NamedTuple):
    """`weights`: float32, the shape of the mask; `denominator`: what the sum over the whole minibatch is divided by."""

    weights: Tensor
    denominator: float


def token_weights(
    mask: Tensor, turn_ids: Tensor, aggregation: str = "token", *, constant: float | None = None
) -> TokenWeights:
    """How much each token of a minibatch counts; compute once per minibatch, then slice for micro-batches.

    * `token`: weight 1, denominator = number of counted tokens (mean over tokens).
    * `turn`: weight 1 / counted tokens of its turn, denominator = number of turns with a counted token (mean per turn,
      then over turns).
    * `constant`: weight 1, denominator = `constant`, whatever the lengths (Dr. GRPO).

    An empty mask has denominator 1, so that its loss is 0 and not NaN.

    Args:
        mask: Bool, True where a token counts, any shape.
        turn_ids: int64, same shape: tokens of one turn share an id ≥ 0; read where the mask is True.
        aggregation: `token`, `turn` or `constant`.
        constant: Denominator of `constant`, positive, in tokens; a good value is minibatch turns × longest response.

    Raises:
        ValueError: Unknown aggregation, shapes that differ, or a missing or non-positive constant.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation: {aggregation!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
    if turn_ids.shape != mask.shape:
        raise ValueError(f"turn_ids: shape {tuple(turn_ids.shape)}, expected that of the mask, {tuple(mask.shape)}")
    weights = mask.to(torch.float32)
    if aggregation == "constant":
        if constant is None or not constant > 0:
            raise ValueError(f"constant: {constant} is no denominator; give a positive number of tokens")
        return TokenWeights(weights, float(constant))
    if aggregation == "token":
        return TokenWeights(weights, float(max(int(mask.sum()), 1)))
    _, turn = turn_ids[mask].unique(return_inverse=True)
    lengths = torch.bincount(turn)
    weights[mask] = 1.0 / lengths[turn].to(torch.float32)
    return TokenWeights(weights, float(max(lengths.shape[0], 1)))


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio: str = "token",
    turn_ids: Tensor | None = None,
    denominator: float | Tensor,
    weights: Tensor | None = None,
) -> LossResult:
    """Clipped surrogate policy loss.

    L = − Σ w · min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A) / D with ρ = exp(logp − logp_old); with a dual clip c, the
    objective of a token with A < 0 is at least cA. At ρ = 1 the gradient is that of −Σ w A logp / D (REINFORCE).
    Source: PPO (arXiv 1707.06347, Eq. 7), dual clip (arXiv 1912.09729, Eq. 5).

    * `ratio` token: each token has its own ρ.
    * `sequence`: all tokens of a turn share ρ = exp(mean over them of logp − logp_old). With the weights of `turn` this
      is GSPO (arXiv 2507.18071, Eq. 5 to 7). It stays far nearer to 1: clip bounds of 3e-4 and 4e-4 are the published.
    * `none`: L = − Σ w · A · logp / D, the plain policy gradient (A2C); the clip bounds are not read.

    Args:
        logprobs: Log-probabilities under the policy, with gradient.
        old_logprobs: Those of the sampling policy, same temperature and constraint, same shape.
        advantages: Advantage of each token's turn, same shape.
        mask: Bool, same shape, True where the token counts.
        clip_low: ε_low in [0, 1).
        clip_high: ε_high ≥ 0.
        dual_clip: c > 1, or None for no dual clip.
        ratio: `token`, `sequence` or `none`.
        turn_ids: Of `sequence`: int64, same shape, tokens of one turn share an id ≥ 0; read where the mask is True.
        denominator: D of the whole minibatch, positive (see `token_weights`).
        weights: w of each token, same shape; None is 1.

    Returns:
        The loss and, as means over the counted tokens: `clip_frac` (the clipped branch was taken), `dual_clip_frac`,
        `approx_kl` (k3 of the sampling policy against this one), `mismatch` (|logp − logp_old|), `ratio_mean`; and
        `ratio_max`. An empty mask: all 0. The ratios are those of the objective, with `none` those of tokens.

    Raises:
        ValueError: Shapes that differ, a coefficient outside its range, an unknown ratio, or turns that are missing.
    """
    _check_clips(clip_low, clip_high, dual_clip)
    if ratio not in RATIOS:
        raise ValueError(f"ratio: {ratio!r} is unknown; choose one of {', '.join(RATIOS)}")
    log_ratio = _masked_difference(logprobs, old_logprobs, mask)
    if advantages.shape != mask.shape:
        raise ValueError(f"advantages: shape {tuple(advantages.shape)} with a mask of {tuple(mask.shape)}")
    advantages = torch.where(mask, advantages, 0.0).to(log_ratio.dtype)
    rho = (_turn_means(log_ratio, mask, turn_ids) if ratio == "sequence" else log_ratio).exp()
    if ratio == "none":
        is_clipped = is_dual = torch.zeros_like(mask)
        objective = torch.where(mask, logprobs.to(log_ratio.dtype), 0.0) * advantages
    else:
        objective, is_clipped, is_dual = _clipped(rho, advantages, clip_low, clip_high, dual_clip)
    loss = -_weighted(objective, mask, weights, denominator)
    with torch.no_grad():
        metrics = {
            "clip_frac": masked_mean(is_clipped.float(), mask),
            "dual_clip_frac": masked_mean(is_dual.float(), mask),
            "approx_kl": masked_mean(log_ratio.exp() - log_ratio - 1.0, mask),
            "mismatch": masked_mean(log_ratio.abs(), mask),
            "ratio_mean": masked_mean(rho, mask),
            "ratio_max": masked_max(rho, mask).clamp(min=0.0),
        }
    return LossResult(loss, metrics)


def _clipped(
    rho: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped objective of every token, where the clipped branch was taken, and where the dual clip holds."""
    plain = rho * advantages
    clipped = rho.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    objective, is_clipped = torch.minimum(plain, clipped), clipped < plain
    if dual_clip is None:
        return objective, is_clipped, torch.zeros_like(is_clipped)
    floor = dual_clip * advantages
    is_dual = (advantages < 0) & (objective < floor)
    return torch.where(is_dual, floor, objective), is_clipped, is_dual


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    denominator: float | Tensor,
    weights: Tensor | None = None,
) -> LossResult:
    """KL to the reference policy with the k3 estimator: Σ w · (exp d − d − 1) / D, d = logp_ref − logp.

    Unbiased for KL(π ‖ π_ref) and never negative; 0 exactly where the two agree. Source:
    http://joschu.net/blog/kl-approx.html. Arguments as `policy_loss`; metrics: `kl`, the mean over the counted tokens.
    """
    per_token = k3_kl(logprobs, ref_logprobs, mask)
    loss = _weighted(per_token, mask, weights, denominator)
    return LossResult(loss, {"kl": masked_mean(per_token.detach(), mask)})


def entropy_loss(
    entropy: Tensor, mask: Tensor, *, denominator: float | Tensor, weights: Tensor | None = None
) -> LossResult:
    """Negative entropy, to be added with a positive coefficient: − Σ w · H / D.

    Args:
        entropy: Entropy of each token's distribution in nats, with gradient.
        mask: As `policy_loss`; likewise `denominator` and `weights`.

    Returns:
        The loss, and `entropy`, the mean over the counted tokens.
    """
    loss = -_weighted(entropy, mask, weights, denominator)
    return LossResult(loss, {"entropy": masked_mean(entropy.detach(), mask)})


def k3_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(d) − d − 1 with d = logp_ref − logp for every token; 0 where the mask is False."""
    difference = _masked_difference(ref_logprobs, logprobs, mask)
    return difference.exp() - difference - 1.0


def _masked_difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """a − b where the mask is True, else 0; in float32 at least, bounded so that its exponential is finite."""
    if a.shape != mask.shape or b.shape != mask.shape:
        raise ValueError(f"logprobs: shapes {tuple(a.shape)} and {tuple(b.shape)} with a mask of {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask: {mask.dtype}; expected torch.bool, True where a token counts")
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    difference = torch.where(mask, a.to(dtype), 0.0) - torch.where(mask, b.to(dtype), 0.0)
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _turn_means(terms: Tensor, mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """The mean over the counted tokens of each token's turn; 0 where the mask is False."""
    if turn_ids is None or turn_ids.shape != mask.shape:
        shape = None if turn_ids is None else tuple(turn_ids.shape)
        raise ValueError(
            f"turn_ids: {shape} with a mask of {tuple(mask.shape)}; ratio sequence needs every token's turn"
        )
    _, turn = turn_ids[mask].unique(return_inverse=True)
    lengths = torch.bincount(turn)
    sums = terms.new_zeros(lengths.shape[0]).index_add(0, turn, terms[mask])
    return torch.zeros_like(terms).masked_scatter(mask, (sums / lengths)[turn])


def _weighted(terms: Tensor, mask: Tensor, weights: Tensor | None, denominator: float | Tensor) -> Tensor:
    if not denominator > 0:
        raise ValueError(f"denominator: {denominator} is not positive; take it from token_weights")
    if weights is not None and weights.shape != mask.shape:
        raise ValueError(f"weights: shape {tuple(weights.shape)} with a mask of {tuple(mask.shape)}")
    return masked_sum(terms if weights is None else terms * weights, mask) / denominator


def _check_clips(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0.0 <= clip_low < 1.0:
        raise ValueError(f"clip_low: {clip_low} is outside [0, 1); 0.2 is the usual value")
    if not clip_high >= 0.0:
        raise ValueError(f"clip_high: {clip_high} is negative; 0.2 is the usual value")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip: {dual_clip} must be greater than 1 (3 is the usual value), or null for none")
