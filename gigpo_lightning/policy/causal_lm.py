"""A pretrained language model as the policy: trained in full, with LoRA, or with LoRA over 4- and 8-bit weights.

Sampling and update are those of every policy. This file loads the model, says what is trained (and only that is
written into checkpoints), and knows how to be the reference: the same weights with the adapter switched off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from gigpo_lightning.batch import MicroBatch
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.chat import ChatPrompt
from gigpo_lightning.policy.chat_text import ChatText
from gigpo_lightning.policy.pretrained import (
    DTYPES,
    QUANTIZATIONS,
    check_attention,
    check_vocabulary,
    fingerprint,
    linear_names,
    load_config,
    load_model,
    load_tokenizer,
    model_without_values,
    widest_layer,
)
from gigpo_lightning.suggest import did_you_mean

_CHAT = ChatText()  # frozen, so that all policies may share it as their default


@dataclass(frozen=True)  # no slots: jsonargparse reads the defaults from __dict__
class LoRA:
    """Low-rank adapters beside frozen weights: W x + (alpha / r) · B A x.

    Args:
        r: Rank, at least 1.
        alpha: Scale; the adapter's output is multiplied by alpha / r.
        targets: Names of the linear layers that get an adapter; `all-linear` is all but the output layer.
        dropout: Share of the adapter's inputs that the update drops, in [0, 1). Above 0 the update's log-probs are no
            longer those of the sampling policy, even before the first step.
    """

    r: int = 16
    alpha: float = 32.0
    targets: Sequence[str] = ("all-linear",)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(
                f"policy.lora.r={self.r}: must be at least 1, 16 is usual; for full training set lora: null"
            )
        if not self.alpha > 0:
            raise ValueError(f"policy.lora.alpha={self.alpha}: must be positive, 2 × r is usual")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"policy.lora.dropout={self.dropout}: must lie in [0, 1), 0 is usual in reinforcement")
        if isinstance(self.targets, str) or not self.targets:
            raise ValueError(f"policy.lora.targets={self.targets!r}: must be a list of names, such as [all-linear]")


class CausalLMPolicy(BasePolicy):
    """A causal language model of the transformers library. Code that comes with a model is never run.

    Args:
        model: Name on the model hub, or a folder written by `save_pretrained`.
        dtype: Type of the weights: `auto` (the model's own), `float32`, `bfloat16` or `float16`. Log-probs and
            adapters are float32 in any case.
        lora: Adapter to train; null trains all weights.
        quantization: `none`, `4bit` (NF4) or `8bit` for the frozen weights under an adapter; needs bitsandbytes.
        gradient_checkpointing: Compute activations again in the backward pass: slower, in far less memory.
        chat: What the prompt says.
        revision: Branch, tag or commit on the hub; null for the newest.
        init_seed: Seed of the adapter's initial weights.
    """

    prompt: ChatPrompt

    def __init__(
        self,
        model: str,
        dtype: str = "auto",
        lora: LoRA | None = None,
        quantization: str = "none",
        gradient_checkpointing: bool = False,
        chat: ChatText = _CHAT,
        revision: str | None = None,
        init_seed: int = 0,
    ):
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"policy.dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
        if quantization not in QUANTIZATIONS:
            raise ValueError(f"policy.quantization={quantization!r}: choose one of {', '.join(QUANTIZATIONS)}")
        if quantization != "none" and lora is None:
            raise ValueError(f"policy.quantization={quantization!r}: such weights cannot be trained; give lora, too")
        if not 0 <= init_seed < 2**63:
            raise ValueError(f"policy.init_seed={init_seed}: must lie in [0, 2^63)")
        self.source, self.dtype, self.lora, self.quantization = model, dtype, lora, quantization
        self.gradient_checkpointing, self.chat = gradient_checkpointing, chat
        self.revision, self.init_seed = revision, init_seed
        self._weights_digest = ""
        self._wrapped: list[Any] = []  # peft's view of the model; not a submodule, or its weights would count twice
        self._trained: frozenset[str] = frozenset()  # names below this module; a frozen copy keeps them
        self.register_load_state_dict_post_hook(_expect_trained_only)

    # -- loading -------------------------------------------------------------------------------------------------------

    def prepare(self, tasks: TaskSet | None = None) -> None:
        """Load model and tokenizer; a second call changes nothing. The tasks are not asked for anything."""
        if self._weights_digest:
            return
        self.load_prompt()
        if not self.prompt.follows_template:
            rank_zero_warn(
                f"the chat template of policy.model={self.source!r} writes earlier turns otherwise than they were "
                "said; segments show them as they were said, between the template's separators"
            )
        self.model = load_model(self.source, self.dtype, self.quantization, self.revision)
        check_vocabulary(self.model, self.prompt.tokenizer, self.source)
        check_attention(self.model, self.source)
        self._weights_digest = fingerprint(self.model)
        if self.lora is not None:
            self._add_adapter(self.lora)
        elif self.model.dtype != torch.float32:
            rank_zero_warn(
                f"policy.lora is null and the weights are {self.model.dtype}: small steps are lost in rounding; set "
                "policy.dtype to float32, or give lora"
            )
        self._checkpoint_activations()
        self.model.train(self.training)  # it comes in evaluation mode
        trained = {name for name, p in self.named_parameters(remove_duplicate=False) if p.requires_grad}
        self._trained = frozenset(trained)

    def add_critic(self, detach: bool) -> None:
        super().add_critic(detach)
        assert self.critic is not None
        self._trained |= {f"critic.{name}" for name, _ in self.critic.named_parameters()}

    def prepare_hollow(self) -> None:
        """Build model and adapter without values, from the model's configuration alone. Nothing is quantized."""
        self.model = model_without_values(load_config(self.source, self.revision), self.dtype)
        if self.lora is not None:
            self._add_adapter(self.lora)
        self._checkpoint_activations()

    def load_prompt(self) -> None:
        """Load the tokenizer and read its chat template."""
        self.prompt = ChatPrompt(load_tokenizer(self.source, self.revision), self.chat, self.source)

    def _checkpoint_activations(self) -> None:
        if self.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def _add_adapter(self, lora: LoRA) -> None:
        """Freeze the weights and put a new adapter beside the chosen layers.

        Raises:
            ValueError: A target names no linear layer, or the output layer, whose weight log-probs are read from.
        """
        from peft import LoraConfig, get_peft_model  # slow to load, and not needed in full training

        known = linear_names(self.model)
        for name in lora.targets:
            if name not in (*known, "all-linear"):
                raise ValueError(
                    f"policy.lora.targets has {name!r}: {self.source} has no such linear layer"
                    f"{did_you_mean(name, known)} (there are: all-linear, {', '.join(known)})"
                )
        targets = known if "all-linear" in lora.targets else list(lora.targets)
        widest = widest_layer(self.model, targets)
        if lora.r > widest:
            raise ValueError(
                f"policy.lora.r={lora.r}: the targets' layers have at most rank {widest}; 8 to 64 is usual"
            )
        config = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=targets,
            lora_dropout=lora.dropout,
            task_type="CAUSAL_LM",
        )
        # Made on the CPU, so that a seed gives the same weights on every machine.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.random.default_generator.manual_seed(self.init_seed)
            # In float32 whatever the type of the weights: small steps would be lost in bfloat16.
            self._wrapped = [get_peft_model(self.model, config)]

    # -- reference -----------------------------------------------------------------------------------------------------

    def make_reference(self) -> BasePolicy | None:
        """None with an adapter: switched off, it leaves the reference."""
        return super().make_reference() if self.lora is None else None

    def reference_logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        with self.adapter_off() if self.lora is not None else nullcontext():
            return super().reference_logprobs(batch, temperature)

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """The pretrained model, for as long as the context lasts. Without an adapter there is nothing to switch off."""
        if self.lora is None:
            raise ValueError("policy.lora is null: a policy that trains all weights has no adapter to switch off")
        with self._wrapped[0].disable_adapter():
            yield

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def positions(self) -> int | None:
        """The model's positions, or its attention window where that is shorter: attention here always sees all."""
        config = self.model.config
        known = [super().positions, getattr(config, "sliding_window", None)]
        return min((n for n in known if n is not None), default=None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Only what is trained: the adapter, or all weights in full training."""
        prefix = kwargs.get("prefix", "")
        state = super().state_dict(*args, **kwargs)
        for key in [k for k in state if k.startswith(prefix) and k.removeprefix(prefix) not in self._trained]:
            del state[key]
        return state

    def save_adapter(self, folder: Path, tokenizer: bool = True) -> None:
        """Write the adapter as peft does, with the tokenizer unless it is not wanted.

        Raises:
            ValueError: There is no adapter.
        """
        if self.lora is None:
            raise ValueError("policy.lora is null: there is no adapter to write; export the merged model instead")
        self._wrapped[0].save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's model card, whose every field is still to be filled
        if tokenizer:
            self.prompt.tokenizer.save_pretrained(folder)

    def save_merged(self, folder: Path) -> None:
        """Write a model as `save_pretrained` does, the adapter added to the weights as they are in the source."""
        model = self.model
        if self.lora is not None:
            # A second copy, so that this policy stays as it is, and whose weights are not quantized.
            other = CausalLMPolicy(self.source, self.dtype, self.lora, chat=self.chat, revision=self.revision)
            other.prepare()
            other.load_state_dict(self.state_dict_without_critic())
            model = other._wrapped[0].merge_and_unload()
        model.save_pretrained(folder)
        self.prompt.tokenizer.save_pretrained(folder)

    def identity(self) -> dict[str, Any]:
        lora = self.lora
        config = self.model.config
        return {
            "model": f"{config.model_type}, {config.num_hidden_layers} × {config.hidden_size}",
            "weights": self._weights_digest,  # not the name: a model may move
            "quantization": self.quantization,
            "lora": None
            if lora is None
            else {"r": lora.r, "alpha": float(lora.alpha), "targets": sorted(lora.targets)},
            **self.prompt.identity(),
        }


def _expect_trained_only(policy: nn.Module, keys: Any) -> None:
    """Weights that are not trained are loaded by `prepare`: a checkpoint need not hold them."""
    assert isinstance(policy, CausalLMPolicy)
    own = [n for n, _ in (*policy.named_parameters(remove_duplicate=False), *policy.named_buffers())]
    # The hook is not told the policy's own place in the module: compare ends of names.
    known = tuple(f".{name}" for name in own if name not in policy._trained)
    keys.missing_keys[:] = [key for key in keys.missing_keys if not f".{key}".endswith(known)]
