"""What an iteration says about itself: figures by name, counts, and a few transcripts. Plain values, ready to log."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gigpo_lightning.credit import Credit, credit_figures
from gigpo_lightning.functional.values import explained_variance
from gigpo_lightning.rollout.task_choice import ClassCount
from gigpo_lightning.trajectory import EndReason, Episode, Group

CREDIT_FIGURES = {
    "density": "anchors/density",
    "coverage": "anchors/coverage",
    "zero_spread_step_groups": "anchors/zero_spread",
    "zero_spread_groups": "credit/zero_spread_groups",
    "episode_advantage_std": "credit/episode_advantage_std",
    "step_advantage_std": "credit/step_advantage_std",
}
_IS_CLASS = re.compile(r"class\..*\.groups", re.DOTALL)


@dataclass(slots=True)
class Tally:
    """Sums over episodes from which the figures of `rollout/*` and `anchors/*` follow; sums add over processes."""

    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add_groups(self, groups: Sequence[Group], stages: Sequence[str], credit: Credit) -> None:
        """Count groups and their credit."""
        for group, stage in zip(groups, stages, strict=True):
            for episode in group.episodes:
                if not episode.age:  # a borrowed one was counted when it was played
                    self._add_episode(episode, stage, group.task_type)
        if credit.library_steps is not None:
            self.sums["library_steps"] += credit.library_steps
        for name, value in credit.sums.items():
            self.sums[f"credit.{name}"] += value
        if credit.value is not None and credit.value_target is not None:
            error = credit.value_target - credit.value
            self.sums["critic.turns"] += len(error)
            for name, values in (("value", credit.value), ("target", credit.value_target), ("error", error)):
                self.sums[f"critic.{name}"] += float(values.sum())
                self.sums[f"critic.{name}_squared"] += float((values**2).sum())

    def _add_episode(self, episode: Episode, stage: str, task_type: str) -> None:
        sums = self.sums
        sums["episodes"] += 1
        sums["won"] += episode.won
        sums["return"] += episode.episode_return
        sums["turns"] += len(episode.turns)
        sums["tokens"] += sum(len(s.token_ids) for s in episode.segments)
        sums["segments"] += len(episode.segments)
        sums["invalid"] += sum(not t.valid for t in episode.turns)
        sums["inadmissible"] += sum(not t.admissible for t in episode.turns)
        sums["ill_formed"] += sum(not t.well_formed for t in episode.turns)
        sums[f"end.{episode.end.value}"] += 1
        for key in (f"stage.{stage}", f"type.{task_type or 'any'}"):
            sums[f"{key}.episodes"] += 1
            sums[f"{key}.won"] += episode.won

    def add_classes(self, counts: Mapping[str, ClassCount]) -> None:
        """Count the groups of tasks that were drawn by signal, by class."""
        for name, count in counts.items():
            for field_name, value in count._asdict().items():
                self.sums[f"class.{name}.{field_name}"] += value

    def classes(self) -> dict[str, ClassCount]:
        """What `add_classes` counted."""
        names = [key[len("class.") : -len(".groups")] for key in self.sums if _IS_CLASS.fullmatch(key)]
        return {n: ClassCount(*(self.sums[f"class.{n}.{name}"] for name in ClassCount._fields)) for n in sorted(names)}

    def metrics(self) -> dict[str, float]:
        """`rollout/*`, `anchors/*` and `credit/*` figures of all that was counted."""
        sums, episodes, turns = self.sums, max(self.sums["episodes"], 1), max(self.sums["turns"], 1)
        figures = {
            "rollout/success": sums["won"] / episodes,
            "rollout/return": sums["return"] / episodes,
            "rollout/length": sums["turns"] / episodes,
            "rollout/env_steps": sums["turns"],
            "rollout/tokens_per_episode": sums["tokens"] / episodes,
            "rollout/segments_per_episode": sums["segments"] / episodes,
            "rollout/invalid_actions": sums["invalid"] / turns,
            "rollout/inadmissible_actions": sums["inadmissible"] / turns,
            "rollout/ill_formed_answers": sums["ill_formed"] / turns,
        }
        for end in EndReason:
            figures[f"rollout/end_{end.value}"] = sums[f"end.{end.value}"] / episodes
        for name, (won, played) in self.rates("type").items():
            figures[f"rollout/success_{name}"] = won / played
        prefix = "credit."
        credited = {name[len(prefix) :]: value for name, value in sums.items() if name.startswith(prefix)}
        if credited:
            figures |= {CREDIT_FIGURES[name]: value for name, value in credit_figures(credited).items()}
        if "library_steps" in sums:
            figures["anchors/library_baseline_frac"] = sums["library_steps"] / turns
        return figures | self._critic()

    def _critic(self) -> dict[str, float]:
        """`critic/*` figures, where there is a critic: what it said before the update."""
        sums, turns = self.sums, self.sums["critic.turns"]
        if not turns:
            return {}
        names = ("target", "target_squared", "error", "error_squared")
        return {
            "critic/explained_variance": explained_variance(turns, *(sums[f"critic.{name}"] for name in names)),
            "critic/value_mean": sums["critic.value"] / turns,
            "critic/target_mean": sums["critic.target"] / turns,
        }

    def rates(self, kind: str) -> dict[str, tuple[int, int]]:
        """`(won, episodes)` by stage or by task type."""
        prefix, suffix = f"{kind}.", ".episodes"
        names = [k[len(prefix) : -len(suffix)] for k in self.sums if k.startswith(prefix) and k.endswith(suffix)]
        return {n: (int(self.sums[f"{prefix}{n}.won"]), int(self.sums[f"{prefix}{n}{suffix}"])) for n in sorted(names)}


@dataclass(slots=True)
class CreditTable:
    """Turns as the anchor library needs them, in one order."""

    step_returns: np.ndarray
    tasks: list[str]
    anchors: list[str]
    texts: list[str]
    stages: list[str]


@dataclass(slots=True)
class RolloutReport:
    """What an iteration says about itself. Once `settle` was called, `metrics`, `success` (by stage) and `classes` (of
    tasks that were drawn by signal) are over all processes.

    `credit_tables` reads the turns of this process, a part of them at a time.
    """

    tally: Tally = field(default_factory=Tally)
    credit_tables: Callable[[], Iterable[CreditTable]] = tuple
    metrics: dict[str, float] = field(default_factory=dict)
    success: dict[str, tuple[int, int]] = field(default_factory=dict)
    classes: dict[str, ClassCount] = field(default_factory=dict)
    histograms: dict[str, np.ndarray] = field(default_factory=dict)
    transcripts: list[str] = field(default_factory=list)

    def settle(self, extra: Mapping[str, float]) -> None:
        """Turn the (summed) tally into figures and add those of this process."""
        self.metrics = {**self.tally.metrics(), **extra}
        self.success = self.tally.rates("stage")
        self.classes = self.tally.classes()
