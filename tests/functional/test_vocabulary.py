"""Log-probabilities over a large vocabulary: the plain ones and their gradients, whatever the tiles; what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from gigpo_lightning.functional import vocabulary
from gigpo_lightning.functional.logprobs import TokenLogprobs
from gigpo_lightning.functional.vocabulary import vocabulary_logprobs

N, V, H = 10, 30, 5
ALL = 2**30  # room for all scores


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Any:
    """Blocks of 8 words, so that a small vocabulary has several, the last of them not full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "BLOCK_WORDS", 8)
        yield


def inputs(seed: int = 0, n: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Hidden states, weight, bias and tokens; the scores spread over ±5 or so."""
    random = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*s, generator=random).to(dtype) for s in ((n, H), (V, H), (V,)))
    return hidden, weight, bias, torch.randint(V, (n,), generator=random)


def plain(hidden: Tensor, weight: Tensor, token_ids: Tensor, **options: Any) -> TokenLogprobs:
    """The oracle: all scores at once."""
    temperature, bias = options.get("temperature", 1.0), options.get("bias")
    log_p = torch.log_softmax(linear(hidden, weight, bias) / temperature, -1)
    return TokenLogprobs(log_p.gather(1, token_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(1))


def with_gradients(function: Callable[..., TokenLogprobs], leaves: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """Log-probs and entropies, and the gradients of a sum of them with weights of both signs."""
    hidden, weight, bias = (leaf.detach().clone().requires_grad_() for leaf in leaves[:3])
    found = function(hidden, weight, leaves[3], bias=bias, **options)
    factor = torch.linspace(-1.0, 2.0, len(hidden), dtype=found.entropy.dtype)
    ((factor * found.logprobs).sum() + (factor.flip(0) ** 2 * found.entropy).sum()).backward()
    return [*(x.detach() for x in found), *(x.grad for x in (hidden, weight, bias))]  # type: ignore[misc]


# -- the same numbers --------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.sampled_from([0.4, 1.0, 2.5]),
    st.sampled_from([1, 3, 100]),
    st.sampled_from([0, 600, ALL]),  # 600 bytes: none to nine of the tiles
)
@example(0, 10, 1.0, 100, 600)  # only the last tile, which is smaller, would fit
def test_is_the_plain_computation(seed: int, n: int, temperature: float, chunk: int, kept: int) -> None:
    leaves = inputs(seed, n, torch.float64)
    wanted = with_gradients(plain, leaves, temperature=temperature)
    found = with_gradients(vocabulary_logprobs, leaves, temperature=temperature, chunk_tokens=chunk, kept_bytes=kept)
    # float64 rounds to 1e-16; entropies of nearly certain tokens are differences of larger numbers
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_float32_gradients_are_right_to_five_digits() -> None:
    leaves = inputs(0, 50)
    wanted = with_gradients(plain, tuple(leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves))
    for a, b in zip(with_gradients(vocabulary_logprobs, leaves, chunk_tokens=7), wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("kept", [0, ALL])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_by_finite_differences(with_bias: bool, kept: int) -> None:
    *leaves, token_ids = inputs(1, 4, torch.float64)
    leaves = [leaf.requires_grad_() for leaf in leaves[: 2 + with_bias]]

    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return vocabulary_logprobs(
            hidden, weight, token_ids, temperature=0.7, bias=bias, chunk_tokens=3, kept_bytes=kept
        )

    assert function(*leaves)[0].dtype == torch.float64
    assert torch.autograd.gradcheck(function, leaves)


def test_any_one_output_and_any_one_input_may_need_a_gradient() -> None:
    leaves = inputs(2)
    for output in range(2):
        for needed in range(3):
            gradients = []
            for function in (plain, vocabulary_logprobs):
                own = [leaf.clone().requires_grad_(i == needed) for i, leaf in enumerate(leaves[:3])]
                function(own[0], own[1], leaves[3], bias=own[2])[output].sum().backward()
                assert [leaf.grad is not None for leaf in own] == [i == needed for i in range(3)]
                gradients.append(own[needed].grad)
            torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_graph_can_be_used_twice() -> None:
    hidden, weight, _, token_ids = inputs(3)
    hidden.requires_grad_()
    for kept in (0, ALL):
        loss = vocabulary_logprobs(hidden, weight, token_ids, kept_bytes=kept).entropy.sum()
        first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_layout_does_not_matter() -> None:
    leaves = inputs(4)
    strided = tuple(leaf.repeat_interleave(2, dim=0)[::2] for leaf in leaves)
    turned = (leaves[0].T.contiguous().T, leaves[1].T.contiguous().T, *leaves[2:])
    wanted = with_gradients(vocabulary_logprobs, leaves)
    for other in (strided, turned):
        assert not other[0].is_contiguous()
        torch.testing.assert_close(with_gradients(vocabulary_logprobs, other), wanted)


def test_no_tokens() -> None:
    logprobs, entropy, *gradients = with_gradients(vocabulary_logprobs, inputs(n=0))
    assert logprobs.shape == entropy.shape == (0,)
    assert all(not gradient.any() for gradient in gradients)
    assert [g.shape for g in gradients] == [(0, H), (V, H), (V,)]


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    leaves = inputs(5, 400, dtype)
    wanted = with_gradients(plain, tuple(leaf.float() if leaf.is_floating_point() else leaf for leaf in leaves))
    found = with_gradients(vocabulary_logprobs, leaves, chunk_tokens=4)
    assert [x.dtype for x in found] == [torch.float32] * 2 + [dtype] * 3
    for a, b in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(found[2:], wanted[2:], strict=True):
        # Each is rounded once, and with bfloat16 its terms are, too. A weight's gradient summed up in bfloat16 over the
        # 100 chunks would be wrong by 100 roundings.
        torch.testing.assert_close(a.float(), b, rtol=0, atol=torch.finfo(dtype).eps * float(b.abs().max()))


def test_bfloat16_products_that_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, played by a function that multiplies as it does."""
    product = torch.mm
    calls: list[torch.dtype] = []

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        calls.append(out_dtype)
        found = product(a.to(out_dtype), b.to(out_dtype))
        return found if out is None else out.copy_(found)

    leaves = inputs(9, dtype=torch.bfloat16)
    wanted = with_gradients(vocabulary_logprobs, leaves)
    monkeypatch.setattr(vocabulary, "sums_in_float32", lambda device: True)
    monkeypatch.setattr(torch, "mm", mm)
    found = with_gradients(vocabulary_logprobs, leaves)
    assert calls == [torch.float32] * 12  # four blocks, three products
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-5, atol=1e-5)
    for a, b in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-7 * float(b.abs().max()))  # a rounding of 8 bits


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_computes_the_same(dtype: torch.dtype) -> None:
    leaves = inputs(5, 400, dtype)
    wanted = with_gradients(vocabulary_logprobs, leaves)
    found = with_gradients(vocabulary_logprobs, tuple(leaf.cuda() for leaf in leaves))
    for a, b in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
    for a, b in zip(found[2:], wanted[2:], strict=True):
        atol = max(1e-5, 2 * torch.finfo(dtype).eps) * float(b.abs().max())
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=atol)


