"""The credit of a run, iteration by iteration: the rule, and the detector that remembers.

Knows neither Lightning nor how turns were played; the policy is borrowed where the detector asks for embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from gigpo_lightning.credit import Credit, Values
from gigpo_lightning.detectors.base import Detector, Gather
from gigpo_lightning.detectors.named import make_detector
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.embedding import observation_embeddings
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.values import rate
from gigpo_lightning.trajectory import Group


@dataclass(frozen=True, slots=True)
class IterationCredit:
    """Credits whole groups of one iteration, in one call or several. `policy` is there where it is asked."""

    rule: CreditRule
    detector: Detector
    iteration: int
    lam: float
    policy: BasePolicy | None
    max_tokens: int

    def values(self, groups: Sequence[Group]) -> Values | None:
        """What the critic says of the groups, under the weights that played; None where the rule has no critic."""
        if not self.rule.needs_critic or self.policy is None:
            return None
        return rate(groups, self.policy, self.max_tokens)

    def credit(self, groups: Sequence[Group], values: Values | None) -> Credit:
        """One advantage per turn."""
        embed = None
        if self.policy is not None:
            embed = partial(observation_embeddings, self.policy, max_tokens=self.max_tokens)
        return self.rule.credit(groups, self.lam, values, detector=self.detector, iteration=self.iteration, embed=embed)


class Crediting:
    """A rule with the detector of one run.

    Args:
        rule: How turns are credited.
        acting: Lends the policy as it plays; all processes must enter.
        max_tokens: Tokens of a batch of embeddings.
    """

    def __init__(self, rule: CreditRule, acting: Callable[[], AbstractContextManager[BasePolicy]], max_tokens: int):
        self.rule, self.detector = rule, make_detector("data.credit.detector", rule.detector)
        self._acting, self._max_tokens = acting, max_tokens

    @contextmanager
    def of_iteration(self, iteration: int, lam: float) -> Iterator[IterationCredit]:
        """What credits the groups of an iteration."""
        asked = self.detector.embeds or self.rule.needs_critic
        # Once, however many calls: processes may differ in that.
        with self._acting() if asked else nullcontext() as policy:
            yield IterationCredit(self.rule, self.detector, iteration, lam, policy, self._max_tokens)

    def end_iteration(self, density: float, gather: Gather) -> dict[str, float]:
        """Let the detector learn from the iteration; returns the figures it was made with. See `Detector`."""
        figures = self.detector.metrics()
        self.detector.end_iteration(density, gather)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """What the detector remembers."""
        return {"kind": type(self.detector).__name__, "detector": self.detector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it over, unless it is of another kind of detector: then start without memory, and say so."""
        kind = type(self.detector).__name__
        if state["kind"] == kind:
            self.detector.load_state_dict(state["detector"])
        elif state["detector"] or self.detector.state_dict():
            rank_zero_warn(
                f"data.credit.detector: the checkpoint has the memory of a {state['kind']}, not of a {kind}; this one "
                "starts without any"
            )
