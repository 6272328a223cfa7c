"""Returns and advantages of flat step records: a record is one turn; its ids say which episode and group it belongs to.

Numpy in float64 throughout, linear in the number of records, records in any order, results as torch tensors in the
order of the input. Knows nothing of tokens, policies or how the anchors were found. Source: arXiv 2505.10978 (GiGPO).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .records import (
    Floats,
    Ints,
    OwnedOnce,
    check_choice,
    check_unit,
    compact,
    discounted,
    in_chunks,
    lay_out,
    read_integers,
    read_values,
    round_off,
)

NORMS = ("std", "none")
STATISTICS = ("trajectory", "step")
COMBINATIONS = ("convex", "additive")
SINGLE_MEMBER = ("zero", "raw")

_NO_PENALTY = np.float64(0.0)


class GigpoCredit(NamedTuple):
    """Per record, float64 [S]: R_t without penalties, A_E, A_S, and their combination A."""

    step_return: Tensor
    episode_advantage: Tensor
    step_advantage: Tensor
    advantage: Tensor


def step_returns(
    rewards: ArrayLike | Tensor, episode_ids: ArrayLike | Tensor, step_index: ArrayLike | Tensor, gamma: float
) -> Tensor:
    """Discounted return from each step on.

    R_t = r_t + γ R_{t+1} inside an episode, and R_T = r_T at its last record. γ = 0 gives the rewards, γ = 1 the
    rewards still to come.

    Args:
        rewards: r_t of every record, [S], finite.
        episode_ids: Episode of every record, integers [S].
        step_index: t of every record, integers [S]; 0, 1, … without a gap in each episode.
        gamma: Discount in [0, 1].

    Returns:
        R_t of every record, float64 [S], in the order of the input.

    Raises:
        ValueError: A missing reward (NaN), a duplicate or missing step, lengths that differ, or γ outside [0, 1].
    """
    check_unit("gamma", gamma)
    values = read_values("rewards", rewards)
    episodes = compact(read_integers("episode_ids", episode_ids, len(values)))
    steps = read_integers("step_index", step_index, len(values))

    def compute(episodes: Ints, values: Floats, steps: Ints) -> tuple[Floats]:
        return (discounted(values, lay_out(compact(episodes), steps), gamma),)

    return torch.from_numpy(in_chunks(episodes, (values, steps), compute, 1)[0])


def gigpo(
    rewards: ArrayLike | Tensor,
    episode_ids: ArrayLike | Tensor,
    step_index: ArrayLike | Tensor,
    group_ids: ArrayLike | Tensor,
    step_group_ids: ArrayLike | Tensor,
    *,
    gamma: float = 0.95,
    norm: str = "std",
    statistics: str = "trajectory",
    combine: str = "convex",
    weight: float,
    penalties: ArrayLike | Tensor | None = None,
    single_member: str = "zero",
    eps: float = 1e-6,
) -> GigpoCredit:
    """Group-in-group advantages.

    A_E = (R(τ) − p_t − mean) / F over the task group's episodes (Eq. 3), A_S = (R_t − p_t − mean) / F over the step
    group's records (Eq. 7), F = std(n − 1) + eps or 1; A = λ A_E + (1 − λ) A_S, or A = A_E + ω A_S (Eq. 8).
    R(τ) is the undiscounted sum of the rewards, R_t the step return, p_t the record's own penalty. λ = 1 and ω = 0 are
    GRPO, λ = 0 the step-only ablation; λ = 0.5 and ω = 1 differ by a factor 2.

    An episode stands in the statistics with the score of its first step, as in the public implementation; without
    penalties all its records have the same score. A group of one member gives 0. Zero spread gives exactly 0: a group
    whose standard deviation is at most 1e-9 (float32 rewards: 1e-6) of the mean Σ|r| behind its scores holds equal
    scores up to round-off. With `norm` none a record's own penalty still counts there.

    Args:
        rewards: r_t of every record, [S], finite. float32 values are compared with float32's precision.
        episode_ids: Episode of every record, integers [S].
        step_index: Step of every record, integers [S]; 0, 1, … without a gap in each episode.
        group_ids: Task group of every record, integers [S]; one per episode.
        step_group_ids: Step group of every record, integers [S]; each inside one task group.
        gamma: Discount of the step returns, in [0, 1].
        norm: `std`, or `none` for F = 1 (the leave-one-out form).
        statistics: `trajectory`: mean and std of A_E over episodes; `step`: over records, so that long episodes weigh
            more (the public implementation's default).
        combine: `convex` (λ) or `additive` (ω).
        weight: λ in [0, 1] for `convex`; ω ≥ 0 for `additive`.
        penalties: p_t ≥ 0 of every record, [S], subtracted after the returns from the record's own two scores.
        single_member: A_E of a task group of one member: `zero`, or `raw` (the public implementation): score / F with
            std 1.
        eps: Added to the standard deviation, positive.

    Raises:
        ValueError: As `step_returns`; an unknown choice; a number outside its range; an episode in two groups or a step
            group across two.
    """
    rule = _Rule(norm, single_member, eps, round_off(rewards), gamma, statistics, combine, weight)
    _check_rule(rule)
    reward_t = read_values("rewards", rewards)
    n_records = len(reward_t)
    episodes = compact(read_integers("episode_ids", episode_ids, n_records))
    steps = read_integers("step_index", step_index, n_records)
    groups = compact(read_integers("group_ids", group_ids, n_records))
    step_groups = compact(read_integers("step_group_ids", step_group_ids, n_records))
    inputs: list[NDArray[Any]] = [reward_t, episodes, steps, step_groups]
    if penalties is not None:
        inputs.append(penalty_t := read_values("penalties", penalties, n_records))
        if penalty_t.min(initial=0.0) < 0.0:
            raise ValueError(f"penalties: {penalty_t.min()} is negative; a penalty is subtracted, give numbers >= 0")
    owned = (OwnedOnce("episode", episodes), OwnedOnce("step group", step_groups))
    return GigpoCredit(*map(torch.from_numpy, in_chunks(groups, inputs, partial(_gigpo_chunk, rule, owned), 4)))


def normalise_in_groups(
    scores: ArrayLike | Tensor,
    group_ids: ArrayLike | Tensor,
    *,
    norm: str = "std",
    single_member: str = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """(score − mean) / F inside each group, F = std(n − 1) + eps, or 1 with `norm` none.

    A group of one member gives 0 (`raw`: score / F with std 1). Zero spread gives exactly 0: a group whose standard
    deviation is at most 1e-9 (float32 scores: 1e-6) of its mean |score| holds equal scores up to round-off.

    Args:
        scores: [S], finite.
        group_ids: Group of every score, integers [S].
        norm, single_member, eps: As `gigpo`.

    Returns:
        float64 [S].

    Raises:
        ValueError: As `gigpo`.
    """
    rule = _Rule(norm, single_member, eps, round_off(scores))
    _check_rule(rule)
    values = read_values("scores", scores)
    ids = compact(read_integers("group_ids", group_ids, len(values)))
    return torch.from_numpy(_normalise(rule, values, ids, np.abs(values), single_member))


class _Rule(NamedTuple):
    """The options of `gigpo`; `round_off`: the share of its size below which a spread is none."""

    norm: str
    single_member: str
    eps: float
    round_off: float
    gamma: float = 1.0
    statistics: str = "step"
    combine: str = "convex"
    weight: float = 1.0


def _gigpo_chunk(
    rule: _Rule,
    owned: tuple[OwnedOnce, OwnedOnce],
    groups: Ints,
    reward_t: Floats,
    episodes: Ints,
    steps: Ints,
    step_groups: Ints,
    penalty_t: Floats | np.float64 = _NO_PENALTY,
) -> tuple[Floats, Floats, Floats, Floats]:
    """The four results for records that hold whole task groups."""
    episodes, step_groups = (once.number(ids, groups) for once, ids in zip(owned, (episodes, step_groups), strict=True))
    layout = lay_out(episodes, steps)
    step_return = discounted(reward_t, layout, rule.gamma)
    episode_return = np.bincount(layout.episodes, reward_t)[layout.episodes]
    # the sums of |r| behind a score bound its round-off; they are the score itself where no reward is negative
    step_size, episode_size = step_return, episode_return
    if (reward_t < 0).any():
        step_size = discounted(np.abs(reward_t), layout, rule.gamma)
        episode_size = np.bincount(layout.episodes, np.abs(reward_t))[layout.episodes]
    members = steps == 0 if rule.statistics == "trajectory" else None
    a_episode = _normalise(
        rule, episode_return - penalty_t, compact(groups), episode_size + penalty_t, rule.single_member, members
    )
    a_step = _normalise(rule, step_return - penalty_t, step_groups, step_size + penalty_t, "zero")
    share_e, share_s = (rule.weight, 1.0 - rule.weight) if rule.combine == "convex" else (1.0, rule.weight)
    return step_return, a_episode, a_step, share_e * a_episode + share_s * a_step


def _normalise(
    rule: _Rule,
    scores: Floats,
    ids: Ints,
    sizes: Floats,
    single_member: str,
    members: NDArray[np.bool_] | None = None,
) -> Floats:
    """Normalise all scores with the statistics of the records in `members` (None: all of them).

    `sizes` are the sums of absolute terms behind the scores; round-off is measured against them.
    """
    among: Any = slice(None) if members is None else members
    own, own_ids = scores[among], ids[among]
    n = np.bincount(own_ids)
    mean = np.bincount(own_ids, own) / np.maximum(n, 1)
    std = np.sqrt(np.bincount(own_ids, (own - mean[own_ids]) ** 2) / np.maximum(n - 1, 1))
    round_off = rule.round_off * np.bincount(own_ids, sizes[among]) / np.maximum(n, 1)
    is_single = n == 1
    is_flat = ~is_single & (std <= round_off)
    if single_member == "raw":
        mean[is_single], std[is_single] = 0.0, 1.0
    scale = 1.0 / (std + rule.eps) if rule.norm == "std" else np.ones_like(std)
    if single_member == "zero":
        scale[is_single] = 0.0
    if rule.norm == "std":
        scale[is_flat] = 0.0
    deviation = scores - mean[ids]
    if is_flat.any():  # without a division, only what is round-off goes: a penalty outside the statistics stays
        deviation[is_flat[ids] & (np.abs(deviation) <= (np.sqrt(n) * round_off)[ids])] = 0.0
    return deviation * scale[ids]


def _check_rule(rule: _Rule) -> None:
    check_unit("gamma", rule.gamma)
    check_choice("norm", rule.norm, NORMS)
    check_choice("statistics", rule.statistics, STATISTICS)
    check_choice("combine", rule.combine, COMBINATIONS)
    check_choice("single_member", rule.single_member, SINGLE_MEMBER)
    if rule.combine == "convex":
        check_unit("weight (λ)", rule.weight)
    elif not 0.0 <= rule.weight < float("inf"):
        raise ValueError(f"weight (ω): {rule.weight} is not a number >= 0; 1 is the paper's value")
    if not rule.eps > 0.0:
        raise ValueError(f"eps: {rule.eps} is not positive; 1e-6 is the usual value")
