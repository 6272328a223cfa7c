"""The command `export`: a trained policy as files that other programs load.

Reads the checkpoint and the configuration of its run. What is written, and how, is the policy's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser

from gigpo_lightning.cli_run import run_of_checkpoint
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.causal_lm import CausalLMPolicy

_PREFIX = "policy."


def run_export(args: Sequence[str]) -> int:
    """Write the adapter, or the merged model, of a checkpoint into a new folder.

    Args:
        args: The command line after `export`.

    Returns:
        0.

    Raises:
        ValueError: Checkpoint, configuration and folder do not fit.
    """
    parser = argparse.ArgumentParser(prog="python -m gigpo_lightning export", allow_abbrev=False)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="a checkpoint file of a run")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write, new or empty")
    parser.add_argument("--merged", action="store_true", help="a whole model, the adapter added to its weights")
    parser.add_argument("--config", type=Path, help="the run's config.yaml, where the checkpoint lies elsewhere")
    options = parser.parse_args(list(args))
    if options.to.exists() and (not options.to.is_dir() or any(options.to.iterdir())):
        raise ValueError(f"--to {options.to}: the folder is not empty; name a new one")
    policy = load_policy(options.ckpt_path, options.config)
    whole = options.merged or policy.lora is None
    (policy.save_merged if whole else policy.save_adapter)(options.to)
    print(f"{'model' if whole else 'adapter'}: {options.to}")
    return 0


def load_policy(checkpoint: Path, config: Path | None = None) -> CausalLMPolicy:
    """The policy of a checkpoint, with the weights it had there.

    Raises:
        ValueError: There is no such checkpoint or configuration, or they are of different policies.
    """
    if not checkpoint.is_file():
        raise ValueError(f"--ckpt_path {checkpoint}: no such file")
    run = run_of_checkpoint(checkpoint)
    config = config or (run / "config.yaml" if run else None)
    if config is None or not config.is_file():
        raise ValueError(f"--ckpt_path {checkpoint}: its run's config.yaml is not there; name it with --config")
    policy = _build(config)
    policy.prepare()
    saved: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    there, here = saved.get("policy_identity") or {}, policy.identity()
    different = [f"{k}: {there.get(k)!r} there, {here[k]!r} here" for k in here if here[k] != there.get(k)]
    if different:
        raise ValueError(f"--ckpt_path {checkpoint} is of another policy than {config}: {'; '.join(different)}")
    weights = saved["state_dict"]
    policy.load_state_dict({k.removeprefix(_PREFIX): v for k, v in weights.items() if k.startswith(_PREFIX)})
    return policy.eval()


def _build(config: Path) -> CausalLMPolicy:
    """The policy that a run's configuration names."""
    options = (yaml.safe_load(config.read_text(encoding="utf-8")).get("model") or {}).get("policy")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(BasePolicy, "policy")
    policy = parser.instantiate_classes(parser.parse_object({"policy": options})).policy
    if not isinstance(policy, CausalLMPolicy):
        raise ValueError(f"{config}: {type(policy).__name__} cannot be exported; only pretrained policies can")
    return policy
