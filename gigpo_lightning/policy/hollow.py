"""A policy whose tensors have shapes and no values: what a run will hold in memory, before a weight is loaded.

The policy's own code is run on torch's fake tensors, forward and backward, and the bytes are counted as they come and
go. So the figures are those of the model at hand, and follow the code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from gigpo_lightning.batch import MicroBatch
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.memory import LiveBytes, int8_bytes, nf4_bytes, storage_bytes
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.casts import kept_casts
from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.hollow_parts import (
    backward,
    bitsandbytes_state,
    choice_stand_ins,
    ids,
    precision_named,
    replace_tensors,
    round_layer,
    stand_ins,
    tensors_in,
)
from gigpo_lightning.policy.hollow_shards import own_part
from gigpo_lightning.policy.ragged import PackedRows, run_ragged

# Layers are alike, so that two short models tell what each layer adds; a model of few layers is run whole.
_SHORT = (2, 4)
# Sampling among listed ids multiplies float32 copies of a weight row and a hidden state, value by value.
_SCORE_BYTES = 3 * 4
# Among all ids: scores and log-probabilities in float32, probabilities and their sums in float64.
_FREE_SCORE_BYTES = 4 + 4 + 8 + 8


@dataclass(frozen=True)
class MicroShape:
    """The size of a micro-batch: `rows` of `length` tokens.

    `listed` tokens were chosen among listed ids, `allowed` in all; `free` ones among the whole vocabulary.
    """

    rows: int
    length: int
    listed: int
    allowed: int
    free: int


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes beyond what a run holds all the time.

    Attributes:
        activations: The most that forward and backward pass of a micro-batch hold.
        logprobs: The most that the log-probs of its chosen tokens hold, from the hidden states on.
        peak: The most that all of it, with the reference's log-probs, holds at once.
    """

    activations: int
    logprobs: int
    peak: int


