"""Playing episodes: what was sampled is what is trained on, whatever the segments, the batch and the constraint."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gigpo_lightning.envs.base import Observation, StepResult
from gigpo_lightning.policy.engine import DecodingEngine, Said
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.pool import EnvState, InProcessPool
from gigpo_lightning.trajectory import EndReason, Episode, Segment
from tests.toy_world import BoxEnv, BoxTasks

TASKS = BoxTasks(4)


def make_policy(seed: int = 0) -> ScratchPolicy:
    # Large initial weights: the distributions must differ from uniform for the comparisons to mean something.
    policy = ScratchPolicy(hidden_size=32, layers=2, initializer_range=0.2, init_seed=seed)
    policy.prepare(TASKS)
    return policy.eval()


def play(
    policy: ScratchPolicy, rule: SegmentRule, *, rows: int = 8, constrain: bool = True, n: int = 12, temperature=1.3
):
    collector = Collector(policy, InProcessPool(BoxEnv), rule, rows=rows, constrain=constrain, max_action_tokens=8)
    jobs = [EpisodeJob(TASKS.get("train", i // 2), 3, (7, i)) for i in range(n)]
    played = dict(collector.run(jobs, temperature))
    return [played[i] for i in range(n)]


def rescore(policy: ScratchPolicy, segment: Segment, temperature: float) -> list[float]:
    """Log-probs of the chosen tokens by transformers' own forward pass, which shares no code with the sampler."""
    model = policy.model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([segment.token_ids])).logits[0].double() / temperature
    model.set_attn_implementation("gigpo_ragged")
    values, offset, choice = [], 0, 0
    for i, chosen in enumerate(segment.response_mask):
        if not chosen:
            continue
        row = logits[i - 1]
        width = segment.allowed_counts[choice]
        allowed = segment.allowed_ids[offset : offset + width] if width else list(range(len(row)))
        offset += width
        choice += 1
        values.append(float(row[segment.token_ids[i]] - row[allowed].logsumexp(0)))
    return values


@pytest.mark.parametrize("turns", [1, 2, None])
@pytest.mark.parametrize("constrain", [True, False])
def test_sampled_logprobs_are_those_of_a_plain_forward_pass(turns: int | None, constrain: bool) -> None:
    policy = make_policy()
    count = 0
    for episode in play(policy, SegmentRule(turns=turns, max_tokens=200), constrain=constrain):
        for segment in episode.segments:
            sampled = [p for p, m in zip(segment.logprobs, segment.response_mask, strict=True) if m]
            assert sampled == pytest.approx(rescore(policy, segment, 1.3), abs=1e-5)
            count += len(sampled)
    assert count >= 20


def actions(episodes: list[Episode]) -> list[list[str]]:
    return [[turn.action for turn in episode.turns] for episode in episodes]


def test_samples_do_not_depend_on_the_batch() -> None:
    policy, rule = make_policy(), SegmentRule(max_tokens=200)
    together = play(policy, rule, rows=12)
    assert actions(together) == actions(play(policy, rule, rows=1)) == actions(play(policy, rule, rows=5))
    # Members of a group have seeds of their own, so they differ.
    assert len({tuple(a) for a in actions(together)}) > 6


def test_greedy_is_the_most_likely_action_and_the_same_for_all_members() -> None:
    episodes = play(make_policy(), SegmentRule(max_tokens=200), temperature=0)
    assert actions(episodes)[0::2] == actions(episodes)[1::2]


@pytest.mark.parametrize("turns", [1, 2, None])
def test_every_turn_stands_in_exactly_one_segment(turns: int | None) -> None:
    for episode in play(make_policy(), SegmentRule(turns=turns, keep_last=2, max_tokens=200)):
        owners = [{t for t in segment.turn_index if t >= 0} for segment in episode.segments]
        assert sorted(t for owner in owners for t in owner) == list(range(len(episode.turns)))
        assert all(len(owner) <= (turns or 99) for owner in owners)
        for segment in episode.segments:
            lengths = {
                len(segment.token_ids),
                len(segment.response_mask),
                len(segment.turn_index),
                len(segment.logprobs),
            }
            assert len(lengths) == 1
            assert sum(segment.response_mask) == len(segment.allowed_counts)
            assert sum(segment.allowed_counts) == len(segment.allowed_ids)


def test_a_segment_of_one_turn_is_the_step_independent_prompt() -> None:
    policy = make_policy()
    prompt = policy.prompt
    for episode in play(policy, SegmentRule(turns=1, keep_last=0, keep_first_observation=False, max_tokens=200)):
        for turn, segment in zip(episode.turns, episode.segments, strict=True):
            header = prompt.header(episode.instruction, [], turn.observation)
            assert segment.token_ids == [*header, *prompt.action_ids(turn.action)]


