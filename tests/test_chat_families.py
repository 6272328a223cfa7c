"""Chat templates in the manner of well-known families: segments are what they would write, or say that they are not.

The templates are files, as `policy.chat.template` takes them; they do what the families' own do, in fewer words.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gigpo_lightning.policy.base import KeptTurn
from gigpo_lightning.policy.chat import ChatPrompt
from gigpo_lightning.policy.chat_text import ChatText
from tests.byte_tokenizer import byte_tokenizer

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Puts a system message of its own where none is given.
QWEN2 = """\
{%- if messages[0].role == 'system' -%}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n
{%- else -%}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{%- endif -%}
{%- for m in messages -%}{%- if m.role != 'system' -%}
{{ '\n<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\n<|im_start|>assistant\n' }}{%- endif -%}"""
# Keeps the reasoning of answers after the last question only; closes an empty one where thinking is off.
QWEN3 = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}{%- set said = m.content.split('</think>')[-1].lstrip('\n') -%}
{%- if m.role == 'assistant' and loop.index0 < ns.last -%}{{ '<|im_start|>assistant\n' + said + '<|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}"""
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# Writes today's date, and trims what is said.
LLAMA3 = """\
{%- set day = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + day + '\n\n' + system -}}
{{- '<|eot_id|>' -}}{%- for m in messages -%}{%- if m.role != 'system' -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""
# Knows no system message, and puts a space before answers.
MISTRAL = """\
{{- '<s>' -}}{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant') -}}{%- endif -%}
{%- if m.role == 'user' -%}{{ '[INST] ' + m.content + ' [/INST]' }}{%- else -%}{{ ' ' + m.content + '</s>' }}
{%- endif -%}{%- endfor -%}"""
FAMILIES = {
    "qwen2": (QWEN2, CHATML),
    "qwen3": (QWEN3, CHATML),
    "llama3": (LLAMA3, LLAMA3_TOKENS),
    "mistral": (MISTRAL, ("<s>", "</s>")),
}


def made(folder: Path, family: str, **texts: Any) -> ChatPrompt:
    template, special = FAMILIES[family]
    path = folder / f"{family}.jinja"
    path.write_text(template, encoding="utf-8")
    system = "" if family == "mistral" else "Act."
    return ChatPrompt(byte_tokenizer(special), ChatText(**{"system": system, "template": str(path), **texts}), family)


def answer_of(prompt: ChatPrompt, text: str) -> tuple[int, ...]:
    return (*prompt.tokenizer.encode(text, add_special_tokens=False), prompt.end_id)


def segment(prompt: ChatPrompt, answer: str) -> str:
    """Three turns in one segment, as text."""
    said = answer_of(prompt, answer)
    ids = [
        *prompt.header("find it", [KeptTurn("a box", said)], "a bag"),
        *said,
        *prompt.continuation("find it", "a bin"),
    ]
    return str(prompt.tokenizer.decode(ids))


def rendered(prompt: ChatPrompt, answer: str) -> str:
    """The same conversation as the template writes it."""
    said = ["find it\n\na box", answer, "a bag", answer, "a bin"]
    messages = [{"role": "system", "content": "Act."}] if prompt.text.system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    options = prompt.text.options or {}
    return str(prompt.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


THOUGHT = "<think>in it?</think><action>open box</action>"


@pytest.mark.parametrize(
    ("family", "texts", "answer", "follows"),
    [
        ("qwen2", {}, "open box", True),
        ("qwen2", {"system": ""}, "open box", True),  # the template's own system message stays
        ("qwen2", {"format": "think"}, THOUGHT, True),
        ("qwen3", {}, "open box", True),
        ("qwen3", {"format": "think"}, THOUGHT, False),  # forgets what was thought
        # The template opens every answer to come with an empty thought, and drops it from those that were given.
        ("qwen3", {"options": {"enable_thinking": False}}, "open box", False),
        ("llama3", {"options": {"date_string": "1 Jan 2025"}}, "open box", True),
        ("llama3", {"format": "think"}, THOUGHT, True),
        ("mistral", {}, "open box", False),  # its space before answers is not said by the policy
    ],
)
def test_segments_are_the_templates_text_or_say_that_they_are_not(
    tmp_path: Path, family: str, texts: dict[str, Any], answer: str, follows: bool
) -> None:
    prompt = made(tmp_path, family, **texts)
    assert prompt.follows_template == follows
    assert (segment(prompt, answer) == rendered(prompt, answer)) == follows
    # In any case every turn stands there once and in order, and answers are what was said.
    text = segment(prompt, answer)
    places = [text.index(part) for part in ("find it", "a box", "a bag", "a bin")]
    assert places == sorted(places) and text.count(answer) == 2


def test_what_qwen3_forgets_stays_in_the_segment(tmp_path: Path) -> None:
    prompt = made(tmp_path, "qwen3", format="think")
    assert rendered(prompt, THOUGHT).count("in it?") == 0
    ends = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert segment(prompt, THOUGHT).endswith(THOUGHT + ends.format("a bag") + THOUGHT + ends.format("a bin"))


def test_an_empty_thought_of_the_template_is_no_part_of_the_answer(tmp_path: Path) -> None:
    prompt = made(tmp_path, "qwen3", options={"enable_thinking": False})
    assert segment(prompt, "open box").endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert prompt.opened == "" and prompt.read(answer_of(prompt, "open box")).well_formed


def test_the_date_of_llama_is_part_of_the_prompts_identity(tmp_path: Path) -> None:
    today = made(tmp_path, "llama3")
    assert f"Today Date: {datetime.now():%d %b %Y}" in segment(today, "open box")
    fixed = made(tmp_path, "llama3", options={"date_string": "1 Jan 2025"})
    assert fixed.identity() != today.identity()
    assert fixed.identity() == made(tmp_path, "llama3", options={"date_string": "1 Jan 2025"}).identity()


def test_a_family_without_system_messages_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"roles must alternate.*set policy\.chat\.system to '' and say it in first"):
        made(tmp_path, "mistral", system="Act.")


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_read_back(tmp_path: Path, family: str) -> None:
    prompt = made(tmp_path, family, format="think")
    reading = prompt.read(answer_of(prompt, THOUGHT))
    assert reading == ("open box", True, THOUGHT)
    ids = prompt.action_ids("open box")  # after `<action>`, for constrained actions
    assert prompt.tokenizer.decode(ids[:-1]) == "open box</action>" and ids[-1] == prompt.end_id
