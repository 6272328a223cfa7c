"""What is planned without values is what real policies hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gigpo_lightning.memory import storage_bytes
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.hollow import HollowPolicy, MicroShape
from gigpo_lightning.policy.scratch import ScratchPolicy
from tests.tiny_lm import CHAT, save_tiny
from tests.toy_world import BoxTasks

LORA = LoRA(r=4, alpha=8.0)
SHAPE = MicroShape(rows=3, length=40, chosen=30, allowed=90)
KINDS: dict[str, dict[str, Any]] = {
    "full": {"lora": None, "dtype": "float32"},
    "full bfloat16": {"lora": None, "dtype": "bfloat16"},
    "lora": {"lora": LORA, "dtype": "float32"},
    "lora bfloat16": {"lora": LoRA(r=4, targets=["q_proj", "down_proj"]), "dtype": "bfloat16"},
    "checkpointing": {"lora": LORA, "dtype": "bfloat16", "gradient_checkpointing": True},
    "4bit": {"lora": LORA, "dtype": "float32", "quantization": "4bit"},
    "8bit": {"lora": LORA, "dtype": "float32", "quantization": "8bit"},
}
pytestmark = pytest.mark.filterwarnings("ignore:policy.lora is null")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of six layers, so that short models have to speak for it; odd sizes leave blocks of rounding unfilled."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=6, intermediate_size=136)


def policy_of(kind: str, folder: str) -> BasePolicy:
    return ScratchPolicy() if kind == "scratch" else CausalLMPolicy(folder, chat=CHAT, **KINDS[kind])


def real(kind: str, folder: str) -> BasePolicy:
    policy = policy_of(kind, folder)
    policy.prepare(BoxTasks())
    return policy


def rounding(policy: BasePolicy) -> list[torch.Tensor]:
    """The tensors that bitsandbytes keeps beside its rounded weights."""
    found: list[torch.Tensor] = []
    for module in policy.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            found += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        for owner, name in ((getattr(module, "weight", None), "SCB"), (getattr(module, "state", None), "SCB")):
            scale = getattr(owner, name, None)
            if isinstance(scale, torch.Tensor):
                found.append(scale)
    return found


@pytest.mark.parametrize("kind", ["scratch", *KINDS])
def test_what_is_held_all_the_time_is_exact(kind: str, folder: str) -> None:
    hollow, policy = HollowPolicy(policy_of(kind, folder), BoxTasks()), real(kind, folder)
    held = [*policy.parameters(), *policy.buffers(), *rounding(policy)]
    assert hollow.weight_bytes == storage_bytes(held)
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert hollow.trained == sum(p.numel() for p in trained)
    assert hollow.trained_bytes == storage_bytes(trained)
    cache = policy.new_cache(7, 50)
    assert hollow.cache_bytes(7, 50) == storage_bytes([cache.keys, cache.values])
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values()]
    assert hollow.optimizer_bytes(torch.optim.AdamW)[0] == storage_bytes(state)
    copy = policy.make_reference()
    assert hollow.reference_bytes == (0 if copy is None else storage_bytes([*copy.parameters(), *copy.buffers()]))
