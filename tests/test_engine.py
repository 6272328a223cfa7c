"""The decoding engine: prompts that were read are not read again, and rows go at their own pace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.policy.answering import Answer
from gigpo_lightning.policy.base import Reading
from gigpo_lightning.policy.engine import SHARED_TOKENS, DecodingEngine, Said, common_length
from gigpo_lightning.policy.scratch import ScratchPolicy
from tests.toy_world import BoxTasks


class Tokens(Answer):
    """A free answer of a given number of tokens, whatever they are; without one it never ends."""

    def __init__(self, count: int = 10_000) -> None:
        super().__init__()
        self.left = count

    def begin(self) -> list[int]:
        return []

    def take(self, token_id: int) -> list[int]:
        self.left -= 1
        self.is_complete = self.left == 0
        return []

    def reading(self, token_ids: Sequence[int]) -> Reading:
        return Reading("", True)


@pytest.fixture(scope="module")
def policy() -> ScratchPolicy:
    made = ScratchPolicy(hidden_size=32, layers=2, initializer_range=0.2)
    made.prepare(BoxTasks(4))
    return made.eval()


def started(policy: ScratchPolicy, slots: int = 8) -> DecodingEngine:
    engine = DecodingEngine(policy, 200)
    engine.begin(slots, 1.0)
    return engine


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(6, 40, length).tolist()


def ask(engine: DecodingEngine, slot: int, ids: list[int], count: int = 3) -> None:
    engine.ask(slot, ids, Tokens(count), np.random.default_rng(slot))


def drain(engine: DecodingEngine) -> dict[int, Said]:
    found: dict[int, Said] = {}
    for _ in range(200):
        found.update((said.slot, said) for said in engine.step())
    return found


def check(policy: ScratchPolicy, ids: list[int], said: Said) -> None:
    """Against transformers' own forward pass."""
    line = torch.tensor([ids + said.token_ids])
    policy.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = policy.model(input_ids=line).logits[0].log_softmax(-1)
    policy.model.set_attn_implementation("gigpo_ragged")
    expected = [float(logits[len(ids) + i - 1, t]) for i, t in enumerate(said.token_ids)]
    assert said.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_prompt_that_a_group_shares_is_read_once(policy: ScratchPolicy) -> None:
    engine, ids = started(policy), prompt(50)
    for slot in range(4):
        ask(engine, slot, ids, count=2)
    found = drain(engine)
    # The first reads 50 tokens, the others only the last one; each then feeds its first chosen token, not its last.
    assert (engine.tokens, engine.shared_tokens) == (50 + 3 * 1 + 4, 3 * 49)
    for said in found.values():
        check(policy, ids, said)
    assert len({tuple(said.token_ids) for said in found.values()}) > 1


def test_a_row_takes_over_what_another_has_read_before(policy: ScratchPolicy) -> None:
    engine, ids = started(policy), prompt(50)
    ask(engine, 0, ids)
    first = drain(engine)[0]
    later = [*ids[:40], 41, *prompt(8, seed=1)]  # 41 is not among the random tokens
    ask(engine, 1, later)
    check(policy, later, drain(engine)[1])
    assert engine.shared_tokens == 40
    check(policy, ids, first)


def test_a_short_common_beginning_is_not_worth_copying(policy: ScratchPolicy) -> None:
    engine, ids = started(policy), prompt(50)
    ask(engine, 0, ids)
    ask(engine, 1, [*ids[: SHARED_TOKENS - 1], *prompt(30, seed=1)])
    drain(engine)
    assert engine.shared_tokens == 0


def test_the_next_turn_reads_only_what_is_new_and_a_new_segment_what_differs(policy: ScratchPolicy) -> None:
    engine, ids = started(policy), prompt(50)
    ask(engine, 0, ids, count=2)
    said = drain(engine)[0]
    before = engine.tokens
    turn = [*ids, *said.token_ids, *prompt(5, seed=1)]
    ask(engine, 0, turn, count=1)
    check(policy, turn, drain(engine)[0])
    # The last token of the answer was not read yet; 5 are new. Going on is not sharing.
    assert (engine.tokens - before, engine.shared_tokens) == (1 + 5, 0)
    segment = [*ids[:30], 41, *prompt(9, seed=2)]  # 41 is not among the random tokens
    ask(engine, 0, segment, count=1)
    check(policy, segment, drain(engine)[0])
    assert (engine.tokens - before, engine.shared_tokens) == (1 + 5 + 10, 30)


