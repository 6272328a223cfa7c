"""Attention over rows of unequal length, for any transformers model, without padding and without its cache classes.

A model is run on one flat line of tokens; this file tells attention which row and position each token has. Two ways of
running share it: `PackedRows` (training: every row whole) and `KVCache` (decoding: each row continues where it
stopped). It uses transformers' public attention registry only, and knows nothing about actions, turns or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "gigpo_ragged"
# Up to this share of rows with more than one new token, those attend by themselves.
FEW_LONG_FRAC = 0.25


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows laid end to end on one line of tokens: which row each token is of, and its position in that row.

    Attributes:
        row: int64 [T], the row of each token.
        position: int64 [T], its position in the row, from 0.
        shape: (number of rows, length of the longest row).
    """

    row: Tensor
    position: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedRows:
        """Rows of the given lengths, each starting at position 0."""
        counts = torch.as_tensor(lengths, dtype=torch.int64, device=device)
        row = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)
        starts = torch.cumsum(counts, 0) - counts
        position = torch.arange(len(row), device=device) - starts[row]
        return cls(row, position, (len(lengths), int(max(lengths, default=0))))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Causal attention inside each row. Tensors are [T, heads, head_dim]; returns the same shape as `query`."""
        # Padding stands at the end of a row, where a causal mask already hides it from every real token.
        out = scaled_dot_product_attention(
            self.pad(query),
            self.pad(key),
            self.pad(value),
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[self.row, :, self.position]

    def pad(self, x: Tensor) -> Tensor:
        """[T, heads, head_dim] → [rows, heads, longest, head_dim], zeros at the ends."""
        padded = x.new_zeros(*self.shape, *x.shape[1:])
        padded[self.row, self.position] = x
        return padded.transpose(1, 2)


class _Block(NamedTuple):
    """Rows of a cache that attend together.

    `rows`: their cache rows [R], None for the first R; `tokens`: places of their tokens on the line [T], None for all;
    `packed`: where those stand among the rows; `mask`: bool [R, 1, longest new, longest], True where a token may look.
    """

    rows: Tensor | None
    tokens: Tensor | None
    packed: PackedRows
    mask: Tensor


class KVCache:
    """Preallocated keys and values for `rows` token sequences of at most `capacity` tokens.

    The rows in use are always the first ones, so that attention reads them in place: when one leaves, the last moves
    into its place. A row is cut back by lowering its length.
    """

    def __init__(self, config: PretrainedConfig, rows: int, capacity: int, dtype: torch.dtype, device: torch.device):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, capacity, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * rows
        self.capacity = capacity
        self._row = self._position = torch.empty(0, dtype=torch.int64)
        self._blocks: list[_Block] = []

    def append(self, counts: Sequence[int]) -> Tensor:
        """Announce `counts[i]` new tokens for row i, perhaps none; returns their positions, int64 [sum of counts].

        Raises:
            ValueError: A row would hold more than `capacity` tokens.
        """
        device = self.keys.device
        before = torch.tensor(self.lengths[: len(counts)], device=device)
        for row, count in enumerate(counts):
            if self.lengths[row] + count > self.capacity:
                raise ValueError(f"row {row} would hold {self.lengths[row] + count} tokens; capacity={self.capacity}")
            self.lengths[row] += count
        new = PackedRows.from_lengths(counts, device)
        self._row, self._position = new.row, before[new.row] + new.position
        long = [row for row, count in enumerate(counts) if count > 1]
        if 0 < len(long) <= FEW_LONG_FRAC * len(counts):
            # Padded to the longest, every row would pay for the few that read a prompt while the others say a token.
            is_long = torch.tensor([count > 1 for count in counts], device=device)[new.row]
            ones = self._block([min(count, 1) * (count == 1) for count in counts], None, (~is_long).nonzero()[:, 0])
            self._blocks = [ones, self._block([counts[row] for row in long], long, is_long.nonzero()[:, 0])]
        else:
            self._blocks = [self._block(counts, None, None)]
        return self._position

    def _block(self, counts: Sequence[int], rows: list[int] | None, tokens: Tensor | None) -> _Block:
        device = self.keys.device
        packed = PackedRows.from_lengths(counts, device)
        longest = max(self.lengths[row] for row in (range(len(counts)) if rows is None else rows))
        last = torch.zeros(packed.shape, dtype=torch.int64, device=device)
        last[packed.row, packed.position] = self._position if tokens is None else self._position[tokens]
        mask = (torch.arange(longest, device=device) <= last[:, :, None])[:, None]
        return _Block(None if rows is None else torch.tensor(rows, device=device), tokens, packed, mask)

    def copy(self, source: int, target: int, length: int) -> None:
        """Let row `target` start with the first `length` tokens of row `source`."""
        for store in (self.keys, self.values):
            store[:, target, :, :length] = store[:, source, :, :length]
        self.lengths[target] = length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend to all that their rows hold so far."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self._row, :, self._position] = key.to(keys.dtype)
        values[self._row, :, self._position] = value.to(values.dtype)
        if len(self._blocks) == 1:
            return self._attend(self._blocks[0], query, keys, values, scale)
        out = torch.empty_like(query)
        for block in self._blocks:
            out[block.tokens] = self._attend(block, query[block.tokens], keys, values, scale)
        return out

    def _attend(self, block: _Block, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        longest = block.mask.shape[-1]
        picked = slice(block.packed.shape[0]) if block.rows is None else block.rows
        out = scaled_dot_product_attention(
            block.packed.pad(query),
            keys[picked, :, :longest],
            values[picked, :, :longest],
            attn_mask=block.mask,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return out[block.packed.row, :, block.packed.position]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    ragged: PackedRows | KVCache | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention signature; tensors arrive as [1, heads, T, head_dim], rotary positions applied."""
    if ragged is None:
        raise ValueError(f"a model with attention {ATTENTION_NAME!r} is called through run_ragged() only")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return ragged.attend(int(module.layer_idx), q, k, v, scaling)[None], None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)


def run_ragged(model: PreTrainedModel, token_ids: Tensor, position: Tensor, ragged: PackedRows | KVCache) -> Tensor:
    """Hidden states [T, hidden] of a flat line of tokens [T], by the model's decoder without its output layer."""
    out = model.get_decoder()(
        input_ids=token_ids[None], position_ids=position[None], use_cache=False, ragged=ragged, attention_mask=None
    )
    return out.last_hidden_state[0]
