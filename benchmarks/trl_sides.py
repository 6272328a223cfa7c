"""One GRPO step by TRL's trainer and one by this package, on given prompts and completions; see `trl_step.py`.

TRL gets the completions by its own hook (`rollout_func`) and computes advantages, reference, loss and gradient with its
own code. Ours are the functions that the LightningModule calls, on packed rows.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from gigpo_lightning.batch import MicroBatch, PackRow, cut_by_tokens, pack
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.functional.advantages import normalise_in_groups
from gigpo_lightning.functional.losses import kl_loss, policy_loss, token_weights
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.pretrained import load_model
from gigpo_lightning.policy.scratch import build_tokenizer

LR, CLIP, KL_COEF = 1e-6, 0.2, 0.04
TRL_EPS = 1e-4  # what TRL adds to the standard deviation of a group; ours is 1e-6
# TRL's `loss_type` and our `aggregation` of the same loss.
AVERAGES = {"bnpo": "token", "grpo": "turn", "dr_grpo": "constant"}


class Completions(NamedTuple):
    """Fixed prompts and completions, all members of a group one after the other."""

    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: list[float]
    members: int


def make_completions(options: argparse.Namespace, words: int) -> Completions:
    """Random token ids (none of the first few, which may be special) of random lengths, random rewards."""
    rng = np.random.default_rng(0)
    n = options.groups * options.members

    def ids(bounds: Sequence[int]) -> list[int]:
        return rng.integers(20, words, rng.integers(bounds[0], bounds[1] + 1)).tolist()

    prompts = [
        prompt for prompt in (ids(options.prompt) for _ in range(options.groups)) for _ in range(options.members)
    ]
    return Completions(prompts, [ids(options.completion) for _ in range(n)], rng.random(n).tolist(), options.members)


def make_model(folder: Path, words: int) -> None:
    """Write a small Llama with random weights, and a tokenizer that TRL wants to see."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=1024,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer(["word"]).save_pretrained(folder)


def move(model: nn.Module, size: float) -> None:
    """A step away from the sampling policy: noise of `size` times the spread of each weight matrix."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=random)
                parameter.add_(noise, alpha=size * float(parameter.std()))


class TRL:
    """TRL's trainer, with its completions given."""

    def __init__(self, folder: str, data: Completions) -> None:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        n = len(data.prompts)
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=n,
            num_generations=data.members,
            max_completion_length=max(map(len, data.completions)),
            beta=KL_COEF,
            epsilon=CLIP,
            temperature=1.0,
            loss_type="bnpo",
            use_bias_correction_kl=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
        )
        self.trainer = GRPOTrainer(
            model=folder,
            reward_funcs=lambda completions, **_: data.rewards,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["word"] * n}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_func=lambda prompts, trainer: {
                "prompt_ids": data.prompts,
                "completion_ids": data.completions,
                "logprobs": None,
            },
        )
        self.trainer.current_gradient_accumulation_steps = 1
        self.model = self.trainer.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        # Before the model moves: this policy sampled, and it is the reference.
        self.inputs = self.trainer._generate_and_score_completions([{"prompt": "word"} for _ in range(n)])
        self.inputs["old_per_token_logps"] = self.inputs["ref_per_token_logps"]
        self.constant = float(n * config.max_completion_length)

    def backward(self, average: str, kl: bool, refer: bool = False) -> float:
        """Loss of the batch, its gradient left in the parameters; `refer` computes the reference anew."""
        self.trainer.loss_type, self.trainer.beta = average, KL_COEF if kl else 0.0
        inputs = dict(self.inputs)
        if refer:
            parts = [torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask")]
            width = inputs["completion_ids"].shape[1]
            with torch.no_grad():
                reference = self.trainer._get_per_token_logps_and_entropies(self.trainer.ref_model, *parts, width)[0]
            inputs["ref_per_token_logps"] = reference
        loss = self.trainer.compute_loss(self.model, inputs)
        loss.backward()
        return float(loss.detach())


class GivenModel(BasePolicy):
    """A policy without a prompt: the token ids are given."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def prepare(self, tasks: TaskSet) -> None:
        """There is nothing to prepare."""

    def identity(self) -> dict[str, Any]:
        return {}


class Ours:
    """The same step with this package."""

    def __init__(self, folder: str, data: Completions, max_tokens: int, constant: float) -> None:
        self.policy = GivenModel(load_model(folder, "float32")).train()
        reference = self.policy.make_reference()
        assert reference is not None  # all weights are trained: a frozen copy
        self.reference = reference
        self.model, self.constant = self.policy.model, constant
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LR)
        groups = np.arange(len(data.prompts)) // data.members
        self.advantages = normalise_in_groups(data.rewards, groups, eps=TRL_EPS)
        rows = [_row(*parts) for parts in zip(data.prompts, data.completions, self.advantages.tolist(), strict=True)]
        parts = cut_by_tokens([len(row.token_ids) for row in rows], max_tokens)
        batches = [pack([rows[i] for i in part]) for part in parts]
        # As the sampler does, the log-probs of what was sampled are kept.
        self.batches = [self._sampled(batch) for batch in batches]

    def _sampled(self, batch: MicroBatch) -> MicroBatch:
        return replace(batch, old_logprobs=self.reference.reference_logprobs(batch, 1.0))

    def backward(self, average: str, kl: bool, refer: bool = False) -> float:
        """As `TRL.backward`; the reference of the old log-probs serves where it is not computed anew."""
        aggregation, total = AVERAGES[average], 0.0
        constant = self.constant if aggregation == "constant" else None
        masks = [torch.ones_like(batch.old_logprobs, dtype=torch.bool) for batch in self.batches]
        weights = [
            token_weights(mask, batch.turn, aggregation, constant=constant)
            for mask, batch in zip(masks, self.batches, strict=True)
        ]
        denominator = constant or sum(weight.denominator for weight in weights)
        for batch, mask, weight in zip(self.batches, masks, weights, strict=True):
            share: dict[str, Any] = {"denominator": denominator, "weights": weight.weights}
            logprobs, _ = self.policy.chosen_logprobs(batch, 1.0)
            loss = policy_loss(
                logprobs, batch.old_logprobs, batch.advantages, mask, clip_low=CLIP, clip_high=CLIP, **share
            ).loss
            if kl:
                reference = self.reference.reference_logprobs(batch, 1.0) if refer else batch.old_logprobs
                loss = loss + KL_COEF * kl_loss(logprobs, reference, mask, **share).loss
            loss.backward()
            total += float(loss.detach())
        return total


def _row(prompt: list[int], completion: list[int], advantage: float) -> PackRow:
    own = np.arange(len(prompt) + len(completion)) >= len(prompt)
    none = np.zeros(0, np.int64)
    ids, logprobs = np.array(prompt + completion), np.zeros(len(own), np.float32)
    return PackRow(ids, own, np.where(own, 0, -1), logprobs, none, none, np.array([advantage]))
