"""The command `export`: a trained policy as files that other programs load.

Reads the checkpoint and the configuration of its run. What is written, and how, is the policy's.
"""

from __future__ import annotations

import os
import shutil
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from safetensors import SafetensorError

from gigpo_lightning.callbacks.durable import damage, lacking
from gigpo_lightning.cli_config import read_mapping, run_name
from gigpo_lightning.cli_errors import ShortParser, option_message
from gigpo_lightning.cli_place import NAMED, named
from gigpo_lightning.cli_quiet import quieten
from gigpo_lightning.cli_run import run_of_checkpoint, versions_of
from gigpo_lightning.paths import shown
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.finite import not_finite

_PREFIX = "policy."
_ENTRIES = ("state_dict", "policy_identity")
_POLICIES = ("CausalLMPolicy", "ScratchPolicy")  # for suggestions


def run_export(args: Sequence[str]) -> int:
    """Write the adapter, or the merged model, of a checkpoint into a new folder, and the critic where it has one.

    Args:
        args: The command line after `export`.

    Returns:
        0.

    Raises:
        ValueError: Checkpoint, configuration and folder do not fit.
    """
    parser = ShortParser(prog="python -m gigpo_lightning export", allow_abbrev=False)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="a checkpoint file of a run, or best or last")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write, new or empty")
    parser.add_argument("--merged", action="store_true", help="a whole model, the adapter added to its weights")
    parser.add_argument(
        "--config", type=Path, help="the run's config.yaml, where the checkpoint lies elsewhere; or what fit had"
    )
    parser.add_argument("--runs_dir", type=Path, default=Path("runs"), help="folder of all runs, for best and last")
    options = parser.parse_args(list(args))
    quieten()
    checkpoint, config = options.ckpt_path, options.config
    if str(checkpoint) in NAMED:
        checkpoint, config = _of_newest_run(str(checkpoint), config, options.runs_dir)
    with _new_folder(options.to) as folder:
        policy = load_policy(checkpoint, config)
        whole = options.merged or policy.lora is None
        try:
            (policy.save_merged if whole else policy.save_adapter)(folder)
            if policy.critic is not None:
                policy.critic.save(folder)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"--to {options.to}: cannot be written: {error}") from error
    print(f"{'model' if whole else 'adapter'}: {options.to}, of {shown(checkpoint)}")
    return 0


def _of_newest_run(wanted: str, config: Path | None, runs_dir: Path) -> tuple[Path, Path]:
    """The checkpoint that `best` or `last` means for `fit`, and its run's configuration.

    Raises:
        ValueError: It cannot be told which runs are meant, or there is none.
    """
    if config is None:
        raise ValueError(f"--ckpt_path {wanted}: of which run? Give the --config of its fit, too, or name the file")
    runs = runs_dir / run_name([config])
    run, checkpoint = named("export", wanted, runs, versions_of(runs), None)
    assert checkpoint is not None
    return Path(checkpoint), run / "config.yaml"


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder inside `target` whose files move into `target` at the end; where anything fails, nothing is left.

    Raises:
        ValueError: `target` is not new or empty, or cannot be made.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        found = "the folder is not empty" if target.is_dir() else "it is not a folder"
        raise ValueError(f"--to {target}: {found}; name a new one")
    made = [folder for folder in (target, *target.parents) if not folder.exists()]
    partial = target / ".partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        mask = os.umask(0)  # it can be asked for by setting it only
        os.umask(mask)
        for file in partial.iterdir():
            if file.is_file():
                file.chmod(0o666 & ~mask)  # safetensors makes files that nobody else may read
            file.replace(target / file.name)
        partial.rmdir()
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in made:
            if folder.is_dir():
                folder.rmdir()
        if isinstance(error, OSError):
            raise ValueError(f"--to {target}: cannot be written: {error.strerror}; name another folder") from error
        raise


def load_policy(checkpoint: Path, config: Path | None = None) -> CausalLMPolicy:
    """The policy of a checkpoint, with the weights it had there.

    Raises:
        ValueError: There is no such checkpoint or configuration, one cannot be used, or they are of different policies.
    """
    if not checkpoint.is_file():
        raise ValueError(f"--ckpt_path {checkpoint}: no such file; name one of a run's checkpoints")
    problem = damage(checkpoint)
    if problem is not None:
        raise ValueError(f"--ckpt_path {checkpoint}: not a whole checkpoint: {problem}")
    missing = lacking(checkpoint, _ENTRIES)
    if missing:
        raise ValueError(
            f"--ckpt_path {checkpoint}: not a checkpoint of gigpo_lightning: it lacks {', '.join(missing)}"
        )
    if config is None:
        run = run_of_checkpoint(checkpoint)
        config = run / "config.yaml" if run else None
        if config is None or not config.is_file():
            raise ValueError(f"--ckpt_path {checkpoint}: its run's config.yaml is not there; name it with --config")
    policy = _build(config)
    policy.prepare()
    saved: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    there, here = saved["policy_identity"], policy.identity()
    different = [f"{k}: {there.get(k)!r} there, {here[k]!r} here" for k in here if here[k] != there.get(k)]
    if different:
        raise ValueError(f"--ckpt_path {checkpoint} is of another policy than {config}: {'; '.join(different)}")
    weights = {k.removeprefix(_PREFIX): v for k, v in saved["state_dict"].items() if k.startswith(_PREFIX)}
    broken = not_finite(weights.items())
    if broken:
        raise ValueError(f"--ckpt_path {checkpoint}: its weight {broken} is not finite; take an earlier one")
    if any(name.startswith("critic.") for name in weights):
        policy.add_critic(detach=False)
    try:
        policy.load_state_dict(weights)
    except RuntimeError as error:  # it lists all that differ, one a line
        first = str(error).strip().splitlines()[1:2]
        raise ValueError(
            f"--ckpt_path {checkpoint}: its weights are of another model: {''.join(first).strip()}"
        ) from error
    return policy.eval()


def _build(config: Path) -> CausalLMPolicy:
    """The policy that a run's configuration names.

    Raises:
        ValueError: It names none, or one that cannot be made or exported.
    """
    model = read_mapping(config).get("model")
    options = model.get("policy") if isinstance(model, dict) else None
    if options is None:
        raise ValueError(f"--config {config}: it has no model.policy; name the config.yaml of the checkpoint's run")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(BasePolicy, "policy")
    try:
        parsed = parser.parse_object({"policy": options})
    except ArgumentError as error:
        raise ValueError(f"--config {config}: {option_message(str(error), (), _POLICIES, [config])}") from error
    policy = parser.instantiate_classes(parsed).policy
    if not isinstance(policy, CausalLMPolicy):
        raise ValueError(f"{config}: {type(policy).__name__} cannot be exported; only pretrained policies can")
    return policy
