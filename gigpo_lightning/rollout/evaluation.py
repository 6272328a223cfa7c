"""Evaluations on fixed task lists: what is played, and what the outcomes say.

A list depends on its stage, split and numbers only, so that the same tasks are played whatever the batch size or the
training seed. Pure: who plays them, and where results go, is for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gigpo_lightning.curriculum import Stage, stage_named
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.rollout.collector import EpisodeJob
from gigpo_lightning.trajectory import Episode

# Tells the random numbers of evaluations from those of training.
EVALUATION_STREAM = 3
Place = tuple[Stage, str]  # a stage and a split of its tasks
Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)  # no slots: jsonargparse reads the defaults from __dict__
class EvaluationRule:
    """What is played when the policy is evaluated.

    Args:
        stages: Stages of the curriculum that `test` plays, by name; null for all.
        splits: Splits of the task set that `test` plays.
        tasks: Tasks per stage and split in `test`.
        seeds: Sampled episodes per task in `test`, each with a seed of its own.
        temperature: Temperature of the sampled episodes.
        greedy: Whether the most likely actions are played, too.
        during_fit_tasks: Unseen tasks per stage that `validate` and the evaluations during `fit` play, once each.
        during_fit_stages: Stages that these play, by name; null for the first one and the present one. Named stages
            give one scale for the whole run, and for runs that are compared.
        predict_tasks: Unseen tasks that `predict` plays and writes as transcripts.
        predict_stage: Stage that they come from, by name; null for the one that the checkpoint had reached.
        seed: Seed of the sampled episodes.
    """

    stages: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("seen", "unseen")
    tasks: int = 100
    seeds: int = 3
    temperature: float = 0.4
    greedy: bool = True
    during_fit_tasks: int = 64
    during_fit_stages: tuple[str, ...] | None = None
    predict_tasks: int = 10
    predict_stage: str | None = None
    seed: int = 1000

    def __post_init__(self) -> None:
        for name in ("tasks", "seeds", "during_fit_tasks", "predict_tasks"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.evaluation.{name}={getattr(self, name)}: must be at least 1")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"data.evaluation.temperature={self.temperature}: must be positive; `greedy` needs none")
        if self.seed < 0:
            raise ValueError(f"data.evaluation.seed={self.seed}: must be at least 0")
        if not self.splits:
            raise ValueError("data.evaluation.splits is empty: name at least one split, e.g. [unseen]")
        lists = {"splits": self.splits, "stages": self.stages, "during_fit_stages": self.during_fit_stages}
        for option in ("stages", "during_fit_stages"):
            if lists[option] is not None and not lists[option]:
                raise ValueError(f"data.evaluation.{option} is empty: name at least one stage, or null for the default")
        for option, names in ((option, names or ()) for option, names in lists.items()):
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ValueError(f"data.evaluation.{option}: {twice[0]!r} is listed twice; name each once")

    def check(self, stages: Sequence[Stage], splits: Sequence[str]) -> None:
        """Refuse names that the curriculum or the task set does not have.

        Raises:
            ValueError: A stage or split is unknown.
        """
        self.test_stages(stages)
        self.fit_stages(stages, present=None)
        if self.predict_stage is not None:
            stage_named(stages, self.predict_stage, "data.evaluation.predict_stage")
        unknown = [split for split in self.splits if split not in splits]
        if unknown:
            raise ValueError(f"data.evaluation.splits: there is no split {unknown[0]!r} (splits: {', '.join(splits)})")

    def test_stages(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Those of `stages` that `test` plays, in the order asked for."""
        names = [stage.name for stage in stages] if self.stages is None else self.stages
        return tuple(stage_named(stages, name, "data.evaluation.stages") for name in names)

    def fit_stages(self, stages: Sequence[Stage], present: Stage | None) -> tuple[Stage, ...]:
        """Those that evaluations during a fit play in stage `present`: the named ones, else the first and `present`."""
        if self.during_fit_stages is not None:
            option = "data.evaluation.during_fit_stages"
            return tuple(stage_named(stages, name, option) for name in self.during_fit_stages)
        chosen = {stage.name: stage for stage in (*stages[:1], present) if stage is not None}
        return tuple(chosen.values())


