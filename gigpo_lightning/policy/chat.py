"""A conversation as token ids, for models that come with a chat template.

The template is read once: what it writes before, between and after messages is kept as literal text, and segments are
built from that text and the very ids that were sampled. So a segment only grows, also where the template would rewrite
earlier turns. Knows nothing about models or environments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from gigpo_lightning.policy.base import KeptTurn, PromptFormat, Reading
from gigpo_lightning.policy.chat_text import ChatText, fill, filled, read_template, unread_option
from gigpo_lightning.policy.plain_text import plain_ids, special_pattern
from gigpo_lightning.policy.projection import parse, written

ENCODINGS_KEPT = 50_000
# A template is a program: it may also add a text to a number, or divide by zero.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError)
_MARKS = re.compile("qsystemq|qfirstq|qanswerq|qturnq")


class Separators(NamedTuple):
    """What a chat template writes around messages, and the token that ends an answer.

    A segment is `opening` (the system's text) `to_first` (the user's text) `to_answer`, an answer with `end`, then for
    every further turn `to_turn` (the user's text) `to_next_answer` and an answer with `end`.
    """

    opening: str
    to_first: str
    to_answer: str
    end: str
    to_turn: str
    to_next_answer: str


class ChatPrompt(PromptFormat):
    """The prompt of a tokenizer's chat template.

    Attributes:
        follows_template: Whether segments are what the template itself would write. False for templates that rewrite
            earlier turns (Qwen3 drops their reasoning) or answers: segments then go on literally.

    Args:
        tokenizer: A tokenizer with a chat template, unless `text` names one.
        text: What is said.
        source: The model's name, for messages.

    Raises:
        ValueError: There is no chat template, or its separators cannot be told from a rendered conversation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: ChatText, source: str = "the model"):
        self.tokenizer, self.text = tokenizer, text
        self._named = f"the chat template of policy.model={source!r}"
        if text.template is not None:
            tokenizer.chat_template = read_template(text.template)
            self._named = f"policy.chat.template={text.template!r}"
        if not tokenizer.chat_template:
            raise ValueError(
                f"policy.model={source!r} has no chat template: take an instruction-tuned model, or name a Jinja file "
                "in policy.chat.template"
            )
        unread = unread_option(text.options or (), str(tokenizer.chat_template))
        if unread:
            raise ValueError(f"policy.chat.options has {unread}, which {self._named} does not read: leave it out")
        self._separators = self._derive()
        if self.reasons and self._separators.to_next_answer.rstrip().endswith("</think>"):
            raise ValueError(
                f"policy.chat.format='think': {self._named} ends the thought itself, before the policy answers: set "
                "policy.chat.options to {enable_thinking: true}"
            )
        self._special = special_pattern(tokenizer)
        self._end = int(tokenizer.convert_tokens_to_ids(self._separators.end))
        self._encoded: dict[str, tuple[int, ...]] = {}
        self.follows_template = self._follows_template()

    @property
    def end_id(self) -> int:
        return self._end

    @property
    def reasons(self) -> bool:
        return self.text.format == "think"

    @property
    def opened(self) -> str:
        return "<think>" if self._separators.to_next_answer.rstrip().endswith("<think>") else ""

    def header(
        self,
        instruction: str,
        kept: Sequence[KeptTurn],
        observation: str,
        admissible: Sequence[str] | None = None,
    ) -> list[int]:
        return self._header(instruction, kept, observation, self._list(admissible))

    def _header(self, instruction: str, kept: Sequence[KeptTurn], observation: str, listed: str | None) -> list[int]:
        ids: list[int] = []
        shown: list[str] = []  # a kept turn without an answer is shown together with the next one
        for turn in kept:
            shown.append(turn.observation)
            if turn.action_ids:
                ids += [*self._say(instruction, shown, opens=not ids), *turn.action_ids]
                shown = []
        return [*ids, *self._say(instruction, [*shown, observation], listed, opens=not ids)]

    def continuation(self, instruction: str, observation: str, admissible: Sequence[str] | None = None) -> list[int]:
        return list(self._say(instruction, [observation], self._list(admissible), opens=False))

    def _list(self, admissible: Sequence[str] | None) -> str | None:
        """The actions as the message shows them, or None where it does not."""
        if not self.text.asks_actions:
            return None
        if admissible is None:
            raise ValueError(
                "policy.chat.first or turn shows {admissible}, but the world does not list its admissible actions: "
                "leave the placeholder out"
            )
        return self.text.separator.join(admissible)

    def action_ids(self, action: str) -> tuple[int, ...]:
        closing = "</action>" if self.reasons else ""
        if self._is_disguised(action):
            return (*plain_ids(self.tokenizer, action), *self._encode(closing), self._end)
        return (*self._encode(action + closing), self._end)

    def action_text(self, token_ids: Sequence[int]) -> str:
        return self.read(token_ids).action

    def read(self, token_ids: Sequence[int]) -> Reading:
        ended = self._end in token_ids
        ids = list(token_ids[: token_ids.index(self._end)]) if ended else list(token_ids)
        text = self.opened + str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        action, well_formed = parse(text, self.text.format)
        return Reading(action, well_formed and ended, "" if text.strip() == action else text)

    def identity(self) -> dict[str, Any]:
        """What the meaning of the weights depends on: texts and separators."""
        text = self.text
        between_actions = [text.separator] if text.asks_actions else []
        return {
            "chat": [text.system, text.first, text.turn, text.format, *between_actions],
            "separators": list(self._separators),
        }

    def _say(
        self, instruction: str, observations: Sequence[str], listed: str | None = None, *, opens: bool
    ) -> tuple[int, ...]:
        """The ids of the user's message up to where the policy answers; with `opens` those of the system before it."""
        s, seen = self._separators, "\n".join(observations)
        if self._is_disguised(instruction + seen + (listed or "")):
            return self._say_plainly(instruction, seen, listed, opens)
        if not opens:
            return self._encode(s.to_turn + fill(self.text.turn, instruction, seen, listed) + s.to_next_answer)
        system, first = fill(self.text.system, instruction), fill(self.text.first, instruction, seen, listed)
        return self._encode(s.opening + system + s.to_first + first + s.to_answer)

    def _is_disguised(self, text: str) -> bool:
        """Whether a world's text spells what the tokenizer would read as a special token."""
        return self._special.search(text) is not None

    def _say_plainly(self, instruction: str, seen: str, listed: str | None, opens: bool) -> tuple[int, ...]:
        """The same with the world's texts encoded by themselves: tokens end where those begin and end."""
        s, text = self._separators, self.text
        if opens:
            parts = [(s.opening, False), *filled(text.system, instruction), (s.to_first, False)]
            parts += [*filled(text.first, instruction, seen, listed), (s.to_answer, False)]
        else:
            parts = [(s.to_turn, False), *filled(text.turn, instruction, seen, listed), (s.to_next_answer, False)]
        return tuple(
            token_id
            for part, is_world in parts
            for token_id in (plain_ids(self.tokenizer, part) if is_world else self._encode(part))
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = self._encoded.get(text)
        if ids is None:
            if len(self._encoded) >= ENCODINGS_KEPT:
                self._encoded.clear()
            ids = self._encoded[text] = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return ids

    # -- the template --------------------------------------------------------------------------------------------------

    def _render(self, messages: list[dict[str, str]]) -> str:
        """The template's text of a conversation, up to where the next answer starts.

        Raises:
            ValueError: The template refuses the conversation.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **(self.text.options or {})
                )
            )
        except _TEMPLATE_ERRORS as error:
            hint = "; does it take a system message? If not, set policy.chat.system to '' and say it in first"
            asked = self.text.system and type(error) is not TemplateSyntaxError
            raise ValueError(f"{self._named} refuses a conversation: {error}" + (hint if asked else "")) from error

    def _conversation(self, system: str, said: Sequence[str]) -> list[dict[str, str]]:
        """Messages of the system, if it says anything, then of user and assistant in turn."""
        opening = [{"role": "system", "content": system}] if self.text.system else []
        return opening + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]

    def _derive(self) -> Separators:
        """Render a conversation of marked messages and take what stands between the marks.

        Raises:
            ValueError: A message is missing, out of order or twice there, or no special token ends an answer.
        """
        marks = ["qsystemq", "qfirstq", "qanswerq", "qturnq"]  # as `_MARKS` finds them
        shown = marks if self.text.system else marks[1:]
        opening = self._cut(self._render(self._conversation(marks[0], marks[1:2])), shown[:-2])
        later = self._cut(self._render(self._conversation(marks[0], marks[1:])), shown)[-3:]
        to_turn = later[1].lstrip()
        special = [token for token in self.tokenizer.all_special_tokens if to_turn.startswith(token)]
        added = [str(token) for token in self.tokenizer.get_added_vocab() if to_turn.startswith(str(token))]
        end = max([*special, *added], key=len, default="")
        if not end:
            raise ValueError(
                f"{self._named} ends answers with {to_turn[:20]!r}, which starts "
                "with no special token: name a Jinja file that ends them with one in policy.chat.template"
            )
        first = opening if self.text.system else ["", *opening]
        return Separators(first[0], first[1], first[2], end, to_turn.removeprefix(end), later[2])

    def _cut(self, rendered: str, marks: Sequence[str]) -> list[str]:
        """The texts before, between and after the marks."""
        if _MARKS.findall(rendered) != list(marks):
            raise ValueError(
                f"{self._named} does not show every message once and in order "
                f"({rendered[:80]!r}…): "
                + ("set policy.chat.system to '' and say it in first, or " if self.text.system else "")
                + "name another Jinja file in policy.chat.template"
            )
        return _MARKS.split(rendered)

    def _follows_template(self) -> bool:
        """Whether the ids of a growing conversation only grow, and are those of a segment."""
        said = [fill(self.text.first, "find it", "You see a box.")]
        kept: list[KeptTurn] = []
        seen = "You see a box."
        before: list[int] = []
        for number in range(3):
            rendered = self.tokenizer.encode(
                self._render(self._conversation(fill(self.text.system, "find it"), said)), add_special_tokens=False
            )
            if rendered[: len(before)] != before or rendered != self._header("find it", kept, seen, None):
                return False
            answer = written(f"open box {number}", self.text.format, "It may be in there.")
            answer_ids = (*self._encode(answer), self._end)
            before = [*rendered, *answer_ids]
            kept.append(KeptTurn(seen, answer_ids))
            seen = f"Box {number} is empty."
            said += [answer, fill(self.text.turn, "find it", seen)]
        return True
