"""Episodes played at random, without a model: how many tokens an iteration will have.

The rows are those of training, for an untrained policy's choices are about as random. Knows prompts and worlds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gigpo_lightning.envs.base import Task
from gigpo_lightning.policy.base import PromptFormat
from gigpo_lightning.policy.generation import TrieCache
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
        choices: Mean tokens of them that the policy chose.
        allowed: Mean number of ids that a token was chosen among; None where decoding is unconstrained.
        prompt_tokens: The longest text read at once before an answer.
        row_tokens: The longest row.
    """

    episodes: int
    turns: float
    tokens: float
    choices: float
    allowed: float | None
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
    """Play each task once, among the admissible actions where the world lists them.

    A free answer is as long as it may be, and in the world one of the admissible actions is taken.

    Raises:
        ValueError: A first prompt leaves no room for an answer, or every episode failed; with the last failure.
    """
    random = np.random.default_rng(seed)
    player = _Player(prompt, pool, rule, TrieCache(prompt), max_turns, constrain, max_action_tokens)
    played = [player.play(task, random) for task in tasks]
    rows = [[s for s in segments if len(s.token_ids)] for segments, turns in played if turns]
    if not rows:
        raise ValueError(f"no episode could be played: {player.error}")
    every = [segment for segments in rows for segment in segments]
    choices = sum(sum(s.response_mask) for s in every)
    allowed = sum(sum(s.allowed_counts) for s in every)
    return Work(
        episodes=len(rows),
        turns=sum(turns for _, turns in played) / len(rows),
        tokens=sum(len(s.token_ids) for s in every) / len(rows),
        choices=choices / len(rows),
        allowed=allowed / choices if allowed else None,
        prompt_tokens=player.prompt_tokens,
        row_tokens=max(len(s.token_ids) for s in every),
    )


@dataclass
class _Player:
    prompt: PromptFormat
    pool: EnvPool
    rule: SegmentRule
    tries: TrieCache
    max_turns: int
    constrain: bool
    max_action_tokens: int
    prompt_tokens: int = 0
    error: str = ""

    def play(self, task: Task, random: np.random.Generator) -> tuple[Sequence[Segment], int]:
        """The rows of an episode and its turns; a failure of the environment ends it."""
        (state,) = self.pool.reset([0], [task])
        if state.error is not None:
            self.error = state.error
            return (), 0
        context = EpisodeContext(self.prompt, self.rule, state.instruction, state.observation)
        context.require_room(self.max_action_tokens, task.id)
        for turn in range(1, self.max_turns + 1):
            self.prompt_tokens = max(self.prompt_tokens, len(context.pending))
            context.pending, context.fresh = [], False
            action = self._answer(context, state, random)
            (state,) = self.pool.step([0], [action])
            if state.error is not None:
                self.error = state.error
                return context.segments(), turn - 1
            if state.terminated or state.truncated or turn == self.max_turns:
                break
            context.observe(state.observation, self.max_action_tokens)
            if context.room < self.max_action_tokens:
                break
        return context.segments(), turn

    def _answer(self, context: EpisodeContext, state: EnvState, random: np.random.Generator) -> str:
        """Say something; returns the action that the world takes."""
        listed = state.admissible or ()
        if not (self.constrain and listed):
            for _ in range(self.max_action_tokens):
                context.choose(self.prompt.end_id, 0.0, None)
            return str(random.choice(listed)) if listed else _BLIND_ACTION
        forced, node = self.tries.get(listed).follow_forced()
        context.force(forced)
        while node.action is None:
            token_id = int(random.choice(node.allowed))
            context.choose(token_id, 0.0, node.allowed)
            forced, node = node.child(token_id).follow_forced()
            context.force(forced)
        return node.action
