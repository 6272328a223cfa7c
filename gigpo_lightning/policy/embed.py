"""Texts as vectors: the policy's own hidden states, averaged over the tokens of a text. There is no second network.

Knows nothing of what the vectors are for, and nothing of prompts: a text is read alone, without goal or header.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gigpo_lightning.batch import cut_by_tokens
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.ragged import PackedRows, run_ragged

# Tokens of one run of the model.
BATCH_TOKENS = 4096


@torch.no_grad()
def embed_texts(policy: BasePolicy, texts: Sequence[str], max_tokens: int = 128) -> Tensor:
    """The mean over a text's tokens of the final hidden states, for each text.

    Equal texts are read once. The result does not depend on what else is in the batch, up to round-off, nor on whether
    the policy is in training mode. Where weights are spread over processes, call it inside `placement.acting`.

    Args:
        policy: A prepared policy.
        texts: What is read; a text without any token becomes the zero vector.
        max_tokens: Tokens of a text that are read, from its beginning, ≥ 1; never more than the model has positions.

    Returns:
        float32 [texts, hidden], on the policy's device.

    Raises:
        ValueError: `max_tokens` is less than 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: {max_tokens}; at least one token must be read, 128 is usual")
    weight = policy.model.get_input_embeddings().weight
    longest = min(max_tokens, policy.positions or max_tokens)
    distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    tokenizer = policy.prompt.tokenizer
    encoded = [tokenizer.encode(text, add_special_tokens=False)[:longest] for text in distinct]
    vectors = torch.zeros(len(distinct), weight.shape[-1], device=weight.device)
    rows = [row for row, ids in enumerate(encoded) if ids]
    was_training = policy.training
    policy.eval()  # dropout would make a vector a matter of chance
    try:
        for cut in cut_by_tokens([len(encoded[row]) for row in rows], BATCH_TOKENS):
            numbers = [rows[i] for i in cut]
            vectors[numbers] = _means(policy, [encoded[row] for row in numbers])
    finally:
        policy.train(was_training)
    return vectors[[distinct[text] for text in texts]]


def _means(policy: BasePolicy, rows: Sequence[Sequence[int]]) -> Tensor:
    """Mean final hidden state of each row of ids, none empty; float32 [rows, hidden]."""
    device = policy.model.get_input_embeddings().weight.device
    packed = PackedRows.from_lengths([len(ids) for ids in rows], device)
    flat = torch.tensor([token for ids in rows for token in ids], device=device)
    hidden = run_ragged(policy.model, flat, packed.position, packed).float()
    sums = torch.zeros(len(rows), hidden.shape[-1], device=device).index_add_(0, packed.row, hidden)
    return sums / packed.row.bincount(minlength=len(rows))[:, None]
