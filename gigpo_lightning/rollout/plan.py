"""Which episodes an iteration plays: pure functions of (seed, rank, iteration).

So a resumed run plays the same, and an evaluation never moves the training stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.base import Task, TaskSet
from gigpo_lightning.rollout.collector import EpisodeJob
from gigpo_lightning.rollout.task_choice import TaskSignal, class_of

# Streams of random numbers are told apart by these tags.
_TASKS, _EPISODES, _ROWS = range(3)


@dataclass(frozen=True, slots=True)
class GroupJob:
    """One group to play: a task and its stage, and the jobs of its members.

    `task_class` is that of a task that was drawn by signal, else empty.
    """

    task: Task
    stage: str
    members: tuple[EpisodeJob, ...]
    task_class: str = ""


def generator(*seed: int) -> np.random.Generator:
    """A generator that depends on the given whole numbers only."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(seed))))


def plan_iteration(
    tasks: dict[str, TaskSet],
    stage: Stage,
    rehearsal: Sequence[Stage],
    *,
    split: str,
    groups: int,
    members: int,
    seed: int,
    rank: int,
    iteration: int,
    turn_limit: int | None = None,
    signal: TaskSignal | None = None,
) -> Iterator[GroupJob]:
    """The groups of one iteration on one process, one by one.

    Args:
        tasks: The task set of every stage by name.
        stage: The present stage.
        rehearsal: Earlier stages, of which `stage.rehearsal` is the share. Their tasks are drawn uniformly and played
            to their own full turn limits: they are there to keep what is known.
        split: Split of the tasks.
        groups: Groups to play.
        members: Episodes per group.
        seed: Seed of the run.
        rank: Number of this process.
        iteration: Number of the iteration.
        turn_limit: Turn limit of the present stage while it grows; null for the stage's own.
        signal: What is known of the present stage's tasks, if it prefers some; null for a uniform draw.
    """
    random = generator(_TASKS, seed, rank, iteration)
    for number in range(groups):
        earlier = bool(rehearsal) and random.random() < stage.rehearsal
        chosen = rehearsal[int(random.integers(len(rehearsal)))] if earlier else stage
        task_set = tasks[chosen.name]
        size = task_set.len(split)
        get = partial(_uniform, task_set, split, random)
        by_signal = signal is not None and not earlier
        task = signal.draw(get, chosen.signal_by, size, random) if signal is not None and by_signal else get()
        limit = chosen.max_turns if earlier or turn_limit is None else turn_limit
        seeds = [(_EPISODES, seed, rank, iteration, number, member) for member in range(members)]
        episode_jobs = tuple(EpisodeJob(task, limit, s) for s in seeds)
        name = class_of(task, chosen.signal_by, size) if by_signal else ""
        yield GroupJob(task, chosen.name, episode_jobs, name)


def _uniform(tasks: TaskSet, split: str, random: np.random.Generator) -> Task:
    return tasks.get(split, int(random.integers(tasks.len(split))))


def plan_rows(
    rows: int, minibatches: int, *, seed: int, rank: int, iteration: int, pass_index: int
) -> list[np.ndarray]:
    """The rows of each minibatch of one pass: every row once, in random order, parts as equal as can be."""
    order = generator(_ROWS, seed, rank, iteration, pass_index).permutation(rows)
    return list(np.array_split(order, minibatches))
