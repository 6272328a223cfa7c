"""Episodes played by an expert, as token rows of the policy: what imitation learns from.

The expert knows only what it has read. Its actions are spelled along the same tries that sampling follows, so that a
chosen token has the same alternatives as in a rollout. It gives no reasons: where the format asks for a thought, an
empty one stands there, which is not imitated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gigpo_lightning.batch import PackRow
from gigpo_lightning.envs.base import Expert, Observation, Task, TextEnv
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.thought import empty_thought
from gigpo_lightning.policy.tries import TrieCache
from gigpo_lightning.rollout.context import EpisodeContext, SegmentRule
from gigpo_lightning.trajectory import Segment


def demonstrate(
    policy: BasePolicy,
    tries: TrieCache,
    env: TextEnv,
    expert: Expert,
    rule: SegmentRule,
    task: Task,
    max_turns: int,
    room_tokens: int,
) -> tuple[Segment, ...]:
    """The segments of one won episode of the expert, or none where it failed within `max_turns`.

    Raises:
        ValueError: The world lists no admissible actions, or the expert took one that is not admissible.
    """
    observation = env.reset(task)
    admissible = _listed(env)
    context = EpisodeContext(
        policy.prompt, rule, observation.instruction, observation.text, admissible, anchor=env.anchor()
    )
    for _ in range(max_turns):
        action = expert.act(observation, admissible)
        if policy.prompt.reasons:
            context.force(empty_thought(policy.prompt))
        _spell(context, tries, admissible, action, policy.prompt.action_ids(action))
        result = env.step(action)
        if result.terminated or result.truncated:
            return context.segments() if result.info.get("won") else ()
        observation, admissible = Observation(result.observation.text), _listed(env)
        context.observe(observation.text, room_tokens, admissible, anchor=env.anchor(), reward=result.reward)
        if context.room < room_tokens:
            return ()
    return ()


def _listed(env: TextEnv) -> tuple[str, ...]:
    admissible = env.admissible_actions()
    if admissible is None:
        raise ValueError("a warm start needs a world that lists its admissible actions")
    return tuple(admissible)


def _spell(
    context: EpisodeContext, tries: TrieCache, admissible: tuple[str, ...], action: str, token_ids: Sequence[int]
) -> None:
    """Append the action's tokens, as choices where there are alternatives."""
    node = tries.get(admissible)
    allowed = []
    for token_id in token_ids:
        if token_id not in node.allowed:
            raise ValueError(f"the expert took {action!r}, which is not among {len(admissible)} admissible actions")
        allowed.append(node.allowed)
        node = node.child(token_id)
    context.answer(token_ids, [0.0 if len(ids) > 1 else None for ids in allowed], allowed)


def pack_row(segment: Segment, advantage: float) -> PackRow:
    """A segment as arrays, with the same advantage for all its turns."""
    index = np.asarray(segment.turn_index)
    first = int(index[index >= 0].min(initial=int(index.max(initial=0))))
    return PackRow(
        token_ids=np.asarray(segment.token_ids),
        response_mask=np.asarray(segment.response_mask),
        turn_index=index - first,
        logprobs=np.asarray(segment.logprobs),
        allowed_ids=np.asarray(segment.allowed_ids, dtype=np.int64),
        allowed_counts=np.asarray(segment.allowed_counts, dtype=np.int64),
        advantages=np.full(int(index.max(initial=0)) - first + 1, advantage),
        answer_starts=np.asarray(segment.answer_starts),
    )
