"""The trie of the admissible actions: what may come next, what is forced, and lists that cannot be told apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.policy.constraint import ActionTrie

END = 0


def test_choices_and_forced_tokens_by_hand() -> None:
    trie = ActionTrie.build([("go a", [5, 1, END]), ("go b", [5, 2, END]), ("look", [7, END])])
    assert trie.allowed == (5, 7)
    assert trie.follow_forced() == ([], trie)  # a choice stands first
    forced, leaf = trie.child(7).follow_forced()
    assert (forced, leaf.action, leaf.allowed) == ([END], "look", ())
    assert trie.child(5).allowed == (1, 2)
    assert trie.child(5) is trie.child(5)  # members of a group share what was made
    assert (trie.longest, trie.child(5).longest, trie.child(7).longest, leaf.longest) == (3, 2, 1, 0)
    assert trie.child(5).child(2).follow_forced()[1].action == "go b"
    with pytest.raises(KeyError):
        trie.child(6)


def test_a_single_action_is_forced_to_its_end() -> None:
    forced, leaf = ActionTrie.build([("look", [7, 3, END])]).follow_forced()
    assert (forced, leaf.action) == ([7, 3, END], "look")


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([], "no admissible action: the environment must list at least one, or None"),
        ([("a", [4, END]), ("b", [4, END])], "action 'b' cannot be told from 'a' .* data.constrain: false"),
        ([("a", [4, END]), ("a", [4, END])], "action 'a' cannot be told from 'a'"),
        ([("a", [4, END]), ("b", [4])], "action 'b' could be a prefix"),
        ([("a", [4, END]), ("b", [4, END, 5, END])], "action 'b' could be a prefix"),
        ([("a", [])], "action 'a' could be a prefix"),
    ],
)
def test_actions_that_cannot_be_told_apart_are_refused(actions: list[tuple[str, list[int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActionTrie.build(actions)


@given(st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, unique_by=tuple))
def test_every_action_is_reached_and_nothing_else(bodies: list[list[int]]) -> None:
    actions = {(*body, END): str(body) for body in bodies}
    reached, open_nodes = {}, [((), ActionTrie.build([(text, ids) for ids, text in actions.items()]))]
    while open_nodes:
        path, node = open_nodes.pop()
        if node.action is not None:
            reached[path] = node.action
        open_nodes += [((*path, token), node.child(token)) for token in node.allowed]
    assert reached == actions
