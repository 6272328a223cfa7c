"""What an episode of a run comes to in turns and tokens, from a few that are played at random."""

from __future__ import annotations

from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.pretrained import load_config
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.rollout.random_play import Work, play_at_random

_EPISODES = 16


def works_of(data: RolloutDataModule, policy: BasePolicy, curriculum: Curriculum | None) -> tuple[dict[str, Work], str]:
    """What an episode of the first and of the last stage comes to; else why that is not known.

    Raises:
        ValueError: There is no such model.
    """
    stages = [Stage(name="all", max_turns=data.max_turns)]
    if curriculum is not None:
        stages = [curriculum.stage, *curriculum.stages[-1:]]
    if isinstance(policy, CausalLMPolicy):
        load_config(policy.source, policy.revision)  # without it there is nothing to plan
        try:
            policy.load_prompt()
        except ValueError as error:
            return {}, str(error)
    else:
        policy.prepare(data.tasks)
    return {stage.name: _work(data, policy, stage) for stage in stages}, ""


def _work(data: RolloutDataModule, policy: BasePolicy, stage: Stage) -> Work:
    tasks = data.stage_tasks(stage)
    pool = InProcessPool(data.tasks.make_env)
    try:
        return play_at_random(
            policy.prompt,
            pool,
            [tasks.get("train", i) for i in range(min(_EPISODES, tasks.len("train")))],
            data.segment_rule,
            max_turns=stage.max_turns,
            constrain=data.constrain,
            max_action_tokens=data.max_action_tokens,
            seed=data.seed,
        )
    finally:
        pool.close()
