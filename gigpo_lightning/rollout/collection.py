"""From played groups to credit and the iteration's report: what happens between playing and training.

Pure: the options of credit as one value, and what an iteration says about itself. Writes nothing and plays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gigpo_lightning.credit import Credit, credit_groups
from gigpo_lightning.rollout.library_baseline import SINGLETON_BASELINES, Library, with_library
from gigpo_lightning.rollout.report import CreditTable, RolloutReport, Tally
from gigpo_lightning.rollout.transcript import credit_notes, transcript
from gigpo_lightning.trajectory import EndReason, Episode, Group, Turn

# Estimators with step advantages.
_WITH_STEPS = ("gigpo", "step")


@dataclass(frozen=True)  # no slots: jsonargparse reads the defaults from __dict__
class CreditRule:
    """How turns are credited.

    Args:
        estimator: `gigpo`, `grpo` (episode advantage only) or `step` (step advantage only).
        gamma: Discount of the step returns, in [0, 1].
        norm: `std`, or `none` to divide by nothing.
        statistics: `trajectory` (over episodes) or `step` (over step records, as the public reference does).
        combine: `convex` (λ·A_E + (1 − λ)·A_S) or `additive` (A_E + ω·A_S).
        omega: ω of `additive`.
        invalid_penalty: What an invalid action costs its own turn.
        format_penalty: What an answer that breaks its format costs its own turn; an invalid action in it costs both.
        penalty_in_returns: Whether they enter the returns, too.
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
    singleton_baseline: str = "none"

    def __post_init__(self) -> None:
        if not 0.0 <= self.omega < float("inf"):
            raise ValueError(f"data.credit.omega: {self.omega} is not a number ≥ 0; 1 is the paper's value")
        turn = Turn("", "", 0.0, "", valid=True, admissible=True, tokens=1)
        smallest = [Group("", "", (Episode("", "", (turn,), (), EndReason.TERMINATED, won=True),))]
        try:  # credit checks its own options: one turn shows a bad one before anything is played
            for estimator in (self.estimator, "gigpo"):  # gigpo reads all options
                self._credit(smallest, 1.0, estimator)
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

    def share(self, lam: float) -> float:
        """The share of the episode advantage that this rule really gives, for the figures: λ where it is read."""
        if self.estimator != "gigpo":
            return 1.0 if self.estimator == "grpo" else 0.0
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

    def credit(self, groups: Sequence[Group], lam: float, library: Library | None = None) -> Credit:
        """One advantage per turn of these groups, at the present λ."""
        credit = self._credit(groups, lam, self.estimator)
        if self.singleton_baseline == "none" or library is None:
            return credit
        convex = 0.0 if self.estimator == "step" else lam
        share = self.omega if self.combine == "additive" and self.estimator == "gigpo" else 1.0 - convex
        return with_library(credit, groups, library, norm=self.norm, share=share, penalty=self._penalty)

    def _penalty(self, turn: Turn) -> float:
        """What is taken off a turn's own score."""
        if self.penalty_in_returns:
            return 0.0
        return self.invalid_penalty * (not turn.valid) + self.format_penalty * (not turn.well_formed)

    def _credit(self, groups: Sequence[Group], lam: float, estimator: str) -> Credit:
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
        )


def make_report(groups: Sequence[Group], stages: Sequence[str], credit: Credit, transcripts: int) -> RolloutReport:
    """The figures of an iteration on this process, its turns for the anchor library, and a few transcripts."""
    tally = Tally()
    tally.add_groups(groups, stages, credit)
    report = RolloutReport(tally=tally, credit_table=CreditTable(step_returns=credit.step_return.numpy()))
    report.histograms["anchors/step_group_sizes"] = credit.step_group_sizes.numpy()
    sizes = credit.step_group_ids.bincount().tolist()
    table, offset = report.credit_table, 0
    for group, stage in zip(groups, stages, strict=True):
        for episode in group.episodes:
            turns = slice(offset, offset + len(episode.turns))
            offset = turns.stop
            table.tasks += [group.task_id] * len(episode.turns)
            table.anchors += [str(turn.anchor) for turn in episode.turns]
            table.texts += [turn.observation for turn in episode.turns]
            table.stages += [stage] * len(episode.turns)
            if len(report.transcripts) < transcripts:
                members = credit.step_group_ids[turns].tolist()
                notes = credit_notes(episode, members, [sizes[m] for m in members], credit.advantage[turns].tolist())
                report.transcripts.append(transcript(episode, notes))
    return report