def test_ends_are_told_apart() -> None:
    episodes = play(make_policy(), SegmentRule(max_tokens=200), n=40)
    for episode in episodes:
        assert (episode.end is EndReason.TERMINATED) == episode.turns[-1].action.startswith("take")
    assert {e.end for e in episodes} == {EndReason.TERMINATED, EndReason.TRUNCATED}
    short = play(make_policy(), SegmentRule(max_tokens=30, keep_last=9), n=40)
    assert EndReason.CONTEXT_LIMIT in {e.end for e in short}


def test_the_policy_goes_on_while_environments_elsewhere_work() -> None:
    policy, events = make_policy(), []

    class Elsewhere(InProcessPool):
        is_elsewhere = True

        def send(self, slots: Sequence[int], actions: Sequence[str]) -> None:
            events.append("send")
            super().send(slots, actions)

        def receive(self) -> list[EnvState]:
            events.append("receive")
            return super().receive()

    class Watched(DecodingEngine):
        def step(self) -> list[Said]:
            events.append("decode")
            return super().step()

    rule = SegmentRule(max_tokens=200)
    collector = Collector(policy, Elsewhere(BoxEnv), rule, rows=4, engine=Watched(policy, 264))
    jobs = [EpisodeJob(TASKS.get("train", i), 4, (7, i)) for i in range(6)]
    assert sorted(index for index, _ in collector.run(jobs, 1.3)) == list(range(6))
    story = " ".join(events)
    assert "send decode receive" in story and "send receive" not in story


class FlakyEnv(BoxEnv):
    """Fails at every third reset's first step."""

    resets = 0

    def reset(self, task):  # type: ignore[no-untyped-def]
        FlakyEnv.resets += 1
        self.fail = FlakyEnv.resets % 3 == 0
        return super().reset(task)

    def step(self, action):  # type: ignore[no-untyped-def]
        if self.fail:
            raise OSError("the lights went out")
        return super().step(action)


def test_a_failed_episode_is_replaced_and_counted() -> None:
    collector = Collector(make_policy(), InProcessPool(FlakyEnv), SegmentRule(max_tokens=200), rows=4)
    jobs = [EpisodeJob(TASKS.get("train", i), 5, (i,)) for i in range(10)]
    episodes = dict(collector.run(jobs, 1.0))
    assert sorted(episodes) == list(range(10))
    assert all(e.end is not EndReason.ERROR for e in episodes.values())
    assert collector.stats.env_errors and "the lights went out" in collector.stats.env_errors[0]


def test_too_many_failures_stop_with_the_environments_own_message() -> None:
    class DeadEnv(BoxEnv):
        def step(self, action):  # type: ignore[no-untyped-def]
            raise OSError("the lights went out")

    collector = Collector(make_policy(), InProcessPool(DeadEnv), SegmentRule(max_tokens=200), max_env_errors=5)
    with pytest.raises(ValueError, match=r"failed 6 times .*max_env_errors=5.*train-0: .*the lights went out") as end:
        list(collector.run([EpisodeJob(TASKS.get("train", 0), 5, (0,))], 1.0))
    assert 'raise OSError("the lights went out")' in str(end.value.__cause__)


class WordyEnv(BoxEnv):
    """Its boxes have long names that differ in the last word only: 3 + 3 · 40 tokens, and the end."""

    def admissible_actions(self) -> Sequence[str]:
        return [f"open box {'the box is ' * 40}{i}" for i in (1, 2)]

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("nothing happens ."), 0.0, False, False)


def test_long_actions_get_the_room_that_they_need() -> None:
    """The last token is chosen from the state after all others, which must fit behind the segment."""
    policy, jobs = make_policy(), [EpisodeJob(TASKS.get("train", i), 6, (i,)) for i in range(4)]

    def play_wordy(max_tokens: int) -> list[Episode]:
        collector = Collector(policy, InProcessPool(WordyEnv), SegmentRule(None, 0, False, max_tokens))
        return [episode for _, episode in collector.run(jobs, 1.0)]

    # A first prompt of 11 tokens; of an action's 124 tokens 64 lie beyond the segment: 71 hold one turn and no second.
    with pytest.raises(ValueError, match=r"max_tokens=70 leaves no room .*\(11 tokens\): raise it to at least 71"):
        play_wordy(70)
    for episode in play_wordy(71):
        assert [len(episode.turns), len(episode.segments)] == [6, 6]
    # Two turns in a segment: 11 + 124, 8 for the world's answer and its markers, 60.
    for episode in play_wordy(203):
        assert [len(episode.turns), len(episode.segments)] == [6, 3]


def test_a_process_may_have_nothing_to_play() -> None:
    """As in an evaluation of fewer tasks than processes."""
    collector = Collector(make_policy(), InProcessPool(BoxEnv), SegmentRule(max_tokens=200))
    assert list(collector.run([], 1.0)) == []