def test_an_adapter_in_float32_before_a_head_in_bfloat16() -> None:
    hidden, weight, _, token_ids = inputs(6)
    found = vocabulary_logprobs(hidden, weight.bfloat16(), token_ids)
    torch.testing.assert_close(found, plain(hidden, weight.bfloat16().float(), token_ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_changes_nothing(backward_inside: bool) -> None:
    leaves = inputs(7)
    hidden, weight, bias = (leaf.clone().requires_grad_() for leaf in leaves[:3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = vocabulary_logprobs(hidden, weight, leaves[3], bias=bias, kept_bytes=0)
        loss = found.logprobs.sum() + found.entropy.sum()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    other = [leaf.clone().requires_grad_() for leaf in leaves[:3]]
    wanted = vocabulary_logprobs(other[0], other[1], leaves[3], bias=other[2], kept_bytes=0)
    (wanted.logprobs.sum() + wanted.entropy.sum()).backward()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for a, b in zip((hidden, weight, bias), other, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


def test_the_extremes_are_exact_and_have_no_nan() -> None:
    """Scores of ±1e4 and 0: the first token is certain; a word that the bias rules out has no share and no gradient."""
    weight = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf], requires_grad=True)
    hidden = torch.tensor([[1.0], [0.0]], requires_grad=True)
    found = vocabulary_logprobs(hidden, weight, torch.tensor([0, 1]), bias=bias)
    # The second row: two words of score 0 are left.
    assert found.logprobs.tolist() == [0.0, pytest.approx(-math.log(2))]
    assert found.entropy.tolist() == [0.0, pytest.approx(math.log(2))]
    (found.logprobs + found.entropy).sum().backward()
    assert bias.grad.tolist() == [-0.5, 0.5, 0.0]  # −p and 1 − p with p = 1/2; the entropy is at its maximum
    assert all(bool(leaf.grad.isfinite().all()) for leaf in (hidden, weight))


def test_a_nearly_certain_token_is_not_certain() -> None:
    """−log(1 + e^−15) = −3.1e-7, of which float32 shows two or three units of 1.2e-7: 1 + e^−15 is rounded to them."""
    found = vocabulary_logprobs(torch.ones(1, 1), torch.tensor([[15.0], [0.0]]), torch.tensor([0]))
    assert found.logprobs.item() == pytest.approx(-3.1e-7, abs=1.2e-7)


def test_what_is_not_finite_stays_so() -> None:
    """An update of a broken model must be seen to be broken."""
    hidden, weight, _, token_ids = inputs(8)
    hidden[3, 1] = math.nan
    found = vocabulary_logprobs(hidden, weight, token_ids)
    assert found.logprobs.isnan().tolist() == found.entropy.isnan().tolist() == [i == 3 for i in range(N)]


# -- cost --------------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Notes the size of the largest tensor that anything makes, and counts multiplications of matrix products."""

    largest = multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.multiplications += a.numel() * b.shape[1]
        return out


@pytest.mark.parametrize(
    ("kept", "trained", "products"),
    # forward, scores again, gradient of the hidden states, gradient of the weight
    [(0, True, 4), (0, False, 3), (ALL, True, 3), (ALL, False, 2)],
)
def test_number_of_matrix_products(kept: int, trained: bool, products: int) -> None:
    hidden, weight, _, token_ids = inputs()
    hidden.requires_grad_()
    weight.requires_grad_(trained)
    with Watch() as watch:
        found = vocabulary_logprobs(hidden, weight, token_ids, chunk_tokens=3, kept_bytes=kept)
        (found.logprobs + found.entropy).sum().backward()
    assert watch.multiplications == products * N * V * H


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_tile(dtype: torch.dtype) -> None:
    """Of 200 × 30 scores, 20 × 8 at a time; hidden states [200, 5] in float32 are larger than that."""
    hidden, weight, _, token_ids = inputs(n=200, dtype=dtype)
    hidden.requires_grad_()
    with Watch() as watch:
        found = vocabulary_logprobs(hidden, weight, token_ids, chunk_tokens=20, kept_bytes=0)
        (found.logprobs + found.entropy).sum().backward()
    assert watch.largest == 200 * H


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_no_gradient_is_wanted(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, token_ids = inputs()
    hidden.requires_grad_()
    wanted = vocabulary_logprobs(hidden, weight, token_ids)
    given: list[Any] = []
    make = vocabulary._Scores.make
    monkeypatch.setattr(vocabulary._Scores, "make", lambda self, *args: (given.append(args[-1]), make(self, *args))[1])
    with mode():
        found = vocabulary_logprobs(hidden, weight, token_ids)
    assert len(given) == 4 and all(buffer is not None for buffer in given)
    torch.testing.assert_close(found, TokenLogprobs(*(x.detach() for x in wanted)), rtol=0, atol=0)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature: 0.0 is not positive"),
        ({"temperature": math.nan}, "temperature: nan is not positive"),
        ({"chunk_tokens": 0}, "chunk_tokens: 0 is not positive"),
        ({"token_ids": torch.tensor([0, 1, 2])}, r"hidden: shape \(2, 4\) with token_ids \(3,\)"),
        ({"weight": torch.zeros(3, 5)}, r"weight: shape \(3, 5\), expected \[V, 4\]"),
        ({"bias": torch.zeros(4)}, r"bias: shape \(4,\), expected \[3\]"),
        ({"token_ids": torch.tensor([0, 3])}, r"token_ids: token 3 of row 1 is outside \[0, 3\)"),
        ({"token_ids": torch.tensor([-1, 3])}, r"token_ids: token -1 of row 0 is outside \[0, 3\)"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(3, 4),
        "token_ids": torch.tensor([0, 2]),
    }
    vocabulary_logprobs(**good)
    with pytest.raises(ValueError, match=message):
        vocabulary_logprobs(**{**good, **change})
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match=f"token_ids: {dtype}; expected whole numbers"):
            vocabulary_logprobs(**{**good, "token_ids": torch.tensor([0, 1], dtype=dtype)})
