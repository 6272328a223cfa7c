"""A byte-level tokenizer as real models have one, made on the spot: every byte a token, and the merges one asks for."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(special: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """`special` are whole tokens, the last of them ends a text; `merges` join neighbours (a line end is `Ċ`)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    joined = [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate((*alphabet, *joined))}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[-1])
    made.add_special_tokens({"additional_special_tokens": list(special[:-1])})
    return made
