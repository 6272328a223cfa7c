"""What a chat prompt says around the world's texts: options with placeholders, and how these are filled.

Strings only: knows nothing about templates or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gigpo_lightning.policy.projection import FORMATS

PLACEHOLDERS = ("instruction", "observation", "admissible")
# What the rendering of a conversation sets itself.
_TAKEN = ("messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")


@dataclass(frozen=True)  # no slots: jsonargparse reads the defaults from __dict__
class ChatText:
    """What the conversation says around the world's texts; `{instruction}` and `{observation}` stand for those.

    In `first` and `turn`, `{admissible}` stands for the actions that are possible now. The line that holds it is left
    out of the earlier turns that open a segment.

    Args:
        system: System message; empty for none. It does not know the observation.
        first: The user's message that opens a segment.
        turn: Every later message of the user.
        format: `plain` (the answer is the action) or `think` (`<think>…</think><action>…</action>`).
        template: Jinja file to use in place of the tokenizer's own chat template.
        options: Named values that the chat template reads, such as `enable_thinking: false` for Qwen3; one that it does
            not mention is refused.
        separator: What stands between the actions of `{admissible}`.
    """

    system: str = "You act in a text world. Answer with one action and nothing else."
    first: str = "{instruction}\n\n{observation}"
    turn: str = "{observation}"
    format: str = "plain"
    template: str | None = None
    options: dict[str, Any] | None = None
    separator: str = ", "

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"policy.chat.format={self.format!r}: choose one of {', '.join(FORMATS)}")
        for name in self.options or {}:
            if not isinstance(name, str) or name in _TAKEN:
                raise ValueError(
                    f"policy.chat.options has {name!r}: name values that the chat template reads, not this"
                )
        for name, known in (("system", PLACEHOLDERS[:1]), ("first", PLACEHOLDERS), ("turn", PLACEHOLDERS)):
            for given in re.findall(r"\{(\w+)\}", getattr(self, name)):
                if given not in known:
                    raise ValueError(f"policy.chat.{name} has {{{given}}}: it may use {{{'}, {'.join(known)}}}")
        for name in ("first", "turn"):
            for line in getattr(self, name).split("\n"):
                if "{admissible}" in line and re.search(r"\{(instruction|observation)\}", line):
                    raise ValueError(
                        f"policy.chat.{name} has {{admissible}} beside another placeholder: give it a line of its own, "
                        "which is left out of earlier turns"
                    )
            if "{observation}" not in getattr(self, name):
                raise ValueError(f"policy.chat.{name} lacks {{observation}}: the policy would act blindly")
        if "{instruction}" not in self.system + self.first:
            raise ValueError("policy.chat.system and policy.chat.first lack {instruction}: nobody would name the goal")
        if self.asks_actions and not self.separator:
            raise ValueError(
                "policy.chat.separator='': the actions of {admissible} could not be told apart; ', ' is usual"
            )

    @property
    def asks_actions(self) -> bool:
        """Whether a message shows the admissible actions."""
        return "{admissible}" in self.first + self.turn


def fill(text: str, instruction: str, observation: str = "", listed: str | None = None) -> str:
    """The text with its placeholders filled in one go, so that braces in a world's texts stay what they are.

    Without a list of actions the line that would hold it is left out.
    """
    return "".join(part for part, _ in filled(text, instruction, observation, listed)).strip()


def filled(text: str, instruction: str, observation: str = "", listed: str | None = None) -> list[tuple[str, bool]]:
    """What `fill` puts together, part by part: each with whether it is the world's. Space at both ends is left."""
    if listed is None:
        text = "\n".join(line for line in text.split("\n") if "{admissible}" not in line)
    values = {"instruction": instruction, "observation": observation, "admissible": listed or ""}
    parts = re.split(r"\{(instruction|observation|admissible)\}", text)
    return [(values[part], True) if number % 2 else (part, False) for number, part in enumerate(parts)]


def read_template(path: str) -> str:
    """A chat template from a file.

    Raises:
        ValueError: There is no such file, or no text in it.
    """
    if not Path(path).is_file():
        raise ValueError(f"policy.chat.template={path!r}: there is no such file")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"policy.chat.template={path!r}: cannot be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise ValueError(f"policy.chat.template={path!r}: the file is empty; leave it out for the tokenizer's own")
    return text


def unread_option(options: Iterable[str], template: str) -> str:
    """The first of the options that the template never mentions; empty where it mentions all."""
    return next((name for name in options if not re.search(rf"\b{re.escape(name)}\b", template)), "")
