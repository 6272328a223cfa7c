"""From played groups to credit and the iteration's report: what happens between playing and training.

Pure: the options of credit as one value, and what an iteration says about itself. Writes nothing and plays nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gigpo_lightning.credit import Credit, Values, credit_groups
from gigpo_lightning.detectors.base import Detector, Embed
from gigpo_lightning.detectors.named import make_detector
from gigpo_lightning.estimators import CRITIC_ESTIMATORS
from gigpo_lightning.rollout.library_baseline import SINGLETON_BASELINES, Library, with_library
from gigpo_lightning.rollout.report import RolloutReport
from gigpo_lightning.rollout.transcript import credit_notes, transcript
from gigpo_lightning.trajectory import EndReason, Episode, Group, Turn

# Estimators with step advantages.
_WITH_STEPS = ("gigpo", "step")


@dataclass(frozen=True)  # no slots: jsonargparse reads the defaults from __dict__
class CreditRule:
    """How turns are credited.

    Args:
        estimator: `gigpo`, `grpo` (episode advantage only), `step` (step advantage only), `rloo` (return less the mean
            of the group's others), or with `model.critic` `ppo` (GAE) or `a2c` (n-step returns).
        gamma: Discount of the step returns, of GAE and of n-step returns, in [0, 1].
        norm: `std`, or `none` to divide by nothing. With rloo, ppo and a2c `std` is not of a group: it divides the
            advantages of all turns of an iteration by theirs; with a critic their mean is taken off before.
        statistics: `trajectory` (over episodes) or `step` (over step records, as the public reference does).
        combine: `convex` (λ·A_E + (1 − λ)·A_S) or `additive` (A_E + ω·A_S).
        omega: ω of `additive`.
        invalid_penalty: What an invalid action costs its own turn.
        format_penalty: What an answer that breaks its format costs its own turn; an invalid action in it costs both.
        penalty_in_returns: Whether they enter the returns, too.
        detector: Which turns of a group left the same state: `exact`, `window`, `similarity`, `embedding`, or a class
            with options: ExactDetector, WindowDetector, SimilarityDetector, EmbeddingDetector, ManualDetector,
            HybridDetector, or one of your own.
        gae_lambda: λ of ppo's GAE, in [0, 1]: 0 trusts the critic alone, 1 the returns alone.
        n_steps: Turns of a2c's n-step returns, at least 1.
        singleton_baseline: Where a step group has one member: `none` for a step advantage of 0, or `library` for one
            against what `AnchorLibrary` in trainer.callbacks knows of the state from earlier iterations.
    """

    estimator: str = "gigpo"
    gamma: float = 0.95
    norm: str = "std"
    statistics: str = "trajectory"
    combine: str = "convex"
    omega: float = 1.0
    invalid_penalty: float = 0.1
    format_penalty: float = 0.0
    penalty_in_returns: bool = False
    detector: Detector | str = "exact"
    gae_lambda: float = 0.95
    n_steps: int = 5
    singleton_baseline: str = "none"

    def __post_init__(self) -> None:
        if not 0.0 <= self.omega < float("inf"):
            raise ValueError(f"data.credit.omega: {self.omega} is not a number ≥ 0; 1 is the paper's value")
        turn = Turn("", "", 0.0, "", valid=True, admissible=True, tokens=1)
        smallest = [Group("", "", (Episode("", "", (turn,), (), EndReason.TERMINATED, won=True),))]
        try:  # credit checks its own options: one turn shows a bad one before anything is played
            make_detector("detector", self.detector)
            nothing = Values(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
            for estimator in (self.estimator, "gigpo", *CRITIC_ESTIMATORS):  # together they read all options
                self._credit(smallest, 1.0, estimator, values=nothing)
        except ValueError as error:
            raise ValueError(f"data.credit.{error}") from None
        option = f"data.credit.singleton_baseline={self.singleton_baseline!r}"
        if self.singleton_baseline not in SINGLETON_BASELINES:
            raise ValueError(f"{option}: choose one of {', '.join(SINGLETON_BASELINES)}")
        if self.singleton_baseline == "library" and self.estimator not in _WITH_STEPS:
            raise ValueError(
                f"{option}: the estimator {self.estimator} has no step advantages; choose none, or gigpo or step"
            )

    @property
    def reads_lam(self) -> bool:
        """Whether λ has any influence."""
        return self.estimator == "gigpo" and self.combine == "convex"

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads the values of a critic."""
        return self.estimator in CRITIC_ESTIMATORS

    @property
    def normalises_iteration(self) -> bool:
        """Whether advantages are normalised over the iteration instead of inside groups."""
        return self.norm == "std" and (self.needs_critic or self.estimator == "rloo")

    def share(self, lam: float) -> float:
        """The share of the episode advantage that this rule really gives, for the figures: λ where it is read.

        The advantages of rloo, ppo and a2c know no step groups: 1.
        """
        if self.estimator != "gigpo":
            return 0.0 if self.estimator == "step" else 1.0
        return lam if self.combine == "convex" else 1.0 / (1.0 + self.omega)

    def check_library(self, library: Library | None) -> None:
        """Refuse a baseline that nobody keeps.

        Raises:
            ValueError: `singleton_baseline` is `library`, and there is none.
        """
        if self.singleton_baseline == "library" and library is None:
            raise ValueError(
                "data.credit.singleton_baseline='library': there is no AnchorLibrary in trainer.callbacks; add it, or "
                "choose none"
            )

    def credit(
        self,
        groups: Sequence[Group],
        lam: float,
        values: Values | None = None,
        library: Library | None = None,
        *,
        detector: Detector | None = None,
        iteration: int = 0,
        embed: Embed | None = None,
    ) -> Credit:
        """One advantage per turn of these groups.

        Args:
            groups: Whole groups.
            lam: The present λ.
            values: What the critic says, where there is one.
            library: What is known of anchor states, where it is asked.
            detector: The rule's own one with its memory.
            iteration: For the detector.
            embed: Embeddings of texts, for detectors that ask.
        """
        detector = detector or make_detector("data.credit.detector", self.detector)
        credit = self._credit(
            groups, lam, self.estimator, values=values, detector=detector, iteration=iteration, embed=embed
        )
        if self.singleton_baseline == "none" or library is None:
            return credit
        convex = 0.0 if self.estimator == "step" else lam
        share = self.omega if self.combine == "additive" and self.estimator == "gigpo" else 1.0 - convex
        return with_library(credit, groups, library, norm=self.norm, share=share)

    def _credit(self, groups: Sequence[Group], lam: float, estimator: str, **found: Any) -> Credit:
        """Credit under the rule's options, by `estimator`; `found` are the arguments that are no options."""
        return credit_groups(
            groups,
            estimator=estimator,
            lam=lam if self.combine == "convex" else self.omega,
            gamma=self.gamma,
            norm=self.norm,
            statistics=self.statistics,
            combine=self.combine,
            invalid_penalty=self.invalid_penalty,
            format_penalty=self.format_penalty,
            penalty_in_returns=self.penalty_in_returns,
            gae_lambda=self.gae_lambda,
            n_steps=self.n_steps,
            **found,
        )


def add_to_report(
    report: RolloutReport, groups: Sequence[Group], stages: Sequence[str], credit: Credit, transcripts: int
) -> None:
    """Count groups and their credit, until `transcripts` are there with a transcript of every episode."""
    report.tally.add_groups(groups, stages, credit)
    name, sizes = "anchors/step_group_sizes", credit.step_group_sizes.numpy()
    report.histograms[name] = np.concatenate([report.histograms.get(name, sizes[:0]), sizes])
    missing = transcripts - len(report.transcripts)
    if missing <= 0:
        return
    members_of, offset = Counter(credit.step_group_ids.tolist()), 0
    for episode in [episode for group in groups for episode in group.episodes][:missing]:
        turns = slice(offset, offset + len(episode.turns))
        offset = turns.stop
        ids = credit.step_group_ids[turns].tolist()
        notes = credit_notes(episode, ids, [members_of[i] for i in ids], credit.advantage[turns].tolist())
        report.transcripts.append(transcript(episode, notes))
