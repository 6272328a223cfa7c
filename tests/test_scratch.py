"""The policy made on the spot: its tokenizer, its prompt, and the start of its attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gigpo_lightning.policy import scratch
from gigpo_lightning.policy.base import KeptTurn
from gigpo_lightning.policy.ragged import PackedRows, run_ragged
from gigpo_lightning.policy.scratch import ScratchPolicy, build_tokenizer, count_parameters
from tests.toy_world import BoxTasks

NAN, INF = float("nan"), float("inf")


def made(**options: Any) -> ScratchPolicy:
    policy = ScratchPolicy(**{"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, **options})
    policy.prepare(BoxTasks())
    return policy.eval()


def test_longest_phrase_wins_and_words_end_where_their_letters_end() -> None:
    tokenizer = build_tokenizer(["go to", "go", "pen", "pencil", "1", "10"])
    assert tokenizer.tokenize("go to pencil 10 pen 1 go") == ["go to", "pencil", "10", "pen", "1", "go"]


def test_unknown_words_are_spelled_so_that_no_two_actions_share_their_tokens() -> None:
    prompt = made().prompt
    assert prompt.action_ids("open zap 1") != prompt.action_ids("open zip 1")
    unknown = prompt.tokenizer.unk_token_id  # type: ignore[attr-defined]
    assert unknown not in prompt.action_ids("open zap ~!@ 77")


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary is empty"):
        build_tokenizer([" ", ""])


@pytest.mark.parametrize("repeat", [True, False])
def test_the_goal_stands_before_every_answer_or_once(repeat: bool) -> None:
    prompt = made(repeat_instruction=repeat).prompt
    goal = list(prompt.action_ids("take the cup")[:-1])
    kept = [KeptTurn("you see 3 box .", prompt.action_ids("open box 1"))]
    ids = prompt.header("take the cup", kept, "in it is a book .")
    later = prompt.continuation("take the cup", "done .")

    def occurrences(line: list[int]) -> list[int]:
        return [i for i in range(len(line)) if line[i : i + len(goal)] == goal]

    assert len(occurrences(ids)) == 1
    assert len(occurrences(later)) == int(repeat)
    # Repeated, it ends one token before the answer; otherwise it follows <bos> and <task>.
    assert occurrences(ids) == ([len(ids) - 1 - len(goal)] if repeat else [2])


def test_a_verb_that_is_written_last_is_read_back_first() -> None:
    policy = made(verb_last=["open"])
    words = policy.prompt.tokenizer.convert_ids_to_tokens  # type: ignore[attr-defined]
    ids = policy.prompt.action_ids("open box 1")
    assert words(ids) == ["box", "1", "open", "<end>"]
    assert words(policy.prompt.action_ids("take the cup")) == ["take", "the", "cup", "<end>"]  # others as they stand
    for action in ("open box 1", "open", "take the cup"):
        assert policy.prompt.action_text(policy.prompt.action_ids(action)) == action
    with pytest.raises(ValueError, match=r"'take open' ends with a word of policy\.verb_last"):
        policy.prompt.action_ids("take open")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("open", r"verb_last='open': must be a list of words, e\.g\. \[take\]"),
        (None, r"verb_last=None: must be a list of words.*\[\] for none"),
        (["open", "take", "open"], "verb_last: 'open' is listed twice"),
        (["open box"], "verb_last has 'open box': it must be one entry of the world's vocabulary"),
        (["tkae"], "verb_last has 'tkae': .*; did you mean 'take'"),
        ([""], "verb_last has ''"),
        (["<end>"], "verb_last has '<end>': it must be one entry of the world's vocabulary$"),
        (["<unk>"], "verb_last has '<unk>'"),
        (["z"], "verb_last has 'z'"),  # a token that spells words, none of the world's
    ],
)
def test_what_cannot_be_written_last_is_refused(words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(verb_last=words)


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = made(init_seed=1), made(init_seed=1), made(init_seed=2)
    assert torch.equal(torch.rand(1), expected)
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)


def test_the_start_copies_what_was_read_last() -> None:
    """The mean logit of a word read just before exceeds its mean elsewhere; without the start it need not."""

    def advantage(copy: float, recency: float) -> float:
        policy = made(copy_init=copy, recency_init=recency, initializer_range=0.05, hidden_size=64)
        words = torch.arange(6, 100)
        gains = []
        for word in words[::5]:
            line = torch.cat([words[:40], word[None], torch.tensor([3, 4])])
            rows = PackedRows.from_lengths([len(line)])
            with torch.no_grad():
                logits = policy.output_layer().all(run_ragged(policy.model, line, rows.position, rows)[-1:])[0]
            gains.append(float(logits[word] - logits[words].mean()))
        return sum(gains) / len(gains)

    assert advantage(1.0, 1.0) > 5 * abs(advantage(0.0, 0.0))
    assert advantage(1.0, 1.0) > advantage(1.0, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 30, "heads": 4}, "multiple of 2 × heads"),
        ({"layers": 0}, "layers=0"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"intermediate_size": 0}, "policy.intermediate_size=0: must be at least 1"),
        ({"intermediate_size": -1}, "policy.intermediate_size=-1"),
        ({"max_positions": 0}, "policy.max_positions=0"),
        *[({"initializer_range": value}, f"initializer_range={value}: must lie in") for value in (0.0, 1.1, NAN, INF)],
        *[({name: value}, f"policy.{name}={value}") for name in ("copy_init", "recency_init") for value in (NAN, INF)],
        *[({"rope_theta": value}, f"rope_theta={value}: must be positive") for value in (0.0, -1.0, NAN, INF)],
        *[({"init_seed": value}, f"init_seed={value}") for value in (-1, 2**63)],
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_ten_million_parameters_are_in_reach_and_more_than_fifty_are_refused() -> None:
    large = made(hidden_size=384, layers=6, heads=6, kv_heads=6)
    assert 9e6 < sum(p.numel() for p in large.parameters()) < 12e6
    with pytest.raises(ValueError, match="50,000,000"):
        made(hidden_size=1024, layers=8, heads=8, kv_heads=8)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1}, {"intermediate_size": 7, "layers": 3}])
def test_parameters_are_counted_before_they_are_made(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made(**options)
    assert count_parameters(policy.model.config) == sum(p.numel() for p in policy.parameters())
    monkeypatch.setattr(scratch, "LlamaForCausalLM", lambda *_: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=r"policy has \d\d,\d{3},\d{3},\d{3},\d{3} parameters"):
        made(hidden_size=2**20, **options)


def test_another_architecture_has_another_identity() -> None:
    identity = made().identity()
    assert identity == made(init_seed=3).identity()  # only what the weights' shapes and meaning depend on
    assert identity != made(repeat_instruction=False).identity()
    assert identity != made(layers=3).identity()
    assert identity != made(verb_last=["open"]).identity()


def test_a_cache_longer_than_the_policy_has_positions_is_refused() -> None:
    policy = made(max_positions=100)
    assert policy.new_cache(1, 100).capacity == 100
    with pytest.raises(ValueError, match=r"100 positions.*101 tokens: lower data.segments.max_tokens"):
        policy.new_cache(1, 101)
