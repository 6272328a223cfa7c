"""Log-probabilities and entropies over a large vocabulary, from hidden states, in bounded memory.

The scores of all tokens over the whole vocabulary never exist at once: they are made in tiles (some tokens × some
words), folded into running sums, and made again in the backward pass. Words are the outer loop, so that a weight of low
precision is converted, and the gradient of the weight is written, one block at a time. Nothing here knows a model, or
why the tokens are rated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .logprobs import TokenLogprobs
from .products import sums_in_float32

# Tiles of 1024 × 4096 scores (16 MB in float32) keep matrix products at full speed.
CHUNK_TOKENS = 1024
BLOCK_WORDS = 4096

# Scores are kept for the backward pass up to this size; making them again costs up to half the time once more.
KEPT_BYTES = 256 * 2**20

# Stands for a bias of -inf: exp(-1e4) is 0 in float32, and 0 · -1e4 is 0 where 0 · -inf would be NaN.
_LOG_ZERO = -1.0e4


def vocabulary_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    kept_bytes: int = KEPT_BYTES,
) -> TokenLogprobs:
    """Log-probability of each token, and entropy, under softmax((hidden · weightᵀ + bias) / temperature).

    Equals `constrained_logprobs` of these logits without a restriction. Beyond inputs and gradients, memory is two
    tiles of `chunk_tokens` × 4096 scores, the hidden states in float32, and at most `kept_bytes`: it does not grow with
    N × V. A weight that requires no gradient (a frozen head) costs nothing in the backward pass.

    Scores, log-probabilities and sums are float32 (float64 if an input is), also under autocast. Only where hidden
    states and weight are both bfloat16 does the backward pass round: the gradient of the scores, to bfloat16 before it
    is multiplied, as in plain bfloat16 training.

    Args:
        hidden: Final hidden states [N, H].
        weight: Output embedding (the weight of the language-model head) [V, H].
        token_ids: The tokens to rate, int64 [N], in [0, V).
        temperature: Positive.
        bias: Bias of the head [V], or None; −inf rules a word out.
        chunk_tokens: Tokens per tile, at least 1.
        kept_bytes: Scores of this size are kept for the backward pass; 0 makes all of them again.

    Raises:
        ValueError: Shapes that do not fit, a token outside the vocabulary, a temperature or chunk that is not positive.
        TypeError: Tokens that are not whole numbers.
    """
    _check(hidden, weight, token_ids, temperature, bias, chunk_tokens)
    kept = kept_bytes if torch.is_grad_enabled() else 0
    return TokenLogprobs(*_VocabularyLogprobs.apply(hidden, weight, bias, token_ids, temperature, chunk_tokens, kept))


class _Scores:
    """Makes tiles of tempered scores [tokens, words]."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, chunk: int) -> None:
        kinds = [x.dtype for x in (hidden, weight, bias) if x is not None]
        self.dtype = torch.float64 if torch.float64 in kinds else torch.float32
        self.low = hidden.dtype == weight.dtype == torch.bfloat16
        self.direct = self.low and self.dtype == torch.float32 and sums_in_float32(hidden.device)
        self.hidden = hidden if self.direct else hidden.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype).clamp(min=_LOG_ZERO)
        self.weight, self.temperature = weight, temperature
        self.chunk = max(1, min(chunk, len(hidden)))

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tokens, words, and the words' weights of every tile: block by block, in a block chunk by chunk."""
        n, v = len(self.hidden), len(self.weight)
        for begin in range(0, v, BLOCK_WORDS):
            words = slice(begin, min(begin + BLOCK_WORDS, v))
            block = self.weight[words] if self.direct else self.weight[words].to(self.dtype)
            for start in range(0, n, self.chunk):
                yield slice(start, min(start + self.chunk, n)), words, block

    def buffer(self) -> Tensor:
        """Memory for the largest tile."""
        return self.hidden.new_empty(self.chunk * min(BLOCK_WORDS, len(self.weight)), dtype=self.dtype)

    def make(self, rows: slice, words: slice, block: Tensor, buffer: Tensor | None) -> Tensor:
        """The scores of one tile, in the buffer if one is given."""
        shape = (rows.stop - rows.start, words.stop - words.start)
        out = self.hidden.new_empty(shape, dtype=self.dtype) if buffer is None else _as(buffer, shape)
        if self.direct:
            torch.mm(self.hidden[rows], block.T, out_dtype=self.dtype, out=out)
        else:
            torch.mm(self.hidden[rows], block.T, out=out)
        if self.bias is not None:
            out.add_(self.bias[words])
        return out if self.temperature == 1.0 else out.div_(self.temperature)


