"""Credit: groups of episodes in, one advantage per turn out.

Lays the turns flat, lets a detector form the step groups and an estimator, chosen by name, compute the advantages.
Knows nothing of tokens: the loss spreads a turn's advantage over that turn's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gigpo_lightning.detectors.base import Detector, Embed, TurnTable
from gigpo_lightning.detectors.named import make_detector
from gigpo_lightning.estimators import CRITIC_ESTIMATORS, ESTIMATORS, CreditOptions, Records
from gigpo_lightning.functional.advantages import GigpoCredit
from gigpo_lightning.trajectory import EndReason, Group, Turn

_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class Credit:
    """What each turn deserves. All tensors are [turns], in the order groups, then episodes, then turns.

    `advantage`, `episode_advantage`, `step_advantage` and `step_return` are float64, `step_group_ids` int64; `value`
    (what the critic said) and `value_target` (what it should say) likewise, None where the estimator has no critic.
    `step_group_sizes` [step groups] holds the number of turns of each step group, for a histogram. `sums` holds counts
    and sums that add up over parts of an iteration and over processes; `credit_figures` says what follows from them.
    `penalties` float64 are what was taken off each turn's own scores, 0 where they are in the returns.
    `library_steps` counts the turns whose step advantage comes from the anchor library; None where it was not asked.
    """

    advantage: Tensor
    episode_advantage: Tensor
    step_advantage: Tensor
    step_return: Tensor
    penalties: Tensor
    step_group_ids: Tensor
    step_group_sizes: Tensor
    sums: dict[str, float]
    value: Tensor | None = None
    value_target: Tensor | None = None
    library_steps: int | None = None

    @property
    def figures(self) -> dict[str, float]:
        """What `credit_figures` says of this credit alone."""
        return credit_figures(self.sums)


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
    iteration: int = 0,
    embed: Embed | None = None,
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
        detector: What forms the step groups, or its short name.
        iteration: For detectors that ask.
        embed: Embeddings of texts, for detectors that ask.

    Raises:
        ValueError: An unknown name, a number outside its range, no turns, a missing reward (NaN), missing values, or an
            episode that ended in an environment error: such an episode must be replaced, not credited.
    """
    compute = _pick("estimator", estimator, ESTIMATORS)
    detector = make_detector("detector", detector)
    for name, penalty in (("invalid_penalty", invalid_penalty), ("format_penalty", format_penalty)):
        if not 0.0 <= penalty < float("inf"):
            raise ValueError(f"{name}: {penalty} is not a number >= 0; 0 is off, 0.1 the usual value")
    if estimator in CRITIC_ESTIMATORS and values is None:
        raise ValueError(f"estimator: {estimator} needs the values of a critic; set model.critic")
    table = _table(groups, iteration, embed)
    records = _lay_flat(
        groups,
        table,
        _checked(detector, table),
        lambda t: invalid_penalty * (not t.valid) + format_penalty * (not t.well_formed),
        values,
    )
    if penalty_in_returns:
        rewards, none = records.rewards - records.penalties, torch.zeros_like(records.penalties)
        records = records._replace(rewards=rewards, penalties=none)
    parts = compute(records, CreditOptions(lam, gamma, norm, statistics, combine, gae_lambda, n_steps))
    # Penalties outside the returns are no part of what the critic learns to expect.
    target = parts.advantage + records.penalties + records.values if estimator in CRITIC_ESTIMATORS else None
    sizes = torch.bincount(records.step_group_ids)
    return Credit(
        advantage=parts.advantage,
        episode_advantage=parts.episode_advantage,
        step_advantage=parts.step_advantage,
        step_return=parts.step_return,
        penalties=records.penalties,
        step_group_ids=records.step_group_ids,
        step_group_sizes=sizes,
        sums=_sums(records, parts, sizes),
        value=None if target is None else records.values,
        value_target=target,
    )


def _table(groups: Sequence[Group], iteration: int, embed: Embed | None) -> TurnTable:
    """What a detector sees of the groups."""
    failed = [episode for group in groups for episode in group.episodes if episode.end is EndReason.ERROR]
    if failed:
        raise ValueError(
            f"groups: an episode of task {failed[0].task_id} ended in an environment error; replace it before credit"
        )
    episodes = [(g, group, episode) for g, group in enumerate(groups) for episode in group.episodes]
    lengths = [len(episode.turns) for _, _, episode in episodes]
    if not sum(lengths):
        raise ValueError("groups: there is no turn to credit; collect at least one episode")
    return TurnTable(
        turns=[turn for _, _, episode in episodes for turn in episode.turns],
        group_ids=torch.from_numpy(np.repeat([g for g, _, _ in episodes], lengths)),
        task_ids=[group.task_id for _, group, episode in episodes for _ in episode.turns],
        instructions=[episode.instruction for _, _, episode in episodes for _ in episode.turns],
        iteration=iteration,
        embed=embed,
    )


