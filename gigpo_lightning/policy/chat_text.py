"""What a chat prompt says around the world's texts: options with placeholders, and how these are filled.

Strings only: knows nothing about templates or tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gigpo_lightning.policy.projection import FORMATS

PLACEHOLDERS = ("instruction", "observation", "admissible")


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
        options: Named values that the chat template reads, such as `enable_thinking: false` for Qwen3.
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

    @property
    def asks_actions(self) -> bool:
        """Whether a message shows the admissible actions."""
        return "{admissible}" in self.first + self.turn


def fill(text: str, instruction: str, observation: str = "", listed: str | None = None) -> str:
    """The text with its placeholders filled in one go, so that braces in a world's texts stay what they are.

    Without a list of actions the line that would hold it is left out.
    """
    if listed is None:
        text = "\n".join(line for line in text.split("\n") if "{admissible}" not in line)
    values = {"instruction": instruction, "observation": observation, "admissible": listed or ""}
    return re.sub(r"\{(instruction|observation|admissible)\}", lambda match: values[match[1]], text).strip()
