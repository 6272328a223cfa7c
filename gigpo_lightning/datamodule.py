"""Rollouts as training data: collects once per iteration, credits, and yields the minibatches of its updates.

One Lightning epoch is one iteration. Callbacks steer through `controls` and read `report`; what happens inside an
episode is the collector's, what a turn deserves is `credit`'s, and the loss is the module's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from gigpo_lightning.batch import Minibatch
from gigpo_lightning.curriculum import Stage, stage_named
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.placement import acting
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.engine_options import EngineOptions
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.collector import EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.crediting import Crediting
from gigpo_lightning.rollout.evaluation import EvaluationBatch, EvaluationRule, Place, plan
from gigpo_lightning.rollout.iteration import Controls, IterationSpec, rollout_path, run_iteration
from gigpo_lightning.rollout.loaders import Evaluations, Iterations
from gigpo_lightning.rollout.minibatches import minibatches_of
from gigpo_lightning.rollout.options import check_counts, check_processes, check_replay, check_sampling
from gigpo_lightning.rollout.player import Player, PlayRule
from gigpo_lightning.rollout.preflight import check_first_prompt, check_places, claim_folder
from gigpo_lightning.rollout.rating import rate_anew
from gigpo_lightning.rollout.replay import ReplayCache, ReplayRule
from gigpo_lightning.rollout.report import RolloutReport
from gigpo_lightning.rollout.sampler import Sampler
from gigpo_lightning.trajectory import Episode

# Frozen, so that all datamodules may share them as defaults.
_CREDIT, _SEGMENTS, _EVALUATION = CreditRule(), SegmentRule(), EvaluationRule()


class RolloutDataModule(pl.LightningDataModule):
    """Groups of episodes, collected under the present policy at the start of every epoch.

    Args:
        tasks: The world's tasks.
        groups: Task groups per iteration, over all processes; each process plays whole groups.
        members: Episodes per group, at least 2.
        passes: How often the update goes through the rollouts of an iteration.
        minibatches: Optimiser steps per pass.
        max_tokens_per_batch: Tokens of a micro-batch; gradients do not depend on it.
        skip_zero_advantage: Leave out rows in which every advantage is 0, as in groups that all failed: they would only
            feel the entropy bonus and the KL, at full cost. Means over tokens are then over the rows that are kept.
        lam: λ, the share of the episode advantage in [0, 1]; null for 0.8, or what `LambdaDecay` sets.
        temperature: Sampling temperature; null for 1, or what `Exploration` sets.
        entropy_coef: Weight of the entropy bonus; null for 0, or what `Exploration` sets.
        max_turns: Turn limit of an episode, unless a curriculum sets it.
        credit: How turns are credited.
        segments: How episodes are cut into training rows.
        replay: Whether groups without a success borrow a recent one of their task, and which; null for never.
        evaluation: What evaluations play.
        rows: Episodes under way at once.
        constrain: Sample among the admissible actions only, where the world lists them.
        max_action_tokens: Longest free answer, in tokens.
        max_env_errors: Environment failures in one collection after which the run stops.
        engine: What says the answers; null for the policy's own model in this process. How far the log-probs of another
            engine are from the policy's own is logged, and made up for by truncated importance weights.
        env_workers: Processes that the environments are spread over; 0 plays them in this one, the faster way where
            steps are as quick as those of native ALFWorld.
        env_deadline_s: Seconds that one reset or step may take in a worker process before it is killed and replaced.
        rollout_dir: Folder of the rollout files, for one run only; null for `rollouts` in the run's folder.
        keep_rollouts: Rollout files that are kept, at least 1.
        transcripts: Episodes per iteration kept as text.
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
        skip_zero_advantage: bool = False,
        lam: float | None = None,
        temperature: float | None = None,
        entropy_coef: float | None = None,
        max_turns: int = 50,
        credit: CreditRule = _CREDIT,
        segments: SegmentRule = _SEGMENTS,
        replay: ReplayRule | None = None,
        evaluation: EvaluationRule = _EVALUATION,
        rows: int = 128,
        constrain: bool = True,
        max_action_tokens: int = 16,
        max_env_errors: int = 16,
        engine: EngineOptions | None = None,
        env_workers: int = 0,
        env_deadline_s: float = 60.0,
        rollout_dir: str | None = None,
        keep_rollouts: int = 2,
        transcripts: int = 2,
        seed: int = 0,
    ):
        super().__init__()
        check_counts(1, groups=groups, passes=passes, minibatches=minibatches, rows=rows, keep_rollouts=keep_rollouts)
        check_counts(
            1, max_tokens_per_batch=max_tokens_per_batch, max_action_tokens=max_action_tokens, max_turns=max_turns
        )
        check_counts(0, max_env_errors=max_env_errors, env_workers=env_workers, transcripts=transcripts, seed=seed)
        check_sampling(members, lam, credit, temperature, entropy_coef, env_deadline_s)
        self.tasks, self.transcripts = tasks, transcripts
        self.groups, self.members, self.passes, self.minibatches = groups, members, passes, minibatches
        self.max_tokens_per_batch, self.skip_zero_advantage = max_tokens_per_batch, skip_zero_advantage
        check_replay(replay, credit)
        self.crediting, self.replay = Crediting(credit, max_tokens_per_batch), ReplayCache(replay)
        self.segment_rule, self.evaluation, self.max_turns = segments, evaluation, max_turns
        self.rows, self.constrain, self.max_action_tokens = rows, constrain, max_action_tokens
        self.rollout_dir, self.keep_rollouts, self.seed = rollout_dir, keep_rollouts, seed
        self.given = {"lam": lam, "temperature": temperature, "entropy_coef": entropy_coef}
        self.controls = Controls(**{n: given for n, given in self.given.items() if given is not None})  # type: ignore[arg-type]
        self.iteration = 0
        self._reached: str | None = None  # the stage of the restored checkpoint
        self.report = RolloutReport()
        self._narrowed: dict[str, TaskSet] = {}
        self._playable: list[Place] = []  # what was tried
        limits = (max_env_errors, env_workers, env_deadline_s)
        rule = PlayRule(segments, rows, constrain, max_action_tokens, *limits, leave_open=credit.needs_critic)
        self.player = Player(tasks, rule, Sampler(engine))

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        stage = self.controls.stage.name if self.controls.stage else None
        parts = {"credit": self.crediting.state_dict(), "replay": self.replay.state_dict()}
        return {"iteration": self.iteration, "seed": self.seed, "stage": stage, **parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fitting = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        if fitting and state_dict["seed"] != self.seed:
            raise ValueError(
                f"data.seed={self.seed}, but the checkpoint was made with seed {state_dict['seed']}: a resumed run "
                "must keep its seed"
            )
        self.iteration = int(state_dict["iteration"])
        self._reached = state_dict["stage"]
        self.crediting.load_state_dict(state_dict["credit"])
        self.replay.load_state_dict(state_dict["replay"])

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
        """The stage being played: the curriculum's, else the one that the checkpoint had reached, else all tasks."""
        if self.controls.stage is not None:
            return self.controls.stage
        stages = self.controls.stages
        if stages and self._reached is not None:
            return stage_named(stages, self._reached, "the checkpoint is of another curriculum")
        return stages[0] if stages else Stage(name="all", max_turns=self.max_turns)

    # -- collection ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        self.player.sampler.check(self.policy)

    def play(self, jobs: Iterable[EpisodeJob], temperature: float) -> Iterator[Episode]:
        """Play the jobs with the present policy, which acts until all are asked for; episodes in order of the jobs."""
        with self._acting() as policy:
            yield from self.player.play(policy, jobs, temperature)

    def _acting(self) -> AbstractContextManager[BasePolicy]:
        assert self.trainer is not None
        return acting(self.policy, self.trainer.precision_plugin)

    def collect(self) -> Iterator[Minibatch]:
        """Play, credit and report one iteration; yields its minibatches, a fixed number of them."""
        assert self.trainer is not None
        rank, world, iteration = self.trainer.global_rank, self.trainer.world_size, self.iteration
        self.iteration += 1
        folder = Path(self.rollout_dir or Path(self.trainer.log_dir or self.trainer.default_root_dir) / "rollouts")
        with self._acting() as policy:  # to the end: credit may ask it, too
            store, self.report = run_iteration(
                IterationSpec(iteration, self.groups, self.members, self.seed, rank, world, self.transcripts),
                self.controls,
                self.stage,
                self.stage_tasks,
                partial(self.player.play, policy),
                lambda: self.player.stats,
                self.crediting.of_iteration(policy, self.controls.lam, self.controls.library, iteration),
                self.replay,
                rollout_path(folder, iteration, rank, self.keep_rollouts),
            )
        self.crediting.end_iteration(self.report.metrics, self.controls.lam, world)
        yield from minibatches_of(
            store,
            passes=self.passes,
            minibatches=self.minibatches,
            max_tokens=self.max_tokens_per_batch,
            temperature=self.controls.temperature,
            seed=self.seed,
            rank=rank,
            iteration=iteration,
            skip_zero_advantage=self.skip_zero_advantage,
            rescore=partial(rate_anew, self._acting, self.player.sampler, self.replay.rule, self.report.metrics, world),
        )

    # -- loaders -------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader[Minibatch]:
        self.check_fit()
        return DataLoader(Iterations(self.collect, self.passes * self.minibatches), batch_size=None)

    def val_dataloader(self) -> DataLoader[EvaluationBatch]:
        return self._evaluation_loader(self._validated, self.evaluation.during_fit_tasks)

    def test_dataloader(self) -> DataLoader[EvaluationBatch]:
        rule = self.evaluation
        return self._evaluation_loader(self._tested, rule.tasks, rule.seeds, greedy=rule.greedy)

    def predict_dataloader(self) -> DataLoader[EvaluationBatch]:
        return self._evaluation_loader(self._predicted, self.evaluation.predict_tasks)

    def _evaluation_loader(
        self, places: Callable[[], list[Place]], count: int, seeds: int = 1, greedy: bool = False
    ) -> DataLoader[EvaluationBatch]:
        """Evaluations of what `places` names when they begin."""

        def batches() -> Iterator[EvaluationBatch]:
            for stage, split in places():
                yield from plan(self.evaluation, stage, self.stage_tasks(stage), split, count, seeds, greedy=greedy)

        self._check_plan(places())
        return DataLoader(Evaluations(batches), batch_size=None)

    def _validated(self) -> list[Place]:
        """Unseen tasks of the first stage, to see the whole run on one scale, and of the present one; or as named."""
        return [(stage, "unseen") for stage in self.evaluation.fit_stages(self.controls.stages, self.stage)]

    def _tested(self) -> list[Place]:
        stages = self.evaluation.test_stages(self.controls.stages) or (self.stage,)
        return [(stage, split) for stage in stages for split in self.evaluation.splits]

    def _predicted(self) -> list[Place]:
        named = self.evaluation.predict_stage
        stage = stage_named(self.controls.stages, named, "data.evaluation.predict_stage") if named else self.stage
        return [(stage, "unseen")]

    # -- refusals ------------------------------------------------------------------------------------------------------

    def check_fit(self) -> None:
        """Refuse now what training, its validations and the final test could not play, and a folder of another run.

        Raises:
            ValueError: A stage, split or prompt that cannot be played, or a bad `rollout_dir`; the message names it.
        """
        assert self.trainer is not None
        check_processes(self.groups, self.trainer.world_size)
        self.crediting.rule.check_library(self.controls.library)
        splits = ("train", "unseen") if self.trainer.enable_validation else ("train",)
        self._check_plan([(stage, split) for stage in self.controls.stages or (self.stage,) for split in splits])
        self._check_plan(self._tested())
        run = Path(self.trainer.log_dir or self.trainer.default_root_dir)  # asked of all processes: they exchange it
        if self.rollout_dir is not None and self.trainer.is_global_zero:
            claim_folder(Path(self.rollout_dir), run, resumed=self.iteration > 0)

    def _check_plan(self, places: Iterable[Place]) -> None:
        """Refuse names, stages and splits that the world cannot play now, not when they are reached."""
        self.evaluation.check(self.controls.stages, self.tasks.splits)
        new = [place for place in places if place not in self._playable]
        room = partial(
            check_first_prompt, self.player.pool, self.policy.prompt, self.segment_rule, self.max_action_tokens
        )
        check_places(new, self.stage_tasks, room)
        self._playable += new

    def teardown(self, stage: str) -> None:
        self.player.close()

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("exception")  # Lightning itself tears down only what ends well