class HollowPolicy:
    """A prepared copy of a policy without values.

    Attributes:
        parameters, trained: Numbers of weights.
        weight_bytes, trained_bytes: Bytes of all weights, and of those that are trained.
        reference_bytes: Bytes of the frozen copy that the KL needs; 0 where the policy is its own reference.

    Args:
        policy: A policy that is not prepared; it stays so.
        tasks: The world's tasks.
        on_gpu: Whether the run will be on a GPU: optimisers and the output layer work otherwise there.
        precision: The trainer's: `32-true`, `bf16-mixed` or `bf16-true`.

    Raises:
        ValueError: As the policy's `prepare`, but for what only the weights could tell.
    """

    def __init__(self, policy: BasePolicy, tasks: TaskSet, on_gpu: bool = False, precision: str = "32-true"):
        self.policy, self._precision = copy.deepcopy(policy), precision_named(precision)
        if isinstance(self.policy, CausalLMPolicy):
            self.policy.prepare_hollow()
        else:
            with torch.device("meta"):
                self.policy.prepare(tasks)
        self._precision.convert_module(self.policy)
        self._on_gpu, self._mode = on_gpu, FakeTensorMode()
        self._quantization = getattr(policy, "quantization", "none")
        rounded = self._rounded_layers() if self._quantization != "none" else []
        with self._mode:
            replace_tensors(self.policy)
        everything = [*self.policy.parameters(), *self.policy.buffers()]
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in self.policy.parameters())
        self.trained = sum(p.numel() for p in trained)
        self.trained_bytes = storage_bytes(trained)
        rounding = sum(self._rounded_bytes(layer.weight) - storage_bytes([layer.weight]) for layer in rounded)
        self.weight_bytes = storage_bytes(everything) + rounding
        self.reference_bytes = 0 if getattr(policy, "lora", None) is not None else self.weight_bytes
        for layer in rounded:
            round_layer(layer, eight_bit=self._quantization == "8bit")
        with self._mode:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)  # held all the time, so not part of any peak
        self._known = [*everything, *(p.grad for p in trained if p.grad is not None)]

    # -- what is held all the time -------------------------------------------------------------------------------------

    def cache_bytes(self, rows: int, capacity: int, in_own_type: bool = False) -> int:
        """Bytes of the keys and values of `rows` sequences of at most `capacity` tokens.

        In the type that the trainer's precision computes in, or in the weights' own, as another engine keeps them.
        """
        with self._mode if in_own_type else self._computing():
            return storage_bytes(tensors_in(vars(self.policy.new_cache(rows, capacity))))

    def optimizer_bytes(self, factory: Callable[[Iterable[Tensor]], Optimizer], processes: int = 1) -> tuple[int, int]:
        """Bytes of an optimiser's state, and the most that a step holds beyond it; of weights spread over processes.

        Raises:
            ValueError: The optimiser cannot be tried without values.
        """
        with self._mode:
            trained = [own_part(p, processes) for p in self.policy.parameters() if p.requires_grad]
        known = [*trained, *(p.grad for p in trained if p.grad is not None)]
        optimizer = factory(trained)
        with self._mode:
            if hasattr(optimizer, "init_state"):
                return bitsandbytes_state(optimizer), 0
            for group in optimizer.param_groups:
                if self._on_gpu and group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # torch's own choice on a GPU
            try:
                with LiveBytes(known, stand_ins({})) as live:
                    optimizer.step()
            except (RuntimeError, ArithmeticError) as error:  # NotImplementedError is a RuntimeError
                raise ValueError(f"{type(optimizer).__name__} cannot be tried without values: {error}") from error
            state = storage_bytes(tensors_in(list(optimizer.state.values())))
        return state, max(live.peak - state, 0)

    # -- peaks ---------------------------------------------------------------------------------------------------------

    def update_bytes(self, shape: MicroShape, with_reference: bool) -> UpdateBytes:
        """What the update of one micro-batch holds beyond weights and gradients."""
        self.policy.train()
        tokens = shape.rows * shape.length

        def decoder() -> None:
            rows = PackedRows(ids(tokens), ids(tokens), (shape.rows, shape.length), ((shape.rows, shape.length),))
            backward(run_ragged(self.policy.model, ids(tokens), rows.position, rows).sum())

        def logprobs() -> None:
            backward(_total(self.policy.chosen_logprobs(_micro_batch(shape), 1.0)))

        def update() -> None:
            micro = _micro_batch(shape)
            loss = _total(self.policy.chosen_logprobs(micro, 1.0))
            if with_reference:
                loss = loss + self.policy.reference_logprobs(micro, 1.0).sum()
            backward(loss)

        answers = stand_ins({shape.rows: tokens, shape.listed: shape.allowed})
        peak = partial(self._peak, answers | choice_stand_ins(shape.listed, shape.free, shape.allowed))
        with self._given_hidden(tokens) as hidden:
            step = peak(logprobs, [hidden])
        activations = self._over_layers(lambda: peak(decoder))
        return UpdateBytes(activations, step, max(activations, self._over_layers(lambda: peak(update))))

    def rollout_bytes(self, rows: int, capacity: int, prompt_tokens: int, widest: int | None) -> int:
        """The most that a step of decoding holds: every row reads `prompt_tokens` into a cache that is then full.

        An upper bound. When prompts are long, few rows hold so much before; when all are new, attention sees less.

        Args:
            rows: Rows of the cache.
            capacity: Tokens of each.
            prompt_tokens: Tokens that are read at once.
            widest: The most ids that a token is chosen among; None for the whole vocabulary.
        """
        self.policy.eval()
        with self._computing():
            cache = self.policy.new_cache(rows, capacity)

        def feed() -> None:
            cache.lengths = [capacity - prompt_tokens] * rows
            self.policy.feed(cache, [[0] * prompt_tokens] * rows)

        answers, given = stand_ins({rows: rows * prompt_tokens}), tensors_in(vars(cache))
        with torch.no_grad():
            reading = self._over_layers(lambda: self._peak(answers, feed, given))
        weight = self.policy.model.get_output_embeddings().weight
        if widest is not None:
            return max(reading, rows * widest * weight.shape[1] * _SCORE_BYTES)
        # Without exact products of short numbers the output layer is there once more in float32.
        copied = 0 if self._on_gpu or weight.dtype == torch.float32 else weight.numel() * 4
        return copied + max(reading, rows * weight.shape[0] * _FREE_SCORE_BYTES)

    def _peak(
        self,
        answers: dict[Any, Callable[..., Any]],
        run: Callable[[], None],
        given: Sequence[Tensor] = (),
    ) -> int:
        """The most that `run` holds beyond the policy and what is `given`."""
        playing = nullcontext() if torch.is_grad_enabled() else kept_casts()
        with self._computing(), LiveBytes([*self._known, *given], answers) as live, playing:
            run()
        return live.peak

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Tensors without values, in the types that the precision computes in."""
        with self._mode, self._precision.forward_context():
            yield

    @contextmanager
    def _given_hidden(self, tokens: int) -> Iterator[Tensor]:
        """The policy with a decoder that costs nothing: it answers with hidden states that are there already."""
        model = self.policy.model
        with self._mode:
            width = model.get_output_embeddings().weight.shape[1]
            hidden = torch.empty(1, tokens, width, dtype=model.dtype, requires_grad=True)
        model.get_decoder = lambda: lambda **_: SimpleNamespace(last_hidden_state=hidden)
        try:
            yield hidden
        finally:
            del model.get_decoder  # the method of its class comes back

    def _over_layers(self, measure: Callable[[], int]) -> int:
        """The measure for all layers, from those of two short models."""
        decoder = self.policy.model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if layers is None or len(layers) <= _SHORT[1]:
            return measure()
        values = []
        for count in _SHORT:
            decoder.layers = layers[:count]
            try:
                values.append(measure())
            finally:
                decoder.layers = layers
        per_layer = (values[1] - values[0]) / (_SHORT[1] - _SHORT[0])
        return round(values[0] + per_layer * (len(layers) - _SHORT[0]))

    # -- rounded weights -----------------------------------------------------------------------------------------------

    def _rounded_layers(self) -> list[nn.Linear]:
        """The layers that bitsandbytes rounds: all frozen linear ones but the output layer."""
        head = self.policy.model.get_output_embeddings()
        linears = [m for m in self.policy.model.modules() if isinstance(m, nn.Linear) and m is not head]
        return [m for m in linears if not m.weight.requires_grad]

    def _rounded_bytes(self, weight: Tensor) -> int:
        return nf4_bytes(weight.numel()) if self._quantization == "4bit" else int8_bytes(*weight.shape)


def _micro_batch(shape: MicroShape) -> MicroBatch:
    chosen = shape.listed + shape.free
    return MicroBatch(
        token_ids=ids(shape.rows * shape.length),
        lengths=(shape.length,) * shape.rows,
        chosen=ids(chosen),
        turn=ids(chosen),
        old_logprobs=torch.empty(chosen),
        advantages=torch.empty(chosen),
        allowed_ids=ids(shape.allowed),
        allowed_counts=ids(chosen) if shape.listed else None,
    )


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.sum() for part in parts]).sum()
