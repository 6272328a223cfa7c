"""Embeddings of observations by the policy itself: what its last layer makes of their tokens. No second network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gigpo_lightning.batch import cut_by_tokens
from gigpo_lightning.policy.base import BasePolicy, PromptFormat
from gigpo_lightning.policy.ragged import PackedRows, run_ragged


@torch.no_grad()
def observation_embeddings(policy: BasePolicy, texts: Sequence[str], max_tokens: int) -> Tensor:
    """The mean of the final hidden states over the tokens of each text, read as an observation after an answer.

    What stands after the observation in the prompt is not computed: it could not change the states before it.

    Args:
        policy: Prepared, in evaluation mode, under the weights that played.
        texts: Each is read by itself, cut to the positions of the model.
        max_tokens: Tokens of a batch.

    Returns:
        float32 [texts, hidden], on the CPU.
    """
    frame = policy.prompt.continuation("", "", ())
    rows = [_prompt(policy.prompt, text, frame, policy.positions) for text in texts]
    # Neighbours of equal length attend together; the order in which the texts came plays no part.
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i][0]), texts[i]))
    width, device = policy.model.get_output_embeddings().weight.shape[1], next(policy.parameters()).device
    pooled = torch.zeros(len(texts), width)
    for cut in cut_by_tokens([len(rows[i][0]) for i in order], max_tokens):
        numbers = [order[i] for i in cut]
        packed = PackedRows.from_lengths([len(rows[i][0]) for i in numbers], device)
        ids = torch.tensor([token for i in numbers for token in rows[i][0]], device=device)
        hidden = run_ragged(policy.model, ids, packed.position, packed).float()
        counted = packed.position >= torch.tensor([rows[i][1] for i in numbers], device=device)[packed.row]
        sums = hidden.new_zeros(len(numbers), width).index_add_(0, packed.row[counted], hidden[counted])
        pooled[numbers] = (sums / packed.row[counted].bincount(minlength=len(numbers))[:, None]).cpu()
    return pooled


def _prompt(prompt: PromptFormat, text: str, frame: Sequence[int], positions: int | None) -> tuple[list[int], int]:
    """The ids up to the end of the observation, and how many stand before it; at least one is left for it.

    The observation is what differs from `frame`, the prompt of an empty one.
    """
    ids = prompt.continuation("", text, ())
    shared = min(len(ids), len(frame))
    before = next((i for i in range(shared) if ids[i] != frame[i]), shared)
    after = next((i for i in range(shared - before) if ids[-1 - i] != frame[-1 - i]), shared - before)
    opening = prompt.tokenizer.bos_token_id  # models that know one never read a text that did not begin with it
    opened = [] if opening is None else [opening]
    row = [*opened, *ids[: len(ids) - after]][:positions] or list(ids[:1])
    return row, min(len(opened) + before, len(row) - 1)
