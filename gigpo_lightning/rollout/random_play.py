"""Episodes played at random, without a model: how many tokens an iteration will have.

The rows are those of training, for an untrained policy's choices are about as random. Knows prompts and worlds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gigpo_lightning.envs.base import Task
from gigpo_lightning.policy.answer_rules import AnswerRules
from gigpo_lightning.policy.base import PromptFormat
from gigpo_lightning.policy.engine import Said, common_length
from gigpo_lightning.policy.projection import admit
from gigpo_lightning.rollout.context import EpisodeContext, SegmentRule
from gigpo_lightning.rollout.pool import EnvPool, EnvState
from gigpo_lightning.trajectory import Segment

# What is said in worlds that list no actions; most will not understand it.
_BLIND_ACTION = "look"


@dataclass(frozen=True)
class Work:
    """What random episodes come to.

    Attributes:
        episodes: How many were played.
        turns: Mean turns of an episode.
        tokens: Mean tokens of an episode's rows.
        listed: Mean tokens of them that were chosen among listed ids,
        allowed: those ids together, and
        free: tokens that were chosen among the whole vocabulary.
        widest: The most ids that a token was chosen among; None for the whole vocabulary.
        prompt_tokens: The longest text read at once before an answer.
        row_tokens: The longest row.
    """

    episodes: int
    turns: float
    tokens: float
    listed: float
    allowed: float
    free: float
    widest: int | None
    prompt_tokens: int
    row_tokens: int


def play_at_random(
    prompt: PromptFormat,
    pool: EnvPool,
    tasks: Sequence[Task],
    rule: SegmentRule,
    *,
    max_turns: int,
    constrain: bool,
    max_action_tokens: int,
    seed: int = 0,
) -> Work:
    """Play each task once. What is said freely is as long as it may be; the world then takes an admissible action.

    Raises:
        ValueError: A first prompt leaves no room for an answer, or every episode failed; with the last failure.
    """
    random = np.random.default_rng(seed)
    rules = AnswerRules(prompt, constrain, max_action_tokens)
    player = _Player(prompt, pool, rule, rules, max_turns, max_action_tokens, _filler(prompt))
    played = [player.play(task, random) for task in tasks]
    episodes = sum(turns > 0 for _, turns in played)
    if not episodes:
        raise ValueError(f"no episode could be played: {player.error}")
    rows = [segment for segments, _ in played for segment in segments]
    counts = [count for segment in rows for count in segment.allowed_counts]
    free = counts.count(0)
    return Work(
        episodes=episodes,
        turns=sum(turns for _, turns in played) / episodes,
        tokens=sum(len(segment.token_ids) for segment in rows) / episodes,
        listed=(len(counts) - free) / episodes,
        allowed=sum(counts) / episodes,
        free=free / episodes,
        widest=None if free else max(counts, default=1),
        prompt_tokens=player.prompt_tokens,
        row_tokens=max(len(segment.token_ids) for segment in rows),
    )


@dataclass
class _Player:
    prompt: PromptFormat
    pool: EnvPool
    rule: SegmentRule
    rules: AnswerRules
    max_turns: int
    max_action_tokens: int
    filler: int
    prompt_tokens: int = 0
    error: str = ""

    def play(self, task: Task, random: np.random.Generator) -> tuple[Sequence[Segment], int]:
        """The rows of an episode and its turns; a failure of the environment ends it."""
        (state,) = self.pool.reset([0], [task])
        if state.error is not None:
            self.error = state.error
            return (), 0
        context = EpisodeContext(
            self.prompt, self.rule, state.instruction, state.observation, state.admissible, anchor=state.anchor
        )
        context.require_room(self.max_action_tokens, task.id)
        read: list[int] = []
        for turn in range(1, self.max_turns + 1):
            self.prompt_tokens = max(
                self.prompt_tokens, len(context.token_ids) - common_length(read, context.token_ids)
            )
            action = self._answer(context, state, random)
            read = list(context.token_ids)
            self.pool.send([0], [action])
            (state,) = self.pool.receive()
            if state.error is not None:
                self.error = state.error
                return context.segments(), turn - 1
            if state.terminated or state.truncated or turn == self.max_turns:
                break
            context.observe(
                state.observation,
                self.max_action_tokens,
                state.admissible,
                anchor=state.anchor,
                reward=state.reward,
            )
            if context.room < self.max_action_tokens:
                break
        return context.segments(), turn

    def _answer(self, context: EpisodeContext, state: EnvState, random: np.random.Generator) -> str:
        """Say something; returns the action that the world takes."""
        answer, said = self.rules.start(state.admissible), Said(0)
        said.force(answer.begin())
        while not answer.is_complete:
            token_id = self.filler if answer.allowed is None else int(random.choice(answer.allowed))
            said.choose(token_id, 0.0, answer.allowed)
            said.force(answer.take(token_id))
        context.answer(said.token_ids, said.logprobs, said.allowed)
        action, is_admissible = admit(answer.reading(said.token_ids).action, state.admissible)
        if is_admissible and state.admissible:
            return action
        return str(random.choice(state.admissible)) if state.admissible else _BLIND_ACTION


def _filler(prompt: PromptFormat) -> int:
    """A token for answers without a meaning; not one that would end them."""
    return next(i for i in prompt.action_ids(_BLIND_ACTION) if i != prompt.end_id)
