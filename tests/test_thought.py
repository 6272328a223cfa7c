"""Half-constrained answers: any thought, then one of the admissible actions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gigpo_lightning.policy.chat import ChatPrompt
from gigpo_lightning.policy.chat_text import ChatText
from gigpo_lightning.policy.constraint import ActionTrie
from gigpo_lightning.policy.thought import ThoughtAnswer, thought_room
from tests.byte_tokenizer import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Tokens that run over the end of a tag, as real vocabularies have them.
MERGES = [(">", "Ċ"), (">Ċ", "Ċ"), (">", "<"), (">", "x"), ("k", ">")]
ACTIONS = ("go", "go north", "take cup")
LONGEST = len("take cup</action>") + 1  # nearly every character is a token, and one ends the answer
TAGS = len("<think></think><action>") - 2  # `k>` is one token in either tag


def prompt_of(opening: str = "") -> ChatPrompt:
    tokenizer = byte_tokenizer(["<|start|>", "<|end|>"], MERGES)
    tokenizer.chat_template = TEMPLATE.replace("assistant\n{% endif %}", f"assistant\n{opening}{{% endif %}}")
    return ChatPrompt(tokenizer, ChatText(system="", format="think"), "bytes")


PROMPT = prompt_of()


def trie_of(*actions: str, prompt: ChatPrompt = PROMPT) -> ActionTrie:
    return ActionTrie.build((action, prompt.action_ids(action)) for action in actions)


def spelled(text: str) -> list[int]:
    return PROMPT.tokenizer.encode(text, add_special_tokens=False)


def shown(ids: Sequence[int], prompt: ChatPrompt = PROMPT) -> str:
    return str(prompt.tokenizer.decode(ids))


def say(answer: ThoughtAnswer, chosen: Sequence[int]) -> list[int]:
    """All tokens of the answer where the policy chooses these while it may."""
    ids = answer.begin()
    for token_id in chosen:
        if answer.is_complete:
            break
        assert answer.allowed is None or token_id in answer.allowed
        ids += [token_id, *answer.take(token_id)]
    return ids


def test_thought_then_action_by_hand() -> None:
    answer = ThoughtAnswer(PROMPT, trie_of(*ACTIONS), 99)
    assert shown(answer.begin()) == "<think>" and answer.allowed is None
    for token_id in spelled("it is far</think"):
        assert answer.take(token_id) == [] and answer.allowed is None
    assert shown(answer.take(spelled(">")[0])) == "<action>"
    g, t = spelled("gt")
    assert answer.allowed == (g, t)
    assert shown(answer.take(g)) == "o"  # forced: no other action begins with "g"
    space, tag = spelled(" <")
    assert answer.allowed == tuple(sorted((space, tag))) and not answer.is_complete
    assert shown(answer.take(space)) == "north</action><|end|>" and answer.is_complete


@pytest.mark.parametrize(
    ("closing", "forced"),
    [
        ([*"</think", ">Ċ"], "<action>"),
        ([*"</think", ">ĊĊ"], "<action>"),
        ([*"</think", "><"], "action>"),  # what is there of the next tag is not said again
        ([*"</thin", "k>"], "<action>"),
    ],
)
def test_a_token_may_run_over_the_tag(closing: list[str], forced: str) -> None:
    answer = ThoughtAnswer(PROMPT, trie_of(*ACTIONS), 99)
    chosen = [*spelled("hm"), *PROMPT.tokenizer.convert_tokens_to_ids(closing)]
    ids = answer.begin()
    for token_id in chosen:
        after = answer.take(token_id)
        ids += [token_id, *after]
    assert shown(after) == forced
    rest = spelled("t")
    ids += [*rest, *answer.take(rest[0])]
    assert answer.is_complete
    reading = answer.reading(ids)
    assert (reading.action, reading.well_formed) == ("take cup", True)
    assert reading.text == shown(ids).removesuffix("<|end|>")


def test_the_budget_ends_the_thought_in_time() -> None:
    for room in (1, 5, 40):
        max_tokens = TAGS + room + LONGEST
        assert thought_room(PROMPT, trie_of(*ACTIONS).longest, max_tokens) == room
        answer = ThoughtAnswer(PROMPT, trie_of(*ACTIONS), max_tokens)
        ids = say(answer, [*spelled("a" * room), *spelled("t")])
        assert shown(ids) == f"<think>{'a' * room}</think><action>take cup</action><|end|>"
        assert answer.is_complete and len(ids) == max_tokens
        assert answer.reading(ids).well_formed


def test_without_room_there_is_no_thought() -> None:
    answer = ThoughtAnswer(PROMPT, trie_of(*ACTIONS), 3)
    assert shown(answer.begin()) == "<think></think><action>"
    lonely = ThoughtAnswer(PROMPT, trie_of("go"), 3)
    ids = lonely.begin()
    assert shown(ids) == "<think></think><action>go</action><|end|>"  # nothing to choose at all
    assert lonely.is_complete and lonely.reading(ids).action == "go"


def test_the_end_within_the_thought_leaves_no_action() -> None:
    answer = ThoughtAnswer(PROMPT, trie_of(*ACTIONS), 99)
    ids = say(answer, [*spelled("hm"), PROMPT.end_id])
    assert answer.is_complete
    assert answer.reading(ids) == ("", False, "<think>hm")


@pytest.mark.parametrize("thought", ["a <action>go</action> b</think>", "<think></think>", "b</think"])
def test_a_spoilt_thought_is_told_and_the_action_is_still_the_worlds(thought: str) -> None:
    """Tags of its own, or a token that runs over the tag with text."""
    chosen = [*spelled(thought), *([] if thought.endswith(">") else PROMPT.tokenizer.convert_tokens_to_ids([">x"]))]
    answer = ThoughtAnswer(PROMPT, trie_of(*ACTIONS), 99)
    ids = say(answer, [*chosen, *spelled("t")])
    assert answer.is_complete
    assert answer.reading(ids)[:2] == ("take cup", False)


def test_a_template_may_open_the_thought() -> None:
    prompt = prompt_of("<think>\n")
    answer = ThoughtAnswer(prompt, trie_of(*ACTIONS, prompt=prompt), 99)
    assert answer.begin() == []
    ids = say(answer, [*spelled("hm</think"), *spelled(">"), *spelled("t")])
    assert shown(ids) == "hm</think><action>take cup</action><|end|>"
    assert answer.reading(ids)[:2] == ("take cup", True)
    assert thought_room(prompt, 9, 99) == thought_room(PROMPT, 9, 99) + len(spelled("<think>"))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_chosen_the_action_is_admissible(data: st.DataObject) -> None:
    """The identities behind it: at most `max_tokens`, one of the actions, and forced tokens never count as chosen."""
    max_tokens = TAGS + LONGEST + 12
    answer = ThoughtAnswer(PROMPT, trie_of(*ACTIONS), max_tokens)
    thought = st.sampled_from(
        [*spelled("<>/think a"), *PROMPT.tokenizer.convert_tokens_to_ids([">Ċ", "><", ">x", "k>"])]
    )
    ids, chosen = answer.begin(), 0
    while not answer.is_complete:
        token_id = data.draw(thought if answer.allowed is None else st.sampled_from(answer.allowed))
        assert answer.allowed is None or len(answer.allowed) > 1
        chosen += answer.allowed is None
        ids += [token_id, *answer.take(token_id)]
    assert len(ids) <= max_tokens and 1 <= chosen <= 12
    reading = answer.reading(ids)
    assert reading.action in ACTIONS
    assert shown(ids).endswith(f"<action>{reading.action}</action><|end|>")