def _checked(detector: Detector, table: TurnTable) -> Tensor:
    """The detector's step groups, numbered without gaps; the detector may be the user's own."""
    found, group_ids = detector.detect(table), table.group_ids
    name = type(detector).__name__
    wanted = f"it must give one int64 ≥ 0 for each of {len(group_ids)} turns"
    if not isinstance(found, Tensor):
        raise ValueError(f"detector: {name}.detect gave {type(found).__name__}; {wanted}")
    if found.shape != group_ids.shape or found.dtype != torch.int64 or int(found.min()) < 0:
        raise ValueError(f"detector: {name}.detect gave {found.dtype} of shape {list(found.shape)}; {wanted}")
    if int(found.max()) > 2 * len(found):  # digests of one's own, say: what follows is linear in the highest number
        found = found.unique(return_inverse=True)[1]
    owner = torch.zeros(int(found.max()) + 1, dtype=torch.int64)
    owner[found] = group_ids
    if not torch.equal(owner[found], group_ids):
        raise ValueError(f"detector: {name}.detect put turns of two task groups into one step group")
    return found if bool((found.bincount() > 0).all()) else found.unique(return_inverse=True)[1]


def _lay_flat(
    groups: Sequence[Group],
    table: TurnTable,
    step_group_ids: Tensor,
    penalty: Callable[[Turn], float],
    values: Values | None,
) -> Records:
    episodes = [episode for group in groups for episode in group.episodes]
    lengths = np.array([len(episode.turns) for episode in episodes])
    episode_ids = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    if values is None:
        values = Values(torch.zeros(int(lengths.sum()), dtype=torch.float64), torch.zeros(len(episodes)).double())
    is_over = torch.tensor([episode.end is EndReason.TERMINATED for episode in episodes])
    return Records(
        rewards=torch.tensor([_reward(turn.reward) for turn in table.turns], dtype=torch.float64),
        penalties=torch.tensor([penalty(turn) for turn in table.turns], dtype=torch.float64),
        episode_ids=torch.from_numpy(episode_ids),
        step_index=torch.from_numpy(np.arange(len(episode_ids)) - starts[episode_ids]),
        group_ids=table.group_ids,
        step_group_ids=step_group_ids,
        values=values.turns,
        bootstrap=torch.where(is_over, 0.0, values.ends)[episode_ids],
    )


def _reward(reward: float | None) -> float:
    if reward is None:
        raise ValueError("reward: None; a missing reward is an error, not 0: the environment must give a number")
    return float(reward)


def credit_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """What the added-up `Credit.sums` of an iteration come to; every share of nothing is 0.

    `density` (states that recur ÷ states; a state is what the detector takes for one, a step group, and recurs with two
    turns), `coverage` (turns in step groups of at least two ÷ turns), `zero_spread_groups` and
    `zero_spread_step_groups` (share, among those of at least two members, that teach nothing),
    `episode_advantage_std` and `step_advantage_std` over the turns.
    """

    def share(part: str, whole: str) -> float:
        return sums[part] / sums[whole] if sums[whole] else 0.0

    def spread(name: str) -> float:
        return math.sqrt(max(share(f"{name}_squares", "turns") - share(name, "turns") ** 2, 0.0))

    return {
        "density": share("recurring_states", "states"),
        "coverage": share("recurring_turns", "turns"),
        "zero_spread_groups": share("flat_groups", "wide_groups"),
        "zero_spread_step_groups": share("flat_step_groups", "recurring_states"),
        "episode_advantage_std": spread("episode_advantage"),
        "step_advantage_std": spread("step_advantage"),
    }


def _sums(records: Records, parts: GigpoCredit, sizes: Tensor) -> dict[str, float]:
    first = records.step_index == 0
    wide_groups, flat_groups = _wide_and_flat(parts.episode_advantage[first], records.group_ids[first])
    recurring, flat_step_groups = _wide_and_flat(parts.step_advantage, records.step_group_ids)
    return {
        "turns": float(len(records.rewards)),
        "states": float(len(sizes)),
        "recurring_states": recurring,
        "recurring_turns": float(sizes[sizes >= 2].sum()),
        "flat_step_groups": flat_step_groups,
        "wide_groups": wide_groups,
        "flat_groups": flat_groups,
        "episode_advantage": float(parts.episode_advantage.sum()),
        "episode_advantage_squares": float(parts.episode_advantage.square().sum()),
        "step_advantage": float(parts.step_advantage.sum()),
        "step_advantage_squares": float(parts.step_advantage.square().sum()),
    }


def _wide_and_flat(advantages: Tensor, ids: Tensor) -> tuple[float, float]:
    """Groups of at least two, and those of them whose advantages are all 0, which zero spread gives exactly."""
    wide = torch.bincount(ids) >= 2
    moved = torch.bincount(ids, (advantages != 0).to(torch.float64)) > 0
    return float(wide.sum()), float((wide & ~moved).sum())


def _pick(option: str, name: str, registry: dict[str, _Entry]) -> _Entry:
    if name not in registry:
        raise ValueError(f"{option}: {name!r} is unknown; choose one of {', '.join(registry)}")
    return registry[name]
