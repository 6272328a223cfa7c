"""One iteration's collection: plan, play, credit, report, write. Its result is the rows to train on.

Complete groups are credited and written while later ones are played, and then forgotten: memory does not grow with
their number. Knows the collector, not Lightning: rank and number of processes come in as numbers.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import Protocol, TypeVar

from gigpo_lightning.credit import Credit, Values
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.functional.records import ROUND_OFF_FLOAT64
from gigpo_lightning.rollout.collection import add_to_report
from gigpo_lightning.rollout.collector import CollectorStats, EpisodeJob
from gigpo_lightning.rollout.library_baseline import Library
from gigpo_lightning.rollout.plan import GroupJob, plan_iteration
from gigpo_lightning.rollout.processes import gathered
from gigpo_lightning.rollout.replay import ReplayCache
from gigpo_lightning.rollout.report import RolloutReport
from gigpo_lightning.rollout.store import RolloutStore, RolloutWriter, merged_moments
from gigpo_lightning.rollout.task_choice import TaskSignal, count_classes
from gigpo_lightning.trajectory import Episode, Group

# Added to the standard deviation of an iteration, as in groups.
_EPS = 1e-6

_Item = TypeVar("_Item")


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
    """The numbers of one iteration on one process; `groups` are all groups, over all processes.

    `credited_episodes` are about as many as are credited and written at a time; no result depends on it.
    """

    iteration: int
    groups: int
    members: int
    seed: int
    rank: int
    world: int
    transcripts: int
    credited_episodes: int = 128


Play = Callable[[Iterator[EpisodeJob], float], Iterable[Episode]]
"""From jobs, which are drawn as they are needed, and a temperature: their episodes, in order."""


class GroupCredit(Protocol):
    """Credits the groups of an iteration, part by part and in order."""

    @property
    def is_normalised_later(self) -> bool:
        """Whether the advantages are raw, to be normalised over the iteration."""

    def values(self, groups: Sequence[Group]) -> Values | None:
        """What a critic says of some groups; None without one."""

    def credit(self, groups: Sequence[Group], values: Values | None) -> Credit:
        """The credit of some groups; no group's credit may depend on another group."""


