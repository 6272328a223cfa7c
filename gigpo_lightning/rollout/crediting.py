"""The credit of a run, iteration by iteration: the rule, and the detector that remembers.

Knows neither Lightning nor how turns were played; the policy is lent for detectors that ask for embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from gigpo_lightning.credit import Credit, Values
from gigpo_lightning.detectors.base import Detector
from gigpo_lightning.detectors.named import make_detector
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.embedding import observation_embeddings
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.library_baseline import Library
from gigpo_lightning.rollout.processes import gathered
from gigpo_lightning.rollout.values import rate
from gigpo_lightning.trajectory import Group


@dataclass(frozen=True, slots=True)
class IterationCredit:
    """Credits whole groups of one iteration, in one call or several; `policy` is as it played them."""

    rule: CreditRule
    detector: Detector
    policy: BasePolicy
    lam: float
    library: Library | None
    iteration: int
    max_tokens: int

    @property
    def is_normalised_later(self) -> bool:
        """Whether the advantages are raw, to be normalised over the iteration."""
        return self.rule.normalises_iteration

    def values(self, groups: Sequence[Group]) -> Values | None:
        """What the critic says of the groups; None where the rule has no critic."""
        return rate(groups, self.policy, self.max_tokens) if self.rule.needs_critic else None

    def credit(self, groups: Sequence[Group], values: Values | None) -> Credit:
        """One advantage per turn."""
        embed = partial(observation_embeddings, self.policy, max_tokens=self.max_tokens)
        return self.rule.credit(
            groups, self.lam, values, self.library, detector=self.detector, iteration=self.iteration, embed=embed
        )


class Crediting:
    """A rule with the detector of one run.

    Args:
        rule: How turns are credited.
        max_tokens: Tokens of a batch of embeddings, and of one of a critic's values.
    """

    def __init__(self, rule: CreditRule, max_tokens: int):
        self.rule, self.detector = rule, make_detector("data.credit.detector", rule.detector)
        self._max_tokens = max_tokens

    def of_iteration(self, policy: BasePolicy, lam: float, library: Library | None, iteration: int) -> IterationCredit:
        """What credits the groups of an iteration, played by `policy` as it is."""
        return IterationCredit(self.rule, self.detector, policy, lam, library, iteration, self._max_tokens)

    def end_iteration(self, figures: MutableMapping[str, float], lam: float, world: int) -> None:
        """All groups are credited: add what credit was made with to the figures, and let the detector learn from them.

        Args:
            figures: Those of the iteration over all processes.
            lam: The λ of the iteration.
            world: Number of processes; all must call this.
        """
        figures.update({"credit/lambda": self.rule.share(lam), **self.detector.metrics()})
        self.detector.end_iteration(figures["anchors/density"], partial(gathered, world=world))

    def state_dict(self) -> dict[str, Any]:
        """What the detector remembers."""
        return {"kind": self.detector.kind, "detector": self.detector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it over, unless it is of another kind of detector: then start without memory, and say so."""
        kind = self.detector.kind
        if state["kind"] == kind:
            self.detector.load_state_dict(state["detector"])
        elif state["detector"] or self.detector.state_dict():
            rank_zero_warn(
                f"data.credit.detector: the checkpoint has the memory of {state['kind']}, not of {kind}, which starts "
                "without any"
            )
