"""A program that speaks vLLM's interface over a transformers model, so that its log-probs are real.

It does what was seen of vLLM 0.32: an output layer that shares the embedding's weights is a copy of its own, stale
unless it is sent; an adapter that is there already is kept unless it is loaded in place; keys and values of former
weights stay until they are reset. `Faults` makes it fail in the ways that must be noticed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

BLOCK = 16


@dataclass
class Faults:
    """What it does otherwise than it should, and how many tokens it says in a step."""

    tokens_per_step: int = 1
    is_stale: bool = False  # weights are taken and thrown away
    shift: float = 0.0  # added to the log-probs of sampled tokens
    keeps_cache: bool = False


@dataclass
class EngineArgs:
    """The options that are read; a `TypeError` for others, as vLLM's."""

    model: str
    revision: str | None
    dtype: str
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    enable_sleep_mode: bool
    enable_prefix_caching: bool
    logprobs_mode: str
    skip_tokenizer_init: bool
    generation_config: str
    async_scheduling: bool
    disable_log_stats: bool
    enable_lora: bool = False
    max_lora_rank: int = 16
    max_loras: int = 1
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = False
    block_size: int | None = None


@dataclass
class SamplingParams:
    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    allowed_token_ids: Sequence[int] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    output_kind: str = "cumulative"


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


@dataclass
class _Request:
    number: str
    token_ids: list[int]
    params: SamplingParams
    random: torch.Generator
    prompt: int  # its tokens
    cached: int
    said: int = 0


