"""The credit of a run, iteration by iteration: the rule, and the detector that remembers.

Knows neither Lightning nor how turns were played; the policy is borrowed where the detector asks for embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from gigpo_lightning.credit import Credit
from gigpo_lightning.detectors.base import Gather
from gigpo_lightning.detectors.named import make_detector
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.embedding import observation_embeddings
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.trajectory import Group

CreditGroups = Callable[[Sequence[Group], float], Credit]


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
    def of_iteration(self, iteration: int) -> Iterator[CreditGroups]:
        """Gives what credits whole groups at the present λ, in one call or several."""
        if not self.detector.embeds:
            yield partial(self.rule.credit, detector=self.detector, iteration=iteration)
            return
        with self._acting() as policy:  # once, however many calls: processes may differ in that
            embed = partial(observation_embeddings, policy, max_tokens=self._max_tokens)
            yield partial(self.rule.credit, detector=self.detector, iteration=iteration, embed=embed)

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
