"""Credit: groups of episodes in, one advantage per turn out.

Lays the turns flat, lets a detector form the step groups and an estimator compute the advantages; both are chosen by
name. Knows nothing of tokens: the loss spreads a turn's advantage over that turn's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gigpo_lightning.functional.advantages import GigpoCredit, gigpo
from gigpo_lightning.functional.anchors import group_exact
from gigpo_lightning.trajectory import EndReason, Group, Turn

_Entry = TypeVar("_Entry")

Detector = Callable[[Sequence[Hashable], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Credit:
    """What each turn deserves. All tensors are [turns], in the order groups, then episodes, then turns.

    `advantage`, `episode_advantage`, `step_advantage` and `step_return` are float64, `step_group_ids` int64.
    `step_group_sizes` [step groups] holds the number of turns of each step group, for a histogram. `figures`: `density`
    (distinct states that recur ÷ distinct states), `coverage` (turns in step groups of at least two ÷ turns),
    `zero_spread_groups` and `zero_spread_step_groups` (share, among those of at least two members, that teach nothing),
    `episode_advantage_std` and `step_advantage_std` over the turns. `library_steps` counts the turns whose step
    advantage comes from the anchor library; None where it was not asked.
    """

    advantage: Tensor
    episode_advantage: Tensor
    step_advantage: Tensor
    step_return: Tensor
    step_group_ids: Tensor
    step_group_sizes: Tensor
    figures: dict[str, float]
    library_steps: int | None = None


class Records(NamedTuple):
    """The turns of several groups laid flat, [S] each: what every estimator starts from."""

    rewards: Tensor
    penalties: Tensor
    episode_ids: Tensor
    step_index: Tensor
    group_ids: Tensor
    step_group_ids: Tensor


class CreditOptions(NamedTuple):
    """The numbers of an estimator; each reads those it needs."""

    lam: float
    gamma: float
    norm: str
    statistics: str
    combine: str


Estimator = Callable[[Records, CreditOptions], GigpoCredit]


def credit_groups(
    groups: Sequence[Group],
    *,
    estimator: str = "gigpo",
    lam: float,
    gamma: float = 0.95,
    norm: str = "std",
    statistics: str = "trajectory",
    combine: str = "convex",
    invalid_penalty: float = 0.1,
    format_penalty: float = 0.0,
    penalty_in_returns: bool = False,
    detector: str | Detector = "exact",
) -> Credit:
    """One advantage per turn.

    Args:
        groups: The collected groups; every episode ended properly and has at least one turn.
        estimator: `gigpo`, `grpo` (A_E only) or `step` (A_S only).
        lam: Global share λ in [0, 1] with `combine` convex, ω ≥ 0 with additive; read by `gigpo` only.
        gamma: Discount of the step returns, in [0, 1].
        norm: `std`, or `none` for no division by the standard deviation.
        statistics: `trajectory` (over episodes) or `step` (over records) for the episode advantage.
        combine: `convex` or `additive`.
        invalid_penalty: What an invalid action costs, ≥ 0, subtracted from the scores of its own turn.
        format_penalty: What an answer that breaks its format costs, ≥ 0, in the same way; a turn may cost both.
        penalty_in_returns: Subtract them from the turn's reward instead, so that they enter both returns.
        detector: Name of the detector that forms step groups, or a function (keys, group_ids) -> step_group_ids.

    Raises:
        ValueError: An unknown name, a number outside its range, no turns, a missing reward (NaN), or an episode that
            ended in an environment error: such an episode must be replaced, not credited.
    """
    compute = _pick("estimator", estimator, ESTIMATORS)
    detect = _pick("detector", detector, DETECTORS) if isinstance(detector, str) else detector
    for name, penalty in (("invalid_penalty", invalid_penalty), ("format_penalty", format_penalty)):
        if not 0.0 <= penalty < float("inf"):
            raise ValueError(f"{name}: {penalty} is not a number >= 0; 0 is off, 0.1 the usual value")
    records = _lay_flat(
        groups, detect, lambda t: invalid_penalty * (not t.valid) + format_penalty * (not t.well_formed)
    )
    if penalty_in_returns:
        rewards, none = records.rewards - records.penalties, torch.zeros_like(records.penalties)
        records = records._replace(rewards=rewards, penalties=none)
    parts = compute(records, CreditOptions(lam, gamma, norm, statistics, combine))
    sizes = torch.bincount(records.step_group_ids)
    sizes = sizes[sizes > 0]
    return Credit(
        advantage=parts.advantage,
        episode_advantage=parts.episode_advantage,
        step_advantage=parts.step_advantage,
        step_return=parts.step_return,
        step_group_ids=records.step_group_ids,
        step_group_sizes=sizes,
        figures=_figures(records, parts, sizes),
    )


def _gigpo(records: Records, options: CreditOptions) -> GigpoCredit:
    return gigpo(
        records.rewards,
        records.episode_ids,
        records.step_index,
        records.group_ids,
        records.step_group_ids,
        gamma=options.gamma,
        norm=options.norm,
        statistics=options.statistics,
        combine=options.combine,
        weight=options.lam,
        penalties=records.penalties,
    )


def _grpo(records: Records, options: CreditOptions) -> GigpoCredit:
    return _gigpo(records, options._replace(lam=1.0, combine="convex"))


def _step(records: Records, options: CreditOptions) -> GigpoCredit:
    return _gigpo(records, options._replace(lam=0.0, combine="convex"))


# An estimator or detector of one's own is one more entry.
ESTIMATORS: dict[str, Estimator] = {"gigpo": _gigpo, "grpo": _grpo, "step": _step}
DETECTORS: dict[str, Detector] = {"exact": group_exact}


def _lay_flat(groups: Sequence[Group], detect: Detector, penalty: Callable[[Turn], float]) -> Records:
    episodes = [(g, episode) for g, group in enumerate(groups) for episode in group.episodes]
    failed = [episode for _, episode in episodes if episode.end is EndReason.ERROR]
    if failed:
        raise ValueError(
            f"groups: an episode of task {failed[0].task_id} ended in an environment error; replace it before credit"
        )
    turns = [turn for _, episode in episodes for turn in episode.turns]
    if not turns:
        raise ValueError("groups: there is no turn to credit; collect at least one episode")
    lengths = np.array([len(episode.turns) for _, episode in episodes])
    episode_ids = np.repeat(np.arange(len(episodes)), lengths)
    starts = np.cumsum(lengths) - lengths
    group_ids = torch.from_numpy(np.array([g for g, _ in episodes])[episode_ids])
    return Records(
        rewards=torch.tensor([_reward(turn.reward) for turn in turns], dtype=torch.float64),
        penalties=torch.tensor([penalty(turn) for turn in turns], dtype=torch.float64),
        episode_ids=torch.from_numpy(episode_ids),
        step_index=torch.from_numpy(np.arange(len(turns)) - starts[episode_ids]),
        group_ids=group_ids,
        step_group_ids=detect([turn.anchor for turn in turns], group_ids),
    )


def _reward(reward: float | None) -> float:
    if reward is None:
        raise ValueError("reward: None; a missing reward is an error, not 0: the environment must give a number")
    return float(reward)


def _figures(records: Records, parts: GigpoCredit, sizes: Tensor) -> dict[str, float]:
    first = records.step_index == 0
    n_recurring = int((sizes >= 2).sum())
    return {
        "density": n_recurring / len(sizes),
        "coverage": float(sizes[sizes >= 2].sum()) / len(records.rewards),
        "zero_spread_groups": _flat_share(parts.episode_advantage[first], records.group_ids[first]),
        "zero_spread_step_groups": _flat_share(parts.step_advantage, records.step_group_ids),
        "episode_advantage_std": float(parts.episode_advantage.std(correction=0)),
        "step_advantage_std": float(parts.step_advantage.std(correction=0)),
    }


def _flat_share(advantages: Tensor, ids: Tensor) -> float:
    """Share of the groups of at least two whose advantages are all 0, which zero spread gives exactly; 0 if none."""
    counted = torch.bincount(ids) >= 2
    moved = torch.bincount(ids, (advantages != 0).to(torch.float64)) > 0
    n_counted = int(counted.sum())
    return float((counted & ~moved).sum()) / n_counted if n_counted else 0.0


def _pick(option: str, name: str, registry: dict[str, _Entry]) -> _Entry:
    if name not in registry:
        raise ValueError(f"{option}: {name!r} is unknown; choose one of {', '.join(registry)}")
    return registry[name]
