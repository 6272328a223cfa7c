"""Attention over rows of unequal length, for any transformers model, without padding and without its cache classes.

A model is run on one flat line of tokens; this file tells attention which row and position each token has. Two ways of
running share it: `PackedRows` (training: every row whole) and `KVCache` (decoding: each row continues where it
stopped). It uses transformers' public attention registry only, and knows nothing about actions, turns or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "gigpo_ragged"
# Where rows are padded: up to this share of rows with more than one new token, those attend by themselves.
FEW_LONG_FRAC = 0.25
# Where they are not, on a CPU: one more call costs as much as this many products of numbers in it (measured).
CALL_PRODUCTS = 200_000


def pads(device: torch.device) -> bool:
    """Whether rows of unequal length attend in one padded call. On a CPU padding costs more than calls."""
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows laid end to end on one line of tokens: which row each token is of, and its position in that row.

    Attributes:
        row: int64 [T], the row of each token.
        position: int64 [T], its position in the row, from 0.
        shape: (number of rows, length of the longest row).
        runs: Neighbours of equal length, as (rows, length).
    """

    row: Tensor
    position: Tensor
    shape: tuple[int, int]
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedRows:
        """Rows of the given lengths, each starting at position 0."""
        counts = torch.as_tensor(lengths, dtype=torch.int64, device=device)
        row = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)
        starts = torch.cumsum(counts, 0) - counts
        position = torch.arange(len(row), device=device) - starts[row]
        runs = tuple((len(list(same)), length) for length, same in groupby(lengths))
        return cls(row, position, (len(lengths), int(max(lengths, default=0))), runs)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Causal attention inside each row. Tensors are [1, heads, T, head_dim]; returns [1, T, heads, head_dim]."""
        if pads(query.device):
            # Padding stands at the end of a row, where a causal mask already hides it from every real token.
            out = _causal(self.pad(query), self.pad(key), self.pad(value), scale)
            return out[self.row, :, self.position][None]
        tokens = [rows * length for rows, length in self.runs]
        parts = zip(self.runs, query.split(tokens, 2), key.split(tokens, 2), value.split(tokens, 2), strict=True)
        outs = [
            _on_line(_causal(_by_rows(q, *run), _by_rows(k, *run), _by_rows(v, *run), scale)) for run, q, k, v in parts
        ]
        return torch.cat(outs, 2).transpose(1, 2)

    def pad(self, x: Tensor) -> Tensor:
        """[1, heads, T, head_dim] → [rows, heads, longest, head_dim], zeros at the ends."""
        x = x[0].transpose(0, 1)
        padded = x.new_zeros(*self.shape, *x.shape[1:])
        padded[self.row, self.position] = x
        return padded.transpose(1, 2)


def _by_rows(x: Tensor, rows: int, length: int) -> Tensor:
    """[1, heads, rows · length, head_dim] → [rows, heads, length, head_dim]."""
    return x if rows == 1 else x[0].unflatten(1, (rows, length)).transpose(0, 1)


def _on_line(x: Tensor) -> Tensor:
    """[rows, heads, length, head_dim] → [1, heads, rows · length, head_dim]."""
    return x if len(x) == 1 else x.transpose(0, 1).flatten(1, 2)[None]


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[rows, heads, length, head_dim] → the same."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and query.is_cuda and query.dtype == torch.float32:
        # No fused kernel of a GPU takes shared heads in float32: copies of keys and values cost less than all scores.
        key, value, shared = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), 1
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shared > 1)


class _Block(NamedTuple):
    """Rows of a cache that attend together, padded to the longest.

    `rows`: their cache rows [R], None for the first R; `tokens`: places of their tokens on the line [T], None for all;
    `packed`: where those stand among the rows; `mask`: bool [R, 1, longest new, longest], True where a token may look.
    """

    rows: Tensor | None
    tokens: Tensor | None
    packed: PackedRows
    mask: Tensor


class _Run(NamedTuple):
    """Neighbouring rows of a cache that attend together.

    `shape`: (rows, most new tokens); `tokens`: how many are new; `places`: where those stand among rows · most, None
    where all rows have equally many; `keys`, `values`: what the rows hold in every layer, [rows, heads, longest,
    head_dim]; `bias`: [rows, 1, most, longest], −∞ where a token must not look; None where it may look at all.
    """

    shape: tuple[int, int]
    tokens: int
    places: Tensor | None
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    bias: Tensor | None

    def attend(self, layer: int, query: Tensor, scale: float | None) -> Tensor:
        """[1, heads, tokens, head_dim] → the same."""
        rows, new = self.shape
        if self.places is not None:
            padded = query.new_zeros(1, query.shape[1], rows * new, query.shape[3])
            query = padded.index_copy_(2, self.places, query)
        out = _on_line(_attend(_by_rows(query, rows, new), self.keys[layer], self.values[layer], self.bias, scale))
        return out if self.places is None else out.index_select(2, self.places)


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
        # What a row may waste in a run: a call's cost, in new tokens × tokens looked at.
        self._waste = CALL_PRODUCTS // (config.num_attention_heads * head_dim)
        self._row = self._position = torch.empty(0, dtype=torch.int64)
        self._blocks: list[_Block] = []
        self._runs: list[_Run] = []

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
        if pads(device):
            self._blocks = self._make_blocks(counts, new.row)
        else:
            self._runs = self._make_runs(counts)
        return self._position

    def _make_blocks(self, counts: Sequence[int], row: Tensor) -> list[_Block]:
        """All rows, or those with one new token and those with more."""
        long = [row for row, count in enumerate(counts) if count > 1]
        if not 0 < len(long) <= FEW_LONG_FRAC * len(counts):
            return [self._block(counts, None, None)]
        # Padded to the longest, every row would pay for the few that read a prompt while the others say a token.
        is_long = torch.tensor([count > 1 for count in counts], device=row.device)[row]
        ones = self._block([int(count == 1) for count in counts], None, (~is_long).nonzero()[:, 0])
        return [ones, self._block([counts[row] for row in long], long, is_long.nonzero()[:, 0])]

    def _block(self, counts: Sequence[int], rows: list[int] | None, tokens: Tensor | None) -> _Block:
        device = self.keys.device
        packed = PackedRows.from_lengths(counts, device)
        longest = max(self.lengths[row] for row in (range(len(counts)) if rows is None else rows))
        last = torch.zeros(packed.shape, dtype=torch.int64, device=device)
        last[packed.row, packed.position] = self._position if tokens is None else self._position[tokens]
        mask = (torch.arange(longest, device=device) <= last[:, :, None])[:, None]
        return _Block(None if rows is None else torch.tensor(rows, device=device), tokens, packed, mask)

    def _make_runs(self, counts: Sequence[int]) -> list[_Run]:
        """Each row, or neighbours that are short or alike."""
        longest = max(self.lengths[: len(counts)])
        # Shifted to the left, this triangle hides what comes after each new token, wherever the row has got to.
        triangle = torch.full((max(counts), 2 * longest), -torch.inf, dtype=self.keys.dtype).triu_(longest + 1)
        runs: list[_Run] = []
        row = 0
        while row < len(counts):
            first, new, held = row, counts[row], self.lengths[row]
            cost = new * held
            row += 1
            while new and row < len(counts) and counts[row]:
                wider, longer = max(new, counts[row]), max(held, self.lengths[row])
                together = (row + 1 - first) * wider * longer
                if together - cost - counts[row] * self.lengths[row] > self._waste:
                    break
                new, held, cost, row = wider, longer, together, row + 1
            if new:
                runs.append(self._run(counts, slice(first, row), (new, held), triangle))
        return runs

    def _run(self, counts: Sequence[int], rows: slice, most: tuple[int, int], triangle: Tensor) -> _Run:
        new, held = most
        own, lengths = counts[rows], self.lengths[rows]
        places = None
        if min(own) < new:
            places = torch.tensor([place * new + i for place, count in enumerate(own) for i in range(count)])
        bias = None
        if new > 1 or min(lengths) < held:
            middle = triangle.shape[1] // 2
            starts = [middle + count - length for count, length in zip(own, lengths, strict=True)]
            parts = [triangle[:new, start : start + held] for start in starts]
            bias = parts[0] if len(parts) == 1 else torch.stack(parts)[:, None]
        keys, values = self.keys[:, rows, :, :held].unbind(0), self.values[:, rows, :, :held].unbind(0)
        return _Run((len(own), new), sum(own), places, keys, values, bias)

    def copy(self, source: int, target: int, length: int) -> None:
        """Let row `target` start with the first `length` tokens of row `source`."""
        for store in (self.keys, self.values):
            store[:, target, :, :length] = store[:, source, :, :length]
        self.lengths[target] = length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend to all that their rows hold so far."""
        keys, values = self.keys[layer], self.values[layer]
        # Under autocast rotary positions leave float32; attention in the update rounds it to the cache's type, too.
        keys[self._row, :, self._position] = key[0].transpose(0, 1).to(keys.dtype)
        values[self._row, :, self._position] = value[0].transpose(0, 1).to(values.dtype)
        if self._runs:
            parts = query.split([run.tokens for run in self._runs], 2)
            outs = [run.attend(layer, part, scale) for run, part in zip(self._runs, parts, strict=True)]
            return torch.cat(outs, 2).transpose(1, 2)
        out = query.new_empty(query.transpose(1, 2).shape, dtype=keys.dtype)
        for block in self._blocks:
            packed, picked = block.packed, slice(block.packed.shape[0]) if block.rows is None else block.rows
            chosen = slice(None) if block.tokens is None else block.tokens
            k, v = (store[picked, :, : block.mask.shape[-1]] for store in (keys, values))
            found = _attend(packed.pad(query[:, :, chosen]), k, v, block.mask, scale)
            out[:, chosen] = found[packed.row, :, packed.position]
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """[rows, heads, new, head_dim] → the same; keys and values are [rows, key heads, longest, head_dim].

    Heads that share their keys and values are laid behind each other as if they were further tokens: on a GPU no fused
    kernel takes both shared heads and a mask.
    """
    shared, new = query.shape[1] // key.shape[1], query.shape[2]
    if shared == 1:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    if mask is not None and new > 1:
        mask = mask.repeat(*[1] * (mask.dim() - 2), shared, 1)
    folded = query.unflatten(1, (-1, shared)).flatten(2, 3)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.unflatten(2, (shared, new)).flatten(1, 2)


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
    return ragged.attend(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)


def run_ragged(model: PreTrainedModel, token_ids: Tensor, position: Tensor, ragged: PackedRows | KVCache) -> Tensor:
    """Hidden states [T, hidden] of a flat line of tokens [T], by the model's decoder without its output layer."""
    out = model.get_decoder()(
        input_ids=token_ids[None], position_ids=position[None], use_cache=False, ragged=ragged, attention_mask=None
    )
    return out.last_hidden_state[0]
