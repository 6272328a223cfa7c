"""How episodes are cut: what a header shows under each rule, what gives way where room is short, and the identities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.policy.base import KeptTurn
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import EpisodeContext, SegmentRule
from gigpo_lightning.rollout.keyframes import KEYFRAMES, PastTurn, anchors, changes
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.trajectory import EndReason, Episode, Turn

HOUSES = GeneratedTasks(difficulty={"receptacles": [3, 4]})


def past(states: str, rewards: Sequence[float] = ()) -> list[PastTurn]:
    """The turns of an episode that went through these states, one letter each."""
    earned = [*rewards, *[0.0] * len(states)]
    return [PastTurn(a, b, r) for a, b, r in zip(states, states[1:], earned, strict=False)]


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("", []),
        ("a", []),
        ("abc", []),  # nowhere twice
        ("aba", [0]),  # back at a: turn 0 left it
        ("abab", [1, 2]),  # a was left at 0 and 2, b at 1 and is the present state
        ("aabca", [1]),  # a was left at 0 and 1: the latest
        ("abcbd", [3]),  # b: at 1 and 3
    ],
)
def test_anchors_are_the_last_turns_in_states_where_the_episode_was_twice(states: str, expected: list[int]) -> None:
    assert anchors(past(states)) == expected


def test_changes_are_turns_that_moved_the_state_or_earned_something() -> None:
    # a → a → b → b → b: turn 1 moved, turn 3 earned; a loss is something, too
    assert changes(past("aabbb", [0.0, 0.0, 0.0, 1.0])) == [1, 3]
    assert changes(past("aa", [-0.5])) == [0]
    assert changes([]) == []


# -- headers -----------------------------------------------------------------------------------------------------------


class Numbers:
    """Each observation and each answer is one token; a header shows turns as they come."""

    def header(
        self, instruction: str, kept: Sequence[KeptTurn], observation: str, admissible: Sequence[str] | None = None
    ) -> list[int]:
        return [*(i for turn in kept for i in (int(turn.observation), *turn.action_ids)), int(observation)]

    def continuation(self, instruction: str, observation: str, admissible: Any = None) -> list[int]:
        return [int(observation)]


def header_after(states: str, reserve: int = 1, **rule: Any) -> tuple[list[int], EpisodeContext]:
    """The header of the present turn. Turn i read token i and said token 100 + i."""
    whole = SegmentRule(turns=1, **{"max_tokens": 100, **rule})
    context = EpisodeContext(Numbers(), whole, "", "0", anchor=states[0])  # type: ignore[arg-type]
    for turn, state in enumerate(states[1:]):
        context.answer([100 + turn], [0.0], [None])
        context.observe(str(turn + 1), reserve, anchor=state, reward=0.0)
    return context.token_ids, context


def shown(token_ids: Sequence[int]) -> list[int]:
    """The turns that a header shows with their answers."""
    return [i - 100 for i in token_ids if i >= 100]


def test_a_header_shows_keyframes_before_the_last_turns() -> None:
    states = "abcbddea"  # turns 0–6; now in a again. changes: all but 4 (d → d); anchors: 0 (a), 3 (b), 5 (d)
    assert shown(header_after(states, keep_last=2)[0]) == [5, 6]
    assert shown(header_after(states, keep_last=2, keyframes="anchors")[0]) == [0, 3, 5, 6]
    assert shown(header_after(states, keep_last=0, keyframes="anchors", keep_keyframes=2)[0]) == [3, 5]
    assert shown(header_after(states, keep_last=2, keyframes="changes")[0]) == [0, 1, 2, 3, 5, 6]
    assert shown(header_after(states, keep_last=2, keyframes="changes", keep_keyframes=2)[0]) == [2, 3, 5, 6]
    assert shown(header_after(states, keep_last=1, keyframes="changes", keep_keyframes=2)[0]) == [3, 5, 6]
    assert shown(header_after(states, keep_last=20, keyframes="changes")[0]) == list(range(7))
    # The first observation stands in front, but not twice.
    assert header_after(states, keep_last=0, keyframes="anchors", keep_keyframes=1)[0] == [0, 5, 105, 7]
    assert header_after(states, keep_last=1, keyframes="anchors")[0] == [0, 100, 3, 103, 5, 105, 6, 106, 7]
    plain = header_after(states, keep_last=0, keyframes="anchors", keep_keyframes=1, keep_first_observation=False)
    assert plain[0] == [5, 105, 7]


def test_the_oldest_keyframes_give_way_to_the_answer() -> None:
    states = "abcdefghijkl"  # turn 11: 0 to 10 have moved
    rule: dict[str, Any] = {"keep_last": 2, "keyframes": "changes", "keep_keyframes": 6, "max_tokens": 16}
    # First observation 1, last two turns 4, observation 1: 10 tokens are left, an answer of 1 leaves 9: 4 turns.
    token_ids, context = header_after(states, **rule)
    assert shown(token_ids) == [5, 6, 7, 8, 9, 10] and context.room == 2
    token_ids, context = header_after(states, reserve=7, **rule)  # 3 tokens: 1 turn
    assert shown(token_ids) == [8, 9, 10] and context.room == 8
    # Without any keyframe it still does not fit: the last turns stay, and the episode ends as `context_limit`.
    token_ids, context = header_after(states, reserve=11, **rule)
    assert shown(token_ids) == [9, 10] and context.room == 10


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"keyframes": "all"}, "keyframes='all': choose one of anchors, changes, or null"),
        ({"keep_keyframes": 0}, "keep_keyframes=0: must be at least 1"),
        ({"keep_last": -1}, "keep_last=-1: must be at least 0"),
    ],
)
def test_a_bad_option_is_named(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentRule(**rule)


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy() -> ScratchPolicy:
    made = ScratchPolicy(16, layers=1, heads=2, kv_heads=1, initializer_range=0.3)
    made.prepare(HOUSES)
    return made.eval()


def play(policy: ScratchPolicy, rule: SegmentRule, n: int = 6, max_turns: int = 12) -> list[Episode]:
    collector = Collector(policy, InProcessPool(HOUSES.make_env), rule, rows=4)
    jobs = [EpisodeJob(HOUSES.get("train", i // 2), max_turns, (i,)) for i in range(n)]
    return [episode for _, episode in sorted(collector.run(jobs, 1.5))]


def expected_turns(turns: Sequence[Turn], keyframes: str | None, keep_last: int, keep_keyframes: int) -> list[int]:
    """By the definitions, from what is recorded: which turns the header of the last of `turns` shows."""
    states = [turn.anchor for turn in turns]
    done, last = range(len(turns) - 1), max(0, len(turns) - 1 - keep_last)
    if keyframes == "changes":
        frames = [i for i in done if states[i] != states[i + 1] or turns[i].reward]
    elif keyframes == "anchors":
        frames = [i for i in done if states.count(states[i]) > 1 and states[i] not in states[i + 1 : -1]]
    else:
        frames = []
    return [*[i for i in frames if i < last][-keep_keyframes:], *range(last, len(turns) - 1)]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("keyframes", [None, *KEYFRAMES])
def test_one_turn_per_segment_is_the_step_independent_prompt(
    policy: ScratchPolicy, keyframes: str | None, first: bool
) -> None:
    """Every turn's token ids are those of a prompt that is made anew from texts, and the answer."""
    rule = SegmentRule(1, 2, first, 2000, keyframes, 3)
    beyond, prompt = 0, policy.prompt
    for episode in play(policy, rule):
        answers = [prompt.action_ids(turn.action) for turn in episode.turns]
        for number, segment in enumerate(episode.segments):
            turns = episode.turns[: number + 1]
            kept = expected_turns(turns, keyframes, 2, 3)
            beyond += len(kept) > 2
            frames = [KeptTurn(turns[i].observation, answers[i]) for i in kept]
            if first and number and 0 not in kept:
                frames = [KeptTurn(turns[0].observation, ()), *frames]
            header = prompt.header(episode.instruction, frames, turns[-1].observation)
            assert segment.token_ids == [*header, *answers[number]]
            assert segment.turn_index == [-1] * len(header) + [number] * len(answers[number])
        assert len(episode.segments) == len(episode.turns)
    assert (beyond > 10) == (keyframes is not None)


