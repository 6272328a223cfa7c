"""Model folders that are damaged, not whole, or of a model that ragged attention and our log-probs do not reproduce."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GPT2Config, GraniteConfig

from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from tests.tiny_lm import save_tiny
from tests.toy_world import BoxTasks


def refused(folder: Path, **options: Any) -> str:
    """The message with which the model in this folder is refused."""
    with pytest.raises(ValueError, match=r"^policy\.") as caught:
        CausalLMPolicy(str(folder), **{"lora": LoRA(r=4), **options}).prepare(BoxTasks())
    return str(caught.value)


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", None])
def test_weights_that_are_not_whole_are_refused(tmp_path: Path, content: bytes | None) -> None:
    """Empty, a pointer to a file that git has not fetched, the first half of a download."""
    save_tiny(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000] if content is None else content)
    assert re.search(r"policy\.model=.*weights could not be loaded; is the download complete", refused(tmp_path))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    change_config(tmp_path, intermediate_size=96)
    assert "are they of the model in config.json" in refused(tmp_path)


@pytest.mark.parametrize(
    ("changes", "first"),
    [({"num_hidden_layers": 3}, "model.layers.2.input_layernorm"), ({"tie_word_embeddings": False}, "lm_head.weight")],
)
def test_weights_that_are_missing_never_start_at_random(tmp_path: Path, changes: dict[str, Any], first: str) -> None:
    """The second is what a model without an output layer, such as one for embeddings, looks like."""
    save_tiny(tmp_path)
    change_config(tmp_path, **changes)
    assert re.search(rf"its files lack \d+ weights of the model in config\.json, such as {first}", refused(tmp_path))


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path))
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path)
    assert "scores that are not finite: its weights are damaged" in refused(tmp_path)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_tiny(tmp_path))
    known = len(tokenizer)
    tokenizer.add_tokens(["open box"])
    tokenizer.save_pretrained(tmp_path)
    assert f"its tokenizer has {known + 1} tokens, the model only {known}" in refused(tmp_path)


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    assert "policy.revision='v1': policy.model=" in refused(tmp_path, revision="v1")


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        # log-probs of hidden states alone would be those of another model: z / 8, and 0.5 tanh(z / 0.5)
        (
            GraniteConfig,
            {"logits_scaling": 8.0},
            r"\(granite\) makes scores .* not supported: its scores differ by 700",
        ),
        (Gemma2Config, {"final_logit_softcapping": 0.5, "attn_logit_softcapping": None}, r"its scores differ by"),
        (
            Gemma2Config,
            {"final_logit_softcapping": None, "attn_logit_softcapping": 0.5},
            r"its hidden states differ by",
        ),
    ],
)
def test_models_that_are_rated_otherwise_are_refused(
    tmp_path: Path, kind: Any, config: dict[str, Any], message: str
) -> None:
    save_tiny(tmp_path, kind=kind, **config)
    assert re.search(message, refused(tmp_path)), refused(tmp_path)


def test_a_family_without_grouped_heads_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, kind=GPT2Config)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_key_value_heads"]  # GPT-2 does not know it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "(gpt2) is of a family that is not supported; choose a model of the Llama, Qwen2" in refused(tmp_path)
