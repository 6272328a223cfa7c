"""When another program sampled: how far its log-probs are from the policy's own, and the weights that make up for it.

Two programs round differently under the same weights. Nothing here knows an engine or a model.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# exp(20) ≈ 5e8: the figures stay finite in float32 where one of the two is broken.
_MAX_LOG_RATIO = 20.0


class Correction(NamedTuple):
    """`weights`: float32, one per token; `metrics`: scalars by name."""

    weights: Tensor
    metrics: dict[str, Tensor]


def truncated_importance(policy_logprobs: Tensor, sampler_logprobs: Tensor, *, cap: float = 2.0) -> Correction:
    """Truncated importance weights of tokens that another program sampled.

    w = min(exp(d), C) with d = logp_policy − logp_sampler, both under the weights that sampled. Without the cap
    E_sampler[w f] = E_policy[f]; the cap bounds the variance at the price of a bias. w = 1 where the two agree. Source:
    truncated importance sampling (Ionides 2008, J. Comput. Graph. Stat. 17(2)).

    Args:
        policy_logprobs: What the policy itself assigns to the tokens, same temperature and constraint, any shape.
        sampler_logprobs: What the sampling program said it assigned, same shape.
        cap: C ≥ 1; infinity truncates nothing.

    Returns:
        The weights, without gradient, and over all tokens: `kl_k1` (mean of −d: estimates KL(sampler ‖ policy), of
        either sign), `kl_k3` (mean of exp d − d − 1: the same, never negative), `ratio_mean` (1 is expected),
        `ratio_max` (before the cap) and `truncated_frac`. Without any token all are 0.

    Raises:
        ValueError: Shapes that differ, or a cap below 1.
    """
    if not cap >= 1.0:
        raise ValueError(f"cap: {cap} is below 1, the weight of a token that both rate alike; 2 is usual")
    if policy_logprobs.shape != sampler_logprobs.shape:
        raise ValueError(f"logprobs: shapes {tuple(policy_logprobs.shape)} and {tuple(sampler_logprobs.shape)} differ")
    difference = policy_logprobs.detach().float() - sampler_logprobs.detach().float()
    difference = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = difference.exp()
    terms = {
        "kl_k1": -difference,
        "kl_k3": ratio - difference - 1.0,
        "ratio_mean": ratio,
        "truncated_frac": (ratio > cap).float(),
    }
    metrics = {name: term.sum() / max(term.numel(), 1) for name, term in terms.items()}
    metrics["ratio_max"] = ratio.max() if ratio.numel() else ratio.new_zeros(())
    return Correction(ratio.clamp(max=cap), metrics)
