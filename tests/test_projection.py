"""Free text to actions: format and admissibility are told apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.policy.projection import FORMATS, admit, parse, written

ADMISSIBLE = ["open box 1", "take the Cup"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("open box 1", ("open box 1", True)),
        ("  open   box 1 \n", ("open box 1", True)),  # spaces are no sin
        ("open box 1\nbecause it is near", ("open box 1", False)),  # the first line counts
        ("", ("", False)),
        (" \n ", ("", False)),
    ],
)
def test_plain_is_one_line(text: str, expected: tuple[str, bool]) -> None:
    assert parse(text, "plain") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>it is\nnear</think>\n<action>open box 1</action>", ("open box 1", True)),
        ("<think></think><action> open\nbox 1 </action>\n", ("open box 1", True)),
        ("<action>open box 1</action>", ("open box 1", False)),  # no thought
        ("<think>a</think><action>open box 1</action> and so on", ("open box 1", False)),
        ("<think>a</think><action>go</action><action>open box 1</action>", ("open box 1", False)),  # the last counts
        ("<think>a</think><think>b</think><action>open box 1</action>", ("open box 1", False)),
        ("<think><action>go</action></think><action>open box 1</action>", ("open box 1", False)),
        ("<think>a</think><action></action>", ("", False)),
        ("<think>a</think><action>open box 1", ("", False)),  # never closed
        ("open box 1", ("", False)),
    ],
)
def test_think_wants_each_tag_once_and_nothing_else(text: str, expected: tuple[str, bool]) -> None:
    assert parse(text, "think") == expected


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("open box 1", ("open box 1", True)),
        ("Open  BOX 1", ("open box 1", True)),  # the world's own spelling is sent
        ("take the cup", ("take the Cup", True)),
        ("open box 9", ("open box 9", False)),
        ("open box", ("open box", False)),  # a part of an action is none
        ("", ("", False)),
    ],
)
def test_an_action_is_admitted_in_the_worlds_spelling(action: str, expected: tuple[str, bool]) -> None:
    assert admit(action, ADMISSIBLE) == expected


def test_a_world_that_lists_nothing_admits_everything() -> None:
    assert admit("sing", None) == ("sing", True)


def test_of_actions_that_differ_in_case_only_the_exact_one_is_meant() -> None:
    assert admit("Go", ["go", "Go"]) == ("Go", True)
    assert admit("GO", ["go", "Go"]) == ("go", True)  # else the first


@given(st.sampled_from(FORMATS), st.text("abc 12", min_size=1), st.text("abc\n .", max_size=20))
def test_what_is_written_is_read_back(form: str, action: str, thought: str) -> None:
    expected = " ".join(action.split())
    assert parse(written(action, form, thought), form) == (expected, bool(expected))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'json': choose one of plain, think"):
        parse("x", "json")
