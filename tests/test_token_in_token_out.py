"""What is sampled is what is trained on: for every turn of real episodes the update's log-probs are the sampler's.

Generated ALFWorld households, a tiny model with a moved adapter, and every way of answering.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gigpo_lightning.batch import pack
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.demonstrations import pack_row
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.trajectory import Episode
from tests.tiny_lm import CHAT, made, save_tiny

TASKS = GeneratedTasks(difficulty={"receptacles": [2, 3]})
TEMPERATURE = 0.7
TURNS, ANSWER_TOKENS = 5, 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Weights of 0.1: at the 0.2 of other tests float32 rounds log-probs of -10 by 1e-5 over some 400 tokens.
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny(folder, tasks=TASKS, max_position_embeddings=2048, initializer_range=0.1)


def play(policy: CausalLMPolicy, constrain: bool, turns: int | None, **segments: Any) -> list[Episode]:
    rule = SegmentRule(turns=turns, **{"max_tokens": 800, **segments})
    pool = InProcessPool(TASKS.make_env)
    collector = Collector(policy, pool, rule, rows=3, constrain=constrain, max_action_tokens=ANSWER_TOKENS)
    jobs = [EpisodeJob(TASKS.get("train", i // 2), TURNS, (i,)) for i in range(6)]
    return [episode for _, episode in sorted(collector.run(jobs, TEMPERATURE))]


def check_turns(policy: CausalLMPolicy, episodes: list[Episode]) -> None:
    """Each chosen token of each turn against the update's log-prob, all segments in one batch."""
    segments = [s for e in episodes for s in e.segments if any(s.response_mask)]
    sampled = [(p, t) for s in segments for p, t, m in zip(s.logprobs, s.turn_index, s.response_mask, strict=True) if m]
    with torch.no_grad():
        found, _ = policy.chosen_logprobs(pack([pack_row(s, 1.0) for s in segments]), TEMPERATURE)
    assert len(found) == len(sampled) and min(p for p, _ in sampled) < -1  # far from certain
    assert {t for _, t in sampled} == set(range(TURNS))
    for update, (sampler, turn) in zip(found.tolist(), sampled, strict=True):
        assert update == pytest.approx(sampler, abs=1e-5), f"turn {turn}"


@pytest.mark.parametrize("turns", [1, 3, None])
@pytest.mark.parametrize(
    ("form", "constrain"),
    [("plain", True), ("plain", False), ("think", False), ("think", True)],
)
def test_the_updates_logprobs_are_the_samplers(source: str, form: str, constrain: bool, turns: int | None) -> None:
    policy = made(source, chat=replace(CHAT, format=form))
    episodes = play(policy, constrain, turns)
    check_turns(policy, episodes)
    counts = {n for e in episodes for s in e.segments for n in s.allowed_counts}
    assert (0 in counts) == (not constrain or form == "think")  # choices among the whole vocabulary
    assert (max(counts) > 1) == constrain  # choices among what the actions allow
    assert 1 not in counts


# In five turns few episodes come back to a state before their fourth.
@pytest.mark.parametrize(("keyframes", "turns"), [("anchors", 1), ("changes", 1), ("changes", 3)])
def test_headers_with_keyframes_are_trained_on_as_they_were_read(source: str, keyframes: str, turns: int) -> None:
    policy = made(source, chat=CHAT)
    episodes = play(policy, True, turns, keep_last=1, keyframes=keyframes, keep_keyframes=2)
    check_turns(policy, episodes)
    headers = [[s.turn_index.count(-1) for s in e.segments] for e in episodes]
    plain = [[s.turn_index.count(-1) for s in e.segments] for e in play(policy, True, turns, keep_last=1)]
    assert headers != plain  # some header shows a keyframe


def test_half_constrained_answers_reason_and_act_admissibly(source: str) -> None:
    policy = made(source, chat=replace(CHAT, format="think"))
    episodes = play(policy, True, None)
    turns = [turn for episode in episodes for turn in episode.turns]
    assert sum(turn.well_formed for turn in turns) > len(turns) / 2  # a random thought seldom holds a tag
    for turn in turns:
        assert turn.answer.startswith("<think>") and turn.answer.endswith(f"<action> {turn.action} </action>")
        assert turn.admissible and turn.valid
        assert turn.tokens <= ANSWER_TOKENS


def test_with_an_adapter_that_moved_on_they_differ(source: str) -> None:
    """The check itself: it must see weights that are not those that sampled."""
    policy = made(source, chat=CHAT)
    episodes = play(policy, True, None)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.01)
    with pytest.raises(AssertionError, match="turn 0"):
        check_turns(policy, episodes)
