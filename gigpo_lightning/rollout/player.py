"""Plays the episodes of a run: environments, engine and collector, each made when it is first needed.

Knows how episodes are played, not Lightning: the policy comes with every call, as it is to act.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.rollout.collector import Collector, CollectorStats, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.pool import EnvPool, InProcessPool
from gigpo_lightning.rollout.sampler import Sampler
from gigpo_lightning.rollout.workers import WorkerPool
from gigpo_lightning.trajectory import Episode


@dataclass(frozen=True, slots=True)
class PlayRule:
    """How episodes are played; the fields are options of the datamodule, described there."""

    segments: SegmentRule
    rows: int
    constrain: bool
    max_action_tokens: int
    max_env_errors: int
    env_workers: int
    env_deadline_s: float
    leave_open: bool = False


class Player:
    """Plays jobs with one policy, until it is closed.

    Args:
        tasks: The world.
        rule: How it is played.
        sampler: The engine that says the answers.
    """

    def __init__(self, tasks: TaskSet, rule: PlayRule, sampler: Sampler):
        self._tasks, self._rule, self.sampler = tasks, rule, sampler
        self._pool: EnvPool | None = None
        self._collector: Collector | None = None

    @property
    def pool(self) -> EnvPool:
        """The environments."""
        rule = self._rule
        if self._pool is None and rule.env_workers:
            self._pool = WorkerPool(self._tasks.make_env, rule.env_workers, rule.env_deadline_s)
        elif self._pool is None:
            self._pool = InProcessPool(self._tasks.make_env)
        return self._pool

    @property
    def stats(self) -> CollectorStats:
        """What the last collection cost."""
        return CollectorStats() if self._collector is None else self._collector.stats

    def play(self, policy: BasePolicy, jobs: Iterable[EpisodeJob], temperature: float) -> Iterator[Episode]:
        """Play the jobs; yields their episodes in order, each as soon as those before it are there, too.

        The others go on meanwhile. What is kept are the episodes that wait for an earlier one.

        Args:
            policy: Prepared, the same in every call; in evaluation mode, under the precision of the update.
            jobs: What is played.
            temperature: The sampling temperature; 0 for the most likely tokens.

        Raises:
            ValueError: The environments failed too often.
        """
        if self._collector is None:  # the policy's tokenizer exists only now
            self._collector = self._make_collector(policy)
        waiting: dict[int, Episode] = {}
        following = 0
        for index, episode in self._collector.run(jobs, temperature):
            waiting[index] = episode
            while following in waiting:
                yield waiting.pop(following)
                following += 1

    def close(self) -> None:
        """Release environments and engine; the next call makes new ones."""
        if self._pool is not None:
            self._pool.close()
        self.sampler.close()
        self._pool = self._collector = None

    def _make_collector(self, policy: BasePolicy) -> Collector:
        rule = self._rule
        return Collector(
            policy,
            self.pool,
            rule.segments,
            rows=rule.rows,
            constrain=rule.constrain,
            max_action_tokens=rule.max_action_tokens,
            max_env_errors=rule.max_env_errors,
            leave_open=rule.leave_open,
            engine=self.sampler.engine(policy, rule.segments.max_tokens, rule.rows),
        )