@dataclass(frozen=True, slots=True)
class EvaluationBatch:
    """Episodes that are reported together; `mode` is `sampled` or `greedy` (temperature 0)."""

    stage: str
    split: str
    mode: str
    temperature: float
    jobs: tuple[EpisodeJob, ...]

    def to(self, *_: Any, **__: Any) -> EvaluationBatch:
        """Itself: there is nothing to move to a device, and Lightning asks."""
        return self


class Outcome(NamedTuple):
    """How one episode went."""

    task_id: str
    type: str
    won: bool
    turns: int
    ill_formed: int = 0  # turns whose answer broke its format


def outcomes(jobs: Sequence[EpisodeJob], episodes: Iterable[Episode]) -> list[Outcome]:
    """What is counted of played jobs."""
    return [
        Outcome(
            job.task.id,
            str(job.task.difficulty.get("type", "any")),
            episode.won,
            len(episode.turns),
            sum(not turn.well_formed for turn in episode.turns),
        )
        for job, episode in zip(jobs, episodes, strict=True)
    ]


def plan(
    rule: EvaluationRule, stage: Stage, tasks: TaskSet, split: str, count: int, seeds: int, *, greedy: bool
) -> list[EvaluationBatch]:
    """The first `count` tasks of a split, sampled with `seeds` seeds each (0: not at all), and greedily if asked."""
    chosen = [tasks.get(split, index) for index in range(min(count, tasks.len(split)))]
    batches = []
    for mode, temperature, repeats in (("sampled", rule.temperature, seeds), ("greedy", 0.0, int(greedy))):
        jobs = tuple(
            EpisodeJob(task, stage.max_turns, (EVALUATION_STREAM, rule.seed, index, repeat))
            for index, task in enumerate(chosen)
            for repeat in range(repeats)
        )
        if jobs:
            batches.append(EvaluationBatch(stage.name, split, mode, temperature, jobs))
    return batches


def wilson_interval(rate: float, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of a success rate over `n` tasks (Wilson 1927); [0, 1] where n = 0.

    `n` is the number of tasks, not of episodes: repeats of one task are not independent, so this errs on the wide side.
    """
    if n == 0:
        return 0.0, 1.0
    z2 = Z_95 * Z_95
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise(batch: EvaluationBatch, played: Sequence[Outcome]) -> dict[str, Any]:
    """One row of `results.json`, over all and per task type: success with its interval, mean length, and the share of
    well-formed answers."""
    by_type: dict[str, list[Outcome]] = {}
    for outcome in played:
        by_type.setdefault(outcome.type, []).append(outcome)
    return {
        "stage": batch.stage,
        "split": batch.split,
        "mode": batch.mode,
        "temperature": batch.temperature,
        **_rates(played),
        "types": {kind: _rates(members) for kind, members in sorted(by_type.items())},
    }


def _rates(played: Sequence[Outcome]) -> dict[str, Any]:
    tasks = len({o.task_id for o in played})
    success = sum(o.won for o in played) / len(played)
    return {
        "tasks": tasks,
        "episodes": len(played),
        "success": success,
        "ci95": list(wilson_interval(success, tasks)),
        "length": sum(o.turns for o in played) / len(played),
        "well_formed": 1.0 - sum(o.ill_formed for o in played) / max(sum(o.turns for o in played), 1),
    }


def results_table(rows: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of text for a table: stage, split, mode, success with interval, tasks, mean length."""
    return [
        (
            row["stage"],
            row["split"],
            row["mode"],
            f"{row['success']:.3f}",
            f"{row['ci95'][0]:.3f}–{row['ci95'][1]:.3f}",
            str(row["tasks"]),
            f"{row['length']:.1f}",
        )
        for row in rows
    ]
