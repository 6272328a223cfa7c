"""Which options would make a run need less memory, and how much less. Knows them as they are written."""

from __future__ import annotations

from dataclasses import replace

from gigpo_lightning.cli_plan_needs import Planner, Setup, changed, switched
from gigpo_lightning.cli_plan_split import Split
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA

# Tokens that a segment needs beside its longest prompt to be worth its prompt.
_SHORTEST_ANSWERS = 128


def savings(planner: Planner, setup: Setup) -> list[tuple[str, int]]:
    """Options that would lower the peak, with the bytes that each would save by itself, the largest first."""
    before = planner.needs(setup, compare=False).total
    saved = [(name, before - planner.needs(other, compare=False).total) for name, other in alternatives(setup)]
    return sorted([(name, size) for name, size in saved if size > 0.01 * before], key=lambda pair: -pair[1])


def alternatives(setup: Setup) -> list[tuple[str, Setup]]:
    """What a user may change, one option at a time, as it would be written on the command line."""
    rows, micro, longest = setup.rows // 2, setup.micro_tokens // 2, setup.max_tokens // 2
    found: list[tuple[str, Setup]] = []
    if rows and setup.engine is None:
        found.append((f"--data.rows={rows}", replace(setup, rows=rows)))
    if micro >= 256:
        found.append((f"--data.max_tokens_per_batch={micro}", replace(setup, micro_tokens=micro)))
    if longest >= setup.prompt_tokens + _SHORTEST_ANSWERS:
        found.append((f"--data.segments.max_tokens={longest}", replace(setup, max_tokens=longest)))
    policy, prefix = setup.policy, "--model.policy.init_args."
    if not isinstance(policy, CausalLMPolicy):
        return found
    if not policy.gradient_checkpointing:
        found.append((f"{prefix}gradient_checkpointing=true", switched(setup)))
    if setup.split.processes > 1 and not setup.split.spread and policy.quantization == "none":
        found.append(("--trainer.strategy=fsdp2", replace(setup, split=Split(setup.split.processes, spread=True))))
    if policy.lora is None:
        found.append((f"{prefix}lora={{r: 16}}", changed(setup, lora=LoRA())))
    elif policy.quantization == "none" and not setup.split.spread and setup.engine is None:
        found += [(f"{prefix}quantization={q}", changed(setup, quantization=q)) for q in ("8bit", "4bit")]
    if policy.lora is not None and policy.dtype == "float32":
        found.append((f"{prefix}dtype=bfloat16", changed(setup, dtype="bfloat16")))
    eight_bit = None if setup.split.spread else _eight_bit_adam(setup)
    return found + ([("--model.optimizer=bitsandbytes.optim.AdamW8bit", eight_bit)] if eight_bit else [])


def _eight_bit_adam(setup: Setup) -> Setup | None:
    """With Adam's moments in 8 bit; None where bitsandbytes is missing."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        return None
    return replace(setup, optimizer=lambda parameters: AdamW8bit(list(parameters)))
