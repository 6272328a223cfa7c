"""Which rows of an iteration the present policy rates anew before the first update, and why.

Rows that another engine sampled, for it rounds differently; and rows that an older policy sampled. Both then have the
policy's own log-probs and truncated importance weights. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager

import numpy as np

from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.rollout.processes import gathered
from gigpo_lightning.rollout.replay import ReplayRule
from gigpo_lightning.rollout.rescore import Rescored, rescore
from gigpo_lightning.rollout.sampler import Sampler
from gigpo_lightning.rollout.store import RolloutStore


def rate_anew(
    acting: Callable[[], AbstractContextManager[BasePolicy]],
    sampler: Sampler,
    replay: ReplayRule | None,
    figures: MutableMapping[str, float],
    world: int,
    store: RolloutStore,
    rows: np.ndarray,
    temperature: float,
    max_tokens: int,
) -> Rescored | None:
    """The rows that need it, as the policy rates them while it still is the one that played; None where none does.

    Args:
        acting: Lends the policy as it plays; all processes must enter.
        sampler: What sampled the rows of this iteration.
        replay: The rule by which rows of earlier iterations were borrowed; None where none were.
        figures: Where what is measured goes.
        world: Number of processes.
        store: The rollouts.
        rows: The rows that are trained on.
        temperature: The sampling temperature.
        max_tokens: Tokens of a micro-batch.
    """
    if not sampler.is_foreign and replay is None:
        return None
    is_old = store.ages[rows] > 0
    with acting() as policy:
        found = sampler.rescore(policy, figures, store, rows[~is_old], temperature, max_tokens)
        if replay is None:
            return found
        old = rescore(store, rows[is_old], policy, temperature=temperature, max_tokens=max_tokens, cap=replay.max_ratio)
    figures.update(_ratios(old, world))
    if found is None:
        return old
    return Rescored({**found.logprobs, **old.logprobs}, {**found.importance, **old.importance}, found.metrics)


def _ratios(old: Rescored, world: int) -> dict[str, float]:
    """Of the borrowed tokens of all processes: the mean of present ÷ old probability, and the share that is cut off.

    Nothing where there are none.
    """
    tokens = sum(len(weights) for weights in old.importance.values())
    names = ("ratio_mean", "truncated_frac")
    parts = gathered((tokens, [old.metrics[f"mismatch/{name}"] for name in names]), world)
    total = sum(count for count, _ in parts)
    if not total:
        return {}
    means = [sum(count * values[i] for count, values in parts) / total for i in range(len(names))]
    return {f"replay/{name}": mean for name, mean in zip(names, means, strict=True)}