def test_rows_of_any_length_answer_side_by_side_and_leave(policy: ScratchPolicy) -> None:
    """Long prompts arrive while others say single tokens, so that both blocks of attention are used."""
    engine, found, prompts = started(policy, 8), {}, {}
    for slot in range(8):
        prompts[slot] = prompt(10 + 7 * slot, seed=slot)
        ask(engine, slot, prompts[slot], count=3 + slot)
        found.update((said.slot, said) for said in engine.step())
    found.update(drain(engine))
    for slot in range(8):
        assert len(found[slot].token_ids) == 3 + slot
        check(policy, prompts[slot], found[slot])
    engine.leave(2)  # the last row takes its place in the cache, and goes on
    turn = [*prompts[7], *found[7].token_ids, *prompt(4, seed=99)]
    ask(engine, 7, turn)
    check(policy, turn, drain(engine)[7])


def test_rows_that_wait_for_their_world_are_not_disturbed(policy: ScratchPolicy) -> None:
    engine, first, second = started(policy), prompt(20), prompt(30, seed=1)
    ask(engine, 0, first, count=1)
    said = drain(engine)[0]
    ask(engine, 1, second, count=9)
    check(policy, second, drain(engine)[1])
    turn = [*first, *said.token_ids, *prompt(3, seed=2)]
    ask(engine, 0, turn)
    check(policy, turn, drain(engine)[0])


def test_a_new_collection_forgets_what_was_read_under_other_weights(policy: ScratchPolicy) -> None:
    engine, ids = started(policy), prompt(50)
    ask(engine, 0, ids)
    drain(engine)
    engine.begin(8, 1.0)
    ask(engine, 0, ids, count=1)
    drain(engine)
    assert (engine.tokens, engine.shared_tokens) == (50, 0)


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_the_common_beginning(a: list[int], b: list[int]) -> None:
    n = common_length(a, b)
    assert a[:n] == b[:n]
    assert a[: n + 1] != b[: n + 1] or n == min(len(a), len(b))


@pytest.mark.parametrize("how", ["left", "asked anew", "follower asked anew"])
def test_a_row_whose_example_goes_away_reads_by_itself(policy: ScratchPolicy, how: str) -> None:
    """Before the first step, slot 1 only waits for what slot 0 is about to read."""
    engine, ids, other = started(policy), prompt(40), prompt(30, seed=1)
    ask(engine, 0, ids)
    ask(engine, 1, ids)
    if how == "left":
        engine.leave(0)
    elif how == "asked anew":
        ask(engine, 0, other)
    else:
        ask(engine, 1, [*ids[:20], *other])
    found = drain(engine)
    check(policy, [*ids[:20], *other] if how == "follower asked anew" else ids, found[1])
    if how != "left":
        check(policy, other if how == "asked anew" else ids, found[0])


def test_what_cannot_be_answered_is_refused(policy: ScratchPolicy) -> None:
    engine = DecodingEngine(policy, 200)
    with pytest.raises(ValueError, match="there are 0 conversations under way, as many as were begun"):
        ask(engine, 0, [6, 7])
    for slots, temperature in ((-1, 1.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(ValueError, match="both must be at least 0"):
            engine.begin(slots, temperature)
    engine.begin(1, 1.0)
    for ids, count in (([], 1), ([6] * 201, 1), ([6], 0)):
        answer = Tokens(count)
        answer.is_complete = count == 0
        with pytest.raises(ValueError, match="there must be 1 to 200 tokens and something left to answer"):
            engine.ask(0, ids, answer, np.random.default_rng(0))
    words = policy.model.config.vocab_size
    for wrong in (words, -1):
        with pytest.raises(ValueError, match=f"slot 0: token {wrong} is none of the {words} words"):
            ask(engine, 0, [6, wrong])
    ask(engine, 0, [6, 7])
    with pytest.raises(ValueError, match="slot 1: there are 1 conversations under way"):
        ask(engine, 1, [6, 7])
    engine.leave(0)
    engine.leave(0)  # nobody is there any more
    ask(engine, 1, [6, 7])
    assert list(drain(engine)) == [1]
