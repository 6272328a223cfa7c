"""From an answer in free text to an action: pure functions of strings.

Three questions are kept apart: what the action is, whether the answer kept to the format, and whether the world admits
the action. A well-formed answer may name an impossible action, and an admissible action may stand in a sloppy answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

FORMATS = ("plain", "think")
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*<action>(.*?)</action>\s*", re.DOTALL)
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|action)>")


class Projection(NamedTuple):
    """`action`: what is sent to the world; `well_formed`: the answer kept to the format; `admissible`: the world admits
    the action, True where the world does not say."""

    action: str
    well_formed: bool
    admissible: bool


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


def project(text: str, form: str, admissible: Sequence[str] | None) -> Projection:
    """The action of an answer, its format and its admissibility.

    An action that differs from an admissible one only in case or spaces is that one: worlds compare letter by letter.

    Args:
        text: The whole answer, end token removed.
        form: `plain` or `think`.
        admissible: The world's admissible actions; None where it does not list them.
    """
    action, well_formed = parse(text, form)
    if admissible is None:
        return Projection(action, well_formed, True)
    known = {_one_line(a).casefold(): a for a in reversed(admissible)}
    if action in admissible:
        return Projection(action, well_formed, True)
    meant = known.get(action.casefold())
    return Projection(action if meant is None else meant, well_formed, meant is not None)


def written(action: str, form: str, thought: str = "") -> str:
    """An answer in the format: `parse` reads it back."""
    return action if form == "plain" else f"<think>{thought}</think><action>{action}</action>"


def _one_line(text: str) -> str:
    return " ".join(text.split())
