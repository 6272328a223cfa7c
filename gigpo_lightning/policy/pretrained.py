"""Loading pretrained models and tokenizers, with one clear message for each thing that can be missing.

Knows the transformers library, and nothing about adapters, prompts or training.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
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
_CHOOSE = "choose a model of the Llama, Qwen2, Qwen3, Mistral or SmolLM family"
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Rows of the embedding that tell one set of weights from another.
_FINGERPRINT_ROWS = 64
# Hidden states by our attention and by the model's own may differ by rounding only, relative to their norm.
_PROBE_TOKENS, _PROBE_LAYERS = 12, 4
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


def load_tokenizer(source: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Raises:
        ValueError: It cannot be had; the message says why and what to do.
    """
    _check_folder(source, revision)
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        raise _not_found("tokenizer", source, error) from error


def load_config(source: str, revision: str | None = None) -> PretrainedConfig:
    """The sizes of a model.

    Raises:
        ValueError: They cannot be had, or tell of layers that are not attention.
    """
    _check_folder(source, revision)
    try:
        config = AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        raise _not_found("model", source, error) from error
    odd = {kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYER_TYPES}
    if odd:
        raise ValueError(
            f"policy.model={source!r} has layers of type {', '.join(sorted(odd))}: choose a model with attention in "
            "all layers"
        )
    if not hasattr(config, "num_key_value_heads"):
        raise ValueError(
            f"policy.model={source!r} ({config.model_type}) is of a family that is not supported; {_CHOOSE}"
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
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError) as error:
        raise _not_found("model", source, error) from error
    except (ImportError, RuntimeError, SafetensorError) as error:
        if quantization == "none" or isinstance(error, SafetensorError):
            raise ValueError(
                f"policy.model={source!r}: its weights could not be loaded; is the download complete, and are they of "
                f"the model in config.json? ({_first_line(error)})"
            ) from error
        raise ValueError(
            f"policy.quantization={quantization!r} does not run on {device.type} here: take a machine with a GPU or a "
            f"newer bitsandbytes, or set quantization to none ({_first_line(error)})"
        ) from error
    missing = sorted(loaded["missing_keys"])
    if missing:  # they would start at random
        raise ValueError(
            f"policy.model={source!r}: its files lack {len(missing)} weights of the model in config.json, such as "
            f"{missing[0]}; name the files of a whole language model"
        )
    for module in model.modules():
        # On processors with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first evaluation, and from then on
        # no gradient passes through them; sampling and update would differ as well.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.to(device) if quantization == "none" else model


def widest_layer(model: PreTrainedModel, names: Sequence[str]) -> int:
    """The largest rank that a linear layer of one of these names can have."""
    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name.rsplit(".")[-1] in names]
    return max((min(layer.in_features, layer.out_features) for layer in layers), default=0)


def linear_names(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of all linear layers but the output layer, sorted."""
    head = model.get_output_embeddings()
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    return sorted({name.rpartition(".")[2] for name in linear})


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Refuse a tokenizer that writes tokens which the model cannot read.

    Raises:
        ValueError: It has more tokens than the model.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"policy.model={source!r}: its tokenizer has {len(tokenizer)} tokens, the model only {rows}; take the "
            "tokenizer that it was trained with, or call the model's resize_token_embeddings and save it"
        )


def check_attention(model: PreTrainedModel, source: str) -> None:
    """Compare hidden states and scores with the model's own on a few tokens.

    Raises:
        ValueError: They differ: the model attends in a way that ragged attention does not know (capped scores, sinks),
            or does more to its scores than the output layer (capped, scaled). Or they are no numbers.
    """
    device = model.get_input_embeddings().weight.device
    # Ordinary tokens and the first layers: over special ones and many layers, rounding alone makes large differences.
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=device) * model.config.vocab_size // (_PROBE_TOKENS + 2)
    rows = PackedRows.from_lengths([_PROBE_TOKENS], device)
    training = model.training
    model.eval()
    with torch.no_grad(), _shortened(model):
        ours = run_ragged(model, ids, rows.position, rows)
        model.set_attn_implementation("eager")
        own = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        scores = model.get_output_embeddings()(own)
        # Without a mask it would say that the probe may be padding.
        own_scores = model(ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False).logits[0]
    model.set_attn_implementation(ATTENTION_NAME)
    model.train(training)
    tolerance, kind = _TOLERANCE.get(model.dtype, 0.05), f"policy.model={source!r} ({model.config.model_type})"
    if not own_scores.isfinite().all():
        raise ValueError(f"{kind} gives scores that are not finite: its weights are damaged; load it anew")
    for found, expected, what, where in (
        (ours, own, "attends", "hidden states"),
        (scores, own_scores, "makes scores of its hidden states", "scores"),
    ):
        difference = _difference(found, expected)
        if not difference <= tolerance:
            raise ValueError(
                f"{kind} {what} in a way that is not supported: its {where} differ by {difference:.1%}; {_CHOOSE}"
            )


@contextmanager
def _shortened(model: PreTrainedModel) -> Iterator[None]:
    """The model with its first layers only."""
    decoder = model.get_decoder()
    layers = decoder.layers
    decoder.layers = layers[:_PROBE_LAYERS]
    try:
        yield
    finally:
        decoder.layers = layers


def _difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what is expected."""
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm())


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


def _check_folder(source: str, revision: str | None) -> None:
    """A path that is not there would be asked for on the hub, which answers about names that the user never meant."""
    folder = Path(source)
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"policy.model={source!r}: the folder has no config.json; name one made by save_pretrained")
    if looks_local and not folder.is_dir():
        raise ValueError(f"policy.model={source!r}: there is no such folder (`~` is not resolved)")
    if folder.is_dir() and revision is not None:
        raise ValueError(
            f"policy.revision={revision!r}: policy.model={source!r} is a folder, which has none; leave it out"
        )


def _not_found(what: str, source: str, error: Exception) -> ValueError:
    return ValueError(
        f"policy.model={source!r}: its {what} could not be loaded; check the name and the connection to the model hub, "
        f"or name a folder made by save_pretrained ({_first_line(error)})"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
