"""Weights of a policy in a running vLLM: how they get there, and the proof that they did.

All weights are handed over where all are trained, else the adapter beside weights that vLLM has loaded once. After each
hand-over both programs rate the same probe tokens. Knows vLLM's interface for weights, nothing about sampling.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gigpo_lightning.batch import MicroBatch
from gigpo_lightning.policy.causal_lm import CausalLMPolicy

# Mean absolute difference of log-probs that rounding explains, by the type of the weights.
TOLERANCES = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.3}
PROBE_TOKENS, PROBE_PROMPT_TOKENS = 64, 32
_STRIDE = 7919  # a prime: its multiples visit the vocabulary far apart


class Weights:
    """The policy's weights in one vLLM engine.

    Args:
        llm: A `vllm.LLMEngine` in this process.
        policy: Prepared; in evaluation mode, and without autocast, whenever this is used.
        capacity: Longest sequence that vLLM reads.
        tolerance: Largest mean difference of log-probs on the probe; None for that of the weights' type.
    """

    def __init__(self, llm: Any, policy: CausalLMPolicy, capacity: int, tolerance: float | None = None):
        self._llm, self._policy = llm, policy
        self.tolerance = TOLERANCES.get(policy.model.dtype, 0.3) if tolerance is None else tolerance
        self._probe = probe_tokens(policy)[: capacity - 1]
        self._before: Tensor | None = None
        self._folder = None if policy.lora is None else tempfile.TemporaryDirectory(prefix="gigpo_adapter_")
        self.adapter: Any = None
        """The `LoRARequest` to sample with; None where all weights are trained."""

    def hand_over(self) -> None:
        """Give vLLM the present weights, and forget what it read under the former ones.

        Raises:
            RuntimeError: vLLM kept keys and values of the former weights.
        """
        if self._folder is None:
            # An output layer that shares the embedding's weights has its name here, too: vLLM keeps its own copy.
            named = self._policy.model.named_parameters(remove_duplicate=False)
            weights = ((name, weight.detach()) for name, weight in named)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        else:
            self._load_adapter(Path(self._folder.name))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the former weights: requests were still under way")

    def _load_adapter(self, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        self._policy.save_adapter(folder, tokenizer=False)
        self._llm.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
        # Sampled with in-place loading, it would be read from the disk again for every step.
        self.adapter = LoRARequest("policy", 1, str(folder))

    def prove(self) -> float:
        """Compare the log-probs of the probe with the policy's own; returns their mean absolute difference.

        Raises:
            RuntimeError: They differ by more than rounding, or are nearer to those of the former hand-over.
        """
        own, theirs = self._own_logprobs(), self._llm_logprobs()
        difference = float((own - theirs).abs().mean())
        stale = float("inf") if self._before is None else float((self._before - theirs).abs().mean())
        if not difference <= self.tolerance or 2 * stale < difference:
            former = "" if self._before is None else f"; from those of the former weights they differ by {stale:.3g}"
            raise RuntimeError(
                f"vLLM does not sample from the present weights: on {len(own)} probe tokens its log-probs differ from "
                f"the policy's own by {difference:.3g} on average, {float((own - theirs).abs().max()):.3g} at most, "
                f"where {self.tolerance:.3g} is allowed (data.engine.sync_tolerance){former}"
            )
        self._before = own
        return difference

    def close(self) -> None:
        """Remove the adapter's files."""
        if self._folder is not None:
            self._folder.cleanup()

    @torch.no_grad()
    def _own_logprobs(self) -> Tensor:
        """[probe − 1], by the policy."""
        ids = torch.tensor(self._probe)
        count = len(ids) - 1
        micro = MicroBatch(
            token_ids=ids,
            lengths=(len(ids),),
            chosen=torch.arange(1, len(ids)),
            turn=torch.zeros(count, dtype=torch.int64),
            old_logprobs=torch.zeros(count),
            advantages=torch.zeros(count),
            allowed_ids=torch.zeros(0, dtype=torch.int64),
            allowed_counts=None,
        )
        device = self._policy.model.get_input_embeddings().weight.device
        return self._policy.chosen_logprobs(micro.to(device), 1.0)[0].float().cpu()

    def _llm_logprobs(self) -> Tensor:
        """[probe − 1], by vLLM; nothing else may be under way."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0, detokenize=False)
        self._llm.add_request("probe", tokens_input(self._probe), params, lora_request=self.adapter)
        found: list[Any] = []
        while self._llm.has_unfinished_requests():
            for output in self._llm.step():
                found = output.prompt_logprobs or found
        pairs = zip(self._probe[1:], found[1:], strict=True)  # the first token follows nothing
        return torch.tensor([entry[token_id].logprob for token_id, entry in pairs])


def probe_tokens(policy: CausalLMPolicy) -> list[int]:
    """The beginning of a prompt, and then tokens from all over the vocabulary: the same ids in every run."""
    ids = policy.prompt.header("probe", (), "probe")[:PROBE_PROMPT_TOKENS]
    vocabulary = policy.model.config.vocab_size
    return [*ids, *(i * _STRIDE % vocabulary for i in range(1, PROBE_TOKENS - len(ids) + 1))]
