"""What is compared: named sets of changes to one configuration, from overlays of algorithms and from YAML files.

A change is an option of `fit` or an edit of the list of callbacks, which options could only replace as a whole. Knows
texts and plain values; whether `fit` takes them is tried elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gigpo_lightning.cli_config import read_mapping
from gigpo_lightning.compare.options import check_rest
from gigpo_lightning.resources import find_file, shipped_files
from gigpo_lightning.suggest import did_you_mean

_ALGORITHMS = "algorithm/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,60}")
_TAKEN = ("plan.json", "compare.json", "compare.md", "compare.png")  # beside the folders of the variants
_KEYS = ("label", "configs", "options", "callbacks")
# These use or keep what the callbacks before them have decided: new ones come before them.
_LAST = ("TensorBoardViews", "IterationProgress", "IterationCheckpoint", "EvaluationFiles")

Edits = Mapping[str, Mapping[str, Any] | None]


@dataclass(frozen=True)
class Variant:
    """One of the things compared.

    Args:
        name: Its folder and its name in tables.
        label: Its name in pictures.
        options: What it adds to the command line of `fit`.
        callbacks: By class name: options that change or add a callback, None to leave it out.
    """

    name: str
    label: str
    options: tuple[str, ...] = ()
    callbacks: Edits = field(default_factory=dict)


def collect(algorithms: Sequence[str], files: Sequence[str]) -> tuple[Variant, ...]:
    """The variants that a command line names, in its order.

    Raises:
        ValueError: An overlay or file is missing or bad, or two variants have one name.
    """
    found = [_algorithm(name) for name in algorithms]
    for file in files:
        found += read_variants(_find(file))
    for number, variant in enumerate(found):
        if variant.name in [other.name for other in found[:number]]:
            raise ValueError(f"there are two variants of the name {variant.name}: name each once")
    return tuple(found)


def read_variants(path: Path) -> list[Variant]:
    """The variants of a file, in its order.

    Raises:
        ValueError: The file cannot be read, or a variant in it; the message names both.
    """
    content = read_mapping(path, "--variants")
    return [_variant(name, entry, f"--variants {path}: {name}") for name, entry in content.items()]


def edit_callbacks(listed: Sequence[Mapping[str, Any]], edits: Edits) -> list[dict[str, Any]]:
    """The list of callbacks with the edits made.

    Args:
        listed: Entries with `class_path` and `init_args`.
        edits: By class name: options to change or, where the callback is not listed, to add it with; None removes it.

    Raises:
        ValueError: One that is to be removed is not listed.
    """
    result = [dict(entry) for entry in listed]
    for name, changes in edits.items():
        places = [number for number, entry in enumerate(result) if _class_name(entry) == name.rsplit(".")[-1]]
        if changes is None and not places:
            there = [_class_name(entry) for entry in result]
            raise ValueError(
                f"callbacks: {name} is to be left out, but is not in trainer.callbacks{did_you_mean(name, there)} "
                f"(there are: {', '.join(there) or 'none'})"
            )
        if changes is None:
            result = [entry for number, entry in enumerate(result) if number not in places]
        elif places:
            entry = result[places[0]]
            entry["init_args"] = {**(entry.get("init_args") or {}), **changes}
        else:
            last = [number for number, entry in enumerate(result) if _class_name(entry) in _LAST]
            result.insert(min(last, default=len(result)), {"class_path": name, "init_args": dict(changes)})
    return result


def _algorithm(name: str) -> Variant:
    """The variant that an overlay `algorithm/NAME.yaml` makes."""
    try:
        if not _NAME.fullmatch(name):  # `../x` would be found, and be the name of a folder
            raise ValueError(name)
        find_file("configs", _ALGORITHMS + name)
    except ValueError:
        shipped = [file for file in shipped_files("configs") if file.startswith(_ALGORITHMS)]
        known = [file.removeprefix(_ALGORITHMS).removesuffix(".yaml") for file in shipped]
        raise ValueError(
            f"--algorithms: {name!r} is unknown{did_you_mean(name, known)} (there are: {', '.join(known) or 'none'}; "
            f"your own is a file {_ALGORITHMS}{name}.yaml in the working folder)"
        ) from None
    name = name.removesuffix(".yaml")
    return Variant(name, name, (f"--config={_ALGORITHMS}{name}.yaml",))


def _find(name: str) -> Path:
    try:
        return find_file("configs/ablations", name)
    except ValueError as error:
        raise ValueError(f"--variants {error}") from None


def _variant(name: Any, entry: Any, where: str) -> Variant:
    """A variant from its entry in a file: a mapping, or a list of options of `fit`, or nothing."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: the name of a variant needs 1 to 61 of the characters a–z, 0–9, `.`, `_`, `-`, `=`")
    if name in _TAKEN:
        raise ValueError(f"{where}: the comparison has a file of that name; choose another name for the variant")
    if isinstance(entry, list):
        entry = {"options": entry}
    entry = {} if entry is None else entry
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected {', '.join(_KEYS)}, or a list of options of fit, got {entry!r}")
    for key in entry:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS)
            raise ValueError(f"{where}: unknown key {key}{hint} (there are: {', '.join(_KEYS)})")
    configs, options = entry.get("configs") or [], entry.get("options") or []
    if isinstance(options, dict):
        options = [f"--{key}={'null' if value is None else _text(value)}" for key, value in options.items()]
    if not _are_texts(configs) or not _are_texts(options):
        raise ValueError(f"{where}: configs and options are lists of texts, e.g. [--data.members=4]")
    callbacks = entry.get("callbacks") or {}
    if not isinstance(callbacks, dict) or not all(
        value is None or isinstance(value, dict) for value in callbacks.values()
    ):
        raise ValueError(f"{where}: callbacks are class names with their options, or null to leave one out")
    try:
        check_rest(options)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    label = entry.get("label") or name
    return Variant(name, str(label), (*(f"--config={config}" for config in configs), *options), callbacks)


def _text(value: Any) -> str:
    """A value as it is written on a command line."""
    return (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    )


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _class_name(entry: Mapping[str, Any]) -> str:
    return str(entry["class_path"]).rsplit(".")[-1]
