"""One iteration's collection: plan, play, credit, report, write. Its result is the rows to train on.

Knows the collector and the rules, not Lightning: rank and number of processes come in as numbers.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gigpo_lightning.batch import MicroBatch, Minibatch, cut_by_tokens
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.rollout.collection import CreditRule, make_report
from gigpo_lightning.rollout.collector import CollectorStats, EpisodeJob
from gigpo_lightning.rollout.library_baseline import Library
from gigpo_lightning.rollout.plan import GroupJob, plan_iteration, plan_rows
from gigpo_lightning.rollout.report import RolloutReport
from gigpo_lightning.rollout.rescore import Rescore, no_rescore
from gigpo_lightning.rollout.store import RolloutStore, RolloutWriter
from gigpo_lightning.rollout.task_choice import TaskSignal, count_classes
from gigpo_lightning.trajectory import Episode, Group


@dataclass(slots=True)
class Controls:
    """What callbacks set for the next iteration. `stages` are all that evaluations may play.

    `turn_limit` is that of the stage while it grows, `signal` what is known of its tasks where it prefers some,
    `library` what is known of anchor states.
    """

    lam: float = 0.8
    temperature: float = 1.0
    entropy_coef: float = 0.0
    stage: Stage | None = None
    rehearsal: tuple[Stage, ...] = ()
    stages: tuple[Stage, ...] = ()
    turn_limit: int | None = None
    signal: TaskSignal | None = None
    library: Library | None = None


@dataclass(frozen=True, slots=True)
class IterationSpec:
    """The numbers of one iteration on one process; `groups` are all groups, over all processes."""

    iteration: int
    groups: int
    members: int
    seed: int
    rank: int
    world: int
    transcripts: int


Play = Callable[[list[EpisodeJob], float], list[Episode]]


def run_iteration(
    spec: IterationSpec,
    controls: Controls,
    stage: Stage,
    stage_tasks: Callable[[Stage], TaskSet],
    play: Play,
    stats: Callable[[], CollectorStats],
    rule: CreditRule,
    path: Path,
) -> tuple[RolloutStore, RolloutReport]:
    """Play the groups of an iteration, credit them, write them to `path` and report."""
    clock = _Clock()
    jobs = plan_iteration(
        {s.name: stage_tasks(s) for s in (stage, *controls.rehearsal)},
        stage,
        controls.rehearsal,
        split="train",
        groups=len(range(spec.rank, spec.groups, spec.world)),
        members=spec.members,
        seed=spec.seed,
        rank=spec.rank,
        iteration=spec.iteration,
        turn_limit=controls.turn_limit,
        signal=controls.signal,
    )
    clock.lap("tasks")
    groups = play_groups(jobs, play, controls.temperature)
    clock.lap("play")
    credit = rule.credit(groups, controls.lam, controls.library)
    clock.lap("credit")
    names = [job.stage for job in jobs]
    report = make_report(groups, names, credit, spec.transcripts)
    report.tally.add_classes(count_classes([job.task_class for job in jobs], groups))
    _sum_over_processes(report, spec.world)
    clock.lap("report")
    with RolloutWriter(path) as writer:
        writer.write(groups, names, credit)
    store = RolloutStore(path)
    clock.lap("store")
    figures = _over_processes(_figures(clock.laps, stats(), len(groups) * spec.members), spec.world)
    report.settle({**figures, "credit/lambda": rule.share(controls.lam)})
    return store, report


def play_groups(jobs: Sequence[GroupJob], play: Play, temperature: float) -> list[Group]:
    """Play all members of all groups together; the groups in their order."""
    episodes = iter(play([member for job in jobs for member in job.members], temperature))
    return [
        Group(job.task.id, str(job.task.difficulty.get("type", "")), tuple(next(episodes) for _ in job.members))
        for job in jobs
    ]


def minibatches_of(
    store: RolloutStore,
    *,
    passes: int,
    minibatches: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    rank: int,
    iteration: int,
    skip_zero_advantage: bool = False,
    rescore: Rescore = no_rescore,
) -> Iterator[Minibatch]:
    """All minibatches of an iteration, pass by pass; always `passes` × `minibatches` of them.

    Before the first, while the weights are still those that sampled, `rescore` may rate the rows anew.
    """
    trainable = np.flatnonzero((store.chosen_counts > 0) & (store.teaches | (not skip_zero_advantage)))
    rescored = rescore(store, trainable, temperature, max_tokens)

    def micro_batch(numbers: list[int]) -> MicroBatch:
        micro = store.micro_batch(numbers)
        return micro if rescored is None else rescored.correct(micro, numbers)

    for index in range(passes):
        parts = plan_rows(len(trainable), minibatches, seed=seed, rank=rank, iteration=iteration, pass_index=index)
        for part in parts:
            rows = trainable[part]
            cuts = cut_by_tokens([int(store.token_counts[r]) for r in rows], max_tokens)
            yield Minibatch(tuple(micro_batch([int(rows[i]) for i in cut]) for cut in cuts), temperature)


def rollout_path(folder: Path, iteration: int, rank: int, keep: int) -> Path:
    """Where the rollouts of an iteration go; files older than the last `keep` are removed."""
    for old in range(iteration - keep, -1, -1):
        stale = folder / f"iteration_{old:06d}_rank{rank}.arrow"
        if not stale.exists():
            break
        stale.unlink()
    return folder / f"iteration_{iteration:06d}_rank{rank}.arrow"


class _Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def _figures(laps: dict[str, float], stats: CollectorStats, episodes: int) -> dict[str, float]:
    """The `time/*` figures: seconds by part, and speeds."""
    play_s, total_s = max(laps["play"], 1e-9), max(sum(laps.values()), 1e-9)
    return {
        "time/environment_s": stats.env_s + laps["tasks"],
        "time/policy_s": stats.policy_s,
        "time/collector_s": laps["play"] - stats.env_s - stats.policy_s,
        "time/credit_s": laps["credit"],
        "time/report_s": laps["report"],
        "time/store_s": laps["store"],
        "time/rollout_s": total_s,
        "time/rollout_tokens_per_s": stats.tokens / play_s,
        "time/shared_tokens_frac": stats.shared_tokens / max(stats.tokens + stats.shared_tokens, 1),
        "time/env_steps_per_s": stats.steps / play_s,
        "time/episodes_per_s": episodes / total_s,
        "rollout/env_errors": float(len(stats.env_errors)),
    }


def _sum_over_processes(report: RolloutReport, world: int) -> None:
    """Add up the counts of all processes, so that every process takes the same decisions from them."""
    # Processes may have met different task types, so the names travel with the numbers.
    total: defaultdict[str, float] = defaultdict(float)
    for sums in _gathered(dict(report.tally.sums), world):
        for name, value in sums.items():
            total[name] += value
    report.tally.sums = total


def _over_processes(figures: dict[str, float], world: int) -> dict[str, float]:
    """Speeds and counts added up; seconds those of the slowest process, for which the others wait."""
    every = _gathered(figures, world)
    values = {name: [one[name] for one in every] for name in figures}
    return {n: sum(v) if n.endswith(("_per_s", "_errors")) else max(v) for n, v in values.items()}


def _gathered(own: dict[str, float], world: int) -> list[dict[str, float]]:
    """The values of all processes, in order of rank."""
    if world == 1:
        return [own]
    every: list[Any] = [None] * world
    torch.distributed.all_gather_object(every, own)
    return every