def run_iteration(
    spec: IterationSpec,
    controls: Controls,
    stage: Stage,
    stage_tasks: Callable[[Stage], TaskSet],
    play: Play,
    stats: Callable[[], CollectorStats],
    crediting: GroupCredit,
    replay: ReplayCache,
    path: Path,
) -> tuple[RolloutStore, RolloutReport]:
    """Play the groups of an iteration, credit them, write them to `path` and report.

    Args:
        spec: The numbers of the iteration.
        controls: What is played how.
        stage: The stage being played.
        stage_tasks: The tasks of a stage.
        play: Plays episodes.
        stats: What they cost.
        crediting: Credits the groups, some at a time.
        replay: Lends successes to groups without one.
        path: The file to write.

    Returns:
        The rows to train on, and what the iteration says about itself, its figures over all processes.
    """
    clock, report, step_groups = _Clock(), RolloutReport(), 0
    groups_here = len(range(spec.rank, spec.groups, spec.world))
    planned = _planned(spec, controls, stage, stage_tasks, groups_here)
    jobs, played, named = tee(clock.apart("tasks", planned), 3)
    groups = played_groups(played, play((member for job in jobs for member in job.members), controls.temperature))
    noted = ((job.stage, job.task_class) for job in named)
    with RolloutWriter(path) as writer:
        while part := list(islice(groups, max(1, spec.credited_episodes // spec.members))):
            clock.lap("play")
            names, classes = zip(*islice(noted, len(part)), strict=True)
            report.tally.add_classes(count_classes(classes, part))
            part = replay.exchange(part, spec.iteration)
            credit = _credited(part, crediting, step_groups, clock)
            step_groups += len(credit.step_group_sizes)
            add_to_report(report, part, names, credit, spec.transcripts)
            clock.lap("report")
            writer.write(part, names, credit)
            clock.lap("store")
            del part, credit  # before the next are played
    clock.lap("play")
    store = RolloutStore(path)
    report.credit_tables = store.credit_tables
    if crediting.is_normalised_later:
        mean, scale = _mean_and_scale(gathered(store.moments(), spec.world))
        # Without a critic 0 means that nothing is to be learned, and stays so.
        store.normalise(mean if "values" in clock.laps else 0.0, scale)
    clock.lap("store")
    _sum_over_processes(report, spec.world)
    clock.lap("report")
    report.settle(_over_processes(_figures(clock.laps, stats(), groups_here * spec.members), spec.world))
    report.metrics.update(replay.end_iteration(spec.iteration, partial(gathered, world=spec.world)))
    return store, report


def _planned(
    spec: IterationSpec, controls: Controls, stage: Stage, stage_tasks: Callable[[Stage], TaskSet], groups: int
) -> Iterator[GroupJob]:
    """The groups that this process plays."""
    return plan_iteration(
        {s.name: stage_tasks(s) for s in (stage, *controls.rehearsal)},
        stage,
        controls.rehearsal,
        split="train",
        groups=groups,
        members=spec.members,
        seed=spec.seed,
        rank=spec.rank,
        iteration=spec.iteration,
        turn_limit=controls.turn_limit,
        signal=controls.signal,
    )


def _credited(part: Sequence[Group], crediting: GroupCredit, step_groups: int, clock: _Clock) -> Credit:
    """The credit of some groups; `step_groups`, those of the groups before, keep the numbers unique in the file."""
    values = crediting.values(part)
    clock.lap("credit" if values is None else "values")
    credit = crediting.credit(part, values)
    credit = replace(credit, step_group_ids=credit.step_group_ids + step_groups)
    clock.lap("credit")
    return credit


def played_groups(jobs: Iterator[GroupJob], episodes: Iterable[Episode]) -> Iterator[Group]:
    """The groups, in order, as soon as all their episodes are there; all episodes are asked for."""
    members: list[Episode] = []
    job = None
    for episode in episodes:
        job = job or next(jobs)
        members.append(episode)
        if len(members) == len(job.members):
            yield Group(job.task.id, str(job.task.difficulty.get("type", "")), tuple(members))
            job, members = None, []


def _mean_and_scale(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """What `RolloutStore.normalise` needs for mean 0 and standard deviation 1 over all processes, from their moments.

    Equal advantages, up to round-off, become 0.
    """
    n, mean, squares = merged_moments(parts)
    std = math.sqrt(squares / max(n - 1.0, 1.0))
    return mean, 1.0 / (std + _EPS) if std > ROUND_OFF_FLOAT64 * abs(mean) else 0.0


def rollout_path(folder: Path, iteration: int, rank: int, keep: int) -> Path:
    """Where the rollouts of an iteration go; files older than the last `keep` are removed."""
    for old in range(iteration - keep, -1, -1):
        stale = folder / f"iteration_{old:06d}_rank{rank}.arrow"
        if not stale.exists():
            break
        stale.unlink()
    return folder / f"iteration_{iteration:06d}_rank{rank}.arrow"


class _Clock:
    """Seconds between laps, added up by name."""

    def __init__(self) -> None:
        self.laps: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] += now - self._last
        self._last = now

    def apart(self, name: str, items: Iterator[_Item]) -> Iterator[_Item]:
        """The items; the time that they need counts under `name`, not in the lap in which they are asked for."""
        while True:
            begin = time.perf_counter()
            item = next(items, None)
            spent = time.perf_counter() - begin
            self.laps[name] += spent
            self._last += spent
            if item is None:
                return
            yield item


def _figures(laps: dict[str, float], stats: CollectorStats, episodes: int) -> dict[str, float]:
    """The `time/*` figures: seconds by part, and speeds."""
    play_s, total_s = max(laps["play"], 1e-9), max(sum(laps.values()), 1e-9)
    of_critic = {"time/values_s": laps["values"]} if "values" in laps else {}
    return {
        "time/environment_s": stats.env_s + laps["tasks"],
        "time/policy_s": stats.policy_s,
        "time/collector_s": laps["play"] - stats.env_s - stats.policy_s,
        **of_critic,
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
    for sums in gathered(dict(report.tally.sums), world):
        for name, value in sums.items():
            total[name] += value
    report.tally.sums = total


def _over_processes(figures: dict[str, float], world: int) -> dict[str, float]:
    """Speeds and counts added up; seconds those of the slowest process, for which the others wait."""
    every = gathered(figures, world)
    values = {name: [one[name] for one in every] for name in figures}
    return {n: sum(v) if n.endswith(("_per_s", "_errors")) else max(v) for n, v in values.items()}
