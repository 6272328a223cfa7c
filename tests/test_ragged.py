"""Attention over rows of unequal length, in both ways of calling it, against each row computed by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from gigpo_lightning.policy import ragged
from gigpo_lightning.policy.ragged import KVCache, PackedRows

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8
CONFIG = LlamaConfig(
    hidden_size=HEADS * HEAD_DIM, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS
)


@pytest.fixture(params=[True, False], ids=["padded", "in runs"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU and that of a CPU, both on this CPU."""
    monkeypatch.setattr(ragged, "pads", lambda device: request.param)


def drawn(heads: int, tokens: int, seed: int) -> Tensor:
    return torch.randn(1, heads, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_itself(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v of the last tokens of one row, each over what stands before it and itself.

    Query [heads, new, head_dim], keys and values [key heads, all, head_dim]; returns [new, heads, head_dim].
    """
    out = torch.empty(query.shape[1], HEADS, HEAD_DIM, dtype=query.dtype)
    before = keys.shape[1] - query.shape[1]
    for head in range(HEADS):
        shared = head * KEY_HEADS // HEADS
        for i in range(query.shape[1]):
            seen = slice(before + i + 1)
            scores = keys[shared, seen] @ query[head, i] / math.sqrt(HEAD_DIM)
            out[i, head] = scores.softmax(0) @ values[shared, seen]
    return out


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("lengths", [[3, 3, 1, 5, 5, 5, 2], [4], [1, 1, 1]])
def test_packed_rows_and_their_gradient(lengths: list[int]) -> None:
    tokens = sum(lengths)
    q, k, v = (drawn(h, tokens, i).requires_grad_() for i, h in enumerate((HEADS, KEY_HEADS, KEY_HEADS)))
    rows = PackedRows.from_lengths(lengths)
    out = rows.attend(0, q, k, v, None)
    assert out.shape == (1, tokens, HEADS, HEAD_DIM)
    parts = zip(*(x[0].split(lengths, 1) for x in (q, k, v)), strict=True)
    expected = torch.cat([by_itself(*part) for part in parts])
    torch.testing.assert_close(out[0], expected)
    weights = drawn(HEADS, tokens, 9)[0].transpose(0, 1)
    gradients = torch.autograd.grad((out[0] * weights).sum(), (q, k, v))
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), (q, k, v)))


STEPS = {
    "prompts of unequal length": [[7, 3, 12, 1]],
    "neighbours read as much, from unequal places": [[7, 3, 12, 1], [4, 4, 4, 4]],
    "single tokens beside prompts, and rows that wait": [[7, 3, 12, 1, 2, 2], [1, 0, 1, 6, 0, 1], [1, 1, 1, 0, 0, 1]],
    "equal rows": [[5, 5, 5], [1, 1, 1]],
}


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("waste", [0, 100_000], ids=["alone", "together"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_cache_that_grows(steps: list[list[int]], waste: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "CALL_PRODUCTS", waste)
    cache = KVCache(CONFIG, rows=8, capacity=40, dtype=torch.float64, device=torch.device("cpu"))
    held = [drawn(KEY_HEADS, 0, 0)[0]] * 6, [drawn(KEY_HEADS, 0, 0)[0]] * 6
    for number, counts in enumerate(steps):
        position = cache.append(counts)
        starts = [len_ - n for len_, n in zip(cache.lengths, counts, strict=False)]
        assert position.tolist() == [start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]
        tokens = sum(counts)
        q, k, v = (drawn(h, tokens, 10 * number + i) for i, h in enumerate((HEADS, KEY_HEADS, KEY_HEADS)))
        out = cache.attend(1, q, k, v, None)
        for store, new in zip(held, (k, v), strict=True):
            for row, part in enumerate(new[0].split(counts, 1)):
                store[row] = torch.cat([store[row], part], 1)
        expected = [by_itself(part, held[0][row], held[1][row]) for row, part in enumerate(q[0].split(counts, 1))]
        torch.testing.assert_close(out[0], torch.cat(expected))


@pytest.mark.parametrize(
    ("lengths", "shapes"),
    [
        # 100,000 products are 3,125 tokens looked at by 32 numbers each: a gap of 2,000 costs less, one of 4,000 more;
        ([2000, 10], [(2, 1)]),
        ([4010, 10], [(1, 1), (1, 1)]),
        # two short rows would both pay for a long one after them: 2 × 2,000;
        ([10, 10, 2010], [(2, 1), (1, 1)]),
        # equal ones waste nothing, however long.
        ([9000, 9000], [(2, 1)]),
    ],
)
def test_rows_stay_together_while_that_wastes_less_than_a_call(
    lengths: list[int], shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "CALL_PRODUCTS", 100_000)
    cache = KVCache(CONFIG, rows=len(lengths), capacity=9001, dtype=torch.float32, device=torch.device("cpu"))
    cache.lengths = [n - 1 for n in lengths]
    cache.append([1] * len(lengths))
    assert [run.shape for run in cache._runs] == shapes
