"""Constrained log-probabilities: a row-by-row oracle, the identities, gradients, and refused input."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gigpo_lightning.functional.logprobs import (
    constrained_logprobs,
    constrained_logprobs_from_hidden,
    segment_logsumexp,
)

VOCABULARY = 9


class Rows(NamedTuple):
    logits: Tensor
    token_ids: Tensor
    allowed_ids: Tensor
    allowed_counts: Tensor


def make_rows(seed: int, n: int = 6) -> Rows:
    random = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, VOCABULARY + 1, (n,), generator=random)
    allowed = [torch.randperm(VOCABULARY, generator=random)[:c] for c in counts.tolist()]
    tokens = torch.stack([ids[torch.randint(len(ids), (), generator=random)] for ids in allowed])
    return Rows(3 * torch.randn(n, VOCABULARY, generator=random), tokens, torch.cat(allowed), counts)


@given(st.integers(0, 10_000), st.sampled_from([0.4, 1.0, 2.5]))
def test_is_the_oracle(seed: int, temperature: float) -> None:
    rows = make_rows(seed)
    found = constrained_logprobs(*rows, temperature)
    start = 0
    for i, count in enumerate(rows.allowed_counts.tolist()):
        allowed = rows.allowed_ids[start : start + count].tolist()
        start += count
        scores = {a: math.exp(rows.logits[i, a].item() / temperature) for a in allowed}
        p = {a: score / sum(scores.values()) for a, score in scores.items()}
        assert found.logprobs[i].item() == pytest.approx(math.log(p[rows.token_ids[i].item()]), abs=1e-5)
        assert found.entropy[i].item() == pytest.approx(-sum(x * math.log(x) for x in p.values()), abs=1e-5)


@given(st.integers(0, 10_000))
def test_all_tokens_allowed_is_log_softmax(seed: int) -> None:
    rows = make_rows(seed)
    n = len(rows.token_ids)
    every, counts = torch.arange(VOCABULARY).repeat(n), torch.full((n,), VOCABULARY)
    full = constrained_logprobs(rows.logits, rows.token_ids, temperature=0.7)
    listed = constrained_logprobs(rows.logits, rows.token_ids, every, counts, 0.7)
    wanted = torch.log_softmax(rows.logits / 0.7, -1)
    torch.testing.assert_close(full.logprobs, wanted[torch.arange(n), rows.token_ids])
    torch.testing.assert_close(full.entropy, torch.distributions.Categorical(logits=wanted).entropy())
    torch.testing.assert_close(listed, full)


@given(st.integers(0, 10_000))
def test_is_a_mask_of_minus_infinity(seed: int) -> None:
    rows = make_rows(seed)
    row = torch.repeat_interleave(rows.allowed_counts)
    mask = torch.full_like(rows.logits, -torch.inf)
    mask[row, rows.allowed_ids] = 0.0
    masked = constrained_logprobs(rows.logits + mask, rows.token_ids)
    torch.testing.assert_close(constrained_logprobs(*rows), masked)


@given(st.integers(0, 10_000), st.booleans())
def test_from_hidden_equals_from_logits(seed: int, with_bias: bool) -> None:
    rows = make_rows(seed)
    random = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(*s, generator=random) for s in ((len(rows.token_ids), 5), (VOCABULARY, 5), (VOCABULARY,))]
    gradients = []
    for direct in (True, False):
        hidden, embedding, bias = (leaf.clone().requires_grad_() for leaf in leaves)
        b = bias if with_bias else None
        if direct:
            found = constrained_logprobs_from_hidden(hidden, embedding, *rows[1:], 0.8, b)
        else:
            logits = torch.nn.functional.linear(hidden, embedding, b)
            found = constrained_logprobs(logits, *rows[1:], 0.8)
        (found.logprobs.sum() + 0.3 * found.entropy.sum()).backward()
        gradients.append((found, hidden.grad, embedding.grad, bias.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)  # sums of products in float32


def test_a_forced_token_costs_nothing() -> None:
    logits = torch.tensor([[5.0, -3.0, 1.0]], requires_grad=True)
    found = constrained_logprobs(logits, torch.tensor([1]), torch.tensor([1]), torch.tensor([1]))
    (found.logprobs + found.entropy).sum().backward()
    assert found.logprobs.item() == 0.0
    assert found.entropy.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(1, 3))


def test_gradients_by_finite_differences() -> None:
    # float32 is the arithmetic of the function: differences of 1e-3 leave an error of about 1e-4
    rows = make_rows(5)
    for chosen in (0, 1):
        assert torch.autograd.gradcheck(
            lambda x, part=chosen: constrained_logprobs(x, *rows[1:], 0.9)[part].double(),
            rows.logits.double().requires_grad_(),
            eps=1e-2,
            atol=1e-2,
        )


@pytest.mark.parametrize("constrained", [True, False])
def test_no_nan_gradient_at_the_extremes(constrained: bool) -> None:
    logits = torch.tensor([[1e4, -1e4, -torch.inf], [0.0, -torch.inf, -torch.inf]], requires_grad=True)
    allowed = (torch.tensor([0, 1, 2, 0, 2]), torch.tensor([3, 2])) if constrained else (None, None)
    found = constrained_logprobs(logits, torch.tensor([0, 0]), *allowed)
    (found.logprobs + found.entropy).sum().backward()
    assert found.logprobs.tolist() == [0.0, 0.0]
    assert found.entropy.tolist() == [0.0, 0.0]
    assert torch.equal(logits.grad, torch.zeros(2, 3))


def test_only_allowed_tokens_get_a_gradient() -> None:
    logits = torch.zeros(1, 4, requires_grad=True)
    found = constrained_logprobs(logits, torch.tensor([2]), torch.tensor([0, 2]), torch.tensor([2]))
    found.logprobs.sum().backward()
    assert found.logprobs.item() == pytest.approx(-math.log(2))
    assert logits.grad.tolist() == [[-0.5, 0.0, 0.5, 0.0]]  # 1 − p and −p with p = 1/2


def test_half_precision_is_computed_in_float32() -> None:
    rows = make_rows(2)
    found = constrained_logprobs(rows.logits.bfloat16(), *rows[1:])
    torch.testing.assert_close(found, constrained_logprobs(rows.logits.bfloat16().float(), *rows[1:]))
    assert found.logprobs.dtype == torch.float32


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.long)
    assert constrained_logprobs(torch.zeros(0, 4), none, none, none).logprobs.shape == (0,)


def test_segment_logsumexp() -> None:
    # log(e^0 + e^0) = log 2; log e^1000 = 1000 without overflow; nothing is −inf
    values = torch.tensor([0.0, 1000.0, 0.0], requires_grad=True)
    found = segment_logsumexp(values, torch.tensor([0, 2, 0]), 3)
    assert found.tolist() == pytest.approx([math.log(2), -math.inf, 1000.0])
    found[[0, 2]].sum().backward()
    assert values.grad.tolist() == [0.5, 1.0, 0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: 0.0 is not positive"),
        ({"token_ids": torch.tensor([0, 1, 2])}, r"logits: shape \(2, 3\) with token_ids \(3,\)"),
        ({"allowed_counts": torch.tensor([4])}, r"allowed_counts: shape \(1,\), expected \(2,\)"),
        ({"allowed_counts": torch.tensor([2, 3])}, r"allowed_ids: \(4,\) ids for counts that add up to 5"),
        ({"allowed_counts": torch.tensor([4, 0])}, "token 2 of row 1 occurs 0 times"),
        ({"token_ids": torch.tensor([2, 2])}, "token 2 of row 0 occurs 0 times"),
        ({"allowed_ids": torch.tensor([0, 0, 1, 2])}, "token 0 of row 0 occurs 2 times"),
        ({"allowed_ids": None}, "allowed_ids: missing although allowed_counts is given"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "logits": torch.zeros(2, 3),
        "token_ids": torch.tensor([0, 2]),
        "allowed_ids": torch.tensor([0, 1, 1, 2]),
        "allowed_counts": torch.tensor([2, 2]),
    }
    constrained_logprobs(**good)
    with pytest.raises(ValueError, match=message):
        constrained_logprobs(**{**good, **change})
