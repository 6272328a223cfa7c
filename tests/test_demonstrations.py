"""The expert's episodes as token rows: the same rows that sampling these actions would have given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from gigpo_lightning.envs.base import Observation
from gigpo_lightning.policy.chat import ChatPrompt
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.policy.tries import TrieCache
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.demonstrations import demonstrate, pack_row
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.trajectory import Segment
from tests.tiny_lm import CHAT, save_tokenizer
from tests.toy_world import BoxEnv, BoxExpert, BoxTasks

TASKS = BoxTasks(3)
ROOM_TOKENS = 16


@pytest.fixture(scope="module")
def policy() -> ScratchPolicy:
    made = ScratchPolicy(16, layers=1, heads=2, kv_heads=1)  # near to uniform: every short episode is played sometimes
    made.prepare(TASKS)
    return made.eval()


def show(policy: ScratchPolicy, index: int, rule: SegmentRule, max_turns: int = 5) -> tuple[Segment, ...]:
    task = TASKS.get("train", index)
    return demonstrate(
        policy, TrieCache(policy.prompt), BoxEnv(), BoxExpert(), rule, task, max_turns, room_tokens=ROOM_TOKENS
    )


class Player(BoxExpert):
    """The expert with a memory of what it did."""

    def __init__(self) -> None:
        self.actions: list[str] = []

    def act(self, observation: Observation, admissible: Sequence[str]) -> str:
        self.actions.append(super().act(observation, admissible))
        return self.actions[-1]


@pytest.mark.parametrize("turns", [None, 1, 2])
def test_rows_are_those_of_a_rollout_with_the_same_actions(policy: ScratchPolicy, turns: int | None) -> None:
    """Play until a sampled episode happens to do what the expert does: their rows must agree in all but log-probs."""
    rule = SegmentRule(turns=turns, max_tokens=200)
    jobs = [EpisodeJob(TASKS.get("train", i % 8), 5, (i,)) for i in range(400)]
    episodes = Collector(policy, InProcessPool(BoxEnv), rule, max_action_tokens=ROOM_TOKENS).run(jobs, 1.0)
    agreed: dict[int, int] = {}
    for number, episode in episodes:
        index = number % 8
        player = Player()
        task = TASKS.get("train", index)
        shown = demonstrate(policy, TrieCache(policy.prompt), BoxEnv(), player, rule, task, 5, ROOM_TOKENS)
        if [turn.action for turn in episode.turns] == player.actions:
            agreed[index] = len(player.actions)
            for one, other in zip(shown, episode.segments, strict=True):
                for name in ("token_ids", "response_mask", "turn_index", "allowed_ids", "allowed_counts"):
                    assert getattr(one, name) == getattr(other, name)
    assert len(agreed) >= 3
    assert max(agreed.values()) >= 3  # not only episodes of one open and one take


def test_a_thought_is_empty_and_not_imitated(tmp_path: Path) -> None:
    prompt = ChatPrompt(
        AutoTokenizer.from_pretrained(save_tokenizer(tmp_path)),
        replace(CHAT, format="think", turn="{observation}"),
        "tiny",
    )
    policy = SimpleNamespace(prompt=prompt)
    (segment,) = show(policy, 0, SegmentRule(max_tokens=200))  # type: ignore[arg-type]
    text = prompt.tokenizer.decode(segment.token_ids)
    chosen = [segment.token_ids[i] for i, mask in enumerate(segment.response_mask) if mask]
    actions = re.findall("<think> </think> <action> (.*?) </action> <end>", text)
    assert len(actions) == max(segment.turn_index) + 1 >= 2
    # Of "open box 1" the number is chosen among three; once something is seen, the verb as well.
    assert prompt.tokenizer.decode(chosen).split() == [
        actions[0].split()[-1],
        *[w for action in actions[1:] for w in action.split() if w in "123" or w in ("open", "take")],
    ]
    assert min(segment.allowed_counts) >= 2


def test_an_expert_that_needs_too_long_shows_nothing(policy: ScratchPolicy) -> None:
    rule = SegmentRule(max_tokens=200)
    needed = [len({t for s in show(policy, i, rule) for t in s.turn_index if t >= 0}) for i in range(8)]
    assert set(needed) == {2, 3, 4}  # the thing is in the first, second or third box
    for index, turns in enumerate(needed):
        assert show(policy, index, rule, max_turns=turns - 1) == ()
        assert show(policy, index, rule, max_turns=turns)


def test_an_episode_that_leaves_no_room_shows_nothing(policy: ScratchPolicy) -> None:
    assert show(policy, 0, SegmentRule(max_tokens=26, keep_last=9)) == ()


def test_an_action_that_is_not_admissible_is_refused(policy: ScratchPolicy) -> None:
    class Wrong(BoxExpert):
        def act(self, observation: Observation, admissible: Sequence[str]) -> str:
            return "open box 9"

    task, rule = TASKS.get("train", 0), SegmentRule(max_tokens=200)
    with pytest.raises(ValueError, match="the expert took 'open box 9', which is not among 3 admissible actions"):
        demonstrate(policy, TrieCache(policy.prompt), BoxEnv(), Wrong(), rule, task, 5, ROOM_TOKENS)


def test_a_world_that_lists_no_actions_is_refused(policy: ScratchPolicy) -> None:
    class Silent(BoxEnv):
        def admissible_actions(self) -> None:  # type: ignore[override]
            return None

    task, rule = TASKS.get("train", 0), SegmentRule(max_tokens=200)
    with pytest.raises(ValueError, match="needs a world that lists its admissible actions"):
        demonstrate(policy, TrieCache(policy.prompt), Silent(), BoxExpert(), rule, task, 5, ROOM_TOKENS)


def test_pack_row_counts_turns_from_zero() -> None:
    """A segment that begins with turn 4 of its episode and holds turns 4 and 5."""
    segment = Segment(
        [7, 8, 9, 10], [False, True, False, True], [-1, 4, 5, 5], [0.0] * 4, [8, 11, 10, 12], [2, 2], [1, 3]
    )
    row = pack_row(segment, 0.5)
    assert row.turn_index.tolist() == [-5, 0, 1, 1]  # the header's is read nowhere
    assert row.advantages.tolist() == [0.5, 0.5]
    assert row.token_ids.tolist() == [7, 8, 9, 10]
    assert row.allowed_ids.tolist() == [8, 11, 10, 12]
    assert row.allowed_counts.tolist() == [2, 2]
