"""From an answer in free text to an action: pure functions of strings.

Three questions are kept apart: what the action is, whether the answer kept to the format, and whether the world admits
the action. A well-formed answer may name an impossible action, and an admissible action may stand in a sloppy answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

FORMATS = ("plain", "think")
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*<action>(.*?)</action>\s*", re.DOTALL)
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|action)>")


def parse(text: str, form: str) -> tuple[str, bool]:
    """The action in an answer, in one line, and whether the answer kept to the format.

    * `plain`: the answer is the action, one non-empty line; of several lines the first counts.
    * `think`: `<think>…</think><action>…</action>` and nothing else, each tag once. Otherwise the action is the text
      of the last closed `<action>`, or empty.

    Raises:
        ValueError: `form` is neither.
    """
    if form == "plain":
        lines = [line for line in text.splitlines() if line.strip()]
        return (_one_line(lines[0]), len(lines) == 1) if lines else ("", False)
    if form != "think":
        raise ValueError(f"format {form!r}: choose one of {', '.join(FORMATS)}")
    match = _THINK.fullmatch(text)
    if match and len(_TAG.findall(text)) == 4:
        action = _one_line(match[2])
        return action, bool(action)
    found = _ACTION.findall(text)
    return (_one_line(_TAG.sub("", found[-1])) if found else ""), False


def admit(action: str, admissible: Sequence[str] | None) -> tuple[str, bool]:
    """The action as the world spells it, and whether the world admits it.

    One that differs from an admissible action only in case or spaces is that one: worlds compare letter by letter.

    Args:
        action: What was read from the answer.
        admissible: The world's admissible actions; None where it does not list them, and admits everything.
    """
    if admissible is None or action in admissible:
        return action, True
    for known in admissible:
        if _one_line(known).casefold() == _one_line(action).casefold():
            return known, True
    return action, False


def written(action: str, form: str, thought: str = "") -> str:
    """An answer in the format: `parse` reads it back."""
    return action if form == "plain" else f"<think>{thought}</think><action>{action}</action>"


def _one_line(text: str) -> str:
    return " ".join(text.split())
