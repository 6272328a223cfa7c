"""The memory tables of docs/models.md: `plan` for the shipped overlays and recipes, from the models' published sizes.

    python benchmarks/memory_table.py [--tokenizer FOLDER] [--only NAME ...]

No weights are needed, nor the model hub. Tokens are counted with the tokenizer in FOLDER (its own, or that of another
model; the tokenizers of the shipped models need about as many); without one they are assumed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from gigpo_lightning.cli_plan import run_plan
from gigpo_lightning.cli_plan_needs import CONTEXT_BYTES, TIGHT_FRAC
from gigpo_lightning.memory import GIB, format_size
from gigpo_lightning.resources import find_file

OVERLAYS = (
    "policy/smollm2-135m",
    "policy/qwen2.5-0.5b-lora",
    "policy/qwen2.5-1.5b-lora",
    "policy/qwen2.5-7b-qlora",
    "policy/qwen3-1.7b-lora",
    "recipes/alfworld-gigpo-1.5b",
    "recipes/alfworld-gigpo-7b-lora",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CARDS_GIB = (8, 12, 16, 24, 40, 48, 80)
COLUMNS = ("overlay", "parameters", "held", "update", "keys and values", "rollout", "needed", "GPU of")


def sizes() -> dict[str, PretrainedConfig]:
    """The published configurations, as far as memory depends on them."""

    def qwen2(
        width: int, layers: int, heads: int, kv_heads: int, inner: int, words: int, tied: bool
    ) -> PretrainedConfig:
        return Qwen2Config(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=inner,
            vocab_size=words,
            tie_word_embeddings=tied,
            max_position_embeddings=32768,
            dtype="bfloat16",
        )

    return {
        "HuggingFaceTB/SmolLM2-135M-Instruct": LlamaConfig(
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            vocab_size=49152,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
            dtype="bfloat16",
        ),
        "Qwen/Qwen2.5-0.5B-Instruct": qwen2(896, 24, 14, 2, 4864, 151936, True),
        "Qwen/Qwen2.5-1.5B-Instruct": qwen2(1536, 28, 12, 2, 8960, 151936, True),
        "Qwen/Qwen2.5-7B-Instruct": qwen2(3584, 28, 28, 4, 18944, 152064, False),
        "Qwen/Qwen3-1.7B": Qwen3Config(
            hidden_size=2048,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=6144,
            vocab_size=151936,
            tie_word_embeddings=True,
            max_position_embeddings=40960,
            dtype="bfloat16",
        ),
    }


def figures(overlay: str, folder: Path, tokenizer: Path | None) -> dict[str, Any]:
    """What `plan` writes about an overlay of alfworld.yaml."""
    options = yaml.safe_load(find_file("configs", overlay).read_text(encoding="utf-8"))
    model = options["model"]["policy"]["init_args"]["model"]
    sizes()[model].save_pretrained(folder)
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            shutil.copy(tokenizer / name, folder)
    args = ["--config", "alfworld.yaml", "--config", overlay, "--model.policy.init_args.model", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()):
        run_plan([*args, "--memory=80GiB", "--json", str(folder / "plan.json")])
    return dict(json.loads((folder / "plan.json").read_text(encoding="utf-8")))


def row(overlay: str, plan: dict[str, Any]) -> str:
    """A line of the table."""
    memory = plan["memory"]
    fits = [card for card in CARDS_GIB if memory["total"] <= TIGHT_FRAC * (card * GIB - CONTEXT_BYTES)]
    trained = memory["trained"] / 1e6
    parts = [memory["held"], memory["update"]["peak"], memory["cache"], memory["rollout"], memory["total"]]
    cells = [f"`{overlay}.yaml`", f"{memory['parameters'] / 1e6:,.1f} M, {trained:,.1f} M trained"]
    cells += [*map(format_size, parts), f"{fits[0]} GiB" if fits else "more than 80 GiB"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer and its chat template")
    parser.add_argument("--only", nargs="+", choices=OVERLAYS, default=OVERLAYS, metavar="NAME", help="some overlays")
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for overlay in options.only:
        with tempfile.TemporaryDirectory() as folder:
            print(row(overlay, figures(overlay, Path(folder), options.tokenizer)), flush=True)


if __name__ == "__main__":
    main()
