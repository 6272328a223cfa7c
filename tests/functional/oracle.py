"""The definitions once more, for clarity and not for speed: one record, one group at a time, in plain Python."""

from __future__ import annotations

import difflib
import math
from collections.abc import Hashable, Sequence


def step_returns(rewards: Sequence[float], episodes: Sequence[int], steps: Sequence[int], gamma: float) -> list[float]:
    """R_t = Σ_{k ≥ t} γ^(k − t) r_k over the records of the same episode."""
    return [
        math.fsum(
            gamma ** (steps[j] - steps[i]) * rewards[j]
            for j in range(len(rewards))
            if episodes[j] == episodes[i] and steps[j] >= steps[i]
        )
        for i in range(len(rewards))
    ]


def normalised(score: float, members: Sequence[float], norm: str, raw_single: bool = False) -> float:
    """(score − mean) / (std + 1e-6) with the sample standard deviation of the members."""
    n = len(members)
    if n == 1:
        return (score / (1 + 1e-6) if norm == "std" else score) if raw_single else 0.0
    mean = math.fsum(members) / n
    if norm == "none":
        return score - mean
    if max(members) - min(members) < 1e-12:
        return 0.0
    return (score - mean) / (math.sqrt(math.fsum((m - mean) ** 2 for m in members) / (n - 1)) + 1e-6)


def gigpo(
    rewards: Sequence[float],
    episodes: Sequence[int],
    steps: Sequence[int],
    groups: Sequence[int],
    step_groups: Sequence[int],
    penalties: Sequence[float],
    *,
    gamma: float,
    norm: str,
    statistics: str,
) -> tuple[list[float], list[float]]:
    """(A_E, A_S) of every record."""
    every = range(len(rewards))
    returns = step_returns(rewards, episodes, steps, gamma)
    totals = [math.fsum(rewards[j] for j in every if episodes[j] == episodes[i]) for i in every]
    e_scores = [totals[i] - penalties[i] for i in every]
    s_scores = [returns[i] - penalties[i] for i in every]
    a_e, a_s = [], []
    for i in every:
        in_group = [j for j in every if groups[j] == groups[i] and (statistics == "step" or steps[j] == 0)]
        in_step_group = [j for j in every if step_groups[j] == step_groups[i]]
        a_e.append(normalised(e_scores[i], [e_scores[j] for j in in_group], norm))
        a_s.append(normalised(s_scores[i], [s_scores[j] for j in in_step_group], norm))
    return a_e, a_s


def group_exact(keys: Sequence[Hashable], groups: Sequence[int]) -> list[int]:
    seen: list[tuple[int, Hashable]] = []
    labels = []
    for pair in zip(groups, keys, strict=True):
        if pair not in seen:
            seen.append(pair)
        labels.append(seen.index(pair))
    return labels


def group_reference(texts: Sequence[str], groups: Sequence[int], threshold: float) -> list[int]:
    """Batch order; the first cluster of the group whose first member is similar enough."""
    clusters: list[tuple[int, str]] = []
    labels = []
    for text, group in zip(texts, groups, strict=True):
        for label, (owner, leader) in enumerate(clusters):
            if owner == group and difflib.SequenceMatcher(None, text, leader).ratio() >= threshold:
                labels.append(label)
                break
        else:
            clusters.append((group, text))
            labels.append(len(clusters) - 1)
    return labels