@pytest.mark.parametrize("keyframes", [None, *KEYFRAMES])
def test_context_limit_is_counted_as_such_under_every_rule(policy: ScratchPolicy, keyframes: str | None) -> None:
    room = max(len(s.token_ids) for e in play(policy, SegmentRule(1, 0, max_tokens=2000)) for s in e.segments) + 16
    # The barest prompt fits: keyframes give way and no episode ends early.
    ends = {e.end for e in play(policy, SegmentRule(1, 0, True, room, keyframes, 9))}
    assert EndReason.CONTEXT_LIMIT not in ends
    # Nine last turns do not, and they do not give way.
    episodes = play(policy, SegmentRule(1, 9, True, room, keyframes, 9))
    limited = [e for e in episodes if e.end is EndReason.CONTEXT_LIMIT]
    assert limited and all(len(e.segments) == len(e.turns) < 12 for e in limited)


def test_each_rule_plays_on_its_own_episode_only(policy: ScratchPolicy) -> None:
    """What is played beside an episode, and in which order, does not move its prompts."""
    rule = SegmentRule(2, 1, True, 2000, "anchors", 3)
    together = play(policy, rule)
    collector = Collector(policy, InProcessPool(HOUSES.make_env), rule, rows=1)
    jobs = [EpisodeJob(HOUSES.get("train", i // 2), 12, (i,)) for i in range(6)]
    alone = [next(iter(collector.run([job], 1.5)))[1] for job in jobs]
    assert [[s.token_ids for s in e.segments] for e in together] == [[s.token_ids for s in e.segments] for e in alone]
