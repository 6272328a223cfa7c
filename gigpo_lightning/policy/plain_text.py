"""A world's texts are text: what spells a special token in them, such as `<|im_end|>`, is read letter by letter.

Otherwise an observation could end the policy's turn and speak for the system. Knows tokenizers, not prompts.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase


def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Finds what the tokenizer would read as a special token, wherever it stands in a text."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    known = {token for token in (*tokenizer.all_special_tokens, *added) if token}
    return re.compile("|".join(map(re.escape, sorted(known))) or r"(?!)")


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids of a text in which nothing is special."""
    return tuple(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
