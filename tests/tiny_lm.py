"""A small Llama with random weights and a chat template, saved as a folder: a pretrained model for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig

from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.chat_text import ChatText
from gigpo_lightning.policy.scratch import build_tokenizer
from tests.toy_world import BoxTasks

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}say : {{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.role }} : {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}say : {% endif %}"
)
CHAT = ChatText(system="take it", first="{instruction} , {observation}")


def save_tokenizer(folder: Path, template: str | None = TEMPLATE, tasks: TaskSet | None = None) -> Path:
    """Write a tokenizer of a world's words, of the box world's unless said otherwise."""
    tags = ("<think>", "</think>", "<action>", "</action>")
    tokenizer = build_tokenizer([*(tasks or BoxTasks()).vocabulary(), "system", "user", "say", *tags])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def save_tiny(
    folder: Path,
    template: str | None = TEMPLATE,
    kind: type[PretrainedConfig] = LlamaConfig,
    tasks: TaskSet | None = None,
    **config: Any,
) -> str:
    """Write model and tokenizer; the weights are large enough for choices to be far from uniform."""
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(folder, template, tasks))
    settings = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        built = kind(**{**settings, **config})
        AutoModelForCausalLM.from_config(built).save_pretrained(folder)
    return str(folder)


def made(source: str, *, moved: bool = True, **options: Any) -> CausalLMPolicy:
    """A prepared policy in evaluation mode; an adapter is `moved` away from its start, where it changes nothing."""
    policy = CausalLMPolicy(source, **{"chat": CHAT, "lora": LoRA(r=4, alpha=8.0), **options})
    policy.prepare(BoxTasks())
    if moved and policy.lora is not None:
        move(policy)
    return policy.eval()


def move(policy: CausalLMPolicy, seed: int = 0) -> None:
    """Give the adapter's second factors, which start as 0, random values."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
