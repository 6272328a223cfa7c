"""Which episodes an iteration plays: pure functions of (seed, rank, iteration).

So a resumed run plays the same, and an evaluation never moves the training stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.base import Task, TaskSet
from gigpo_lightning.rollout.collector import EpisodeJob

# Streams of random numbers are told apart by these tags.
_TASKS, _EPISODES, _ROWS = range(3)


@dataclass(frozen=True, slots=True)
class GroupJob:
    """One group to play: a task and its stage, and the jobs of its members."""

    task: Task
    stage: str
    members: tuple[EpisodeJob, ...]


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
) -> Iterator[GroupJob]:
    """The groups of one iteration on one process, one by one. `tasks` holds the task set of every stage by name."""
    random = generator(_TASKS, seed, rank, iteration)
    for number in range(groups):
        earlier = bool(rehearsal) and random.random() < stage.rehearsal
        chosen = rehearsal[int(random.integers(len(rehearsal)))] if earlier else stage
        task_set = tasks[chosen.name]
        task = task_set.get(split, int(random.integers(task_set.len(split))))
        seeds = [(_EPISODES, seed, rank, iteration, number, member) for member in range(members)]
        episode_jobs = tuple(EpisodeJob(task, chosen.max_turns, s) for s in seeds)
        yield GroupJob(task, chosen.name, episode_jobs)


def plan_rows(
    rows: int, minibatches: int, *, seed: int, rank: int, iteration: int, pass_index: int
) -> list[np.ndarray]:
    """The rows of each minibatch of one pass: every row once, in random order, parts as equal as can be."""
    order = generator(_ROWS, seed, rank, iteration, pass_index).permutation(rows)
    return list(np.array_split(order, minibatches))
