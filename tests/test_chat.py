"""The prompt of a chat template: what is derived from it, and that segments only ever grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gigpo_lightning.policy.base import KeptTurn
from gigpo_lightning.policy.chat import ChatPrompt
from gigpo_lightning.policy.chat_text import ChatText
from tests.tiny_lm import CHAT, TEMPLATE, save_tokenizer

# In the manner of Mistral: the last message of the user opens with the system's.
MOVING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'user' %}user : {% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }} "
    "{% endif %}{{ m.content }} say : {% endif %}{% endfor %}"
)
# In the manner of Qwen3: the thoughts of earlier answers are dropped when the conversation goes on.
FORGETFUL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}say : {{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% else %}{{ m.role }} : {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}say : {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def made(tokenizer: PreTrainedTokenizerBase, own: str | None = TEMPLATE, /, **texts: Any) -> ChatPrompt:
    tokenizer.chat_template = own
    return ChatPrompt(tokenizer, ChatText(**{"system": CHAT.system, "first": CHAT.first, **texts}), "tiny")


def tokens(prompt: ChatPrompt, ids: list[int]) -> str:
    return " ".join(prompt.tokenizer.convert_ids_to_tokens(ids))


def test_a_segment_is_what_the_template_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = made(tokenizer)
    assert prompt.follows_template
    kept = [KeptTurn("you see 3 box .", prompt.action_ids("open box 2"))]
    ids = prompt.header("take the cup", kept, "in it is a book .")
    # bos, system, user, answer, user, and the place for the next answer, as the template has them
    assert tokens(prompt, ids) == (
        "<bos> system : take it user : take the cup , you see 3 box . say : open box 2 <end> "
        "user : in it is a book . say :"
    )
    messages = [
        {"role": "system", "content": "take it"},
        {"role": "user", "content": "take the cup , you see 3 box ."},
        {"role": "assistant", "content": "open box 2"},
        {"role": "user", "content": "in it is a book ."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_header_and_continuation_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    """A segment that grew by one turn is the header that keeps this turn."""
    prompt = made(tokenizer)
    answer = prompt.action_ids("open box 1")
    grown = [*prompt.header("take the cup", [], "you see 3 box ."), *answer]
    grown += prompt.continuation("take the cup", "done .")
    assert grown == prompt.header("take the cup", [KeptTurn("you see 3 box .", answer)], "done .")


def test_a_kept_turn_without_an_answer_is_shown_with_the_next_one(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = made(tokenizer)
    ids = prompt.header("take the cup", [KeptTurn("you see 3 box .", ())], "done .")
    assert tokens(prompt, ids) == "<bos> system : take it user : take the cup , you see 3 box . done . say :"


def test_a_prompt_may_show_what_is_possible_now(tokenizer: PreTrainedTokenizerBase) -> None:
    first = "{instruction} , {observation}\ntake {admissible}"
    prompt = made(tokenizer, first=first, turn="{observation}\n{admissible}", separator=" , ")
    assert prompt.follows_template
    here = ["open box 1", "open box 2"]
    ids = prompt.header("take the cup", [], "you see 3 box .", here)
    assert tokens(prompt, ids).endswith("take the cup , you see 3 box . take open box 1 , open box 2 say :")
    assert tokens(prompt, prompt.continuation("take the cup", "done .", here)).endswith(
        "done . open box 1 , open box 2 say :"
    )
    # earlier turns are shown without the lines that hold their lists
    kept = [KeptTurn("you see 3 box .", prompt.action_ids("open box 2"))] * 2
    ids = prompt.header("take the cup", kept, "done .", ["take the cup"])
    assert tokens(prompt, ids) == (
        "<bos> system : take it user : take the cup , you see 3 box . say : open box 2 <end> "
        "user : you see 3 box . say : open box 2 <end> user : done . take the cup say :"
    )
    assert prompt.identity() != made(tokenizer, first=first, turn="{observation}\n{admissible}").identity()


def test_a_world_that_lists_nothing_cannot_show_it(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = made(tokenizer, turn="{observation}\n{admissible}")
    with pytest.raises(ValueError, match=r"policy\.chat\.first or turn shows \{admissible\}, but the world does not"):
        prompt.header("take the cup", [], "you see 3 box .")


def test_a_template_that_forgets_is_noticed_and_continued_literally(tokenizer: PreTrainedTokenizerBase) -> None:
    assert made(tokenizer, FORGETFUL).follows_template  # a plain answer has nothing that it could drop
    prompt = made(tokenizer, FORGETFUL, format="think")
    assert not prompt.follows_template
    said = prompt.tokenizer.encode("<think>is it</think><action>open box 1</action><end>", add_special_tokens=False)
    ids = prompt.header("take the cup", [KeptTurn("you see 3 box .", tuple(said))], "done .")
    header = prompt.header("take the cup", [], "you see 3 box .")
    assert ids == [*header, *said, *prompt.continuation("take the cup", "done .")]


def test_a_system_message_that_moves_is_refused_and_works_without(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"once and in order .*set policy\.chat\.system to ''"):
        made(tokenizer, MOVING)
    assert made(tokenizer, MOVING, system="").follows_template


def test_braces_of_the_world_are_not_placeholders(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = made(tokenizer)
    plain = prompt.header("take the cup", [], "{instruction}")
    assert tokens(prompt, plain).count("cup") == 1


def test_answers_are_read_with_format_and_end(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = made(tokenizer)
    ids = prompt.action_ids("open box 1")
    assert ids[-1] == prompt.end_id and prompt.end_id not in ids[:-1]
    assert prompt.read(ids) == ("open box 1", True, "")
    assert prompt.read(ids[:-1]) == ("open box 1", False, "")  # cut at the limit
    assert prompt.read([*ids, ids[0]]) == ("open box 1", True, "")  # what follows the end is not the answer's


def test_a_template_may_open_the_reasoning(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = made(tokenizer, TEMPLATE.replace("say : {% endif %}", "say : <think> {% endif %}"), format="think")
    ids = tokenizer.encode("it is open</think><action>open box 1</action><end>", add_special_tokens=False)
    assert prompt.read(ids).well_formed
    # the whole answer, where it says more than the action
    assert prompt.read(ids).text == "<think>it is open </think> <action> open box 1 </action>"
    assert not made(tokenizer, format="think").read(ids).well_formed


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"policy\.model='tiny' has no chat template: .*policy\.chat\.template"),
        ("{{ raise_exception('System role not supported') }}", r"refuses a conversation: System role.*chat\.system"),
        ("{{ messages[-1].content }}", r"does not show every message once and in order"),
        ("{% for m in messages %}{{ m.content }} ; {% endfor %}", r"ends answers with '; .*no special token"),
        # programs that go wrong: not the template engine's own errors
        ("{{ 1 / 0 }}", r"policy\.model='tiny' refuses a conversation: division by zero"),
        ("{{ messages[0].content + 1 }}", r"refuses a conversation: can only concatenate"),
        ("{% for i in range(1000000000) %}{% endfor %}", r"refuses a conversation: Range too big"),
        ("{% if %}", r"refuses a conversation: Expected an expression[^;]*$"),  # says nothing of a system message
    ],
)
def test_templates_that_cannot_be_used_are_refused(
    tokenizer: PreTrainedTokenizerBase, template: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(tokenizer, template)


def test_a_template_of_ones_own(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    assert made(tokenizer, None, template=str(path)).follows_template
    with pytest.raises(ValueError, match=r"policy\.chat\.template='nowhere\.jinja': there is no such file"):
        made(tokenizer, None, template="nowhere.jinja")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe{{", r"\.jinja': cannot be read as UTF-8 text"),
        (b" \n", r"\.jinja': the file is empty"),
        (b"{{ 1 / 0 }}", r"policy\.chat\.template='.*\.jinja' refuses a conversation"),
    ],
)
def test_a_file_that_is_no_template_is_named(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "chat.jinja").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        made(tokenizer, template=str(tmp_path / "chat.jinja"))


def test_an_option_that_the_template_does_not_read_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    own = TEMPLATE + "{# enable_thinking #}"
    assert made(tokenizer, own, options={"enable_thinking": True}).follows_template
    with pytest.raises(ValueError, match=r"chat\.options has enable_thinkin, which the chat template of .* not read"):
        made(tokenizer, own, options={"enable_thinkin": True})


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"format": "json"}, r"policy\.chat\.format='json': choose one of plain, think"),
        ({"first": "{instruction}"}, r"policy\.chat\.first lacks \{observation\}"),
        ({"turn": "next"}, r"policy\.chat\.turn lacks \{observation\}"),
        ({"first": "{observation}"}, r"lack \{instruction\}"),
        ({"system": "{observation}"}, r"policy\.chat\.system has \{observation\}: it may use \{instruction\}"),
        ({"turn": "{observation} {step}"}, r"\{step\}: it may use \{instruction\}, \{observation\}, \{admissible\}"),
        ({"system": "{instruction} {admissible}"}, r"system has \{admissible\}: it may use \{instruction\}"),
        ({"turn": "{observation} or {admissible}"}, r"chat\.turn has \{admissible\} beside another placeholder"),
        ({"turn": "{observation}\n{admissible}", "separator": ""}, r"chat\.separator='': .* told apart"),
        ({"options": {"tokenize": True}}, r"policy\.chat\.options has 'tokenize': name values that the chat template"),
        ({"options": {1: 2}}, r"policy\.chat\.options has 1: name values"),
    ],
)
def test_texts_that_cannot_work_are_refused(texts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatText(**texts)
