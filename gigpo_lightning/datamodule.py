"""Rollouts as training data: collects once per iteration, credits, and yields the minibatches of its updates.

One Lightning epoch is one iteration. Callbacks steer through `controls` and read `report`; what happens inside an episode
is the collector's, what a turn deserves is `credit`'s, and the loss is the module's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from gigpo_lightning.batch import Minibatch, cut_by_tokens
from gigpo_lightning.credit import Credit, credit_groups
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.plan import GroupJob, plan_iteration, plan_rows
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.rollout.report import RolloutReport, Tally
from gigpo_lightning.rollout.store import RolloutStore, RolloutWriter
from gigpo_lightning.trajectory import Episode, Group


@dataclass(frozen=True, slots=True)
class CreditRule:
    """How turns are credited.

    Args:
        estimator: `gigpo`, `grpo` (episode advantage only) or `step` (step advantage only).
        gamma: Discount of the step returns, in [0, 1].
        norm: `std`, or `none` to divide by nothing.
        statistics: `trajectory` (over episodes) or `step` (over step records, as the public reference does).
        combine: `convex` (λ·A_E + (1 − λ)·A_S) or `additive` (A_E + ω·A_S).
        omega: ω of `additive`.
        invalid_penalty: What an invalid action costs.
        penalty_in_returns: Whether it enters the returns, too.
    """

    estimator: str = "gigpo"
    gamma: float = 0.95
    norm: str = "std"
    statistics: str = "trajectory"
    combine: str = "convex"
    omega: float = 1.0
    invalid_penalty: float = 0.1
    penalty_in_returns: bool = False


@dataclass(slots=True)
class Controls:
    """What callbacks set for the next iteration."""

    lam: float
    temperature: float
    entropy_coef: float
    stage: Stage | None = None
    rehearsal: tuple[Stage, ...] = field(default=())


class RolloutDataModule(pl.LightningDataModule):
    """Groups of episodes, collected under the present policy at the start of every epoch.

    Args:
        tasks: The world's tasks.
        groups: Task groups per iteration, over all processes.
        members: Episodes per group, at least 2.
        passes: How often the update goes through the rollouts of an iteration.
        minibatches: Optimiser steps per pass.
        max_tokens_per_batch: Tokens of a micro-batch; gradients do not depend on it.
        lam: λ, the share of the episode advantage in [0, 1], unless a callback sets it.
        temperature: Sampling temperature, unless a callback sets it.
        entropy_coef: Weight of the entropy bonus, unless a callback sets it.
        max_turns: Turn limit of an episode, unless a curriculum sets it.
        credit: How turns are credited.
        segments: How episodes are cut into training rows.
        rows: Episodes under way at once.
        constrain: Sample among the admissible actions only, where the world lists them.
        max_action_tokens: Longest free answer, in tokens.
        max_env_errors: Environment failures in one collection after which the run stops.
        rollout_dir: Folder of the rollout files; null for `rollouts` in the run's folder.
        keep_rollouts: Rollout files that are kept, at least 1.
        seed: Seed of tasks and samples.
    """

    def __init__(
        self,
        tasks: TaskSet,
        groups: int = 16,
        members: int = 8,
        passes: int = 2,
        minibatches: int = 4,
        max_tokens_per_batch: int = 8192,
        lam: float = 0.8,
        temperature: float = 1.0,
        entropy_coef: float = 0.0,
        max_turns: int = 50,
        credit: CreditRule = CreditRule(),
        segments: SegmentRule = SegmentRule(),
        rows: int = 128,
        constrain: bool = True,
        max_action_tokens: int = 16,
        max_env_errors: int = 16,
        rollout_dir: str | None = None,
        keep_rollouts: int = 2,
        seed: int = 0,
    ):
        super().__init__()
        at_least = {
            "groups": (groups, 1),
            "passes": (passes, 1),
            "minibatches": (minibatches, 1),
            "max_tokens_per_batch": (max_tokens_per_batch, 1),
            "max_turns": (max_turns, 1),
            "rows": (rows, 1),
            "keep_rollouts": (keep_rollouts, 1),
        }
        for name, (value, least) in at_least.items():
            if value < least:
                raise ValueError(f"data.{name}={value}: must be at least {least}")
        if members < 2:
            raise ValueError(f"data.members={members}: a group needs at least 2 episodes to compare, 8 is usual")
        if not 0.0 <= lam <= 1.0:
            raise ValueError(f"data.lam={lam}: λ must lie in [0, 1]; 1 is GRPO, 0 is step advantages only, 0.8 is usual")
        if temperature <= 0:
            raise ValueError(f"data.temperature={temperature}: must be positive")
        self.tasks = tasks
        self.groups, self.members = groups, members
        self.passes, self.minibatches = passes, minibatches
        self.max_tokens_per_batch = max_tokens_per_batch
        self.credit_rule, self.segment_rule = credit, segments
        self.max_turns, self.rows, self.constrain = max_turns, rows, constrain
        self.max_action_tokens, self.max_env_errors = max_action_tokens, max_env_errors
        self.rollout_dir, self.keep_rollouts, self.seed = rollout_dir, keep_rollouts, seed
        self.controls = Controls(lam, temperature, entropy_coef)
        self.iteration = 0
        self.report = RolloutReport()
        self._narrowed: dict[str, TaskSet] = {}
        self._collector: Collector | None = None

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["seed"] != self.seed:
            raise ValueError(
                f"data.seed={self.seed}, but the checkpoint was made with seed {state_dict['seed']}: a resumed run must "
                "keep its seed"
            )
        self.iteration = int(state_dict["iteration"])

    # -- tasks ---------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> BasePolicy:
        """The policy in training, reached through the trainer so that there is only one."""
        assert self.trainer is not None
        policy = self.trainer.lightning_module.policy
        assert isinstance(policy, BasePolicy)
        return policy

    def stage_tasks(self, stage: Stage) -> TaskSet:
        """The tasks of a stage."""
        if stage.name not in self._narrowed:
            self._narrowed[stage.name] = self.tasks.narrow(stage.difficulty) if stage.difficulty else self.tasks
        return self._narrowed[stage.name]

    @property
    def stage(self) -> Stage:
        """The stage being played; all tasks where no curriculum runs."""
        return self.controls.stage or Stage(name="all", max_turns=self.max_turns)

    # -- collection ----------------------------------------------------------------------------------------------------

    @property
    def collector(self) -> Collector:
        """Made when first needed: the policy's tokenizer exists only then."""
        if self._collector is None:
            self._collector = Collector(
                self.policy,
                InProcessPool(self.tasks.make_env),
                self.segment_rule,
                rows=self.rows,
                constrain=self.constrain,
                max_action_tokens=self.max_action_tokens,
                max_env_errors=self.max_env_errors,
            )
        return self._collector

    def play(self, jobs: list[EpisodeJob], temperature: float) -> list[Episode]:
        """Play the jobs with the present policy in evaluation mode; episodes in the order of the jobs."""
        policy = self.policy
        training = policy.training
        policy.eval()
        episodes: dict[int, Episode] = dict(self.collector.run(jobs, temperature))
        policy.train(training)
        return [episodes[i] for i in range(len(jobs))]

    def collect(self) -> RolloutStore:
        """Play one iteration, credit it, write it, report it; returns the rows to train on."""
        assert self.trainer is not None
        begin = time.perf_counter()
        rank, world = self.trainer.global_rank, self.trainer.world_size
        iteration, self.iteration = self.iteration, self.iteration + 1
        stage = self.stage
        stages = (stage, *self.controls.rehearsal)
        jobs = plan_iteration(
            {s.name: self.stage_tasks(s) for s in stages},
            stage,
            self.controls.rehearsal,
            split="train",
            groups=len(range(rank, self.groups, world)),
            members=self.members,
            seed=self.seed,
            rank=rank,
            iteration=iteration,
        )
        planned = time.perf_counter()
        groups = self._play_groups(jobs)
        path = self._rollout_path(iteration, rank)
        played = time.perf_counter()
        credit = self._credit(groups)
        names = [job.stage for job in jobs]
        credited = time.perf_counter()
        with RolloutWriter(path) as writer:
            writer.write(groups, names, credit)
        store = RolloutStore(path)
        self.report = self._make_report(groups, names, credit)
        stats = self.collector.stats
        end = time.perf_counter()
        self.report.metrics |= {
            "time/tasks_s": planned - begin,
            "time/environment_s": stats.env_s,
            "time/policy_s": stats.policy_s,
            "time/collector_s": played - planned - stats.env_s - stats.policy_s,
            "time/credit_s": credited - played,
            "time/store_s": end - credited,
            "time/rollout_s": end - begin,
            "time/rollout_tokens_per_s": stats.tokens / max(played - planned, 1e-9),
            "time/env_steps_per_s": stats.steps / max(played - planned, 1e-9),
            "time/episodes_per_s": len(groups) * self.members / max(end - begin, 1e-9),
            "rollout/env_errors": float(len(stats.env_errors)),
            "credit/lambda": self.controls.lam,
        }
        return store

    def _play_groups(self, jobs: list[GroupJob]) -> list[Group]:
        episodes = self.play([member for job in jobs for member in job.members], self.controls.temperature)
        size = self.members
        return [
            Group(job.task.id, str(job.task.difficulty.get("type", "")), tuple(episodes[i * size : (i + 1) * size]))
            for i, job in enumerate(jobs)
        ]

    def _credit(self, groups: list[Group]) -> Credit:
        rule = self.credit_rule
        return credit_groups(
            groups,
            estimator=rule.estimator,
            lam=self.controls.lam if rule.combine == "convex" else rule.omega,
            gamma=rule.gamma,
            norm=rule.norm,
            statistics=rule.statistics,
            combine=rule.combine,
            invalid_penalty=rule.invalid_penalty,
            penalty_in_returns=rule.penalty_in_returns,
        )

    def _make_report(self, groups: list[Group], stages: list[str], credit: Credit) -> RolloutReport:
        tally = Tally()
        tally.add_groups(groups, stages, credit)
        report = RolloutReport(tally.metrics(), tally.rates("stage"))
        report.histograms["anchors/step_group_sizes"] = credit.step_group_sizes.numpy()
        table = report.credit_table
        table.step_returns = credit.step_return.tolist()
        for group, stage in zip(groups, stages, strict=True):
            for episode in group.episodes:
                for turn in episode.turns:
                    table.anchors.append(f"{group.task_id}|{turn.anchor}")
                    table.texts.append(turn.observation)
                    table.stages.append(stage)
        return report

    def _rollout_path(self, iteration: int, rank: int) -> Path:
        assert self.trainer is not None
        folder = Path(self.rollout_dir or Path(self.trainer.log_dir or self.trainer.default_root_dir) / "rollouts")
        for old in range(iteration - self.keep_rollouts, -1, -1):
            stale = folder / f"iteration_{old:06d}_rank{rank}.arrow"
            if not stale.exists():
                break
            stale.unlink()
        return folder / f"iteration_{iteration:06d}_rank{rank}.arrow"

    # -- minibatches ---------------------------------------------------------------------------------------------------

    def minibatches_of(self, store: RolloutStore, iteration: int) -> Iterator[Minibatch]:
        """All minibatches of an iteration, pass by pass; always `passes` × `minibatches` of them."""
        assert self.trainer is not None
        rank = self.trainer.global_rank
        trainable = np.flatnonzero(store.chosen_counts > 0)
        for index in range(self.passes):
            parts = plan_rows(
                len(trainable), self.minibatches, seed=self.seed, rank=rank, iteration=iteration, pass_index=index
            )
            for part in parts:
                rows = trainable[part]
                cuts = cut_by_tokens([int(store.token_counts[r]) for r in rows], self.max_tokens_per_batch)
                micro = tuple(store.micro_batch([int(rows[i]) for i in cut]) for cut in cuts)
                yield Minibatch(micro, self.controls.temperature)

    def train_dataloader(self) -> DataLoader[Minibatch]:
        return DataLoader(_Iterations(self), batch_size=None)

    def teardown(self, stage: str) -> None:
        self._collector = None


class _Iterations(IterableDataset[Minibatch]):
    """One pass over it is one iteration. It has a length, without which Lightning would prefetch a stale batch."""

    def __init__(self, datamodule: RolloutDataModule):
        self._datamodule = datamodule

    def __len__(self) -> int:
        return self._datamodule.passes * self._datamodule.minibatches

    def __iter__(self) -> Iterator[Minibatch]:
        iteration = self._datamodule.iteration
        with torch.no_grad():
            store = self._datamodule.collect()
        yield from self._datamodule.minibatches_of(store, iteration)
