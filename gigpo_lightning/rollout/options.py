"""Ranges of the options of module and datamodule: a bad one is named with what is allowed before anything is built.

NaN fails every comparison, so all ranges are written as what must hold.
"""

from __future__ import annotations

from math import inf

from gigpo_lightning.estimators import CRITIC_ESTIMATORS
from gigpo_lightning.functional.losses import AGGREGATIONS, RATIOS
from gigpo_lightning.policy.critic import CriticRule
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.replay import ReplayRule


def check_loss(
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl_coef: float,
    aggregation: str,
    constant_tokens: float | None,
    ratio: str,
) -> None:
    """Options of the loss.

    Raises:
        ValueError: One is out of its range, or `constant_tokens` is missing or of no use.
    """
    _require(0 <= clip_low < 1, f"model.clip_low={clip_low}: must lie in [0, 1), 0.2 is usual")
    _require(0 <= clip_high < inf, f"model.clip_high={clip_high}: must be at least 0, 0.2 is usual")
    _require(
        dual_clip is None or 1 < dual_clip < inf,
        f"model.dual_clip={dual_clip}: must be greater than 1, or null for none",
    )
    _require(0 <= kl_coef < inf, f"model.kl_coef={kl_coef}: must be at least 0; 0 is off")
    _require(aggregation in AGGREGATIONS, f"model.aggregation={aggregation!r}: choose one of {', '.join(AGGREGATIONS)}")
    _require(ratio in RATIOS, f"model.ratio={ratio!r}: choose one of {', '.join(RATIOS)}")
    _require(
        ratio != "none" or dual_clip is None,
        f"model.dual_clip={dual_clip} with ratio='none': nothing is clipped; set dual_clip to null",
    )
    if aggregation == "constant":
        fits = constant_tokens is not None and 0 < constant_tokens < inf
    else:
        fits = constant_tokens is None
    _require(
        fits,
        f"model.constant_tokens={constant_tokens} with aggregation={aggregation!r}: `constant`, and only that, "
        "needs a positive number of tokens; turns of a minibatch × longest answer is a good value",
    )


def check_updates(gradient_clip: float | None, max_bad_updates: int) -> None:
    """Options of the update.

    Raises:
        ValueError: One is out of its range.
    """
    _require(
        gradient_clip is None or 0 < gradient_clip < inf,
        f"model.gradient_clip={gradient_clip}: must be positive, or null for no clipping",
    )
    _require(max_bad_updates >= 1, f"model.max_bad_updates={max_bad_updates}: must be at least 1")


def check_critic(critic: CriticRule | None, credit: CreditRule, skip_zero_advantage: bool) -> None:
    """The critic and the estimator must fit.

    Raises:
        ValueError: One needs the other, or rows would be left out that a critic learns from.
    """
    _require(
        critic is not None or not credit.needs_critic,
        f"data.credit.estimator={credit.estimator} needs a critic: set model.critic.lr (0.001 is usual), or add "
        f"--config algorithm/{credit.estimator}.yaml",
    )
    _require(
        critic is None or credit.needs_critic,
        f"model.critic: data.credit.estimator={credit.estimator} reads no critic; set model.critic to null, or the "
        f"estimator to one of {', '.join(CRITIC_ESTIMATORS)}",
    )
    _require(
        critic is None or not skip_zero_advantage,
        "data.skip_zero_advantage=true with model.critic: a critic learns from every turn; set it to false",
    )


def check_counts(least: int, **counts: int) -> None:
    """Options of the datamodule, by name, that must be at least `least`.

    Raises:
        ValueError: One is smaller.
    """
    for name, value in counts.items():
        _require(value >= least, f"data.{name}={value}: must be at least {least}")


def check_processes(groups: int, processes: int) -> None:
    """Every process plays whole groups, and must have one to play.

    Raises:
        ValueError: There are more processes than groups.
    """
    _require(
        groups >= processes,
        f"data.groups={groups} for {processes} processes: each plays whole groups; give at least {processes} groups, "
        "or fewer trainer.devices",
    )


def check_sampling(
    members: int,
    lam: float | None,
    credit: CreditRule,
    temperature: float | None,
    entropy_coef: float | None,
    env_deadline_s: float,
) -> None:
    """Options of the datamodule with a range of their own.

    Raises:
        ValueError: One is out of its range, or λ is given and `credit` does not read it.
    """
    _require(members >= 2, f"data.members={members}: a group needs at least 2 episodes to compare, 8 is usual")
    _require(
        lam is None or 0 <= lam <= 1,
        f"data.lam={lam}: λ must lie in [0, 1]; 1 is GRPO, 0 is step advantages only, 0.8 is usual",
    )
    _require(
        lam is None or credit.reads_lam,
        f"data.lam={lam}: only data.credit.estimator=gigpo with combine=convex reads it, not {credit.estimator} with "
        f"{credit.combine}; leave lam out",
    )
    _require(
        temperature is None or 0 < temperature < inf, f"data.temperature={temperature}: must be positive, 1 is usual"
    )
    _require(
        entropy_coef is None or 0 <= entropy_coef < inf,
        f"data.entropy_coef={entropy_coef}: must be at least 0; 0 is off, 0.01 a usual value",
    )
    _require(0 < env_deadline_s < inf, f"data.env_deadline_s={env_deadline_s}: must be positive, 60 is usual")


def check_replay(replay: ReplayRule | None, credit: CreditRule) -> None:
    """Groups that borrow successes must be what the estimator compares.

    Raises:
        ValueError: The estimator has a critic.
    """
    _require(
        replay is None or not credit.needs_critic,
        f"data.replay: data.credit.estimator={credit.estimator} compares with a critic, not within groups; take gigpo, "
        "grpo, rloo or step, or replay=null",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