class _Sums:
    """Over the blocks seen so far, for every token: Σ exp z, Σ z exp z, and z of the token itself."""

    def __init__(self, token_ids: Tensor, dtype: torch.dtype) -> None:
        self.token_ids = token_ids
        self.highest = torch.full(token_ids.shape, torch.finfo(dtype).min, dtype=dtype, device=token_ids.device)
        # The two sums are of z − highest instead of z, so that nothing overflows.
        self.total, self.moment, self.own = (torch.zeros_like(self.highest) for _ in range(3))

    def add(self, rows: slice, words: slice, scores: Tensor, first: Tensor, second: Tensor) -> None:
        """Fold in one tile. The buffers are overwritten; the first may hold the scores themselves."""
        column, inside = _column(self.token_ids[rows], words)
        self.own[rows] = torch.where(inside, scores.gather(1, column).squeeze(1), self.own[rows])
        highest = torch.maximum(self.highest[rows], scores.amax(1))
        drop = self.highest[rows] - highest
        below = torch.sub(scores, highest.unsqueeze(1), out=_as(first, scores.shape))
        power = torch.exp(below, out=_as(second, scores.shape))
        total, scale = self.total[rows], drop.exp()
        self.moment[rows] = scale * (self.moment[rows] + drop * total) + below.mul_(power).sum(1)
        self.total[rows] = scale * total + power.sum(1)
        self.highest[rows] = highest

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and log Σ exp z, each [N]."""
        log_total = self.total.log()
        # Taken off one after the other: in their sum, what a nearly certain token lacks to log 1 would be rounded away.
        logprobs = self.own - self.highest - log_total
        return logprobs, log_total - self.moment / self.total, self.highest + log_total


class _Gradients:
    """The gradients of hidden states, weight and bias, those that are needed, summed up over tiles."""

    def __init__(self, scores: _Scores, hidden: Tensor, needed: tuple[bool, ...]) -> None:
        self.scores, weight = scores, scores.weight
        # bfloat16 inputs are multiplied as they are, with the gradient of the scores rounded.
        self.inputs = hidden if scores.low else scores.hidden
        exact = functools.partial(torch.zeros, dtype=scores.dtype, device=weight.device)
        self.hidden = exact(hidden.shape) if needed[0] else None
        self.weight = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device) if needed[1] else None
        self.bias = exact(len(weight)) if needed[2] else None
        # A block of the weight's gradient is summed up in full precision, then written once.
        self.part = exact(min(BLOCK_WORDS, len(weight)), weight.shape[1]) if needed[1] else None

    def add(self, rows: slice, words: slice, block: Tensor, gradient: Tensor) -> None:
        """Take in the gradient of one tile of scores; tiles come in the order of `_Scores.tiles`."""
        if self.bias is not None:
            self.bias[words] += gradient.sum(0)
        if self.scores.low:
            gradient, block = gradient.bfloat16(), self.scores.weight[words]
        if self.hidden is not None:
            _add_product(self.hidden[rows], gradient, block)
        if self.weight is not None and self.part is not None:
            part = self.part[: len(block)]
            if rows.start == 0:
                part.zero_()
            _add_product(part, gradient.T, self.inputs[rows])
            if rows.stop == len(self.inputs):
                self.weight[words] = part


class _VocabularyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
        chunk: int,
        kept_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        keeping = any(ctx.needs_input_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            scores = _Scores(hidden, weight, bias, temperature, chunk)
            sums, first, second = _Sums(token_ids, scores.dtype), scores.buffer(), scores.buffer()
            for rows, words, block in scores.tiles():
                size = (rows.stop - rows.start) * len(block) * first.element_size()
                keeping = keeping and size <= kept_bytes
                tile = scores.make(rows, words, block, None if keeping else first)
                sums.add(rows, words, tile, first, second)
                if keeping:
                    kept.append(tile)
                    kept_bytes -= size
            logprobs, entropy, logsumexp = sums.result()
        ctx.save_for_backward(hidden, weight, bias, token_ids, entropy, logsumexp, *kept)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, entropy, logsumexp, *kept = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            scores = _Scores(hidden, weight, bias, ctx.temperature, ctx.chunk)
            first, second = scores.buffer(), scores.buffer()
            sums = _Gradients(scores, hidden, ctx.needs_input_grad)
            # ∂ log p(a) / ∂z_b = δ_ab − p_b and ∂H / ∂z_b = −p_b (log p_b + H): δ · own − p_b (flat + steep · log p_b)
            own, steep = d_logprobs / ctx.temperature, d_entropy / ctx.temperature
            flat = own + steep * entropy
            for i, (rows, words, block) in enumerate(scores.tiles()):
                tile = kept[i] if i < len(kept) else scores.make(rows, words, block, first)
                log_p = torch.sub(tile, logsumexp[rows].unsqueeze(1), out=_as(first, tile.shape))
                p = torch.exp(log_p, out=_as(second, tile.shape))
                factor = torch.addcmul(flat[rows].unsqueeze(1), steep[rows].unsqueeze(1), log_p, out=log_p)
                column, inside = _column(token_ids[rows], words)
                gradient = p.mul_(factor).neg_()
                gradient.scatter_add_(1, column, torch.where(inside, own[rows], 0.0).unsqueeze(1))
                sums.add(rows, words, block, gradient)
        d_hidden = None if sums.hidden is None else sums.hidden.to(hidden.dtype)
        d_bias = None if sums.bias is None or bias is None else sums.bias.to(bias.dtype)
        return d_hidden, sums.weight, d_bias, None, None, None, None


def _as(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The beginning of a flat buffer in the shape [rows, columns]."""
    return buffer[: shape[0] * shape[1]].view(shape)


