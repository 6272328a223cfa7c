"""Which configuration files a command line names, and under which name the run is kept.

Knows the text of the command line only; what the files say is the parser's business, if they can be read at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gigpo_lightning.cli_faults import yaml_problem
from gigpo_lightning.cli_run import run_of_checkpoint
from gigpo_lightning.resources import find_file, shipped_files
from gigpo_lightning.yaml_keys import repeated_key

DEFAULT_NAME = "default"


def resolve_configs(args: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Replace every `--config NAME` by the path of the file that is meant.

    Args:
        args: The command line after the subcommand.

    Returns:
        The command line with paths, and these paths in the order in which they overlay each other.

    Raises:
        ValueError: There is no such file, it is not YAML with keys, or the name is missing.
    """
    resolved: list[str] = []
    paths: list[Path] = []
    rest = iter(args)
    for arg in rest:
        option, equals, name = arg.partition("=")
        if option not in ("--config", "-c"):
            resolved.append(arg)
            continue
        name = name if equals else next(rest, "")
        if not name or name.startswith("--"):
            raise ValueError(f"--config: the name of a file is missing ({', '.join(shipped_files('configs'))})")
        path = _locate(name)
        read_mapping(path)
        paths.append(path)
        resolved += ["--config", str(path)]
    return resolved, paths


def saved_config(args: Sequence[str]) -> list[str]:
    """`--config FILE` for a command line that names a checkpoint inside a run but no configuration: the run's own one.

    Args:
        args: The command line after the subcommand, without any `--config`.
    """
    rest = iter(args)
    for arg in rest:
        option, equals, value = arg.partition("=")
        if option == "--ckpt_path":
            run = run_of_checkpoint(Path(value if equals else next(rest, "")))
            if run is not None and (run / "config.yaml").is_file():
                return ["--config", str(run / "config.yaml")]
    return []


def run_name(configs: Sequence[Path]) -> str:
    """The folder name of a run: the stem of its first configuration file.

    The `config.yaml` that a run leaves in `<name>/version_<k>` stands for that run's name.
    """
    if not configs:
        return DEFAULT_NAME
    first = configs[0].absolute()
    if first.name == "config.yaml" and first.parent.name.startswith("version_"):
        return first.parent.parent.name
    return first.stem


def _locate(name: str) -> Path:
    try:
        return find_file("configs", name)
    except ValueError as error:
        raise ValueError(f"--config {error}") from None


def read_mapping(path: Path, option: str = "--config") -> dict[str, Any]:
    """The content of a YAML file that `option` names; a parser's own messages would not name the file.

    Raises:
        ValueError: There is no such file, no options in it, or one twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content, twice = yaml.safe_load(text), repeated_key(text)
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{option} {path}: not readable as YAML: {yaml_problem(error)}") from None
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ValueError(f"{option} {path}: expected `key: value` lines, but the file {found}")
    if twice is not None:
        raise ValueError(f"{option} {path}:{twice[1]}: `{twice[0]}` is given twice; YAML would take the last one alone")
    return content
