"""Baselines from outside of the batch: what is known of a state stands in for a step group that has one member.

Pure and per record: it may be computed in chunks of any size. Knows nothing of where the statistics come from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gigpo_lightning.functional.advantages import NORMS
from gigpo_lightning.functional.records import ROUND_OFF_FLOAT64, check_choice, compact, read_integers, read_values


class SingletonAdvantages(NamedTuple):
    """`advantage` float64 [S], 0 where `used`, bool [S], is False."""

    advantage: Tensor
    used: Tensor


def singleton_advantages(
    scores: ArrayLike | Tensor,
    step_group_ids: ArrayLike | Tensor,
    visits: ArrayLike | Tensor,
    mean: ArrayLike | Tensor,
    variance: ArrayLike | Tensor,
    *,
    norm: str = "std",
    eps: float = 1e-6,
) -> SingletonAdvantages:
    """Step advantages of the records whose step group has one member, from earlier visits of their state.

    A_S = (R_t − μ) / (σ + ε), bounded by ± n / √(n + 1).

    R_t: the record's score; n, μ, σ: number, mean and sample standard deviation of the returns that were seen before
    when the state was left. The bound is the largest that a member of a group of n + 1 can have, and is felt only by a
    return beyond all earlier ones: were the record itself among the n + 1, it could not be larger either. Without it
    two earlier returns that happened to be close would make an advantage of hundreds. With `norm` none A_S = R_t − μ.

    0, and not `used`: records in groups of at least two; n < 2; σ = 0 up to round-off (no spread is known, so that the
    difference has no scale). As μ depends on the state alone and not on the action, the policy gradient's expectation
    stays what it is.

    Args:
        scores: Step return of each record, less its own penalties, [S].
        step_group_ids: Step group of each record, [S]; all members of a group are among the records.
        visits: Earlier visits of the record's state, 0 for an unknown one, [S].
        mean: Their mean return [S]; not read where there are no visits.
        variance: Their sample variance [S], likewise.
        norm: `std` or `none`.
        eps: Added to the standard deviation, > 0.

    Raises:
        ValueError: Lengths differ, a value is missing, a variance is negative, or an unknown `norm`.
    """
    check_choice("norm", norm, NORMS)
    if not eps > 0.0:
        raise ValueError(f"eps: {eps} is not positive; 1e-6 is the usual value")
    score = read_values("scores", scores)
    groups = compact(read_integers("step_group_ids", step_group_ids, len(score)))
    n = read_values("visits", visits, len(score))
    mu, var = read_values("mean", mean, len(score)), read_values("variance", variance, len(score))
    if (var < 0.0).any():
        raise ValueError(f"variance: {var.min()} is negative")
    std = np.sqrt(var)
    spread = std > ROUND_OFF_FLOAT64 * np.maximum(np.abs(mu), np.abs(score))
    used = (np.bincount(groups, minlength=1)[groups] == 1) & (n >= 2) & spread
    deviation = score - mu
    if norm == "std":
        bound = n / np.sqrt(n + 1.0)
        deviation = np.clip(deviation / (std + eps), -bound, bound)
    return SingletonAdvantages(torch.from_numpy(np.where(used, deviation, 0.0)), torch.from_numpy(used))
