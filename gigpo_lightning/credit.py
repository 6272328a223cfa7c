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

from gigpo_lightning.estimators import CRITIC_ESTIMATORS, ESTIMATORS, CreditOptions, Records
from gigpo_lightning.functional.advantages import GigpoCredit
from gigpo_lightning.functional.anchors import group_exact
from gigpo_lightning.trajectory import EndReason, Group, Turn

_Entry = TypeVar("_Entry")

Detector = Callable[[Sequence[Hashable], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Credit:
    """What each turn deserves. All tensors are [turns], in the order groups, then episodes, then turns.

    `advantage`, `episode_advantage`, `step_advantage` and `step_return` are float64, `step_group_ids` int64; `value`
    (what the critic said) and `value_target` (what it should say) likewise, None where the estimator has no critic.
    `step_group_sizes` [step groups] holds the number of turns of each step group, for a histogram. `figures`: `density`
    (distinct states that recur ÷ distinct states), `coverage` (turns in step groups of at least two ÷ turns),
    `zero_spread_groups` and `zero_spread_step_groups` (share, among those of at least two members, that teach nothing),
    `episode_advantage_std` and `step_advantage_std` over the turns.
    """

    advantage: Tensor
    episode_advantage: Tensor
    step_advantage: Tensor
    step_return: Tensor
    step_group_ids: Tensor
    step_group_sizes: Tensor
    figures: dict[str, float]
    value: Tensor | None = None
    value_target: Tensor | None = None


class Values(NamedTuple):
    """A critic's values, float64.

    `turns` [turns]: of the states acted in, in the order of `Credit`; `ends` [episodes]: of the states that episodes
    were left in, not read where the task ended them.
    """

    turns: Tensor
    ends: Tensor


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
    gae_lambda: float = 0.95,
    n_steps: int = 5,
    values: Values | None = None,
    detector: str | Detector = "exact",
) -> Credit:
    """One advantage per turn.

    Args:
        groups: The collected groups; every episode ended properly and has at least one turn.
        estimator: `gigpo`, `grpo` (A_E only), `step` (A_S only), `rloo` (leave-one-out), or with a critic `ppo` (GAE)
            or `a2c` (n-step returns).
        lam: Global share λ in [0, 1] with `combine` convex, ω ≥ 0 with additive; read by `gigpo` only.
        gamma: Discount of the step returns, of GAE and of n-step returns, in [0, 1].
        norm: `std`, or `none` for no division by the standard deviation. Read by gigpo, grpo and step.
        statistics: `trajectory` (over episodes) or `step` (over records) for the episode advantage.
        combine: `convex` or `additive`.
        invalid_penalty: What an invalid action costs, ≥ 0, subtracted from the scores of its own turn.
        format_penalty: What an answer that breaks its format costs, ≥ 0, in the same way; a turn may cost both.
        penalty_in_returns: Subtract them from the turn's reward instead, so that they enter all returns.
        gae_lambda: λ of GAE, in [0, 1]; read by ppo only.
        n_steps: Turns before an n-step return goes over to the critic, at least 1; read by a2c only.
        values: What the critic says; ppo and a2c need it.
        detector: Name of the detector that forms step groups, or a function (keys, group_ids) -> step_group_ids.

    Raises:
        ValueError: An unknown name, a number outside its range, no turns, a missing reward (NaN), missing values, or an
            episode that ended in an environment error: such an episode must be replaced, not credited.
    """
    compute = _pick("estimator", estimator, ESTIMATORS)
    detect = _pick("detector", detector, DETECTORS) if isinstance(detector, str) else detector
    for name, penalty in (("invalid_penalty", invalid_penalty), ("format_penalty", format_penalty)):
        if not 0.0 <= penalty < float("inf"):
            raise ValueError(f"{name}: {penalty} is not a number >= 0; 0 is off, 0.1 the usual value")
    if estimator in CRITIC_ESTIMATORS and values is None:
        raise ValueError(f"estimator: {estimator} needs the values of a critic; set model.critic")
    records = _lay_flat(
        groups, detect, lambda t: invalid_penalty * (not t.valid) + format_penalty * (not t.well_formed), values
    )
    if penalty_in_returns:
        rewards, none = records.rewards - records.penalties, torch.zeros_like(records.penalties)
        records = records._replace(rewards=rewards, penalties=none)
    parts = compute(records, CreditOptions(lam, gamma, norm, statistics, combine, gae_lambda, n_steps))
    # Penalties outside the returns are no part of what the critic learns to expect.
    target = parts.advantage + records.penalties + records.values if estimator in CRITIC_ESTIMATORS else None
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
        value=None if target is None else records.values,
        value_target=target,
    )


# A detector of one's own is one more entry.
DETECTORS: dict[str, Detector] = {"exact": group_exact}


def _lay_flat(
    groups: Sequence[Group], detect: Detector, penalty: Callable[[Turn], float], values: Values | None
) -> Records:
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
    if values is None:
        values = Values(torch.zeros(len(turns), dtype=torch.float64), torch.zeros(len(episodes), dtype=torch.float64))
    is_over = torch.tensor([episode.end is EndReason.TERMINATED for _, episode in episodes])
    group_ids = torch.from_numpy(np.array([g for g, _ in episodes])[episode_ids])
    return Records(
        rewards=torch.tensor([_reward(turn.reward) for turn in turns], dtype=torch.float64),
        penalties=torch.tensor([penalty(turn) for turn in turns], dtype=torch.float64),
        episode_ids=torch.from_numpy(episode_ids),
        step_index=torch.from_numpy(np.arange(len(turns)) - starts[episode_ids]),
        group_ids=group_ids,
        step_group_ids=detect([turn.anchor for turn in turns], group_ids),
        values=values.turns,
        bootstrap=torch.where(is_over, 0.0, values.ends)[episode_ids],
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
