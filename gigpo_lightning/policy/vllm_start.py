"""Starting vLLM inside this process, in which training goes on undisturbed.

vLLM seeds the global random numbers and sets threads for a process of its own; both are put back. Knows how vLLM is
configured, not how it is asked.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.default_type import float32_by_default

# The ranks that vLLM has kernels for (vllm.config.lora.MaxLoRARanks).
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Set by us: sampling would not be what training takes it for if they were otherwise.
OWN_ARGS = (
    "model",
    "revision",
    "dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "enable_sleep_mode",
    "enable_prefix_caching",
    "logprobs_mode",
    "skip_tokenizer_init",
    "generation_config",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)


def start(
    policy: CausalLMPolicy,
    *,
    capacity: int,
    rows: int,
    gpu_memory_utilization: float,
    sleeps: bool,
    args: dict[str, Any],
) -> Any:
    """A `vllm.LLMEngine` in this process that has loaded the policy's source.

    Args:
        policy: Prepared.
        capacity: Longest sequence, in tokens.
        rows: Sequences at once.
        gpu_memory_utilization: Share of the device's memory.
        sleeps: Whether it shall be put to sleep between collections.
        args: More options of `vllm.EngineArgs`; they override ours but those that must hold.

    Raises:
        ValueError: An option that is not there or not free to choose, more tokens than the model has positions, or a
            rank of the adapter that vLLM has no kernels for.
    """
    _check(policy, capacity, args)
    # Weights are handed over as tensors, which another process would not see.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    settings: dict[str, Any] = {
        "max_num_seqs": rows,
        "async_scheduling": False,  # most requests are for one token: a step ahead would be a step for nothing
        "disable_log_stats": True,
        **args,
        "model": policy.source,
        "revision": policy.revision,
        "dtype": str(policy.model.dtype).removeprefix("torch."),
        "max_model_len": capacity,
        "gpu_memory_utilization": gpu_memory_utilization,
        "enable_sleep_mode": sleeps,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # under temperature and allowed ids
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's: no top-k, no ends of its own
    }
    if policy.lora is not None:
        rank = next(rank for rank in LORA_RANKS if rank >= policy.lora.r)
        settings.update(enable_lora=True, max_lora_rank=rank, max_loras=1)
    from vllm import EngineArgs, LLMEngine

    try:
        chosen = EngineArgs(**settings)
    except TypeError as error:
        raise ValueError(f"data.engine.args: {error}") from error
    return LLMEngine.from_engine_args(chosen)


def _check(policy: CausalLMPolicy, capacity: int, args: dict[str, Any]) -> None:
    taken = [name for name in args if name in OWN_ARGS]
    if taken:
        raise ValueError(f"data.engine.args has {', '.join(taken)}: set from the other options, leave it out")
    positions = policy.positions
    if positions is not None and capacity > positions:
        raise ValueError(
            f"the policy has {positions} positions, but segments may grow to {capacity} tokens: lower "
            "data.segments.max_tokens"
        )
    if policy.lora is not None and policy.lora.r > LORA_RANKS[-1]:
        raise ValueError(f"policy.lora.r={policy.lora.r}: vLLM has kernels up to {LORA_RANKS[-1]}")


@contextmanager
def own_types(device: torch.device) -> Iterator[None]:
    """vLLM computes in the types that it was started with, whatever the trainer's precision is."""
    with float32_by_default(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers and threads of this process are afterwards as they were before."""
    python, arrays = random.getstate(), np.random.get_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    device = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=device):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_num_threads = set_threads  # the CPU build puts a function there that does nothing
        torch.set_num_threads(threads)
