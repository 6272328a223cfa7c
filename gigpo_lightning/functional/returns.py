"""Advantages with a critic, and leave-one-out ones, of flat step records: GAE and n-step returns across turns, RLOO.

A record is one turn. Numpy in float64, linear in the number of records, records in any order, results as torch tensors
in the order of the input. Knows nothing of tokens, networks or why an episode ended: an episode that its task ended has
the value 0 behind its last record, any other the value of the state that it was left in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .records import (
    Floats,
    Ints,
    Layout,
    OwnedOnce,
    check_unit,
    compact,
    discounted,
    in_chunks,
    lay_out,
    read_integers,
    read_values,
    round_off,
)


def gae(
    rewards: ArrayLike | Tensor,
    values: ArrayLike | Tensor,
    bootstrap: ArrayLike | Tensor,
    episode_ids: ArrayLike | Tensor,
    step_index: ArrayLike | Tensor,
    *,
    gamma: float = 0.95,
    gae_lambda: float = 0.95,
) -> Tensor:
    """Generalised advantage estimate across the turns of an episode.

    A_t = Σ_k (γ λ)^k δ_{t+k} with the TD errors δ_t = r_t + γ V_{t+1} − V_t, and the bootstrap value as V_{t+1} behind
    an episode's last record. λ = 0 is the TD error, λ = 1 the return less V_t; with γ = λ = 1 and V = 0 it is the sum
    of the rewards still to come. The target of the critic is A_t + V_t. Source: arXiv 1506.02438, Eq. 16.

    Args:
        rewards: r_t of every record, [S], finite.
        values: V of the state that the record's action was taken in, [S], finite.
        bootstrap: V of the state that an episode was left in, 0 where its task ended it; [S], finite, read at the last
            record of each episode only.
        episode_ids: Episode of every record, integers [S].
        step_index: t of every record, integers [S]; 0, 1, … without a gap in each episode.
        gamma: Discount γ in [0, 1].
        gae_lambda: λ in [0, 1]. Not the λ of GiGPO.

    Returns:
        A_t of every record, float64 [S].

    Raises:
        ValueError: A missing number (NaN), a duplicate or missing step, lengths that differ, γ or λ outside [0, 1].
    """
    check_unit("gamma", gamma)
    check_unit("gae_lambda", gae_lambda)

    def compute(error_t: Floats, layout: Layout) -> Floats:
        return discounted(error_t, layout, gamma * gae_lambda)

    return _of_errors(compute, rewards, values, bootstrap, episode_ids, step_index, gamma)


def n_step(
    rewards: ArrayLike | Tensor,
    values: ArrayLike | Tensor,
    bootstrap: ArrayLike | Tensor,
    episode_ids: ArrayLike | Tensor,
    step_index: ArrayLike | Tensor,
    *,
    gamma: float = 0.95,
    n_steps: int = 5,
) -> Tensor:
    """Advantage of the n-step return across the turns of an episode, as of A2C.

    A_t = Σ_{k<n} γ^k r_{t+k} + γ^n V_{t+n} − V_t, which is the sum of n discounted TD errors; where fewer than n turns
    are left, it is over those and ends with the bootstrap value. n = 1 is the TD error, n ≥ the episode's length is GAE
    at λ = 1. The cost does not depend on n. Source: arXiv 1602.01783, Section 4. Arguments and errors as `gae`, and:

    Args:
        n_steps: n, at least 1.
    """
    check_unit("gamma", gamma)
    if n_steps < 1:
        raise ValueError(f"n_steps: {n_steps} is less than 1, the TD error; 5 is usual")
    n_steps = min(n_steps, 2**31)  # more than any episode has, and no integer overflows when it is added to a step

    def compute(error_t: Floats, layout: Layout) -> Floats:
        to_the_end = discounted(error_t, layout, gamma)
        lengths = np.bincount(layout.episodes)
        has_later = layout.steps + n_steps < lengths[layout.episodes]
        start = np.cumsum(lengths) - lengths
        # where the record n turns later lies: by place in the sorted order, then back to the order of the records
        of_place = np.arange(len(error_t))
        if layout.slot is not None:
            of_place = np.empty_like(layout.slot)
            of_place[layout.slot] = np.arange(len(error_t))
        later = of_place[(start[layout.episodes] + layout.steps + n_steps)[has_later]]
        to_the_end_later = to_the_end[later]
        to_the_end[has_later] -= gamma**n_steps * to_the_end_later
        return to_the_end

    return _of_errors(compute, rewards, values, bootstrap, episode_ids, step_index, gamma)


def rloo(
    rewards: ArrayLike | Tensor,
    episode_ids: ArrayLike | Tensor,
    step_index: ArrayLike | Tensor,
    group_ids: ArrayLike | Tensor,
) -> Tensor:
    """Return of the episode less the mean return of the other N − 1 of its group (REINFORCE leave-one-out).

    A(τ) = R(τ) − Σ_{τ' ≠ τ} R(τ') / (N − 1) with R(τ) the undiscounted sum of the rewards: N / (N − 1) times the
    episode advantage of `gigpo` with `norm` none. A group of one gives 0; equal returns give exactly 0. Source: arXiv
    2402.14740, Eq. 4.

    Args:
        rewards: r_t of every record, [S], finite. float32 values are compared with float32's precision.
        episode_ids: Episode of every record, integers [S].
        step_index: Step of every record, integers [S]; 0, 1, … without a gap in each episode.
        group_ids: Task group of every record, integers [S]; one per episode.

    Returns:
        A of every record's episode, float64 [S].

    Raises:
        ValueError: A missing number (NaN), a duplicate or missing step, lengths that differ, an episode in two groups.
    """
    reward_t = read_values("rewards", rewards)
    n_records = len(reward_t)
    episodes = compact(read_integers("episode_ids", episode_ids, n_records))
    steps = read_integers("step_index", step_index, n_records)
    groups = compact(read_integers("group_ids", group_ids, n_records))
    if n_records == 0:
        return torch.zeros(0, dtype=torch.float64)
    lay_out(episodes, steps)  # refuses steps that are missing or there twice
    OwnedOnce("episode", episodes).number(episodes, groups)
    own = np.bincount(episodes, reward_t)[episodes]
    size = np.bincount(episodes, np.abs(reward_t))[episodes]
    first = steps == 0
    n = np.bincount(groups[first])[groups]
    others = np.maximum(n - 1, 1)
    advantage = own - (np.bincount(groups[first], own[first])[groups] - own) / others
    smallest = round_off(rewards) * np.bincount(groups[first], size[first])[groups] / others
    advantage[(n == 1) | (np.abs(advantage) <= smallest)] = 0.0
    return torch.from_numpy(advantage)


def _of_errors(
    compute: Callable[[Floats, Layout], Floats],
    rewards: ArrayLike | Tensor,
    values: ArrayLike | Tensor,
    bootstrap: ArrayLike | Tensor,
    episode_ids: ArrayLike | Tensor,
    step_index: ArrayLike | Tensor,
    gamma: float,
) -> Tensor:
    """`compute` of the TD errors of every record and of where it belongs."""
    reward_t = read_values("rewards", rewards)
    n_records = len(reward_t)
    value_t, end_t = (read_values(n, v, n_records) for n, v in (("values", values), ("bootstrap", bootstrap)))
    episodes = compact(read_integers("episode_ids", episode_ids, n_records))
    steps = read_integers("step_index", step_index, n_records)

    def chunk(episodes: Ints, reward_t: Floats, value_t: Floats, end_t: Floats, steps: Ints) -> tuple[Floats]:
        layout = lay_out(compact(episodes), steps)
        return (compute(_td_errors(reward_t, value_t, end_t, layout, gamma), layout),)

    return torch.from_numpy(in_chunks(episodes, (reward_t, value_t, end_t, steps), chunk, 1)[0])


def _td_errors(reward_t: Floats, value_t: Floats, end_t: Floats, layout: Layout, gamma: float) -> Floats:
    """δ_t = r_t + γ V_{t+1} − V_t in the order of the records."""
    place = slice(None) if layout.slot is None else layout.slot
    by_place = np.empty_like(value_t)
    by_place[place] = value_t
    follow = np.empty_like(value_t)
    follow[:-1] = by_place[1:]
    ends = np.empty_like(end_t)
    ends[place] = end_t
    follow[layout.last] = ends[layout.last]
    errors: Floats = reward_t + gamma * follow[place] - value_t
    return errors
