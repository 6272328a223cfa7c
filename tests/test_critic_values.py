"""Where a critic reads its values: the prompts of every turn, and the state that an episode was left in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gigpo_lightning.batch import pack
from gigpo_lightning.envs.base import Observation, StepResult, Task
from gigpo_lightning.policy.chat_text import ChatText
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import EpisodeContext, SegmentRule
from gigpo_lightning.rollout.demonstrations import pack_row
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.rollout.values import rate
from gigpo_lightning.trajectory import EndReason, Episode, Group
from tests.tiny_lm import made, save_tiny
from tests.toy_world import BoxEnv, BoxTasks

TASKS = BoxTasks(4)


# -- where values are read ---------------------------------------------------------------------------------------------


def with_critic(**options: Any) -> ScratchPolicy:
    """A policy whose critic says something."""
    policy = ScratchPolicy(hidden_size=32, layers=1, initializer_range=0.2, **options)
    policy.prepare(TASKS)
    policy.add_critic(detach=False)
    assert policy.critic is not None
    torch.nn.init.normal_(policy.critic.head.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(policy.critic.head.bias, 0.3)
    return policy.eval()


def play(policy: ScratchPolicy, rule: SegmentRule, max_turns: int = 4, leave_open: bool = True) -> list[Episode]:
    collector = Collector(policy, InProcessPool(BoxEnv), rule, rows=4, max_action_tokens=8, leave_open=leave_open)
    jobs = [EpisodeJob(TASKS.get("train", i), max_turns, (i,)) for i in range(12)]
    return [episode for _, episode in sorted(collector.run(jobs, 3.0))]  # hot: episodes of all kinds


RULES = {
    "growing": SegmentRule(max_tokens=200),
    "pairs": SegmentRule(turns=2, max_tokens=200),
    "single": SegmentRule(turns=1, max_tokens=200),
    "short": SegmentRule(max_tokens=44, keep_last=1),
}


@pytest.mark.parametrize("kind", RULES)
def test_the_values_are_of_the_prompts_and_of_the_state_at_the_end(kind: str) -> None:
    """Each prompt read alone, as when it was answered, gives the value that the packed rows give."""
    policy = with_critic()
    episodes = play(policy, RULES[kind])
    found = rate([Group("g", "", tuple(episodes))], policy, 100)
    wanted, ends = [], []
    for episode in episodes:
        prompts = [s.token_ids[:start] for s in episode.segments for start in s.answer_starts]
        values = [value_of(policy, prompt) for prompt in prompts]
        is_open = episode.end is not EndReason.TERMINATED
        assert len(values) == len(episode.turns) + is_open
        wanted += values[: len(episode.turns)]
        ends.append(values[-1] if is_open else 0.0)
        assert_prompts(policy, episode, prompts)
    assert {episode.end for episode in episodes} >= {EndReason.TERMINATED, EndReason.TRUNCATED}
    torch.testing.assert_close(found.turns, torch.tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.ends, torch.tensor(ends, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    assert float(found.turns.std()) > 0.1


def assert_prompts(policy: ScratchPolicy, episode: Episode, prompts: list[list[int]]) -> None:
    """Every prompt ends with its own observation, and what the policy said is no part of it."""
    texts = [policy.prompt.tokenizer.decode(prompt) for prompt in prompts]
    for turn, text in zip(episode.turns, texts, strict=False):
        assert turn.observation in text[-len(turn.observation) - 60 :]
    for segment in episode.segments:
        for start in segment.answer_starts:
            # What comes before an answer was not chosen; the answer itself belongs to a turn.
            assert not segment.response_mask[start - 1]
            assert start == len(segment.token_ids) or segment.turn_index[start] >= 0


def value_of(policy: ScratchPolicy, prompt: list[int]) -> float:
    with torch.no_grad():
        hidden = policy.feed(policy.new_cache(1, len(prompt)), [prompt])
        assert policy.critic is not None
        return float(policy.critic(hidden)[0])


def test_an_episode_at_its_context_limit_shows_the_state_it_was_left_in() -> None:
    """17 tokens of header and 30 of first prompt at most: some header after a turn leaves no room."""
    policy = with_critic()
    rule = SegmentRule(turns=1, keep_last=3, max_tokens=50)
    limited = [e for e in play(policy, rule, max_turns=8) if e.end is EndReason.CONTEXT_LIMIT]
    assert limited
    for episode in limited:
        last = episode.segments[-1]
        assert last.is_left_open
        assert not any(last.response_mask)
        assert set(last.turn_index) == {-1}
        assert len(last.answer_starts) == 1
    without = [e for e in play(policy, rule, max_turns=8, leave_open=False) if e.end is EndReason.CONTEXT_LIMIT]
    # nothing else about the episodes changes
    assert [e.turns for e in without] == [e.turns for e in limited]
    assert [e.segments for e in without] == [e.segments[:-1] for e in limited]


def test_a_last_state_beyond_the_models_positions_keeps_its_end() -> None:
    """An observation longer than all that the model reads opens a segment of its own, of which the end is kept."""
    policy = with_critic()
    start = (policy.prompt, RULES["growing"], "take the cup", "you see 3 box .")
    contexts = [EpisodeContext(*start, anchor="a") for _ in range(2)]
    for context, positions in zip(contexts, (None, 20), strict=True):
        context.force(policy.prompt.action_ids("open box 1"))
        context.observe("in it is a " + "cup " * 300, 8, anchor="b", reward=0.0)
        context.leave_open(positions)
    whole, cut = (context.segments()[-1] for context in contexts)
    assert len(whole.token_ids) > 300
    assert cut.token_ids == whole.token_ids[-20:]
    for segment in (whole, cut):
        assert segment.is_left_open
        assert segment.answer_starts == [len(segment.token_ids)]
        assert segment.turn_index == [-1] * len(segment.token_ids)
        assert segment.response_mask == [False] * len(segment.token_ids)
        assert segment.logprobs == [0.0] * len(segment.token_ids)


class ShortBoxes(BoxEnv):
    """Ends an episode by a limit of its own, and then lists nothing."""

    def reset(self, task: Task) -> Observation:
        self.turns = 0
        return super().reset(task)

    def step(self, action: str) -> StepResult:
        self.turns += 1
        result = super().step(action)
        return replace(result, truncated=self.turns >= 2 and not result.terminated)

    def admissible_actions(self) -> Sequence[str]:
        return [] if self.turns >= 2 else super().admissible_actions()


def test_a_state_that_the_world_itself_cut_is_read_with_what_is_possible_there(tmp_path: Path) -> None:
    """In prompts that list it; of a world that lists nothing there the list is empty."""
    chat = ChatText(
        system="take it", first="{instruction} , {observation}\n{admissible}", turn="{observation}\n{admissible}"
    )
    policy = made(save_tiny(tmp_path), chat=chat, lora=None)
    policy.add_critic(detach=False)
    collector = Collector(
        policy, InProcessPool(ShortBoxes), RULES["growing"], rows=4, max_action_tokens=8, leave_open=True
    )
    jobs = [EpisodeJob(TASKS.get("train", i), 9, (i,)) for i in range(6)]
    episodes = [episode for _, episode in sorted(collector.run(jobs, 3.0))]
    cut = [episode for episode in episodes if episode.end is EndReason.TRUNCATED]
    assert cut and all(len(episode.turns) == 2 and episode.segments[-1].is_left_open for episode in cut)
    assert len(rate([Group("g", "", tuple(episodes))], policy, 500).ends) == 6


def test_rollouts_that_were_not_played_for_a_critic_are_refused() -> None:
    policy = with_critic()
    groups = [Group("g", "", tuple(play(policy, RULES["growing"], leave_open=False)))]
    with pytest.raises(ValueError, match="ended as truncated with 4 values for 4 turns"):
        rate(groups, policy, 100)


def test_a_prompt_that_nothing_answers_is_not_trained_on() -> None:
    policy = with_critic()
    episode = next(e for e in play(policy, RULES["growing"]) if e.end is EndReason.TRUNCATED)
    segment = episode.segments[-1]
    n = len(episode.turns)
    row = pack_row(segment, 1.0)._replace(values=np.arange(n) / 2, value_targets=np.arange(n) / 4)
    batch = pack([row, row])
    assert batch.values is not None
    first = [start - 1 for start in segment.answer_starts[:n]]
    assert batch.values.states.tolist() == [*first, *(len(segment.token_ids) + i for i in first)]
    assert batch.values.old.tolist() == [*(np.arange(n) / 2), *(np.arange(n) / 2)]
    assert batch.values.targets.tolist() == [*(np.arange(n) / 4), *(np.arange(n) / 4)]
