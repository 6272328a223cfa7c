"""The mathematics: pure functions of lists, arrays and tensors."""

from __future__ import annotations

from .advantages import GigpoCredit, gigpo, normalise_in_groups, step_returns
from .anchors import group_exact, group_similar
from .baselines import SingletonAdvantages, singleton_advantages
from .correction import Correction, truncated_importance
from .logprobs import TokenLogprobs, constrained_logprobs, constrained_logprobs_from_hidden, segment_logsumexp
from .losses import LossResult, TokenWeights, entropy_loss, k3_kl, kl_loss, policy_loss, token_weights
from .masked import masked_max, masked_mean, masked_sum
from .returns import gae, n_step, rloo
from .schedules import boosted, lambda_schedule, make_schedule
from .values import explained_variance, value_loss
from .vocabulary import vocabulary_logprobs

__all__ = [
    "Correction",
    "GigpoCredit",
    "LossResult",
    "SingletonAdvantages",
    "TokenLogprobs",
    "TokenWeights",
    "boosted",
    "constrained_logprobs",
    "constrained_logprobs_from_hidden",
    "entropy_loss",
    "explained_variance",
    "gae",
    "gigpo",
    "group_exact",
    "group_similar",
    "k3_kl",
    "kl_loss",
    "lambda_schedule",
    "make_schedule",
    "masked_max",
    "masked_mean",
    "masked_sum",
    "n_step",
    "normalise_in_groups",
    "policy_loss",
    "rloo",
    "segment_logsumexp",
    "singleton_advantages",
    "step_returns",
    "token_weights",
    "truncated_importance",
    "value_loss",
    "vocabulary_logprobs",
]