@dataclass
class LLMEngine:
    """One engine; `calls` are its names of weights, adapters and sleep in order."""

    args: EngineArgs
    faults: Faults
    requests: dict[str, _Request] = field(default_factory=dict)
    read: list[list[int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    is_dirty: bool = False
    is_asleep: bool = False

    def __post_init__(self) -> None:
        _check_types()
        assert self.args.logprobs_mode == "processed_logprobs" and self.args.enable_prefix_caching
        # As vLLM does at its start.
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        torch.set_num_threads(1)
        self.model = self._load()
        self.engine_core = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))

    def _load(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.args.model, dtype=getattr(torch, self.args.dtype))
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model.eval()

    # -- weights -------------------------------------------------------------------------------------------------------

    def collective_rpc(self, method: str, kwargs: dict[str, Iterable[tuple[str, torch.Tensor]]]) -> None:
        assert method == "reload_weights" and not self.args.enable_lora
        self.calls.append("reload_weights")
        own = dict(self.model.named_parameters())
        for name, weight in kwargs["weights_iterator"]:
            if not self.faults.is_stale:
                own[name].data.copy_(weight)
        self.is_dirty = True

    def add_lora(self, request: LoRARequest) -> bool:
        assert self.args.enable_lora
        if self.faults.is_stale and "add_lora" in self.calls:
            return True
        if request.load_inplace or "add_lora" not in self.calls:
            self.model = PeftModel.from_pretrained(self._load(), request.lora_path).eval()
            self.is_dirty = True
        self.calls.append("add_lora")
        return True

    def reset_prefix_cache(self) -> bool:
        if self.requests or self.faults.keeps_cache:
            return False
        self.read, self.is_dirty = [], False
        return True

    def sleep(self, level: int) -> None:
        assert self.args.enable_sleep_mode and not self.requests
        self.is_asleep = True
        self.calls.append("sleep")

    def wake_up(self) -> None:
        self.is_asleep = False
        self.calls.append("wake_up")

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, lora_request: Any = None) -> None:
        assert not self.is_dirty, "keys and values of former weights would be used"
        assert (lora_request is not None) == self.args.enable_lora
        assert lora_request is None or not lora_request.load_inplace, "read from the disk at every step"
        ids = list(prompt["prompt_token_ids"])
        assert len(ids) > 0 and len(ids) + params.max_tokens <= self.args.max_model_len
        common = max((_common(ids, other) for other in self.read), default=0)
        cached = 0 if params.prompt_logprobs is not None else min(common, len(ids) - 1) // BLOCK * BLOCK
        generator = torch.Generator().manual_seed(params.seed or 0)
        self.requests[request_id] = _Request(request_id, ids, params, generator, len(ids), cached)

    def abort_request(self, request_ids: list[str]) -> None:
        for number in request_ids:
            del self.requests[number]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        _check_types()
        assert not self.is_asleep
        parts = {number: _Part() for number in self.requests}
        for _ in range(self.faults.tokens_per_step):
            going = [request for number, request in self.requests.items() if not parts[number].ended]
            for request, scores in zip(going, self._scores(going), strict=True):
                self._go_on(request, scores, parts[request.number])
        outputs = []
        for number, part in parts.items():
            request = self.requests[number]
            self.read.append(request.token_ids[:-1])
            if part.ended:
                del self.requests[number]
            outputs.append(
                SimpleNamespace(
                    request_id=number,
                    outputs=[SimpleNamespace(token_ids=part.token_ids, logprobs=part.logprobs)],
                    finished=part.ended,
                    num_cached_tokens=request.cached,
                    prompt_logprobs=part.prompt_logprobs,
                )
            )
        return outputs

    @torch.no_grad()
    def _scores(self, requests: list[_Request]) -> list[torch.Tensor]:
        """For each request the scores after each of its tokens; padding stands behind, where no token sees it."""
        if not requests:
            return []
        longest = max(len(request.token_ids) for request in requests)
        lines = [request.token_ids + [0] * (longest - len(request.token_ids)) for request in requests]
        scores = self.model(input_ids=torch.tensor(lines)).logits.float()
        return [row[: len(request.token_ids)] for row, request in zip(scores, requests, strict=True)]

    def _go_on(self, request: _Request, scores: torch.Tensor, part: _Part) -> None:
        """One more token; `scores` [tokens, vocabulary]."""
        params = request.params
        if params.prompt_logprobs is not None:
            pairs = zip(scores.log_softmax(-1), request.token_ids[1:], strict=False)
            part.prompt_logprobs = [None, *({t: SimpleNamespace(logprob=float(s[t]))} for s, t in pairs)]
        token_id, logprob = _sample(scores[-1], params, request.random)
        request.token_ids.append(token_id)
        request.said += 1
        part.token_ids.append(token_id)
        part.logprobs.append({token_id: SimpleNamespace(logprob=logprob + self.faults.shift)})
        part.ended = request.said >= params.max_tokens or token_id in (params.stop_token_ids or ())


@dataclass
class _Part:
    """What a step adds to a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Any]] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    ended: bool = False


def _sample(scores: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """A token and its log-probability under temperature and allowed ids; greedy ones are told before temperature."""
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(list(params.allowed_token_ids))
        scores = torch.full_like(scores, -torch.inf).scatter(0, allowed, scores[allowed])
    if params.temperature == 0:
        return int(scores.argmax()), float(scores.log_softmax(-1).max())
    logprobs = (scores / params.temperature).log_softmax(-1)
    token_id = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token_id, float(logprobs[token_id])


def _check_types() -> None:
    """The trainer's precision would change what vLLM computes in this process."""
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def install(patch: pytest.MonkeyPatch) -> tuple[Faults, list[LLMEngine]]:
    """Put it in the place of vLLM; returns its faults, to be set, and the engines that are started from now on."""
    faults, engines = Faults(), list[LLMEngine]()

    def from_engine_args(args: EngineArgs) -> LLMEngine:
        engines.append(LLMEngine(args, faults))
        return engines[-1]

    contents: dict[str, dict[str, Any]] = {
        "vllm": {
            "EngineArgs": EngineArgs,
            "SamplingParams": SamplingParams,
            "LLMEngine": SimpleNamespace(from_engine_args=from_engine_args),
        },
        "vllm.inputs": {"tokens_input": lambda ids: {"type": "token", "prompt_token_ids": ids}},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(members)
        patch.setitem(sys.modules, name, module)
    return faults, engines
