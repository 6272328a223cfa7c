"""The estimators by name: flat step records in, advantages out.

Each is a few lines over the pure functions of `functional`; it reads those options that concern it. Knows nothing of
episodes as objects, tokens, or how values and step groups were found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gigpo_lightning.functional.advantages import GigpoCredit, gigpo
from gigpo_lightning.functional.returns import gae, n_step, rloo


class Records(NamedTuple):
    """The turns of several groups laid flat, [S] each: what every estimator starts from."""

    rewards: Tensor
    penalties: Tensor
    episode_ids: Tensor
    step_index: Tensor
    group_ids: Tensor
    step_group_ids: Tensor
    values: Tensor
    bootstrap: Tensor


class CreditOptions(NamedTuple):
    """The numbers of an estimator; each reads those it needs."""

    lam: float
    gamma: float
    norm: str
    statistics: str
    combine: str
    gae_lambda: float
    n_steps: int


Estimator = Callable[[Records, CreditOptions], GigpoCredit]


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


def _rloo(records: Records, options: CreditOptions) -> GigpoCredit:
    own = rloo(records.rewards, records.episode_ids, records.step_index, records.group_ids) - records.penalties
    return _step(records, options)._replace(episode_advantage=own, advantage=own)


def _ppo(records: Records, options: CreditOptions) -> GigpoCredit:
    own = gae(*_with_values(records), gamma=options.gamma, gae_lambda=options.gae_lambda)
    return _step(records, options)._replace(advantage=own - records.penalties)


def _a2c(records: Records, options: CreditOptions) -> GigpoCredit:
    own = n_step(*_with_values(records), gamma=options.gamma, n_steps=options.n_steps)
    return _step(records, options)._replace(advantage=own - records.penalties)


def _with_values(records: Records) -> tuple[Tensor, ...]:
    return records.rewards, records.values, records.bootstrap, records.episode_ids, records.step_index


# An estimator of one's own is one more entry.
ESTIMATORS: dict[str, Estimator] = {
    "gigpo": _gigpo,
    "grpo": _grpo,
    "step": _step,
    "rloo": _rloo,
    "ppo": _ppo,
    "a2c": _a2c,
}
CRITIC_ESTIMATORS = ("ppo", "a2c")  # those that read the values of a critic