def _column(token_ids: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Where each token stands among the words, [n, 1], and whether it is one of them [n]; 0 where it is not."""
    inside = (token_ids >= words.start) & (token_ids < words.stop)
    return torch.where(inside, token_ids - words.start, 0).unsqueeze(1), inside


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a · b; summed in the target's precision where the device can."""
    if a.dtype == target.dtype:
        target.addmm_(a, b)
    elif sums_in_float32(target.device):
        target += torch.mm(a, b, out_dtype=target.dtype)
    else:
        target += a @ b


def _check(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float, bias: Tensor | None, chunk_tokens: int
) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature: {temperature} is not positive; for greedy choice take the argmax instead")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: {chunk_tokens} is not positive; {CHUNK_TOKENS} is a good value")
    if hidden.dim() != 2 or token_ids.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden: shape {tuple(hidden.shape)} with token_ids {tuple(token_ids.shape)}; expected [N, H] and [N]"
        )
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise TypeError(f"token_ids: {token_ids.dtype}; expected whole numbers")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected [V, {hidden.shape[1]}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: shape {tuple(bias.shape)}, expected [{len(weight)}]")
    if len(token_ids) and not (int(token_ids.min()) >= 0 and int(token_ids.max()) < len(weight)):
        bad = int(((token_ids < 0) | (token_ids >= len(weight))).nonzero()[0])
        raise ValueError(f"token_ids: token {int(token_ids[bad])} of row {bad} is outside [0, {len(weight)})")
