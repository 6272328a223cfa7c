"""Choosing tokens from hidden states: the inverse of the cumulative distribution, and scores in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gigpo_lightning.policy import generation
from gigpo_lightning.policy.generation import OutputLayer, choose_tokens


def layer_of(probabilities: list[float]) -> nn.Linear:
    """A layer of width 1 whose scores at hidden state 1 are the logarithms of these."""
    layer = nn.Linear(1, len(probabilities), bias=False)
    layer.weight.data = torch.tensor(probabilities).log()[:, None]
    return layer


LAYER = layer_of([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("uniform", "allowed", "token", "probability"),
    [
        # among all the sums are 0.1, 0.3, 0.6, 1
        (0.0, None, 0, 0.1),
        (0.05, None, 0, 0.1),
        (0.15, None, 1, 0.2),
        (0.59, None, 2, 0.3),
        (0.999, None, 3, 0.4),
        # among 0 and 3 they are 0.2 and 1
        (0.19, (0, 3), 0, 0.2),
        (0.21, (0, 3), 3, 0.8),
        (1 - 2**-53, (0, 3), 3, 0.8),
    ],
)
def test_by_hand(uniform: float, allowed: tuple[int, ...] | None, token: int, probability: float) -> None:
    # The other row is of the other kind, and among more tokens than the first.
    other = (0, 1, 2) if allowed is None or len(allowed) < 3 else None
    first, _ = choose_tokens(OutputLayer(LAYER), torch.ones(2, 1), [allowed, other], [uniform, 0.5], 1.0)
    assert first.token_id == token
    assert first.logprob == pytest.approx(math.log(probability), abs=1e-6)


def test_a_token_of_probability_0_is_never_taken() -> None:
    choices = choose_tokens(
        OutputLayer(layer_of([0.0, 1.0, 0.0])), torch.ones(2, 1), [None] * 2, [0.0, 1 - 2**-53], 1.0
    )
    assert [choice.token_id for choice in choices] == [1, 1]


def test_a_temperature_sharpens() -> None:
    """At temperature 1/2 the shares are 0.01 : 0.04 : 0.09 : 0.16, of 0.3."""
    (choice,) = choose_tokens(OutputLayer(LAYER), torch.ones(1, 1), [None], [0.5], 0.5)
    assert (choice.token_id, choice.logprob) == (3, pytest.approx(math.log(0.16 / 0.3), abs=1e-6))  # 0.14 / 0.3 < 0.5


def test_greedy_takes_the_likeliest_allowed_token() -> None:
    choices = choose_tokens(OutputLayer(LAYER), torch.ones(2, 1), [None, (0, 2)], [0.0, 0.0], 0.0)
    assert [(choice.token_id, choice.logprob) for choice in choices] == [(3, 0.0), (2, 0.0)]


def short_layer(dtype: torch.dtype, bias: bool) -> tuple[OutputLayer, Tensor, Tensor]:
    """A layer in a short type, hidden states of the same, and the scores in float64."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 50, bias=bias).to(dtype)
    hidden = torch.randn(7, 64).to(dtype)
    exact = nn.functional.linear(hidden.double(), layer.weight.double(), layer.bias.double() if bias else None)
    return OutputLayer(layer), hidden, exact.detach()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_float32_whatever_the_weights(dtype: torch.dtype, bias: bool) -> None:
    output, hidden, exact = short_layer(dtype, bias)
    ids = torch.tensor([[3, 8], [0, 49], [1, 2], [5, 6], [7, 8], [9, 9], [4, 0]])
    with torch.no_grad():
        torch.testing.assert_close(output.all(hidden), exact.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.some(hidden, ids), exact.gather(1, ids).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_short_products_that_are_summed_in_float32(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, played by a function that multiplies as it does: the weights are not copied."""
    output, hidden, exact = short_layer(torch.bfloat16, bias)
    product = torch.mm

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        return product(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(generation, "sums_in_float32", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", mm)
    with torch.no_grad():
        torch.testing.assert_close(output.all(hidden), exact.float(), rtol=1e-5, atol=1e-5)
    assert output._full is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_computes_the_same(dtype: torch.dtype) -> None:
    output, hidden, exact = short_layer(dtype, True)
    on_gpu = nn.Linear(64, 50).to("cuda", dtype)
    assert output._bias is not None
    on_gpu.weight.data, on_gpu.bias.data = output._weight.detach().cuda(), output._bias.detach().to("cuda", dtype)
    with torch.no_grad():
        found = OutputLayer(on_gpu).all(hidden.cuda()).cpu()
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)
