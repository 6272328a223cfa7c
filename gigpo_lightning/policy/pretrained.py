"""Loading pretrained models and tokenizers, with one clear message for each thing that can be missing.

Knows the transformers library, and nothing about adapters, prompts or training.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from gigpo_lightning.policy.ragged import ATTENTION_NAME, PackedRows, run_ragged

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "4bit", "8bit")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Rows of the embedding that tell one set of weights from another.
_FINGERPRINT_ROWS = 64
# Hidden states by our attention and by the model's own may differ by rounding only, relative to their norm.
_PROBE_TOKENS, _TOLERANCE = 12, {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


def load_tokenizer(source: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Raises:
        ValueError: It cannot be had; the message says why and what to do.
    """
    _check_folder(source)
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _not_found("tokenizer", source, error) from error


def load_config(source: str, revision: str | None = None) -> PretrainedConfig:
    """The sizes of a model.

    Raises:
        ValueError: They cannot be had, or tell of layers that are not attention.
    """
    _check_folder(source)
    try:
        config = AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _not_found("model", source, error) from error
    odd = {kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYER_TYPES}
    if odd:
        raise ValueError(
            f"policy.model={source!r} has layers of type {', '.join(sorted(odd))}: choose a model with attention in "
            "all layers"
        )
    return config


def model_without_values(config: PretrainedConfig, dtype: str = "auto") -> PreTrainedModel:
    """The model of a configuration on torch's meta device: its tensors have shapes and no values."""
    kept = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config,
            dtype=kept if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
        )


def load_model(
    source: str, dtype: str = "auto", quantization: str = "none", revision: str | None = None
) -> PreTrainedModel:
    """The model on the device that is torch's default, with ragged attention.

    Raises:
        ValueError: It cannot be had, needs what this machine lacks, or attends in a way that ragged attention does not.
    """
    device = torch.get_default_device()
    if dtype == "float16" and device.type == "cpu":
        raise ValueError("policy.dtype='float16' needs a GPU: choose float32 or bfloat16 on this machine")
    options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    config = load_config(source, revision)
    if quantization != "none":
        options["quantization_config"] = _quantization(quantization, dtype, config)
        options["device_map"] = {"": device}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            **options,
        )
    except (OSError, ValueError) as error:
        raise _not_found("model", source, error) from error
    except (ImportError, RuntimeError) as error:
        if quantization == "none":
            raise
        raise ValueError(
            f"policy.quantization={quantization!r} does not run on {device.type} here: take a machine with a GPU or a "
            f"newer bitsandbytes, or set quantization to none ({_first_line(error)})"
        ) from error
    for module in model.modules():
        # On processors with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first evaluation, and from then on
        # no gradient passes through them; sampling and update would differ as well.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.to(device) if quantization == "none" else model


def linear_names(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of all linear layers but the output layer, sorted."""
    head = model.get_output_embeddings()
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    return sorted({name.rpartition(".")[2] for name in linear})


def check_attention(model: PreTrainedModel, source: str) -> None:
    """Compare ragged attention, and scores by the output layer alone, with the model's own on a few tokens.

    Raises:
        ValueError: They differ: the model attends in a way that ragged attention does not know (capped scores, sinks),
            or scales or caps the scores of its output layer.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(_PROBE_TOKENS, device=device) % model.config.vocab_size
    rows = PackedRows.from_lengths([_PROBE_TOKENS], device)
    training = model.training
    model.eval()
    with torch.no_grad():
        ours = run_ragged(model, ids, rows.position, rows).float()
        model.set_attn_implementation("eager")
        own = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        scores = model(input_ids=ids[None], use_cache=False).logits[0].float()
        by_layer = model.get_output_embeddings()(own).float()
    own = own.float()
    model.set_attn_implementation(ATTENTION_NAME)
    model.train(training)
    difference = float((ours - own).norm() / own.norm())
    if not difference <= _TOLERANCE.get(model.dtype, 0.05):
        raise ValueError(
            f"policy.model={source!r} ({model.config.model_type}) attends in a way that is not supported: its hidden "
            f"states differ by {difference:.1%}; choose a model of the Llama, Qwen2, Qwen3, Mistral or SmolLM family"
        )
    if not torch.allclose(scores, by_layer, rtol=1e-2, atol=1e-2 * float(by_layer.abs().max())):
        raise ValueError(
            f"policy.model={source!r} ({model.config.model_type}) scales or caps the scores of its output layer, which "
            "is not supported; choose a model of the Llama, Qwen2, Qwen3, Mistral or SmolLM family"
        )


def fingerprint(model: PreTrainedModel) -> str:
    """A short name of the weights, the same for every dtype that they are loaded in from a bfloat16 or float32 file."""
    weight = model.get_input_embeddings().weight[:_FINGERPRINT_ROWS].detach().to("cpu", torch.bfloat16)
    return hashlib.sha256(weight.float().numpy().tobytes()).hexdigest()[:16]


def _quantization(quantization: str, dtype: str, config: Any) -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"policy.quantization={quantization!r} needs bitsandbytes, which is not installed: pip install "
            "bitsandbytes, or set quantization to none"
        )
    from transformers import BitsAndBytesConfig

    if quantization == "8bit":
        # It says at every layer and every call that inputs are rounded to float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute or torch.float32,
    )


def _check_folder(source: str) -> None:
    """A path that is not there would be asked for on the hub, which answers about names that the user never meant."""
    folder = Path(source)
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"policy.model={source!r}: the folder has no config.json; name one made by save_pretrained")
    if looks_local and not folder.is_dir():
        raise ValueError(f"policy.model={source!r}: there is no such folder (`~` is not resolved)")


def _not_found(what: str, source: str, error: Exception) -> ValueError:
    return ValueError(
        f"policy.model={source!r}: its {what} could not be loaded; check the name and the connection to the model hub, "
        f"or name a folder made by save_pretrained ({_first_line(error)})"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
